"""Warnings in a run: its pseudo-labels collapse, its loss rises. Each says what to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from finetune_mile.learning.phases import Phase

HeadBias = Literal["zero", "prior"]
MANY_EMPTY = 0.5  # share of empty sets
MANY_LABELS = 0.5  # share of all classes that an average image gets
LOW_RECALL = 0.5  # of the given label, among the pseudo-labels
HIGH_CHURN = 0.8
RISE = 3.0  # times the start: training diverges
STEPS = 10  # that the loss must stay there; also the steps that make the start
RATES = "the learning rate of the network or of its head is too high"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelReport:
    """A teacher's labels on a fixed sample of the training images."""

    labels_per_image: float
    empty_share: float
    given_recall: float
    churn: float | None  # labels that changed since the generation before, as a share of those in either


def inspect_labels(targets: Tensor, given: Tensor, before: Tensor | None) -> tuple[LabelReport, Tensor]:
    """Describe pseudo-labels; also returns them as booleans (N, C).

    Args:
        targets: (N, C) that a teacher makes.
        given: (N, C) given labels.
        before: (N, C) of the generation before.
    """
    labels, known = targets >= 0.5, given.bool()
    report = LabelReport(
        labels_per_image=float(labels.sum(1).float().mean()),
        empty_share=float((~labels.any(1)).float().mean()),
        given_recall=float((labels & known).sum() / known.sum().clamp(min=1)),
        churn=None if before is None else float((before ^ labels).sum() / (before | labels).sum().clamp(min=1)),
    )
    return report, labels


def guard(report: LabelReport, num_classes: int, previous: LabelReport | None, *, new_head: bool) -> list[str]:
    """Sentences about pseudo-labels; `new_head`: the first teacher's classifier started untrained."""
    warnings = []
    if report.empty_share > MANY_EMPTY:
        advice = "lower rho" + (", or give the first teacher a longer warm-up" if new_head else "")
        warnings.append(
            f"{report.empty_share:.0%} of the images get no pseudo-label: none of the teacher's outputs is above rho; "
            f"{advice}"
        )
    if report.labels_per_image > MANY_LABELS * num_classes:
        warnings.append(
            f"{report.labels_per_image:.1f} of {num_classes} labels per image: labels are inflating; raise rho or k_t"
        )
    elif previous is not None and report.labels_per_image > 2 * max(previous.labels_per_image, 1.0):
        warnings.append(
            f"labels per image went from {previous.labels_per_image:.1f} to {report.labels_per_image:.1f} in one "
            "generation: raise rho or k_t if this continues"
        )
    if report.empty_share <= MANY_EMPTY and report.given_recall < LOW_RECALL:
        advice = "the first teacher may be untrained (raise the warm-up)" if new_head else "raise k_t"
        warnings.append(
            f"only {report.given_recall:.0%} of the given labels are among the pseudo-labels: {advice}, or set "
            "union: true"
        )
    if report.churn is not None and report.churn > HIGH_CHURN:
        warnings.append(f"{report.churn:.0%} of the pseudo-labels changed since the last generation: raise k_t")
    return warnings


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
        untrained_loss: Callable[[Phase, int, float, HeadBias], float | None],  # of the method
        num_classes: int,
        given_labels: float,  # per labelled training image
        head_bias: HeadBias,
        advice: str,  # the flags that lower the learning rates
    ) -> None:
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
        if self.said or (step > done and done - steps < STEPS < phase.steps):
            return None
        count = self.given_labels if phase.given else max(labels or 0.0, 1.0)
        base, kind = self.untrained_loss(phase, self.num_classes, count, self.head_bias), "an untrained head"
        if base is None:
            return None
        if phase.given and self.start_steps >= STEPS and self.start / self.start_steps < base:
            base, kind = self.start / self.start_steps, "the first steps"
        if phase.given and self.start_steps < STEPS:
            self.start, self.start_steps = self.start + steps * loss, self.start_steps + steps
        self.above = self.above + steps if loss > RISE * base else 0
        if self.above < STEPS:
            return None
        self.said = True
        return (
            f"the loss is {loss:.3g} at step {step}, {loss / base:.0f} times that of {kind} ({base:.3g}). "
            f"Most likely {RATES}: try {self.advice}."
        )

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("start", "start_steps", "above", "said")}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for key, value in saved.items():
            setattr(self, key, value)
