"""`finetune-mile doctor`: what is wrong with data is found before a run."""

import os
import shutil

import numpy as np
import pytest
from PIL import Image

from finetune_mile.cli import main


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog", "owl"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.fromarray(rng.integers(0, 255, (20 + i, 30, 3), dtype=np.uint8))
                image.save(tmp_path / "photos" / split / name / f"{i}.jpg")
    return tmp_path / "photos"


def test_healthy_data(folder, capsys):
    assert main(["doctor", "--data", str(folder), "--workers", "0"]) == 0
    said = capsys.readouterr().out
    assert "photos: 18 training and 6 validation images, 3 classes" in said
    assert "train: 6 (cat) to 6 (cat) images per class, median 6" in said
    assert "short side 20 to 25 pixels" in said
    assert "exact duplicates across train and val: 0" in said
    assert "train: 0 images cannot be read" in said
    shutil.copytree(folder / "val", folder / "test")
    assert main(["doctor", "--data", str(folder), "--workers", "0"]) == 0
    said = capsys.readouterr().out
    assert "photos: 18 training, 6 validation and 6 test images, 3 classes" in said
    assert "exact duplicates across val and test: 6\n  test cat/0.jpg is val cat/0.jpg" in said


def test_what_it_finds(folder, tmp_path, capsys):
    shutil.copy(folder / "train/cat/3.jpg", folder / "val/dog/copy.jpg")
    shutil.copy(folder / "train/cat/3.jpg", folder / "train/cat/again.jpg")
    shutil.rmtree(folder / "val/owl")
    (folder / "train/owl/2.jpg").write_bytes(b"")
    data = (folder / "val/cat/1.jpg").read_bytes()
    (folder / "val/cat/1.jpg").write_bytes(data[: len(data) // 2])
    bad = tmp_path / "bad.csv"
    assert main(["doctor", "--data", f"folder:{folder}", "--workers", "2", "--list", str(bad)]) == 1
    said = capsys.readouterr().out
    assert "val: 1 classes have no image: owl" in said
    assert "exact duplicates across train and val: 1\n  val dog/copy.jpg is train cat/3.jpg" in said
    assert "train: 1 images are exact copies of another one in train" in said
    assert "train: 1 images cannot be read; a run would skip them\n  owl/2.jpg: the file is empty" in said
    assert "val: 1 images cannot be read" in said
    assert [line.split(",")[:2] for line in bad.read_text().splitlines()] == [
        ["split", "id"], ["train", "owl/2.jpg"], ["val", "cat/1.jpg"],
    ]  # fmt: skip


def test_f1_list_replaces_a_list_of_ours_and_nothing_else(folder, tmp_path, capsys, monkeypatch):
    (folder / "train/owl/2.jpg").write_bytes(b"")
    thesis, ours, fifo = tmp_path / "thesis.csv", tmp_path / "bad.csv", tmp_path / "fifo"
    words = ["doctor", "--data", str(folder), "--workers", "0", "--list"]
    for text in ("", "split,id\n", "split,id,reason,more\n", "my thesis\n"):
        thesis.write_text(text)
        with monkeypatch.context() as patch:
            patch.setattr("finetune_mile.verbs.doctor.load_data", None)  # before any work
            assert main([*words, str(thesis)]) == 2
        assert capsys.readouterr().err == (
            f"error: --list {thesis}: this file exists and is not a list of bad images; choose another name\n"
        )
        assert thesis.read_text() == text
    os.mkfifo(fifo)
    for path in (folder, fifo):
        assert main([*words, str(path)]) == 2
        assert "choose another name" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "no/where.csv")]) == 2
    assert "--list" in capsys.readouterr().err
    for _ in range(2):
        assert main([*words, str(ours)]) == 1
        assert [line.split(",")[1] for line in ours.read_text().splitlines()] == ["id", "owl/2.jpg"]
    assert not list(tmp_path.glob(".*"))


def test_true_sets_are_counted(folder, tmp_path, capsys):
    (tmp_path / "sets.csv").write_text("file,labels\ncat/0.jpg,cat;dog\ndog/1.jpg,dog\n")
    assert main(["doctor", "--data", str(folder), "--truth", f"csv:{tmp_path / 'sets.csv'}", "--workers", "0"]) == 0
    assert "true label sets: 4 empty (not counted in set metrics), 1 with several" in capsys.readouterr().out


def test_a_set_in_memory(capsys):
    assert main(["doctor", "--data", "demo:40"]) == 0
    assert "demo: 40 training and 10 validation images, 10 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--data"),
        (["--data", "nowhere"], "no directory 'nowhere'"),
        (["--data", "demo", "--truth", "x"], "write real"),
    ],
)
def test_wrong_input(flags, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *flags]) == 2
    assert sentence in capsys.readouterr().err
