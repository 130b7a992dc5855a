import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from finetune_mile.learning.loop import label_counts
from finetune_mile.learning.losses import bce, cross_entropy, given_matrix
from finetune_mile.methods.pseudo_labels import Argmax, Soften, Threshold

LOGITS = torch.tensor([[2.0, -2.0, 0.1], [-3.0, -3.0, -2.0], [0.5, 0.6, -9.0]])
LABELS = torch.tensor([0, 1, -1])


def test_given_labels_single_multi_and_none():
    assert given_matrix(LABELS, 3).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    several = torch.tensor([[1, 0, 1], [-1, -1, -1]])
    assert given_matrix(several, 3).tolist() == [[1, 0, 1], [0, 0, 0]]


def test_thresholded_labels_and_what_an_empty_set_becomes():
    plain = Threshold(rho=0.25).labels(LOGITS, "bce")
    assert plain.tolist() == [[1, 0, 1], [0, 0, 0], [1, 1, 0]]
    best = Threshold(rho=0.25, empty="argmax").labels(LOGITS, "bce")
    assert best.tolist() == [[1, 0, 1], [0, 0, 1], [1, 1, 0]]
    assert label_counts(plain, given_matrix(LABELS, 3)).tolist() == [4, 1, 1]


def test_a_label_lies_strictly_above_rho():
    """A sigmoid of exactly rho is no label: 0.5 is the sigmoid of 0."""
    assert Threshold(rho=0.5).labels(torch.tensor([[0.0, 1e-6, -1.0]]), "bce").tolist() == [[0, 1, 0]]


def test_soft_and_argmax_labels():
    assert Soften(temperature=2.0).labels(LOGITS, "cross_entropy").allclose((LOGITS / 2).softmax(1))
    assert Soften(temperature=1.0).labels(LOGITS, "bce").allclose(LOGITS.sigmoid())
    assert Argmax().labels(LOGITS, "bce").argmax(1).tolist() == [0, 2, 1]


@given(st.floats(0.01, 0.98), st.floats(0.001, 0.01), st.integers(0, 99))
def test_thresholded_labels_are_binary_and_shrink_as_rho_grows(rho, more, seed):
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))
    low = Threshold(rho=rho).labels(logits, "bce")
    high = Threshold(rho=rho + more).labels(logits, "bce")
    assert set(low.unique().tolist()) <= {0.0, 1.0}
    assert bool((high <= low).all())


def test_bce_is_summed_over_classes_and_averaged_over_the_batch():
    targets = given_matrix(LABELS, 3)
    p = LOGITS.sigmoid()
    by_hand = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum() / 3
    assert float(bce(LOGITS, targets)) == pytest.approx(float(by_hand), rel=1e-5)
    weights = torch.tensor([1.0, 2.0, 0.0])
    weighted = F.binary_cross_entropy_with_logits(LOGITS, targets, weight=weights, reduction="sum") / 3
    assert float(bce(LOGITS, targets, weights)) == pytest.approx(float(weighted), rel=1e-6)


def test_cross_entropy_equals_torchs():
    labels = torch.tensor([0, 1, 2])
    assert float(cross_entropy(LOGITS, given_matrix(labels, 3))) == pytest.approx(
        float(F.cross_entropy(LOGITS, labels)), rel=1e-6
    )
    both = torch.tensor([[1.0, 1.0, 0.0]])
    assert float(cross_entropy(torch.zeros(1, 3), both)) == pytest.approx(math.log(3), rel=1e-6)
