"""WAN, weak assumed negatives (Cole et al. 2021): sigmoid training in which classes not given weigh little."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from finetune_mile.learning.phases import Budget, Phase, StepView, one_interaction
from finetune_mile.methods import Method

if TYPE_CHECKING:
    from torch import Tensor


def phases(block: None, budget: Budget) -> list[Phase]:
    """One long interaction."""
    del block
    return one_interaction(budget, "bce")


def loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    """BCE in which each class that was not given weighs 1 / (C - 1): together as much as the given one."""
    import torch

    from finetune_mile.learning.losses import bce_entries

    del phase
    weak = 1 / max(logits.shape[1] - 1, 1)
    weights = torch.where(targets > 0, 1.0, weak)
    return (weights * bce_entries(logits, targets, step.class_weights)).sum(1).mean()


def untrained_loss(phase: Phase, num_classes: int, labels: float, head_bias: Literal["zero", "prior"]) -> float | None:
    """The same weights, before the first step."""
    del phase
    chance = 0.5 if head_bias == "zero" else 1 / (num_classes + 1)
    return -labels * math.log(chance) - (num_classes - labels) / max(num_classes - 1, 1) * math.log(1 - chance)


METHOD = Method(name="wan", phases=phases, needs=frozenset({"hard_labels"}), loss=loss, untrained_loss=untrained_loss)
