"""How a run is doing, generation by generation, and the guards that warn before it collapses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from finetune_mile.measures.metrics import churn

MANY_EMPTY = 0.5  # share of empty sets
MANY_LABELS = 0.5  # share of all classes that an average image gets
LOW_RECALL = 0.5  # of the given label, among the pseudo-labels
HIGH_CHURN = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelReport:
    """What a teacher's labels look like on a fixed sample of the training images."""

    labels_per_image: float
    empty_share: float
    given_recall: float
    churn: float | None  # against the generation before


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
        churn=None if before is None else churn(before, labels),
    )
    return report, labels


def guard(report: LabelReport, num_classes: int, previous: LabelReport | None) -> list[str]:
    """Warnings in words, each with what to try."""
    warnings = []
    if report.empty_share > MANY_EMPTY:
        warnings.append(
            f"{report.empty_share:.0%} of the images get no pseudo-label: the teacher is not sure of anything yet; "
            "lower rho, or give the first teacher a longer warm-up"
        )
    if report.labels_per_image > MANY_LABELS * num_classes:
        warnings.append(
            f"{report.labels_per_image:.1f} of {num_classes} labels per image: labels are inflating; raise rho or k_t"
        )
    elif previous is not None and report.labels_per_image > 2 * max(previous.labels_per_image, 1.0):
        warnings.append(
            f"labels per image went from {previous.labels_per_image:.1f} to {report.labels_per_image:.1f} in one "
            "generation: raise rho or k_t if this goes on"
        )
    if report.empty_share <= MANY_EMPTY and report.given_recall < LOW_RECALL:
        warnings.append(
            f"only {report.given_recall:.0%} of the given labels are among the pseudo-labels: the first teacher may be "
            "untrained (raise the warm-up), or set union: true"
        )
    if report.churn is not None and report.churn > HIGH_CHURN:
        warnings.append(f"{report.churn:.0%} of the pseudo-labels changed since the last generation: raise k_t")
    return warnings


def pick_probe(size: int, wanted: int) -> Tensor:
    """`wanted` indices spread evenly over `size`: the fixed sample that every generation is looked at on."""
    picked: Tensor = torch.linspace(0, size - 1, min(size, wanted), dtype=torch.float64).round().long().unique()
    return picked
