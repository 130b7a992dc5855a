"""What every source of images promises, for every entry of SOURCES: a new one is tried as soon as it can be written."""

import pickle

import pytest
import torch
from idx_files import write_mnist
from photos import CLASSES, every, make_photos, write_csv, write_folder, write_parquet, write_shards

from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import SOURCES, load_data, split_name


def write_webvision(root, photos):
    (root / "info").mkdir(parents=True)
    (root / "info/synsets.txt").write_text("".join(f"{name} a name\n" for name in CLASSES))
    (root / "info/train_filelist_flickr.txt").write_text("")
    for split, called in (("train", "train_filelist_google"), ("val", "val_filelist")):
        lines = []
        for name, file, data in every(photos, split):
            place = f"google/{file}" if split == "train" else f"val_images_256/{file}"
            (root / place).parent.mkdir(exist_ok=True)
            (root / place).write_bytes(data)
            lines.append(f"{place if split == 'train' else file} {CLASSES.index(name)}\n")
        (root / f"info/{called}.txt").write_text("".join(lines))
    return root


def write_celeba(root, photos):
    (root / "img_align_celeba").mkdir(parents=True)
    rows, parts = [], []
    everyone = [(part, *row) for part, split in enumerate(("train", "val")) for row in every(photos, split)]
    for number, (part, name, _, data) in enumerate(everyone):
        called = f"{number + 1:06d}.jpg"
        (root / "img_align_celeba" / called).write_bytes(data)
        rows.append(f"{called} " + " ".join("1" if name == each else "-1" for each in CLASSES))
        parts.append(f"{called} {part}")
    (root / "list_attr_celeba.txt").write_text("\n".join([str(len(rows)), " ".join(CLASSES), *rows]) + "\n")
    (root / "list_eval_partition.txt").write_text("\n".join(parts) + "\n")
    return root


# Scheme: a function of (folder that is not there yet, photos) to what follows the colon.
WRITERS = {
    "demo": lambda root, photos: "40",
    "folder": write_folder,
    "imagenet": write_folder,
    "hf": write_parquet,
    "csv": write_csv,
    "wds": write_shards,
    "webvision": write_webvision,
    "celeba": write_celeba,
    "multi-mnist": lambda root, photos: f"{write_mnist(root, 90, 40)}?train=30&val=10",
    "mosaic": lambda root, photos: f"{write_folder(root, photos)}?train=12&val=6",
    "colored-mnist": lambda root, photos: write_mnist(root, 90, 40),
    "colored-mnist+": lambda root, photos: write_mnist(root, 90, 40),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))


def test_every_source_is_tried():
    assert WRITERS.keys() == SOURCES.keys(), "a new source needs a writer of a small example here"


@pytest.mark.parametrize("scheme", SOURCES)
def test_a_source_keeps_its_promises(scheme, tmp_path):
    data = load_data(f"{scheme}:{WRITERS[scheme](tmp_path / 'here', make_photos())}")
    assert len(data.classes) >= 2
    assert len(set(data.classes)) == len(data.classes)
    for images in (data.train, data.val):
        assert len(images) > 0
        assert len(set(images.ids)) == len(images) == len(images.given)
        if images.given.ndim == 1:
            assert int(images.given.max()) < len(data.classes)
        else:
            assert images.given.shape[1] == len(data.classes)
        first, last = images.read(0), images.read(len(images) - 1)
        for image in (first, last):
            assert image.dtype == torch.uint8
            assert image.ndim == 3
            assert image.shape[0] == 3
        assert images.read(0).equal(first), "the same image each time"
        again = pickle.loads(pickle.dumps(images))  # as it goes to a loader process
        assert again.read(0).equal(first)
        assert list(again.ids) == list(images.ids)


@pytest.mark.parametrize("scheme", [scheme for scheme in SOURCES if scheme not in ("demo", "hf")])
def test_a_place_that_is_not_there_is_one_sentence(scheme, tmp_path):
    with pytest.raises(Problem, match=scheme.replace("+", r"\+")):
        split_name(f"{scheme}:{tmp_path / 'nowhere'}")
