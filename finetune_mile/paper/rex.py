"""V-REx (Krueger et al. 2021): softmax training over environments with a penalty on the variance of the risks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_mile.learning.phases import Phase, StepView
from finetune_mile.paper.irm import ACTIVATION, NEEDS, Block, phases, risks_and_slopes, untrained_loss

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ACTIVATION", "NEEDS", "Block", "loss", "phases", "untrained_loss"]


def loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    shares, risks, _ = risks_and_slopes(logits, targets, step)
    mean = (shares * risks).sum()
    weight: float = phase.values
    return mean + weight * (shares * (risks - mean).square()).sum()
