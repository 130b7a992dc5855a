"""Every snippet of the documents: commands are read by the real parsers, Python is executed, here or where it says."""

import argparse
import contextlib
import json
import re
import runpy
import shutil
import sys
from functools import partial

import pytest
import torch
import yaml
from safetensors.torch import load_file
from shortcuts import ROOT, tinted_photos
from snippets import blocks, commands, run_python, run_shell

from finetune_mile import cli

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
# What is not read by a parser of ours, and why.
NOT_OURS = {
    "python3": "makes an environment; tests/test_wheel.py does so",
    ".": "the shell's",
    "export": "the shell's",
    "pip": "installs; tests/test_wheel.py does so",
    "PEERS/bin/pip": "installs other tools, which needs the network",
    "pytest": "these tests", "ruff": "see .ci/run", "mypy": "see .ci/run", "lint-imports": "see tests/test_house.py",
    "python -m": "modules of the tests and venv",
}  # fmt: skip
# Documents with Python, and the test that executes it.
PYTHON = {
    "README.md": "tests/test_snippets.py",
    "docs/python.md": "tests/commands/test_python_page.py",
    "docs/features.md": "tests/commands/test_embed.py",
}

LIKE_RUN = ("plan", "preflight")  # take the flags of run beside their own


class Read(Exception):
    """Raised by a parser that has read its words: a command goes no further."""


@pytest.fixture
def only_read(monkeypatch):
    """Commands stop where their words are read, with `Read(what was not understood)`."""
    original = argparse.ArgumentParser.parse_known_args

    def read(self, args=None, namespace=None):
        _, rest = original(self, args, namespace)
        raise Read(rest)

    @contextlib.contextmanager
    def stop():
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", read)
            yield

    return stop


def without_launcher(words):
    """(verb, its words) of a command of ours, however it is started; None for another program's."""
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words[0] == "finetune-mile":
        return words[1], words[2:]
    if words[0] in ("accelerate", "torchrun"):
        at = next(i for i, word in enumerate(words) if word in ("finetune_mile/run.py", "finetune_mile.run", "-m"))
        rest = words[at + 1 :]
        if words[at] == "-m":
            module, *rest = rest
            return (rest[0], rest[1:]) if module == "finetune_mile.cli" else ("run", rest)
        return "run", rest
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        return words[1], words[2:]
    name = " ".join(words[:2]) if words[0] == "python" else words[0]
    assert name in NOT_OURS, words
    return None


def all_commands():
    found = [
        (page, one) for page, text in PAGES.items() for words in commands(text) if (one := without_launcher(words))
    ]
    assert len(found) > 50
    return found


@pytest.mark.parametrize(("page", "command"), all_commands(), ids=lambda value: str(value)[:60])
def test_a_command_of_a_document_is_understood(page, command, only_read, monkeypatch, tmp_path, capsys):
    verb, words = command
    monkeypatch.setattr(sys, "argv", [verb, *words])
    monkeypatch.setenv("IMAGENET_DIR", str(tmp_path))
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    if verb == "run" and "--resume" not in words:
        check_settings(words, capsys)
        return
    start = partial(cli.main, [verb, *words])
    if verb.startswith("benchmarks/"):
        monkeypatch.syspath_prepend((ROOT / verb).parent)
        start = partial(runpy.run_path, str(ROOT / verb), run_name="__main__")
    with only_read(), pytest.raises(Read) as read:
        start()
    (rest,) = read.value.args
    if verb in LIKE_RUN:
        check_settings(rest, capsys)
    else:
        assert rest == [], f"{page}: {rest}"


def check_settings(words, capsys):
    """`run` with these words gets as far as its settings, without data or weights."""
    assert cli.main(["run", *(word for word in words if word != "--explain"), "--explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_command_that_is_wrong_is_found(only_read):
    with only_read(), pytest.raises(Read) as read:
        cli.main(["predict", "runs/mine", "holiday/", "--formt", "csv"])
    assert read.value.args == (["--formt", "csv"],)
    assert cli.main(["run", "--set", "mile.roh=0.5", "--explain", "--json"]) == 2


def test_commands_in_a_sentence_name_verbs_and_flags_that_exist():
    known = json.loads((ROOT / "tests/golden_flags.json").read_text())
    found = 0
    for page, text in PAGES.items():
        if page == "CHANGELOG.md":  # has what there was
            continue
        for words in re.findall(r"`finetune-mile ([a-z][^`]*)`", text):
            verb = "run" if words.split()[0] == "train" else words.split()[0]
            assert verb in cli.VERBS, f"{page}: {words}"
            names = (verb, "run") if verb in LIKE_RUN else (verb,)
            flags = {flag for name in known if name.split()[0] in names for flag in known[name]}
            assert set(re.findall(r"--[a-z][a-z-]*", words)) <= flags, f"{page}: {words}"
            found += 1
    assert found > 20


def test_commands_are_in_bash_blocks_and_yaml_is_yaml():
    for page, text in PAGES.items():
        for block in blocks(text, ""):
            assert not re.search(r"^(finetune-mile|accelerate|python) ", block, re.M), f"{page}: mark it as bash"
        for block in blocks(text, "yaml"):
            assert yaml.safe_load(block), page


def test_python_of_documents_is_executed_by_a_test():
    assert {page for page, text in PAGES.items() if blocks(text, "python")} == PYTHON.keys()
    for page, test in PYTHON.items():
        assert page in (ROOT / test).read_text()


# ------------------------------------------------------------------------------------- executed, on very small images

SMALL = ["--size", "24"]
SHORT = [
    *SMALL,
    "--steps",
    "4",
    "--k-t",
    "2",
    "--k-s",
    "2",
    "--batch-size",
    "8",
    "--set=precision=no",
    "--set=workers=0",
]
MORE = {"quickstart": ["--minutes", "0.2", "--workers", "0"], "run": SHORT, "embed": SMALL, "probe": SMALL}
MORE |= {"pretrain": ["--steps", "2", "--batch-size", "8", "--set", "size=24", "--set", "workers=0"]}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with what the documents take for granted: photos, new ones, and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    tinted_photos(tmp_path / "photos", noise=60)
    shutil.copytree("photos/val", "holiday")
    shutil.copy("photos/val/red/0.png", "photo.jpg")
    torch.save(load_file(ROOT / "weights/simclr-demo.safetensors"), "moco.pth.tar")
    return tmp_path


@pytest.mark.slow
def test_the_readme(place, monkeypatch, capsys):
    pytest.importorskip("onnxscript", reason="export to ONNX needs it: pip install finetune-mile[export]")
    done = run_shell(ROOT / "README.md", monkeypatch, MORE, skip=("venv", "simclrv2-sk1"))
    assert {line: code for line, (code, _) in done.items() if code} == {}
    assert len(done) == 4
    run_python(ROOT / "README.md")
    assert "('red', " in capsys.readouterr().out
    assert (place / "runs/mine/report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "skip", "count"),
    [
        ("docs/features.md", ("timm:resnet50.a1_in1k",), 2),  # the network is needed
        ("docs/pretraining.md", ("torchrun",), 4),  # tests/pretraining/test_pretrain_processes.py
        ("docs/augmentation.md", (), 3),
    ],
)
def test_a_document(place, monkeypatch, capsys, page, skip, count):
    done = run_shell(ROOT / page, monkeypatch, MORE, skip)
    assert {line: code for line, (code, _) in done.items() if code} == {}
    assert len(done) == count
