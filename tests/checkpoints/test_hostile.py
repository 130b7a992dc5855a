"""No file runs code, eats the memory or leaves its folder: it is read, or refused by a Problem."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import bundles
import hostile
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from finetune_mile.checkpoints.readers import read, wire
from finetune_mile.core.problems import Problem

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """The whole corpus, read in one process that has limits."""
    folder = tmp_path_factory.mktemp("hostile")
    workplace = tmp_path_factory.mktemp("workplace")
    lists = tmp_path_factory.mktemp("lists")
    canary = folder / "canary"
    corpus = hostile.write_corpus(folder, canary)
    (lists / "paths.json").write_text(json.dumps([str(path) for path in corpus]))
    before = sorted(folder.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-W", "error", Path(hostile.__file__), str(lists)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=workplace,
        capture_output=True,
        text=True,
        timeout=600,  # of the clock: a child for each file; `test_time_and_memory` bounds the processor
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    after = sorted(folder.rglob("*")) + sorted(workplace.rglob("*"))
    return corpus, json.loads(done.stdout), before == after


def test_corpus_is_large(verdicts):
    corpus, _, _ = verdicts
    assert len(corpus) >= 477, "some of the files are not written any more"


def test_every_file_is_refused_by_a_problem(verdicts):
    _, result, _ = verdicts
    wrong = {k: v[0] for k, v in result["outcomes"].items() if not v[0].startswith("Problem: ")}
    assert not wrong


def test_what_would_have_acted_is_named(verdicts):
    corpus, result, _ = verdicts
    wrong = {
        str(path): (name, result["outcomes"][str(path)][0])
        for path, name in corpus.items()
        if name not in result["outcomes"][str(path)][0]
    }
    assert not wrong


def test_every_sentence_names_the_file(verdicts):
    corpus, result, _ = verdicts
    assert all(str(path) in result["outcomes"][str(path)][0] for path in corpus)


def test_nothing_was_run_or_written(verdicts):
    _, _, untouched = verdicts
    assert untouched


def test_time_and_memory(verdicts):
    _, result, _ = verdicts
    slow = {k: v[1] for k, v in result["outcomes"].items() if v[1] > 5}  # seconds of the processor, not of the clock
    assert not slow
    assert result["megabytes"] < 500


def _tree():
    return {
        "epoch": 3,
        "arch": "resnet50",
        "state_dict": {f"layer{i}.weight": torch.randn(3, i + 1) for i in range(4)},
        "best": 0.5,
    }


def _write_one(kind: str, folder: Path) -> tuple[Path, Path]:
    """An honest file of a kind: (the file to be spoilt, the path to be read)."""
    path = folder / kind
    if kind == "zip":
        torch.save(_tree(), path)
    elif kind == "legacy":
        torch.save(_tree(), path, _use_new_zipfile_serialization=False)
    elif kind == "safetensors":
        save_file(_tree()["state_dict"], path)
    elif kind in ("pickle2", "pickle4"):
        arrays = {k: v.numpy() for k, v in _tree()["state_dict"].items()}
        path.write_bytes(pickle.dumps({"model": arrays}, int(kind[-1])))
    else:
        names = {"w/.ATTRIBUTES/VARIABLE_VALUE": "net/w"}
        arrays = {f"{key}": np.ones((2, 3), np.float32) for key in [*names, "b", "c"]}
        bundles.write_bundle(path, arrays, full_names=names)
        return folder / f"{kind}.{kind.removeprefix('tf-')}", path
    return path, path


def _spoil(raw: bytes, rng: random.Random) -> bytes:
    spoilt = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(spoilt)) if spoilt else 0
        match rng.randrange(5):
            case 0:
                spoilt[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                spoilt[at : at + 1] = bytes([rng.choice(b"\x00\xff\x7f\x80(.RbcoiQ")])
            case 2:
                del spoilt[at : at + rng.randrange(1, 40)]
            case 3:
                spoilt[at:at] = rng.randbytes(rng.randrange(1, 10))
            case _:
                del spoilt[at + 1 :]
    return bytes(spoilt)


# A checksum guards the index, so most of what is spoilt there is found at once.
KINDS = ("zip", "legacy", "safetensors", "pickle2", "pickle4", "tf-index", "tf-data-00000-of-00001")


FAST = ("zip", "safetensors", "tf-index")


@pytest.mark.parametrize(
    "kind", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in KINDS]
)
def test_spoilt_files_are_read_or_refused(kind, tmp_path):
    rng = random.Random(f"spoil {kind}")
    spoilt, path = _write_one(kind, tmp_path)
    honest = spoilt.read_bytes()
    read(path)
    refused = 0
    for _ in range(400):
        spoilt.unlink()  # a new file: the old one may still be mapped
        spoilt.write_bytes(_spoil(honest, rng))
        try:
            read(path)
        except Problem:
            refused += 1
    assert refused > 0


def test_spoilt_index_without_its_checksum(tmp_path, monkeypatch):
    """With the checksums out of the way the parser stands alone."""
    rng = random.Random("index")
    spoilt, path = _write_one("tf-index", tmp_path)
    honest = spoilt.read_bytes()
    monkeypatch.setattr(wire, "masked_crc", lambda _: mock.ANY)
    refused = 0
    for _ in range(400):
        spoilt.unlink()
        spoilt.write_bytes(_spoil(honest[:-8], rng) + honest[-8:])
        try:
            read(path)
        except Problem as problem:
            refused += "checksum" not in str(problem)
    assert refused > 100, "by the parser itself"
