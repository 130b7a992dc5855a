"""Images that cannot be read: replaced in training, left out of evaluation, listed, and too many of them an error."""

import csv
import json

import numpy as np
import pytest
import torch
from photos import photo
from safetensors.torch import load_file
from shortcuts import refused

from finetune_mile import cli
from finetune_mile.core.problems import BadImage
from finetune_mile.core.types import Preprocess
from finetune_mile.images import scans
from finetune_mile.images.bad_images import BadImages, allowed
from finetune_mile.images.checks import report
from finetune_mile.images.pipeline import Augmentation, Views, batches
from finetune_mile.images.sets import ImageSet
from finetune_mile.images.sources import load_data
from finetune_mile.run import main

CLASSES = ("a", "b", "c")


@pytest.fixture
def folder(tmp_path):
    """24 training and 9 validation images; 2 and 1 of them are broken."""
    for split, count in (("train", 8), ("val", 3)):
        for k, name in enumerate(CLASSES):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for i in range(count):
                data = photo(100 * k + i, size=(24, 20))
                (tmp_path / "photos" / split / name / f"{i}.jpg").write_bytes(data)
    root = tmp_path / "photos"
    broken = (root / "train/a/7.jpg", root / "train/b/0.jpg", root / "val/c/1.jpg")
    for path in broken:
        path.write_bytes(path.read_bytes()[:200])
    return root


HOW = Preprocess(size=12)
CROP = Augmentation(crop="random-resized", scale=(0.3, 1), shift=0, flip=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_image_of_the_pool_stands_in(folder, workers):
    data = load_data(str(folder))
    assert data.train.ids[7] == "a/7.jpg"
    assert data.train.ids[8] == "b/0.jpg"
    told = []
    views = Views(data.train, HOW, CROP, 1, pool=np.array([3, 7, 8, 12, 20]), on_bad=lambda bad: told.append(dict(bad)))
    keys = [[(0, 3), (0, 7)], [(0, 8), (1, 8)], [(2, 20)]]
    found = list(batches(views, keys, workers=workers, pin=False))
    assert [b.samples.tolist() for b in found] == [[3, 12], [12, 12], [20]]
    assert found[0].labels.tolist() == [0, 1]
    assert set(views.bad) == {7, 8}
    assert "truncated" in views.bad[7].lower()
    assert told == [dict.fromkeys((7, 8), views.bad[7]) | {8: views.bad[8]}, {8: views.bad[8]}]
    assert not found[1].images[0].equal(found[1].images[1]), "the draws are those of the key"
    assert not found[0].images[1].equal(found[1].images[0])


def test_the_last_one_is_followed_by_the_first(folder):
    data = load_data(str(folder))
    views = Views(data.train, HOW, CROP, 1, pool=np.array([2, 7, 8]))
    assert views.read([(0, 7)])[0].samples.tolist() == [2]
    nothing = Views(data.train, HOW, CROP, 1, pool=np.array([7, 8]))
    for workers in (0, 1):
        with refused("100 images", "a/7.jpg (Trunc"):
            list(batches(nothing, [[(0, 7)]], workers=workers, pin=False))


def test_a_hundred_bad_images_of_many_end_the_run():
    """The image after the last that was tried has no reason of its own."""

    def read(_):
        raise BadImage("is broken")

    images = ImageSet(ids=[f"{i}.jpg" for i in range(120)], given=torch.zeros(120).long(), truth=None, content=read)
    with refused("100 images", "5.jpg (is broken"):
        list(batches(Views(images, HOW, CROP, 1), [[(0, 5)]], workers=0, pin=False))


def test_evaluation_sees_black_and_is_told(folder):
    data = load_data(str(folder))
    views = Views(data.val, HOW, None, 0)
    (batch,) = batches(views, [[(0, i) for i in range(9)]], workers=0, pin=False)
    bad = data.val.ids.index("c/1.jpg")
    assert list(views.bad) == [bad]
    assert not batch.images[bad].any()
    assert batch.samples.tolist() == list(range(9))


FLAGS = ["--init", "none", "--arch", "resnet-demo", "--method", "sigmoid", "--batch-size", "8", "--steps", "8",
         "--set", "size=16"]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_lists_them_and_says_how_many(folder, tmp_path, workers, capsys):
    out = tmp_path / "run"
    assert main(["--data", str(folder), *FLAGS, "--set", f"workers={workers}", "--out", str(out)]) == 0
    with (out / "bad_images.csv").open() as stream:
        rows = {(row["split"], row["id"]) for row in csv.DictReader(stream)}
    assert rows == {("train", "a/7.jpg"), ("train", "b/0.jpg"), ("val", "c/1.jpg")}
    results = json.loads((out / "results.json").read_text())
    assert results["images"] == 8
    assert results["bad_images"] == 3, "training and validation images together"
    assert "3 images could not be read and were skipped; see bad_images.csv" in (out / "report.html").read_text()
    assert results["unreadable_files"] == 0
    said = "".join(capsys.readouterr())
    assert said.count("is bad (") == 1, "one line at the first"
    assert f"and is skipped; {out / 'bad_images.csv'} lists all of them" in said
    assert f"3 images could not be read and were skipped; see {out / 'bad_images.csv'}" in said
    import pyarrow.parquet as pq

    assert pq.read_table(out / "labels.parquet").num_rows == 22
    first = load_file(out / "export/model.safetensors")
    again = tmp_path / f"again-{workers}"
    assert main(["--data", str(folder), *FLAGS, "--set", f"workers={2 - workers}", "--out", str(again)]) == 0
    second = load_file(again / "export/model.safetensors")
    assert all(second[name].equal(tensor) for name, tensor in first.items()), "workers change nothing"


def test_too_many_end_a_run_with_a_sentence(folder, tmp_path, capsys):
    for i in range(8):
        for name in ("a", "c"):
            (folder / "train" / name / f"{i}.jpg").write_bytes(b"nothing")
    out = tmp_path / "run"
    assert main(["--data", str(folder), *FLAGS, "--set", "workers=0", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "train images cannot be read, which is more than 10 (0.1%, at least 10)" in said
    assert f"finetune-mile check --data {folder}" in said
    assert json.loads((out / "run.json").read_text())["status"] == "failed"


def test_the_list_is_shared_and_goes_on(tmp_path):
    ids = [f"{i}.jpg" for i in range(40000)]
    one, two = (BadImages(tmp_path / "bad_images.csv", "x") for _ in range(2))
    one.add("train", ids, {3: "why", 4: "so"})
    one.add("train", ids, {3: "why"})
    two.add("train", ids, {3: "why", 5: "because"})
    two.add("val", ids, {3: "why"})
    assert list(one.read()) == [("train", "3.jpg"), ("train", "4.jpg"), ("train", "5.jpg"), ("val", "3.jpg")]
    assert allowed(40000) == 40
    assert allowed(100) == 10
    two.add("val", ids, dict.fromkeys(range(40), "why"))
    with refused("41 of 40,000 val images", "more than 40"):
        two.add("val", ids, {50: "why"})


def test_a_missing_file_is_a_bad_image(folder):
    data = load_data(str(folder))
    (folder / "train/c/3.jpg").unlink()
    views = Views(data.train, HOW, CROP, 1)
    index = data.train.ids.index("c/3.jpg")
    (batch,) = batches(views, [[(0, index)]], workers=0, pin=False)
    assert batch.samples.tolist() == [index + 1]
    assert "cannot be read: No such file" in views.bad[index]


@pytest.fixture
def with_heic(folder):
    """Three photos of a telephone and one of a camera, beside those that can be read."""
    for path in (folder / "val/c/1.jpg", folder / "train/a/7.jpg", folder / "train/b/0.jpg"):
        path.write_bytes(photo(7, size=(24, 20)))
    for name in ("train/a/IMG_1.HEIC", "train/b/IMG_2.heic", "val/a/IMG_3.heic", "train/c/DSC_1.NEF", "train/c/x.txt"):
        (folder / name).write_bytes(b"....ftypheic")
    return folder


HEIC = "3 files end in .heic and 1 in .nef, which cannot be read; convert them to JPEG"


def test_files_that_end_in_heic_are_said_and_counted(with_heic, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["--data", str(with_heic), *FLAGS, "--set", "workers=0", "--out", str(out)]) == 0
    assert capsys.readouterr().err.count(f"warning: --data {with_heic}: {HEIC}\n") == 1
    results = json.loads((out / "results.json").read_text())
    assert (results["unreadable_files"], results["bad_images"]) == (4, 0)


def test_files_that_end_in_heic_are_remembered_with_the_scan(with_heic, tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(scans, "WORTH_KEEPING", 1)
    monkeypatch.setattr(scans, "SETTLED", -1.0)
    first = load_data(str(with_heic))
    assert first.unreadable == {".heic": 3, ".nef": 1}
    monkeypatch.setattr(scans, "_walk", lambda *_: pytest.fail("it was to be remembered"))
    assert load_data(str(with_heic)).unreadable == first.unreadable


def test_doctor_says_which_files_end_in_heic(with_heic, capsys):
    assert cli.main(["check", "--data", str(with_heic), "--workers", "0"]) == 1
    assert f"{with_heic.name}: {HEIC}\n" in capsys.readouterr().out


def test_quickstart_gets_the_line_about_heic_files(with_heic):
    assert f"{with_heic.name}: {HEIC}" in list(report(load_data(str(with_heic)), {}, []))


def test_a_class_of_heic_files_alone_says_why_it_is_empty(folder):
    (folder / "train/d").mkdir()
    (folder / "train/d/IMG_1.heic").write_bytes(b"....ftypheic")
    with refused("class d", "1 file", ".heic", "convert"):
        load_data(str(folder))


def test_a_bad_image_is_told_once_by_a_process(tmp_path, capsys):
    ids = [f"{i}.jpg" for i in range(100)]
    first, second = (BadImages(tmp_path / f"{name}.csv", f"folder:{tmp_path}") for name in ("first", "second"))
    first.add("train", ids, {3: "empty"})
    first.add("train", ids, {4: "cut"})
    assert capsys.readouterr().err.count("warning: ") == 1
    second.add("train", ids, {4: "cut"})
    second.add("train", ids, {3: "empty"})
    assert capsys.readouterr().err == ""
    assert set(second.read()) == {("train", "3.jpg"), ("train", "4.jpg")}, "it is listed all the same"
    BadImages.told(f"folder:{tmp_path}", "val", ["5.jpg"])
    BadImages(tmp_path / "third.csv", f"folder:{tmp_path}").add("val", ids, {5: "cut"})
    assert capsys.readouterr().err == ""
    BadImages(tmp_path / "other.csv", "folder:elsewhere").add("val", ids, {5: "cut"})
    assert "warning: val image 5.jpg is bad (cut)" in capsys.readouterr().err
