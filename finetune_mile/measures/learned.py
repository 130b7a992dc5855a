"""Did a run learn anything? One sentence while the loss rises, one at the end, each with what to type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from finetune_mile.learning.phases import Auto, Given, Phase
from finetune_mile.measures.intervals import wilson

RISE = 3.0  # times the start: training diverges
STEPS = 10  # that the loss must stay there; also the steps that make the start
RATES = "the learning rate of the network or of its head is too high"


def lower_rates(lr: float, head_lr: float | None) -> str:
    """The flags for a tenth of the learning rates."""
    return f"--lr {lr / 10:g}" + ("" if head_lr is None else f" --set optimizer.head_lr={head_lr / 10:g}")


def untrained_loss(phase: Phase, num_classes: int, labels: float, head_bias: Literal["zero", "prior"]) -> float:
    """The loss that a new head gives before its first step.

    Args:
        phase: says which loss.
        num_classes: C.
        labels: labels per image in the targets.
        head_bias: every sigmoid starts at one half (`zero`) or at 1 / (C + 1) (`prior`).
    """
    softmax = math.log(num_classes)
    if phase.loss == "cross_entropy":
        return softmax
    chance = 0.5 if head_bias == "zero" else 1 / (num_classes + 1)
    sigmoids = -labels * math.log(chance) - (num_classes - labels) * math.log(1 - chance)
    return sigmoids + (phase.targets.ce * softmax if isinstance(phase.targets, Auto) else 0.0)


class LossAlarm:
    """Says once per run that the loss is three times what it was at the start, for ten steps in a row.

    The start is the mean over the first ten steps on given labels, or the loss of an untrained head where that is
    less: a run that diverges within its first steps has a high start. The loss on a teacher's labels depends on how
    many there are, so it is compared with an untrained head for as many labels. The first steps of later phases, in
    which the network meets other labels than those it has just learned, do not count.
    """

    def __init__(
        self, *, num_classes: int, given_labels: float, head_bias: Literal["zero", "prior"], advice: str
    ) -> None:
        """Start without any loss.

        Args:
            num_classes: C.
            given_labels: given labels per labelled training image.
            head_bias: how the bias of the new head starts.
            advice: the flags that lower the learning rates.
        """
        self.num_classes, self.given_labels, self.head_bias, self.advice = num_classes, given_labels, head_bias, advice
        self.start, self.start_steps = 0.0, 0  # the sum of the first losses on given labels
        self.above, self.said = 0, False

    def see(self, phase: Phase, loss: float, *, step: int, done: int, steps: int, labels: float | None) -> str | None:
        """The sentence, at the moment when the loss has been too high for long enough.

        Args:
            phase: that the steps belong to.
            loss: mean over `steps` steps.
            step: optimiser steps done in the run.
            done: optimiser steps done in the phase.
            steps: that the mean is over.
            labels: per image, on a teacher's labels; None on given ones.
        """
        if self.said or phase.penalty is not None:  # a penalty changes the loss on purpose
            return None
        if step > done and done - steps < STEPS < phase.steps:
            return None
        given = isinstance(phase.targets, Given)
        count = self.given_labels if given else max(labels or 0.0, 1.0)
        base, of_what = untrained_loss(phase, self.num_classes, count, self.head_bias), "that of an untrained head"
        if given and self.start_steps >= STEPS and self.start / self.start_steps < base:
            base, of_what = self.start / self.start_steps, "that of the first steps"
        if given and self.start_steps < STEPS:
            self.start, self.start_steps = self.start + steps * loss, self.start_steps + steps
        self.above = self.above + steps if loss > RISE * base else 0
        if self.above < STEPS:
            return None
        self.said = True
        return (
            f"the loss is {loss:.3g} at step {step}, {loss / base:.0f} times {of_what} ({base:.3g}). "
            f"Most likely {RATES}: try {self.advice}."
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {key: getattr(self, key) for key in ("start", "start_steps", "above", "said")}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for key, value in saved.items():
            setattr(self, key, value)


def learned_nothing(results: Mapping[str, float], *, steps: int, data: str, advice: str) -> str | None:
    """A sentence if the accuracy is that of guessing, or less than a constant answer has; None if it is better.

    Args:
        results: of results.json.
        steps: of the run.
        data: --data, for the advice.
        advice: the flags that lower the learning rates.
    """
    if not {"accuracy", "chance_accuracy", "majority_accuracy"} <= results.keys():
        return None
    accuracy, chance, majority = (results[key] for key in ("accuracy", "chance_accuracy", "majority_accuracy"))
    images = int(results.get("images_with_label", results["images"]))
    low, high = (100 * edge for edge in wilson(accuracy / 100, images))
    if low <= chance <= high:
        why = f"no better than guessing ({chance:.1f} %; 95 % interval of the accuracy {low:.1f} to {high:.1f})"
    elif accuracy < majority:
        why = f"less than always answering the most frequent class ({majority:.1f} %)"
    else:
        return None
    return (
        f"This model learned nothing useful: accuracy {accuracy:.1f} % on {images:,} validation images is {why}. "
        f"Likely causes: {RATES} (try {advice}), {steps:,} steps are too few (raise --steps or --epochs), "
        f"or the labels are wrong (finetune-mile doctor --data {data})."
    )
