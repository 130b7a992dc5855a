"""`finetune-mile check --data`: what is wrong with data is found before a run."""

import os
import shutil

import numpy as np
import pytest
from PIL import Image

from finetune_mile.cli import main
from finetune_mile.core.problems import Problem
from finetune_mile.images.alike import same_name, same_names
from finetune_mile.images.sources import load_data


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
    assert main(["check", "--data", str(folder), "--workers", "0"]) == 0
    said = capsys.readouterr().out
    assert "photos: 18 training and 6 validation images, 3 classes" in said
    assert "train: 6 images in every class" in said
    assert "short side 20 to 25 pixels" in said
    assert "exact duplicates across train and val: 0" in said
    assert "train: 0 images cannot be read" in said
    shutil.copytree(folder / "val", folder / "test")
    assert main(["check", "--data", str(folder), "--workers", "0"]) == 0
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
    assert main(["check", "--data", f"folder:{folder}", "--workers", "2", "--list", str(bad)]) == 1
    said = capsys.readouterr().out
    assert "val: 1 classes have no image: owl" in said
    assert "exact duplicates across train and val: 1\n  val dog/copy.jpg is train cat/3.jpg" in said
    assert said.startswith("wrong labels: exact copies that have another label than the original: 1\n")
    assert "  val dog/copy.jpg (dog) is train cat/3.jpg (cat)\n" in said
    assert "exact copies within train, with the same labels: 1\n  train cat/again.jpg is train cat/3.jpg" in said
    assert "train: 1 images cannot be read; a run would skip them\n  owl/2.jpg: the file is empty" in said
    assert "val: 1 images cannot be read" in said
    assert [line.split(",")[:2] for line in bad.read_text().splitlines()] == [
        ["split", "id"], ["train", "owl/2.jpg"], ["val", "cat/1.jpg"], ["val", "dog/copy.jpg"],
        ["train", "cat/again.jpg"],
    ]  # fmt: skip


def test_all_problems_of_a_folder_are_told_at_once_and_the_images_are_read_all_the_same(folder, capsys):
    for place in ("train/leer", "val/leer", "val/hohl"):
        (folder / place).mkdir()
    (folder / "val/cat").rename(folder / "val/Cat")
    (folder / "train/stray.jpg").write_bytes((folder / "train/dog/0.jpg").read_bytes())
    (folder / "val/new").mkdir()
    shutil.move(folder / "val/dog/0.jpg", folder / "val/new/0.jpg")
    (folder / "train/owl/2.jpg").write_bytes(b"")
    assert main(["check", "--data", str(folder), "--workers", "0"]) == 2
    said = capsys.readouterr()
    flag = f"error: --data folder:{folder}"
    assert said.err.splitlines()[:5] == [
        f"{flag}: no image in class leer; remove the folder or fill it",
        f"{flag}: stray.jpg is not in a class folder. Expected one folder per class: CLASS/IMAGE.jpg. Images without "
        "labels go into unlabelled/, or are given with --unlabelled DIR",
        f"{flag} (val/): no image in classes hohl, leer; remove these folders or fill them",
        f"{flag}: val/ has class Cat, train/ has cat: likely the same; rename one",
        f"{flag}: val/ has classes that train/ lacks: new",
    ]
    assert "owl/2.jpg: the file is empty" in said.out
    assert "train stray.jpg is train dog/0.jpg" in said.out, "it has no label, so none is wrong"
    with pytest.raises(Problem) as caught:
        load_data(str(folder))
    assert [f"error: {sentence}" for sentence in caught.value.sentences] == said.err.splitlines()[:5]


def test_problems_that_leave_nothing_to_read_come_with_the_others(tmp_path):
    for name in ("train/a", "train/b", "val/c"):
        (tmp_path / name).mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "train/a/1.png")
    with pytest.raises(Problem) as caught:
        load_data(str(tmp_path), strict=False)
    assert [words in each for words, each in zip(
        ("no image in class b;", "no image in class c;", "no images in class folders", "only one class (a)"),
        caught.value.sentences, strict=True,
    )] == [True] * 4  # fmt: skip


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (["Mops", "mops"], True),
        (["B\u00e4r", "Ba\u0308r"], True),
        (["B\u00e4r", "Baer"], True),
        (["fire truck", "fire_truck"], True),
        (["Fire-Trucks", "firetruck"], True),
        (["a/Cats", "a/cat"], True),
        (["gras", "grass"], False),
        (["1-2", "12"], False),
        (["bus", "bu"], False),
        (["cat", "cut"], False),
        (["a/cat", "b/cat"], False),
    ],
)
def test_class_names_that_are_likely_the_same(names, same):
    assert same_names([*names, "other"]) == ([names] if same else [])
    assert same_name(names[0], names) == (names[1:] if same else [])


def test_classes_of_train_that_are_spelt_in_two_ways_are_named(folder, capsys):
    (folder / "train/owl").rename(folder / "train/Dogs")
    (folder / "val/owl").rename(folder / "val/Dogs")
    assert main(["check", "--data", str(folder), "--workers", "0"]) == 0
    assert "classes Dogs and dog are likely the same; rename or merge them\n" in capsys.readouterr().out


def test_two_unicode_forms_of_a_class_name_are_said(folder, capsys):
    for part in ("train", "val"):
        for old, new in (("owl", "\u00c4pfel"), ("dog", "A\u0308pfel")):
            (folder / part / old).rename(folder / part / new)
    assert main(["check", "--data", str(folder), "--workers", "0"]) == 0
    assert "are likely the same (the same letters in two Unicode forms" in capsys.readouterr().out


def test_f1_list_replaces_a_list_of_ours_and_nothing_else(folder, tmp_path, capsys, monkeypatch):
    (folder / "train/owl/2.jpg").write_bytes(b"")
    thesis, ours, fifo = tmp_path / "thesis.csv", tmp_path / "bad.csv", tmp_path / "fifo"
    words = ["check", "--data", str(folder), "--workers", "0", "--list"]
    for text in ("", "split,id\n", "split,id,reason,more\n", "my thesis\n"):
        thesis.write_text(text)
        with monkeypatch.context() as patch:
            patch.setattr("finetune_mile.verbs.check.load_data", None)  # before any work
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
    assert main(["check", "--data", str(folder), "--truth", f"csv:{tmp_path / 'sets.csv'}", "--workers", "0"]) == 0
    assert "true label sets: 4 empty (not counted in set metrics), 1 with several" in capsys.readouterr().out


def test_a_set_in_memory(capsys):
    assert main(["check", "--data", "demo:40"]) == 0
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
    assert main(["check", *flags]) == 2
    assert sentence in capsys.readouterr().err
