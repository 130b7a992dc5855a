"""`finetune-mile predict`: the labels of files, folders and names on stdin."""

import csv
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shortcuts import ROOT
from snippets import run_shell

import finetune_mile
from finetune_mile import cli
from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.loading import Preprocessor, load_network
from finetune_mile.core.types import Preprocess

CONFIG = {
    "arch": "resnet-demo", "padding": "torch", "num_classes": 3, "classes": ["cat", "dog", "Zürich, city"], "size": 24,
    "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2], "crop": 0.875, "interpolation": "bilinear",
    "activation": "sigmoid", "threshold": 0.65,
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with an export of random weights, and photos of several sizes in which it sees different things."""
    torch.manual_seed(0)
    network, _, _ = load_network("none", arch="resnet-demo", num_classes=3, head_bias="zero")
    preprocess, seen = Preprocessor(Preprocess(**{key: CONFIG[key] for key in ("mean", "std", "size")})), []
    rng = np.random.default_rng(0)
    for i, name in enumerate(
        ("holiday/1.jpg", "holiday/2.png", "holiday/sea/1.jpg", "holiday/sea/grün 3.jpg", "photo.jpg")
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(rng.integers(0, 255, (5, 6, 3), dtype=np.uint8))
        photo = noise.resize((40 + 7 * i, 60 - 5 * i), Image.Resampling.BICUBIC)
        photo.save(tmp_path / name)
        seen.append(preprocess(photo))
    with torch.no_grad():  # random features hardly differ: spread the logits of these photos around zero
        network.fc.weight.mul_(1000)
        network.fc.bias.copy_(-network.eval()(torch.stack(seen)).mean(0))
    write_export(tmp_path / "runs/demo-1/export", network, CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


NAMES = ["holiday/1.jpg", "holiday/2.png", "holiday/sea/1.jpg", "holiday/sea/grün 3.jpg"]


def predicted(capsys, *words):
    """The exit code, and the lines of JSON as {image: labels}."""
    code = cli.main(["predict", "runs/demo-1", *words, "--format", "jsonl"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, {line["image"]: [(each["label"], each["probability"]) for each in line["labels"]] for line in lines}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_labels_above_the_threshold_and_always_the_best(place, capsys, workers):
    code, labels = predicted(capsys, "holiday", "photo.jpg", "--workers", workers, "--batch-size", "2")
    assert code == 0
    assert list(labels) == [*NAMES, "photo.jpg"]
    model, counts = finetune_mile.load_classifier("runs/demo-1"), set()
    for name, mine in labels.items():
        everything = model.predict(name)
        expected = [pair for pair in everything if pair[1] > 0.65] or everything[:1]
        assert [label for label, _ in mine] == [label for label, _ in expected]
        assert [p for _, p in mine] == pytest.approx([p for _, p in expected], abs=1e-5)
        counts.add(len([pair for pair in everything if pair[1] > 0.65]))
    assert {0, 2} <= counts, "some images have no label above the threshold, some several"
    _, all_labels = predicted(capsys, "holiday", "--threshold", "0")
    assert all(len(each) == 3 for each in all_labels.values())


def test_an_export_without_a_threshold_has_a_quarter(place, capsys):
    path = place / "runs/demo-1/export"
    network, _, _ = load_network(str(path), arch=None, num_classes=3, head_bias="zero", keep_head="fc")
    for file in path.iterdir():
        file.unlink()
    write_export(path, network, {key: value for key, value in CONFIG.items() if key != "threshold"})
    cli.main(["predict", "runs/demo-1", "photo.jpg", "--format", "jsonl"])
    assert json.loads(capsys.readouterr().out)["threshold"] == 0.25


def test_table_and_csv_have_the_same_labels(place, capsys):
    _, labels = predicted(capsys, "holiday")
    assert cli.main(["predict", "runs/demo-1", "holiday", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    pairs = [(name, label, p) for name, each in labels.items() for label, p in each]
    assert [(row["image"], row["label"], float(row["probability"])) for row in rows] == pairs
    assert cli.main(["predict", "runs/demo-1", "holiday"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert "0.65" in title
    for line, (name, each) in zip(lines, labels.items(), strict=True):
        shown = ", ".join(f"{label} {p:.2f}" for label, p in each)
        assert line.split("  ")[0].strip() == name
        assert line.endswith(shown if each[0][1] > 0.65 else f"({shown})")


def test_a_name_that_is_not_utf8(place, capsysbinary, monkeypatch):
    name = b"holiday/\xff.jpg"
    Path(os.fsdecode(name)).write_bytes((place / "photo.jpg").read_bytes())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(name + b"\n"), encoding="utf-8"))
    assert cli.main(["predict", "runs/demo-1", "-", "--format", "csv"]) == 0
    assert capsysbinary.readouterr().out.splitlines()[1].startswith(name + b",")


def test_names_on_stdin(place, capsys, monkeypatch):
    for text in ("photo.jpg\nholiday/sea/grün 3.jpg\n", "photo.jpg\0holiday/sea/grün 3.jpg\0"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code, labels = predicted(capsys, "-")
        assert code == 0
        assert list(labels) == ["photo.jpg", "holiday/sea/grün 3.jpg"]


def test_a_bad_image_is_told_and_skipped_and_the_exit_code_is_1(place, capsys, monkeypatch):
    (place / "holiday/broken.jpg").write_bytes(b"\xff\xd8\xffnothing")
    (place / "holiday/phone.heic").write_bytes(b"heic")
    monkeypatch.setattr(sys, "stdin", io.StringIO("gone.jpg\n"))
    code = cli.main(["predict", "runs/demo-1", "holiday", "-", "--format", "jsonl", "--batch-size", "3"])
    out, err = capsys.readouterr()
    assert code == 1
    assert [json.loads(line)["image"] for line in out.splitlines()] == NAMES
    assert "holiday/broken.jpg is skipped: cannot identify" in err
    assert "gone.jpg is skipped: cannot be read: No such file" in err
    assert "1 file ends in .heic" in err
    assert "4 images" in err
    assert "2 skipped" in err


def test_results_stay_on_stdout_while_a_bar_is_shown(place, capsys, monkeypatch):
    """rich sends what is written to sys.stdout to the console of its bar, which is stderr."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["predict", "runs/demo-1", "holiday"]) == 0
    out, err = capsys.readouterr()
    assert all(name in out for name in NAMES)
    assert "holiday/1.jpg" not in err
    assert "images" in err


def test_annotated_copies(place, capsys):
    before = {path: path.read_bytes() for path in place.rglob("*.jpg")}
    words = ["holiday", str(place / "photo.jpg"), "holiday/../photo.jpg", "holiday/1.jpg"]
    assert cli.main(["predict", "runs/demo-1", *words, "--annotate", "seen"]) == 0
    copies = {str(path.relative_to(place / "seen")) for path in (place / "seen").rglob("*") if path.is_file()}
    absolute = str(place.relative_to(place.anchor) / "photo.jpg")
    assert copies == {*NAMES, "holiday/1-2.jpg", "holiday/photo.jpg", absolute}
    assert {path: path.read_bytes() for path in before} == before
    with Image.open(place / "seen/holiday/2.png") as copy, Image.open("holiday/2.png") as original:
        factor = copy.width // original.width
        assert copy.width >= 320
        changed = np.asarray(copy) != np.asarray(original.resize(copy.size, Image.Resampling.NEAREST))
    assert factor * original.width == copy.width
    assert changed[: copy.height // 3, : copy.width // 3].any(), "the label is in the upper left corner"
    assert not changed[copy.height * 2 // 3 :].any(), "and nowhere else"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["runs/none", "photo.jpg"], "RUN runs/none: there is no such run folder or file"),
        (["runs/demo-1", "absent.jpg"], "IMAGES absent.jpg: there is no such file or folder"),
        (["runs/demo-1", "empty"], "IMAGES empty: no images in this folder"),
        (["runs/demo-1", "photo.jpg", "--threshold", "2"], "--threshold 2.0: must be from 0 to 1"),
        (["runs/demo-1", "photo.jpg", "--annotate", "holiday"], "--annotate holiday: it already exists"),
        (["runs/demo-1", "photo.jpg", "--annotate", "photo.jpg/x"], "--annotate photo.jpg/x"),
        (["runs/demo-1", "photo.jpg", "--format", "json"], "did you mean jsonl?"),
        (["onnx", "photo.jpg"], "RUN onnx: predict does not read an export --to onnx"),
    ],
)
def test_what_cannot_work_is_refused_before_work_starts(place, capsys, words, sentence):
    (place / "empty").mkdir()
    (place / "onnx").mkdir()
    (place / "onnx/model.onnx").touch()
    assert cli.main(["predict", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("error:") == 1


def test_a_reader_that_leaves_is_no_error(place, monkeypatch):
    """`predict ... | head -1`."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return spare

    spare = os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert cli.main(["predict", "runs/demo-1", "photo.jpg"]) == 141
    os.close(spare)


def test_the_document(place, monkeypatch, capsys):
    done = run_shell(ROOT / "docs/predict.md", monkeypatch)
    assert len(done) == 3
    assert {code for code, _ in done.values()} == {0}
    assert len((place / "labels.jsonl").read_text().splitlines()) == 4
    assert (place / "seen/holiday/sea/1.jpg").is_file()
