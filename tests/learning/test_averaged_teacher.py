"""Averaged teacher: its formulas against naive ones."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from finetune_mile.learning.phases import Budget
from finetune_mile.learning.roles import Average, tensors_of
from finetune_mile.methods.averaged_teacher import METHOD, MOMENTUM, Block, State

C, SHARE = 4, 0.25
GIVEN = torch.tensor([0, 1, 1, 3, -1, -1, 2, 1])


def block(**settings):
    return Block(**{"loss": "cross_entropy", "confidence": 0.6, "align": True, "weight": 0.5} | settings)


def phase_of(settings):
    (phase,) = METHOD.phases(settings, Budget(total_steps=7, steps_per_epoch=1, pool="all", labelled_share=SHARE))
    return phase


def new_state():
    return State(SimpleNamespace(given=GIVEN, num_classes=C, roles=SimpleNamespace(learner=nn.Linear(1, 1))))


def step_of(given, teacher=None, number=0):
    return SimpleNamespace(given=given, teacher_logits=teacher, class_weights=None, step=number, add_up=lambda x: x)


@pytest.fixture
def batch():
    """Two labelled and six unlabelled images: given labels, teacher's and learner's logits."""
    torch.manual_seed(0)
    given = torch.zeros(8, C)
    given[0, 1] = given[4, 3] = 1
    teacher = torch.randn(8, C) - 2.0  # sure of nothing
    teacher[[1, 2, 4], [0, 3, 2]] = 4.0  # but of these
    return given, teacher, torch.randn(8, C, requires_grad=True)


@pytest.mark.parametrize("kind", ["cross_entropy", "bce"])
def test_the_loss_is_that_of_a_loop_over_images(batch, kind):
    given, teacher, logits = batch
    phase = phase_of(block(loss=kind))
    targets = METHOD.targets(phase, teacher)
    labelled, unlabelled, counted = [], [], 0
    for row in range(8):
        if given[row].any():
            goal = given[row]
        else:
            sure = teacher[row].softmax(0) if kind == "cross_entropy" else teacher[row].sigmoid()
            goal = (sure >= 0.6).float()
            counted += bool(goal.any())
        if kind == "cross_entropy":
            value = -(goal * logits[row].log_softmax(0)).sum()
        else:
            value = F.binary_cross_entropy_with_logits(logits[row], goal, reduction="sum") * goal.any()
        (labelled if given[row].any() else unlabelled).append(value)
    assert 0 < counted < 6, f"{counted} of 6: some images must count, some not"
    expected = sum(labelled) / 2 + 0.5 * sum(unlabelled) / 6
    found = METHOD.loss(phase, logits, targets, step_of(given))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    found.backward()
    ignored = ~given.any(1) & ~targets.any(1)
    assert (logits.grad[ignored] == 0).all(), "an image without a confident label is not trained on"
    assert (logits.grad[~ignored] != 0).any(1).all()


@pytest.mark.parametrize("settings", [{"targets": "best"}, {"targets": "soft"}, {"rest": "negative"}])
def test_other_targets_are_those_of_a_loop_over_images(batch, settings):
    given, teacher, logits = batch
    teacher[2, 0] = 3.0  # two confident classes: a set, or the best of them
    phase = phase_of(block(loss="bce", **settings))
    targets = METHOD.targets(phase, teacher)
    total = 0.0
    for row in range(8):
        if given[row].any():
            continue
        sure = teacher[row].sigmoid()
        goal = sure if settings.get("targets") == "soft" else (sure >= 0.6).float()
        if settings.get("targets") == "best":
            goal = goal * F.one_hot(sure.argmax(), C)
        counts = goal.any() or settings.get("rest") == "negative"
        total += F.binary_cross_entropy_with_logits(logits[row], goal, reduction="sum") * counts
    labelled = sum(F.binary_cross_entropy_with_logits(logits[r], given[r], reduction="sum") for r in (0, 4))
    found = METHOD.loss(phase, logits, targets, step_of(given))
    assert found.item() == pytest.approx((labelled / 2 + 0.5 * total / 6).item(), rel=1e-5)


def test_a_copy_of_the_learner_is_taken_anew_by_number():
    phases = METHOD.phases(block(renew=3), Budget(total_steps=7, steps_per_epoch=1, pool="all", labelled_share=SHARE))
    assert [phase.steps for phase in phases] == [3, 2, 2]
    assert [phase.start for phase in phases] == ["init", "learner", "learner"]
    assert all(phase.becomes == ("teacher", "student") for phase in phases)
    assert [phase.continues for phase in phases] == [False, True, True]
    assert METHOD.traits(block(renew=3)).teacher == "snapshot"


def test_parts_of_a_batch_add_up_to_its_loss(batch):
    given, teacher, logits = batch
    phase = phase_of(block())
    targets = METHOD.targets(phase, teacher)
    complete = METHOD.loss(phase, logits, targets, step_of(given))
    parts = [METHOD.loss(phase, logits[p], targets[p], step_of(given[p])) for p in (slice(0, 4), slice(4, 8))]
    assert (sum(parts) / 2).item() == pytest.approx(complete.item(), rel=1e-6)


def test_the_best_class_counts_and_with_bce_every_confident_one():
    logits = torch.tensor([[2.0, 1.9, -9, -9], [9.0, -9, -9, -9]])
    assert METHOD.targets(phase_of(block(confidence=0.4)), logits).tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert METHOD.targets(phase_of(block()), logits).tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert METHOD.targets(phase_of(block(loss="bce")), logits).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]


def test_alignment_is_the_ratio_of_frequencies_and_running_mean(batch):
    given, teacher, _ = batch
    phase, state = phase_of(block()), new_state()
    frequencies = torch.tensor([1, 3, 1, 1]) / 6
    assert torch.allclose(state.adjusted(phase, teacher, 0), teacher), "nothing is known of the teacher yet"
    mean = frequencies
    for number in range(2):
        state.adjusted(phase, teacher + number, number)
        state.after_step(step_of(given, teacher + number, number), teacher)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * (teacher + number)[~given.any(1)].softmax(1).mean(0)
    expected = teacher.softmax(1) * frequencies / mean
    found = state.adjusted(phase, teacher, 2).softmax(1)
    assert torch.allclose(found, expected / expected.sum(1, keepdim=True), atol=1e-6)
    assert not torch.allclose(found, teacher.softmax(1), atol=1e-3)
    assert torch.equal(state.adjusted(phase_of(block(align=False)), teacher, 2), teacher)


def test_all_parts_of_a_batch_see_the_same_mean_and_it_survives_a_restart(batch):
    given, teacher, _ = batch
    phase = phase_of(block())
    complete, parted = new_state(), new_state()
    for number in range(3):
        now = teacher * number
        expected = complete.adjusted(phase, now, number)
        complete.after_step(step_of(given, now, number), teacher)
        for part in (slice(0, 3), slice(3, 8)):
            assert torch.allclose(parted.adjusted(phase, now[part], number), expected[part], atol=1e-6)
            parted.after_step(step_of(given[part], now[part], number), teacher)
        again = new_state()
        again.load_state_dict(parted.state_dict())
        parted = again


def test_the_teacher_is_the_average_of_the_learner():
    learner, teacher = nn.Linear(2, 1), nn.Linear(2, 1)
    average = Average(learner, 0.9, teacher)
    average.restart()
    start = learner.weight.detach().clone()
    expected = start.clone()
    for number in range(1, 4):
        with torch.no_grad():
            learner.weight.copy_(start + number)
        average.update()
        expected = 0.9 * expected + 0.1 * learner.weight.detach()
    assert torch.allclose(teacher.weight, expected)
    assert torch.equal(tensors_of(average.network())["weight"], teacher.weight)
