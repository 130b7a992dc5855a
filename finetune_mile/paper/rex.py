"""V-REx (Krueger et al. 2021): softmax training over environments with a penalty on the variance of the risks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from finetune_mile.learning.phases import Phase, StepView
from finetune_mile.paper import irm

if TYPE_CHECKING:
    from torch import Tensor


def loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    shares, risks, _ = irm.risks_and_slopes(logits, targets, step)
    mean = (shares * risks).sum()
    weight: float = phase.values
    return mean + weight * (shares * (risks - mean).square()).sum()


METHOD = replace(irm.METHOD, name="rex", loss=loss)
