import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_mile.core.problems import Problem
from finetune_mile.images.sets import ImageSet
from finetune_mile.images.splits import balanced_weights, fingerprint, make_pools, stratified


@given(st.lists(st.integers(0, 4), min_size=5, max_size=200), st.integers(0, 9), st.data())
def test_splits_are_stratified_nested_and_keep_every_class(labels, seed, data):
    labels = np.array(labels)
    ids = [f"image-{i}" for i in range(len(labels))]
    small, large = sorted(data.draw(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1))))
    few, many = (stratified(labels, ids, f, seed) for f in (small, large))
    assert set(few) <= set(many)
    for label in np.unique(labels):
        members = int((labels == label).sum())
        assert int((labels[few] == label).sum()) == max(1, round(small * members)) or small == 1


def test_a_split_depends_on_names_not_on_places():
    labels, ids = np.arange(40) % 4, [f"image-{i}" for i in range(40)]
    chosen = {ids[i] for i in stratified(labels, ids, 0.3, 1)}
    turned = {ids[::-1][i] for i in stratified(labels[::-1], ids[::-1], 0.3, 1)}
    assert chosen == turned
    assert chosen != {ids[i] for i in stratified(labels, ids, 0.3, 2)}


@pytest.mark.parametrize("fraction", [0, -1, 1.5])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(Problem, match="--fraction"):
        stratified(np.zeros(3, dtype=np.int64), list("abc"), fraction, 0)


def test_pools_hide_the_labels_of_the_rest():
    given_labels = torch.arange(20) % 2
    images = ImageSet(
        ids=[str(i) for i in range(20)], given=given_labels, truth=None, content=lambda i: torch.zeros(3, 2, 2)
    )
    pools = make_pools(images, 0.5, 0)
    labelled, rest = pools.indices["labelled"], pools.indices["unlabelled"]
    assert len(labelled) == len(rest) == 10
    assert (pools.images.given[torch.from_numpy(rest)] == -1).all()
    assert pools.images.given[torch.from_numpy(labelled)].equal(given_labels[torch.from_numpy(labelled)])
    record = pools.to_json(0.5, 0)
    assert record["sha256"] == fingerprint(record["ids"])


def test_balanced_class_weights():
    weights = balanced_weights(torch.tensor([0, 0, 0, 1, -1]), 3)
    assert weights[1] / weights[0] == pytest.approx(3)
    assert weights[:2].mean() == pytest.approx(1)
    assert weights[2] == 1
