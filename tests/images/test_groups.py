"""Near-duplicates are on one side of a split that we make; without them the split is what it always was."""

import hashlib
import os

import numpy as np
import pytest
import torch
from PIL import Image
from test_alike import COPIES, scene

from finetune_mile.core.in_memory import named
from finetune_mile.images import groups
from finetune_mile.images.alike import NEAR, NEXT, print_of, similarity
from finetune_mile.images.groups import find_groups
from finetune_mile.images.sources import load_data
from finetune_mile.images.splits import hold_out, make_pools, stratified


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    for k, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(20):
            scene(100 * k + i, (64, 48)).save(tmp_path / "photos" / name / f"{i:02d}.png")
    return tmp_path / "photos"


def as_before(labels, ids, fraction, seed):
    """The draw as it was before near-duplicates were known."""
    from finetune_mile.images.order import hashes

    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in ids)
    numbers = np.array([int.from_bytes(d, "little") >> 1 for d in digests], dtype=np.int64)
    order = np.lexsort((hashes(seed, 0, numbers), labels))
    order = order[labels[order] >= 0]
    members = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return np.sort(np.concatenate([some[: max(1, round(fraction * len(some)))] for some in members]))


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.2, 0.5, 0.77, 0.999])
def test_without_near_duplicates_the_draw_is_what_it_was(fraction):
    rng = np.random.default_rng(0)
    ids = [f"c/{i}.jpg" for i in range(300)]
    for classes in (1, 2, 7, 150):
        labels = rng.integers(-1, classes, 300)
        for alike in (None, np.full(300, -1), np.arange(300)):
            assert np.array_equal(
                stratified(labels, ids, fraction, 3, alike=alike), as_before(labels, ids, fraction, 3)
            )


def test_groups_are_taken_as_a_whole_and_the_shares_stay_near_a_fifth():
    rng = np.random.default_rng(1)
    ids = [f"c/{i}.jpg" for i in range(600)]
    labels = np.repeat([0, 1, 2], 200)
    alike = np.where(rng.random(600) < 0.5, labels * 200 + rng.integers(0, 40, 600), -1)
    before = np.zeros(0, dtype=np.int64)
    for fraction in (0.05, 0.2, 0.4):
        taken = stratified(labels, ids, fraction, 0, alike=alike)
        rest = np.setdiff1d(np.arange(600), taken)
        assert not set(alike[taken]) & set(alike[rest]) - {-1}
        assert np.abs(np.bincount(labels[taken]) / 200 - fraction).max() < 0.02
        assert set(before) <= set(taken), "a smaller share is part of a larger one"
        before = taken


def test_a_group_of_two_classes_or_with_unlabelled_images_is_on_one_side():
    ids = [f"c/{i}.jpg" for i in range(60)]
    labels = np.array([0] * 20 + [1] * 20 + [-1] * 20)
    alike = np.full(60, -1)
    for group in range(5):
        alike[[group, 20 + group, 21 + 3 * group]] = group
        alike[[10 + group, 40 + group]] = 10 + group
    taken = stratified(labels, ids, 0.2, 0, alike=alike)
    rest = np.setdiff1d(np.arange(60), taken)
    assert not set(alike[taken]) & set(alike[rest]) - {-1}
    assert set(labels[taken]) == {0, 1}


def test_a_class_that_is_one_burst_is_split_as_before():
    ids, labels = [f"c/{i}.jpg" for i in range(20)], np.repeat([0, 1], 10)
    alike = np.array([3] * 10 + [-1] * 10)
    assert np.array_equal(stratified(labels, ids, 0.2, 0, alike=alike), as_before(labels, ids, 0.2, 0))
    alike = np.array([3] * 20)  # all photos look alike
    assert np.array_equal(stratified(labels, ids, 0.2, 0, alike=alike), as_before(labels, ids, 0.2, 0))


def test_copies_in_a_folder_are_on_one_side(folder):
    plain = load_data(str(folder))
    assert plain.notes == ()
    assert plain.train.alike is not None
    assert (plain.train.alike == -1).all()
    held = next(name for name in plain.val.ids if name.startswith("cat/"))
    photo = Image.open(folder / held)
    for kind in ("jpeg", "90", "mirror"):
        COPIES[kind](photo).save(folder / "cat" / f"zz {kind}.png")
    (folder / "cat/zz same.png").write_bytes((folder / held).read_bytes())
    data = load_data(str(folder))
    sides = {name: side for side in ("train", "val") for name in getattr(data, side).ids}
    assert len({sides[name] for name in [held, *(n for n in sides if "zz" in n)]}) == 1
    assert "1 group, 5 photos" in data.notes[0]


@pytest.mark.parametrize("form", ["csv", "python"])
def test_copies_are_on_one_side_of_a_list_with_several_labels(tmp_path, form):
    """Each photo has a smaller copy, saved again under a name that is far from its own."""
    for number in range(30):
        photo, copy = scene(number, (64, 48)), f"z{(number * 7) % 30:02}-{number:02}.webp"
        photo.save(tmp_path / f"{number:02}.jpg")
        photo.resize((32, 24)).save(tmp_path / copy, quality=60)
    files = sorted(path.name for path in tmp_path.iterdir())
    names = [["cat", "dog"][: 1 + int(file.split(".")[0][-1]) % 2] for file in files]
    if form == "csv":
        lines = [f"{file},{';'.join(each)}\n" for file, each in zip(files, names, strict=True)]
        (tmp_path / "photos.csv").write_text("file,labels\n" + "".join(lines))
        found = load_data(f"csv:{tmp_path / 'photos.csv'}")
    else:
        with named(([tmp_path / file for file in files], names)) as (where,):
            found = load_data(where)
    train, val = ({name.split(".")[0][-2:] for name in images.ids} for images in (found.train, found.val))
    assert train & val == set()
    assert 8 <= len(found.val) <= 16
    assert any("near-duplicates stay on one side" in note for note in found.notes)


def test_photos_that_follow_each_other_may_differ_more(folder):
    photos = scene(500, (64, 48)), scene(501, (64, 48))
    for photo, places in zip(photos, (("cat/05w", "cat/05x"), ("cat/07w", "dog/07x")), strict=True):
        moved = Image.blend(photo, scene(502, (64, 48)), 0.4)
        prints = np.stack([print_of(photo), print_of(moved)])
        assert NEXT < similarity(prints, prints)[0, 1] < NEAR
        photo.save(folder / f"{places[0]}.png")
        moved.save(folder / f"{places[1]}.png")
    images = load_data(f"{folder}?labels=none", need_labels=False).train
    alike = find_groups(images)
    assert [images.ids[row] for row in np.flatnonzero(alike >= 0)] == ["cat/05w.png", "cat/05x.png"]


def test_groups_are_kept_in_the_cache_and_changed_files_are_read_again(folder, monkeypatch):
    monkeypatch.setattr(groups, "WORTH_KEEPING", 1)
    read, calls = groups._read_print, []
    monkeypatch.setattr(groups, "_read_print", lambda path: calls.append(path) or read(path))
    first = load_data(str(folder))
    assert len(calls) == 40
    again = load_data(str(folder))
    assert len(calls) == 40
    assert list(again.val.ids) == list(first.val.ids)
    (folder / "cat/03.png").write_bytes((folder / "cat/07.png").read_bytes())
    os.utime(folder / "cat/03.png", (1, 1))
    changed = load_data(str(folder))
    assert [path[-10:] for path in calls[40:]] == ["cat/03.png"]
    assert "1 group," in changed.notes[0]
    for kept in groups.cache().rglob("*.npz"):
        kept.write_bytes(kept.read_bytes()[:100])
    assert list(load_data(str(folder)).val.ids) == list(changed.val.ids), "a damaged cache is not used"


def test_of_many_photos_only_exact_copies_are_found(folder, monkeypatch):
    (folder / "cat/same.png").write_bytes((folder / "cat/07.png").read_bytes())
    COPIES["mirror"](Image.open(folder / "dog/07.png")).save(folder / "dog/mirror.png")
    (folder / "dog/empty.png").write_bytes(b"")
    (folder / "dog/empty too.png").write_bytes(b"")
    assert "2 groups" in load_data(str(folder)).notes[0]
    monkeypatch.setattr(groups, "MOST_PHOTOS", 10)
    monkeypatch.setattr(groups, "_read_print", None)
    (folder / "cat/00.png").touch()
    assert "1 group," in load_data(str(folder)).notes[0]
    monkeypatch.setattr(groups, "MOST_FILES", 10)
    monkeypatch.setattr(groups, "_exact", None)
    data = load_data(str(folder))
    assert data.notes == ()
    assert data.train.alike is None


def test_held_out_labels_have_no_copy_among_those_that_train(folder):
    for i in range(6):
        COPIES["mirror"](Image.open(folder / f"cat/{i:02d}.png")).save(folder / f"cat/{i:02d} mirror.png")
    data = load_data(str(folder))
    for seed in range(5):
        pools = hold_out(make_pools(data.train, 1.0, seed), 0.2, seed)
        held, rest = (data.train.alike[rows] for rows in (pools.calibration, pools.indices["labelled"]))
        assert not set(held.tolist()) & set(rest.tolist()) - {-1}
        assert torch.bincount(data.train.given[pools.calibration]).min() >= 2


def test_given_splits_and_images_in_memory_are_not_searched(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(groups, "_read_print", None)
    (tmp_path / "two").mkdir()
    for split in ("train", "val"):
        (tmp_path / "two" / split).symlink_to(folder)
    assert load_data(str(tmp_path / "two")).train.alike is None
    assert load_data("demo:40").train.alike is None
