"""Pseudo-labels of a pool: small, and the same when they come back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_mile.learning.losses import bce, cross_entropy
from finetune_mile.learning.stores import TOP, LabelStore, decode, encode, pack_bits, unpack_bits

IMAGENET = 1_281_167


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def block_bytes(block):
    """What a block takes, in memory and on disk."""
    return sum(tensor.nbytes for tensor in block.values())


@given(st.integers(1, 40), st.integers(0, 99))
def test_labels_pack_to_bits_and_back(classes, seed):
    labels = (rand(7, classes, seed=seed) > 0.5).float()
    packed = pack_bits(labels)
    assert packed.shape == (7, math.ceil(classes / 8))
    assert unpack_bits(packed, classes).equal(labels)


@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 99))
def test_nothing_is_lost_of_hard_labels(classes, density, seed):
    labels = (rand(9, classes, seed=seed) < density).float()
    block = encode(labels, soft=False)
    assert decode(block, torch.arange(9), classes).equal(labels)
    some = torch.tensor([8, 0, 3, 3, 0])
    assert decode(block, some, classes).equal(labels[some])


def test_few_labels_are_listed_and_many_are_bits():
    labels = torch.zeros(50, 1000)
    labels[:, 7] = 1
    few, many = encode(labels, soft=False), encode(torch.ones(50, 1000), soft=False)
    assert block_bytes(few) == 50 * (2 + 4)
    assert block_bytes(many) == 50 * 125


@given(st.integers(1, 80), st.integers(0, 99))
def test_soft_labels_keep_their_largest_values_and_their_sum(classes, seed):
    logits = 4 * torch.randn(6, classes, generator=torch.Generator().manual_seed(seed))
    for full in (logits.softmax(1), logits.sigmoid()):
        found = decode(encode(full, soft=True), torch.arange(6), classes)
        assert (found.sum(1) - full.sum(1)).abs().max() < 1e-3 * full.sum(1).max()
        kept = full.topk(min(TOP, classes)).indices
        assert torch.allclose(found.gather(1, kept), full.gather(1, kept), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("kind", ["soft", "few labels", "all labels"])
def test_imagenet_fits_into_200_megabytes(kind):
    images, classes = 2048, 1000
    full = (3 * torch.randn(images, classes, generator=torch.Generator().manual_seed(0))).softmax(1)
    targets = {"soft": full, "few labels": full > 0.25, "all labels": torch.ones(images, classes)}[kind].float()
    store = LabelStore(torch.arange(images), [encode(targets, soft=kind == "soft")], images, classes)
    assert (store.rows.nbytes + sum(map(block_bytes, store.blocks))) / images * IMAGENET <= 200e6


def test_what_soft_labels_lose_is_small_where_a_teacher_is_sure():
    """1,000 classes: half of the mass in the tail of a flat teacher is spread evenly, a sure one loses nothing."""
    noise = torch.randn(256, 1000, generator=torch.Generator().manual_seed(0))
    student = torch.randn(256, 1000, generator=torch.Generator().manual_seed(1))
    for scale, most in ((1.0, 0.6), (3.0, 0.25), (6.0, 0.01)):
        full = (scale * noise).softmax(1)
        found = decode(encode(full, soft=True), torch.arange(256), 1000)
        assert float((found - full).abs().sum(1).mean()) < most, "total variation, twice"
        assert float(cross_entropy(student, found)) == pytest.approx(float(cross_entropy(student, full)), rel=0.01)
    full = (3 * noise - 6).sigmoid()
    found = decode(encode(full, soft=True), torch.arange(256), 1000)
    assert float(bce(student, found)) == pytest.approx(float(bce(student, full)), rel=0.01)


def test_a_store_finds_rows_across_blocks_and_refuses_strangers():
    labels = (rand(10, 12) > 0.5).float()
    rows = torch.full((30,), -1)
    rows[10:20] = torch.arange(10)
    store = LabelStore(rows, [encode(part, soft=False) for part in labels.split(4)], 4, 12)
    wanted = torch.tensor([19, 10, 13, 14, 10])
    assert store[wanted].equal(labels[wanted - 10])
    with pytest.raises(IndexError, match="outside of the labelled pool"):
        store[torch.tensor([10, 5])]
