"""Did a run learn anything? One sentence while the loss rises, one at the end, each with what to type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from finetune_mile.learning.phases import Phase
from finetune_mile.measures.intervals import wilson

HeadBias = Literal["zero", "prior"]
RISE = 3.0  # times the start: training diverges
FEW_IMAGES = 200  # an interval of 14 points or more
STEPS = 10  # that the loss must stay there; also the steps that make the start
RATES = "the learning rate of the network or of its head is too high"


def lower_rates(lr: float, head_lr: float | None) -> str:
    """The flags for a tenth of the learning rates."""
    return f"--lr {lr / 10:g}" + ("" if head_lr is None else f" --set optimizer.head_lr={head_lr / 10:g}")


class LossAlarm:
    """Says once per run that the loss is three times what it was at the start, for ten steps in a row.

    The start is the mean over the first ten steps on given labels, or the loss of an untrained head where that is
    less: a run that diverges within its first steps has a high start. The loss on a teacher's labels depends on how
    many there are, so it is compared with an untrained head for as many labels. The first steps of later phases, in
    which the network meets other labels than those it has just learned, do not count.
    """

    def __init__(
        self,
        *,
        untrained_loss: Callable[[Phase, int, float, HeadBias], float | None],
        num_classes: int,
        given_labels: float,
        head_bias: HeadBias,
        advice: str,
    ) -> None:
        """Start without any loss.

        Args:
            untrained_loss: the method's: the loss of a phase before the first step, or None.
            num_classes: C.
            given_labels: given labels per labelled training image.
            head_bias: how the bias of the new head starts.
            advice: the flags that lower the learning rates.
        """
        self.untrained_loss, self.num_classes, self.given_labels = untrained_loss, num_classes, given_labels
        self.head_bias, self.advice = head_bias, advice
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
        if self.said:
            return None
        if step > done and done - steps < STEPS < phase.steps:
            return None
        given = phase.given
        count = self.given_labels if given else max(labels or 0.0, 1.0)
        base, of_what = self.untrained_loss(phase, self.num_classes, count, self.head_bias), "that of an untrained head"
        if base is None:
            return None
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
    few = ""
    if low <= chance <= high:
        why = f"no better than guessing ({chance:.1f} %; 95 % interval of the accuracy {low:.1f} to {high:.1f})"
        few = f"{images:,} validation images are too few to tell, " if images < FEW_IMAGES else ""
    elif accuracy < majority:
        why = f"less than always answering the most frequent class ({majority:.1f} %)"
    else:
        return None
    return (
        f"This model learned nothing useful: accuracy {accuracy:.1f} % on {images:,} validation images is {why}. "
        f"Likely causes: {few}{RATES} (try {advice}), {steps:,} steps are too few (raise --steps or --epochs), "
        f"or the labels are wrong (finetune-mile doctor --data {data})."
    )
