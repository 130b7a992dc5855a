"""A run that learns nothing says so: while the loss is too high, and at the end."""

import math

import pytest

from finetune_mile.learning.phases import Phase
from finetune_mile.measures.guards import LossAlarm, lower_rates
from finetune_mile.measures.intervals import wilson
from finetune_mile.measures.verdicts import learned_nothing
from finetune_mile.methods import auto, get_method, loss_of_new_head

ADVICE = lower_rates(0.01, 0.1)


def interaction(steps=1000, **changes):
    settings = {"name": "interaction", "generation": 0, "start": "init", "becomes": ("student",)}
    return Phase(**(settings | {"steps": steps, "loss": "bce"} | changes))


def imitation(steps=15, **changes):
    return interaction(steps, name="imitation", given=False, **changes)


def alarm(**changes):
    settings = {"untrained_loss": loss_of_new_head, "num_classes": 10, "given_labels": 1.0, "head_bias": "prior"}
    return LossAlarm(**(settings | {"advice": ADVICE} | changes))


def heard(watcher, losses, phase=None, every=10, labels=None):
    """What is said over windows of `every` steps that have these losses."""
    phase, said = phase or interaction(), []
    for number, loss in enumerate(losses, start=1):
        said.append(watcher.see(phase, loss, step=number * every, done=number * every, steps=every, labels=labels))
    return [sentence for sentence in said if sentence is not None]


def test_a_loss_that_is_already_314_at_step_10_is_one_sentence_with_the_flags():
    (said,) = heard(alarm(), [314.0, 200.0, 82.0, 7.0])
    assert "the loss is 314 at step 10, 96 times that of an untrained head (3.26)" in said
    assert "--lr 0.001 --set optimizer.head_lr=0.01" in said


def test_a_loss_that_rises_to_three_times_its_start_is_said_once_after_ten_steps():
    losses = [1.0] * 10 + [4.0] * 9 + [1.0] + [4.0] * 30
    watcher = alarm()
    (said,) = heard(watcher, losses, every=1)
    assert "at step 30, 4 times that of the first steps (1)" in said, "nine steps in a row are not enough"
    assert heard(watcher, [9.0] * 20) == []
    again = alarm()
    again.load_state_dict(watcher.state_dict())
    assert heard(again, [9.0] * 20) == [], "a resumed run does not repeat it"


# The demo's own losses (seed 0): interaction and imitation in turn, the last imitation with four labels per image.
DEMO = [("T", 300, [3.25, 3.1, 2.9, 2.6, 2.3], None), ("S", 15, [3.1, 2.45], 1.5), ("T", 45, [2.93, 2.4, 2.3], None),
        ("S", 15, [2.3, 2.0], 1.4), ("T", 45, [2.6, 2.4, 2.3], None), ("S", 15, [3.33, 3.32], 2.0),
        ("T", 45, [2.88, 2.8, 2.7], None), ("S", 15, [5.47, 5.58], 4.0)]  # fmt: skip


def test_the_demo_raises_no_alarm():
    watcher, step = alarm(), 0
    for kind, length, losses, labels in DEMO:
        steps = length // len(losses)
        for number, loss in enumerate(losses, start=1):
            phase = interaction(length) if kind == "T" else imitation(length)
            step += steps
            assert watcher.see(phase, loss, step=step, done=number * steps, steps=steps, labels=labels) is None


def test_losses_are_compared_with_what_is_like_them():
    few_then_many = [0.4] * 3 + [9.0] * 3  # empty label sets first, then four labels per image
    assert heard(alarm(), few_then_many, imitation(100), labels=4.0) == []
    assert heard(alarm(), [31.0], imitation(100), labels=4.0)
    penalised = alarm(untrained_loss=get_method("irm").untrained_loss)
    assert heard(penalised, [0.7, 900.0, 900.0], interaction(loss="cross_entropy", values=1e4)) == []
    # the first steps after the labels change
    watcher = alarm()
    heard(watcher, [2.0])
    later = interaction(200)
    assert watcher.see(later, 12.0, step=500, done=10, steps=10, labels=None) is None
    assert watcher.see(later, 12.0, step=510, done=20, steps=10, labels=None) is not None


def test_what_an_untrained_head_gives():
    assert loss_of_new_head(interaction(loss="cross_entropy"), 10, 1, "zero") == pytest.approx(math.log(10))
    assert loss_of_new_head(interaction(), 10, 1, "zero") == pytest.approx(10 * math.log(2))
    assert loss_of_new_head(interaction(), 10, 1, "prior") == pytest.approx(math.log(11) + 9 * math.log(1.1))
    values = auto.ImitationValues(beta=0.9, ce=10.0, teacher=0.5, gate="auto", v_min=1.0, g_min=0.5)
    on_top = auto.untrained_loss(imitation(values=values), 10, 1, "zero")
    assert on_top == pytest.approx(10 * math.log(2) + 10 * math.log(10))
    assert auto.untrained_loss(interaction(), 10, 1, "zero") == pytest.approx(10 * math.log(2))


def judged(accuracy, majority=10.0, images=3925, **more):
    results = {"accuracy": accuracy, "chance_accuracy": 10.0, "majority_accuracy": majority, "images": images, **more}
    return learned_nothing(results, steps=45, data="folder:photos", advice=ADVICE)


def test_an_accuracy_at_chance_is_a_sentence():
    said = judged(10.8)
    assert "accuracy 10.8 % on 3,925 validation images is no better than guessing (10.0 %" in said
    assert ADVICE in said
    assert "finetune-mile check --data folder:photos" in said
    assert judged(38.1) is None


def test_few_validation_images_cannot_tell_whether_a_model_learned():
    """It said "learned nothing useful" and "too few to tell" in one sentence."""
    said = judged(20.0, images=15)
    assert said.startswith(
        "15 validation images are too few to tell whether this model learned anything: accuracy 20.0 %"
    )
    assert "learned nothing" not in said
    assert judged(20.0, images=2000, images_with_label=15) == said
    assert "too few to tell" not in judged(10.8)


def test_an_accuracy_below_the_most_frequent_class_is_a_sentence():
    assert "is less than always answering the most frequent class (60.0 %; 95 % interval" in judged(41.0, majority=60.0)
    assert judged(61.0, majority=60.0) is None
    assert judged(2.0, majority=10.0) is not None, "worse than guessing"
    assert learned_nothing({"images": 5.0, "lrap": 3.0}, steps=1, data="x", advice="") is None


def test_a_model_is_not_called_useless_where_the_interval_holds_the_most_frequent_class():
    """88 % of 50 photos, with a class of 90 %, was "learned nothing useful", also on the model card."""
    said = judged(88.0, majority=90.0, images=50)
    assert said.startswith("50 validation images are too few to tell whether this model learned anything")
    assert "always answering the most frequent class has 90.0 %" in said
    assert "learned nothing" not in said
    assert "is no better than always answering the most frequent class (60.0 %" in judged(59.5, majority=60.0)


def test_the_interval_is_wilsons():
    assert wilson(0.1, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert wilson(0.0, 10)[0] == pytest.approx(0, abs=1e-12)
    assert wilson(0.0, 10)[1] == pytest.approx(0.2775, abs=1e-4)
    assert wilson(0.5, 0) == (0.0, 1.0)
