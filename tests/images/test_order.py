"""Order and randomness are functions: of the seed, the epoch and the sample, and of nothing else."""

import itertools
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_mile.core import cores
from finetune_mile.core.cores import local_processes, quota
from finetune_mile.core.types import Preprocess
from finetune_mile.images.order import Mixture, Order, micro_batches, permutation, uniforms
from finetune_mile.images.pipeline import (
    CROP_ASPECT,
    Augmentation,
    Readers,
    Views,
    batches,
    centre_box,
    default_workers,
    random_box,
)
from finetune_mile.images.sources.grids import load


def test_draws_are_uniform_and_independent():
    draws = uniforms(3, 0, np.arange(50_000), 3)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert np.abs(draws.mean(0) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.02
    other = uniforms(3, 1, np.arange(50_000), 3)
    assert abs(np.corrcoef(draws[:, 0], other[:, 0])[0, 1]) < 0.02


def test_draws_never_change_from_release_to_release():
    assert uniforms(0, 0, np.array([5]), 2).round(8).tolist() == [[0.67132011, 0.78797723]]
    assert permutation(0, 1, 10).tolist() == [0, 2, 4, 9, 5, 6, 8, 7, 1, 3]


@given(st.integers(1, 40), st.integers(0, 99), st.integers(0, 200), st.integers(1, 90))
def test_an_epoch_sees_everything_once(size, seed, start, count):
    pool = np.arange(size) * 3 + 1
    keys = Order(pool, seed).keys(start, count)
    assert len(keys) == count
    whole = Order(pool, seed).keys(0, start + count)
    assert keys == whole[start:]
    for epoch, members in itertools.groupby(whole, key=lambda key: key[0]):
        seen = [sample for _, sample in members]
        assert len(set(seen)) == len(seen)
        if (epoch + 1) * size <= start + count:
            assert sorted(seen) == pool.tolist()


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_processes_and_accumulation_share_one_order(world, accumulate):
    pool, steps, batch = np.arange(10), 5, 8
    feeds = [
        micro_batches(Order(pool, 7), first_step=2, batch_size=batch, accumulate=accumulate, rank=r, world=world)
        for r in range(world)
    ]
    for step in range(2, 2 + steps):
        seen = [key for _ in range(accumulate) for feed in feeds for key in next(feed)]
        assert sorted(seen) == sorted(Order(pool, 7).keys(step * batch, batch))


def mixture(some, batch):
    return Mixture(Order(np.arange(7), 1), Order(np.arange(7, 40), 2), some=some, of=batch)


@given(st.data())
def test_a_labelled_share_is_exact_in_every_batch_and_even_in_its_parts(data):
    batch = data.draw(st.integers(2, 24))
    some = data.draw(st.integers(1, batch - 1))
    first = data.draw(st.integers(0, 50))
    labelled, rest = Order(np.arange(7), 1), Order(np.arange(7, 40), 2)
    for step in range(first, first + 3):
        keys = mixture(some, batch).keys(step * batch, batch)
        assert [key for key in keys if key[1] < 7] == labelled.keys(step * some, some)
        assert [key for key in keys if key[1] >= 7] == rest.keys(step * (batch - some), batch - some)
        parts = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
        counts = [sum(key[1] < 7 for key in part) for part in np.array(keys).reshape(parts, -1, 2)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_processes_and_accumulation_share_one_mixture(world, accumulate):
    def feeds(world, accumulate):
        return [
            micro_batches(mixture(3, 8), first_step=2, batch_size=8, accumulate=accumulate, rank=r, world=world)
            for r in range(world)
        ]

    many, (one,) = feeds(world, accumulate), feeds(1, 1)
    for _ in range(5):
        assert [key for _ in range(accumulate) for feed in many for key in next(feed)] == next(one)


def test_workers_do_not_change_what_is_seen():
    data = load("").train
    how = Preprocess(size=24, crop=1.0)
    augmentation = Augmentation(crop="random-resized", scale=(0.2, 1.0), shift=0, flip=True)
    keys = [[(0, 3), (1, 3), (0, 4)], [(2, 9), (2, 10), (0, 3)]]
    views = Views(data, how, augmentation, seed=1)
    alone = list(batches(views, keys, workers=0, pin=False))
    helped = list(batches(views, keys, workers=2, pin=False))
    for a, b in zip(alone, helped, strict=True):
        assert a.images.equal(b.images)
        assert a.labels.equal(b.labels)
        assert a.samples.equal(b.samples)
    assert alone[0].images[0].equal(alone[1].images[2]), "the same key is the same view"
    assert not alone[0].images[0].equal(alone[0].images[1]), "another epoch is another view"


def test_loader_processes_stay_for_every_pass():
    """Batches are those of new processes for each pass, also after a pass that was left in the middle."""
    data, how = load(""), Preprocess(size=24, crop=1.0)
    keys = [[(0, 3), (0, 4)], [(0, 9)], [(0, 5), (0, 6)]]
    readers = Readers(workers=1, pin=False, batch_size=2)

    def passed(images):
        found = list(readers.batches(Views(images, how, None, 0), keys))
        for ours, theirs in zip(found, batches(Views(images, how, None, 0), keys, workers=0, pin=False), strict=True):
            assert ours.images.equal(theirs.images)
            assert ours.samples.equal(theirs.samples)
        return {child.pid for child in active_children()}

    before = {child.pid for child in active_children()}
    passed(data.train)
    both = passed(data.val) - before
    assert len(both) == 1, "one set of processes for both splits"
    next(readers.batches(Views(data.train, how, None, 0), keys))
    assert passed(data.train) - before == passed(data.val) - before == both


def test_cores_of_a_node_are_shared_by_its_own_processes_and_limited_by_quotas(tmp_path, monkeypatch):
    own, root = tmp_path / "cgroup", tmp_path / "sys"
    (root / "a/b").mkdir(parents=True)
    assert quota(root, own) == 1e9
    own.write_text("0::/a/b\n")
    (root / "a/b/cpu.max").write_text("max 100000\n")
    assert quota(root, own) == 1e9
    (root / "a/cpu.max").write_text("350000 100000\n")
    assert quota(root, own) == 3.5
    (root / "cpu,cpuacct/x").mkdir(parents=True)
    own.write_text("5:memory:/a\n4:cpu,cpuacct:/x\n")
    for name, value in (("quota", "-1"), ("period", "100000")):
        (root / f"cpu,cpuacct/x/cpu.cfs_{name}_us").write_text(value)
    assert quota(root, own) == 1e9
    (root / "cpu,cpuacct/x/cpu.cfs_quota_us").write_text("250000")
    assert quota(root, own) == 2.5
    monkeypatch.setattr(cores, "OWN_GROUPS", own)
    monkeypatch.setattr(cores, "CGROUPS", root)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
    assert default_workers(1) == 2
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "absent")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_workers(local_processes(16)) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_workers(local_processes(16)) == 8, "two nodes with eight GPUs each"


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 999))
def test_crops_lie_inside_the_image(height, width, sample):
    draws = uniforms(0, 0, np.array([sample]), 40)[0].tolist()
    box = random_box(height, width, (0.08, 1.0), CROP_ASPECT, draws)
    top, left, h, w = box or centre_box(height, width, share=1.0)
    assert top >= 0
    assert left >= 0
    assert 0 < h <= height - top
    assert 0 < w <= width - left


def test_the_demo_is_what_the_paper_describes():
    data = load("")
    for images in (data.train, data.val):
        assert images.truth is not None
        assert images.truth[torch.arange(len(images)), images.given].all(), "the given label is in the grid"
        assert float(images.truth.sum(1).float().mean()) == pytest.approx(6.12, abs=0.05)
    again = load("")
    assert again.train.read(17).equal(data.train.read(17))
    assert again.train.given.equal(data.train.given)
