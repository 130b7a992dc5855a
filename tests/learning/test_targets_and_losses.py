import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from finetune_mile.learning.loop import label_counts
from finetune_mile.learning.losses import bce, cross_entropy, given_matrix
from finetune_mile.learning.phases import Phase
from finetune_mile.methods import loss_of_new_head, named_loss
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


def loss_of(phase, logits, targets, labels):
    step = SimpleNamespace(class_weights=None, given=given_matrix(labels, logits.shape[1]))
    return named_loss(phase, logits, targets, step)


def imitation(**fields):
    return Phase(name="imitation", generation=0, steps=1, start="init", becomes=("student",), given=False, **fields)


@pytest.mark.parametrize("heat", [0.1, 2.0])
def test_finding_12_a_temperature_divides_both_sides_and_the_loss_is_times_its_square(heat):
    """As in SimCLR-v2's distillation; only the teacher's side was divided, which sharpened the student's outputs."""
    student, teacher = LOGITS.clone().requires_grad_(), LOGITS.flip(0)
    rule = Soften(temperature=heat)
    phase = imitation(loss="cross_entropy", values=rule, soft=True)
    loss = loss_of(phase, student, rule.labels(teacher, "cross_entropy"), LABELS)
    by_hand = -((teacher / heat).softmax(1) * (LOGITS / heat).log_softmax(1)).sum(1).mean() * heat**2
    assert loss.item() == pytest.approx(float(by_hand), rel=1e-5)
    loss.backward()
    wanted = heat * ((LOGITS / heat).softmax(1) - (teacher / heat).softmax(1)) / len(LOGITS)
    assert student.grad is not None
    assert torch.allclose(student.grad, wanted, atol=1e-6)
    perfect = teacher.clone().requires_grad_()
    loss_of(phase, perfect, rule.labels(teacher, "cross_entropy"), LABELS).backward()
    assert perfect.grad is not None
    assert float(perfect.grad.abs().max()) < 1e-6, "a student that equals its teacher has nothing left to learn"


def test_finding_12_a_temperature_of_one_changes_no_bit():
    for loss, function in (("bce", bce), ("cross_entropy", cross_entropy)):
        rule = Soften(temperature=1.0)
        targets = rule.labels(LOGITS.flip(0), loss)
        found = loss_of(imitation(loss=loss, values=rule, soft=True), LOGITS, targets, LABELS)
        assert found.equal(function(LOGITS, targets))


def test_finding_3_the_given_labels_have_their_weight_beside_the_teachers():
    """Label + distillation. The third image has no label: it counts in the teacher's part alone."""
    targets = LOGITS.flip(0).softmax(1)
    phase = imitation(loss="cross_entropy", values=Soften(temperature=1.0), label_weight=0.25)
    teachers = -(targets * LOGITS.log_softmax(1)).sum(1)
    labels = torch.tensor([-LOGITS.log_softmax(1)[0, 0], -LOGITS.log_softmax(1)[1, 1], 0.0])
    assert float(loss_of(phase, LOGITS, targets, LABELS)) == pytest.approx(
        float((0.75 * teachers + 0.25 * labels).mean()), rel=1e-6
    )


def test_the_loss_of_a_new_head_follows_the_temperature():
    for heat in (0.5, 1.0, 3.0):
        rule = Soften(temperature=heat)
        for loss, bias in (("cross_entropy", "zero"), ("bce", "zero"), ("bce", "prior")):
            phase = imitation(loss=loss, values=rule, soft=True)
            logits = torch.full((1, 10), 0.0 if bias == "zero" else -math.log(10.0))
            targets = torch.zeros(1, 10)
            targets[0, 3] = 1.0
            found = loss_of(phase, logits, targets, torch.tensor([3]))
            assert loss_of_new_head(phase, 10, 1.0, bias) == pytest.approx(float(found), rel=1e-4)
