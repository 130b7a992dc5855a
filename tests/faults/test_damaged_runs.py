"""Damaged files of a run folder, odd configs of exports, and names that are not UTF-8: sentences, and round trips."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from finetune_mile import api
from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.loading import open_with_head
from finetune_mile.core.files import read_json, read_scores, utf8_name, write_json
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images.name_lists import read_list
from finetune_mile.images.pipeline import to_pixels
from finetune_mile.images.splits import fingerprint, stratified
from finetune_mile.networks.heads import build, new_head
from finetune_mile.run import main
from finetune_mile.training.folder import RunFolder, read_info

NOT_UTF8 = "cat/\udce9.png"
BROKEN = {
    "cut": b'{"accuracy": 5', "empty": b"", "not UTF-8": b'{"a": "\xff"}', "a number": b"5", "a list": b"[1, 2]",
    "deep": b"[" * 100_000, "null": b"null", "text": b"hello", "many digits": b'{"a": ' + b"9" * 5000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", ["run.json", "results.json", "start.json", "split.json"])
def test_a_damaged_json_file_of_a_run_is_named(tmp_path, name, kind):
    (tmp_path / "recipe.yaml").write_text("method: mile\n")
    (tmp_path / name).write_bytes(BROKEN[kind])
    with pytest.raises(Problem, match=name):
        read_json(tmp_path / name)
    reader = {
        "run.json": lambda: read_info(tmp_path), "results.json": lambda: api.Run.open(tmp_path).results,
        "start.json": lambda: RunFolder(tmp_path).start(), "split.json": lambda: read_list(tmp_path / name),
    }[name]  # fmt: skip
    with pytest.raises(Problem, match=name):
        reader()


@pytest.mark.parametrize("value", ['"5"', "[1]", "true", "{}"])
def test_a_score_that_is_no_number_is_named(tmp_path, value):
    (tmp_path / "results.json").write_text(f'{{"accuracy": 5.0, "images": {value}}}')
    with pytest.raises(Problem, match=r"results.json is damaged \(images is not a number\)"):
        read_scores(tmp_path / "results.json")


@pytest.mark.parametrize("odd", [{"seconds": "x"}, {"world_size": []}, {"requested": 5}, {"status": {}}])
def test_odd_types_in_run_json_are_named(tmp_path, odd):
    write_json(tmp_path / "run.json", {"status": "running", "seconds": 1.0, **odd})
    with pytest.raises(Problem, match=rf"run.json is damaged \({next(iter(odd))} is a"):
        read_info(tmp_path)


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"5", b"[]", b"{}", b'{"kind": 1, "step": 1}', b'{"kind": "train"}', b"{"]
)
def test_a_damaged_line_of_the_metrics_is_named_and_a_cut_last_one_left_out(tmp_path, line):
    good = b'{"step": 1, "kind": "train"}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line)
    assert [record["step"] for record in RunFolder(tmp_path).metrics()] == [1]
    (tmp_path / "metrics.jsonl").write_bytes(good + line + b"\n" + good)
    with pytest.raises(Problem, match=r"metrics\.jsonl line 2 is damaged"):
        RunFolder(tmp_path).metrics()


# ------------------------------------------------------------------------------------------ exports

CONFIG = {
    "arch": "resnet-demo", "padding": "torch", "num_classes": 2, "classes": ["a", "b"], "mean": [0.5] * 3,
    "std": [0.2] * 3, "size": 24, "crop": 1.0, "interpolation": "bilinear", "activation": "softmax", "threshold": 0.25,
}  # fmt: skip
ODD = [
    {"size": 8000}, {"size": 10**9}, {"size": 0}, {"size": -1}, {"size": "x"}, {"size": None}, {"std": [0, 0, 0]},
    {"std": [float("nan")] * 3}, {"std": 5}, {"mean": [float("inf")] * 3}, {"mean": "abc"}, {"mean": [0.5]},
    {"threshold": float("nan")}, {"threshold": 2}, {"threshold": "0.5"}, {"thresholds": [0.5, float("nan")]},
    {"thresholds": 5}, {"classes": [1, 2]}, {"classes": {"a": 1}}, {"classes": "ab"}, {"activation": 5},
    {"arch": "resnet18w99999999"}, {"arch": "timm:../../x"}, {"arch": "timm:vit_tiny_patch16_224:depth=8000"},
    {"arch": 5}, {"arch": None}, {"arch": "x" * 10**6}, {"padding": "other"}, {"crop": 0}, {"crop": 9},
    {"interpolation": "magic"}, {"num_classes": -1}, {"num_classes": "x"}, {"steps": "<script>"}, {"fraction": "a"},
    {"method": []}, {"licence": 5}, {"warning": {}}, {"data": 5}, {"init": 5}, {"seed": None},
]  # fmt: skip


@pytest.fixture(scope="module")
def network():
    network = build("resnet-demo")
    new_head(network, 2, "zero")
    return network


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{next(iter(odd))}-{str(next(iter(odd.values())))[:20]}")
def test_an_odd_config_of_an_export_is_one_sentence(tmp_path, network, odd, bounded):
    folder = tmp_path / "export"
    write_export(folder, network, CONFIG | odd)
    with pytest.raises(Problem) as caught:
        open_with_head(str(folder), "RUN").thresholds("export")
    assert len(caught.value.sentences) == 1
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_config_without_optional_entries_is_read(tmp_path, network):
    write_export(tmp_path / "export", network, CONFIG)
    assert open_with_head(str(tmp_path / "export"), "RUN").classes == ("a", "b")


# ------------------------------------------------------------------------------- names that are not UTF-8


def test_a_name_that_is_not_utf8_comes_back_from_the_files_of_a_run(tmp_path):
    write_json(tmp_path / "split.json", {"ids": [NOT_UTF8, "cat/é.png"]})
    assert read_list(tmp_path / "split.json") == [NOT_UTF8, "cat/é.png"]
    (tmp_path / "list.txt").write_bytes(os.fsencode(NOT_UTF8) + b"\n")
    assert read_list(tmp_path / "list.txt") == [NOT_UTF8]
    write_json(tmp_path / "plain.json", {"ids": ["é"]})
    assert "é" in (tmp_path / "plain.json").read_text(encoding="utf-8"), "other names stay legible"
    assert utf8_name(NOT_UTF8) == "cat/\\xe9.png"
    assert utf8_name("é") == "é"
    assert fingerprint([NOT_UTF8]) != fingerprint(["cat/\udcea.png"])
    ids = [f"{i}\udce9" for i in range(10)]
    assert len(stratified(np.zeros(10, dtype=np.int64), ids, 0.5, seed=0)) == 5


def test_a_run_on_names_that_are_not_utf8(tmp_path):
    """It ended in a traceback at the first hash; the page, the CSV files and the export name the photos and classes."""
    place = os.fsencode(str(tmp_path / "photos"))
    for name in (b"cat", b"d\xf6g"):
        os.makedirs(place + b"/" + name)  # noqa: PTH103  bytes
        for i in range(8):
            pixels = np.random.default_rng(i).integers(0, 255, (24, 24, 3), dtype=np.uint8)
            with open(place + b"/" + name + b"/%d\xe9.png" % i, "wb") as stream:  # noqa: PTH123
                Image.fromarray(pixels).save(stream, "PNG")
    words = [
        "--data",
        f"folder:{tmp_path / 'photos'}",
        "--init",
        "none",
        "--arch",
        "resnet-demo",
        "--method",
        "softmax",
    ]
    words += ["--steps", "2", "--set", "size=24", "--set", "workers=0", "--batch-size", "4", "--fraction", "0.5"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    split = json.loads((tmp_path / "run/split.json").read_text(encoding="utf-8"))
    assert {os.fsencode(name)[-5:] for name in split["ids"]} == {b"\xe9.png"}
    assert (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert (tmp_path / "run/per_class.csv").read_text(encoding="utf-8")
    shutil.rmtree(tmp_path / "run/checkpoints", ignore_errors=True)
    again = ["--split", str(tmp_path / "run/split.json"), "--fraction", "1"]
    assert main([*words, *again, "--out", str(tmp_path / "again")]) == 0
    both = [json.loads(Path(tmp_path, run, "split.json").read_text())["sha256"] for run in ("run", "again")]
    assert both[0] == both[1], "the same photos"


# -------------------------------------------------------------------------------------- from Python


@pytest.mark.parametrize("shape", [(0, 0, 3), (0, 5, 3), (5, 0, 3), (0, 0), (5, 0)])
def test_an_image_without_pixels_is_told(shape):
    with pytest.raises(BadImage, match="found ndarray uint8"):
        to_pixels(np.zeros(shape, dtype=np.uint8))


def test_other_images_without_pixels_are_told():
    for image in (torch.zeros(3, 0, 5, dtype=torch.uint8), Image.new("RGB", (0, 5))):
        with pytest.raises(BadImage, match="expected a PIL image"):
            to_pixels(image)


@pytest.mark.parametrize("where", [{"out": "a\0b"}, {"data": "folder:a\0b"}, {"init": "a\0.pth"}, {"recipe": "a\0"}])
def test_a_nul_in_a_path_is_told(where):
    with pytest.raises(Problem, match="NUL character"):
        api.train(**{"data": "demo:20", "init": "none", **where})
