"""Large-loss rejection (Kim et al. 2022, LL-R): sigmoid training that leaves out the likely false negatives.

Of all classes that were not given, those with the largest losses in a batch are probably there. A share of them, which
grows with the step, does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from finetune_mile.core.types import Section
from finetune_mile.learning.phases import Budget, Phase, StepView, one_interaction
from finetune_mile.methods import Method

if TYPE_CHECKING:
    from torch import Tensor


class Block(Section):
    """Large-loss rejection."""

    share: float = Field(default=0.02, ge=0, lt=1, description="of the entries not given, left out at the last step")


def phases(block: Block, budget: Budget) -> list[Phase]:
    """One long interaction."""
    return one_interaction(budget, "bce", values=block.share)


def loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    """BCE without the largest entries, over the batch of all processes, among the classes that were not given."""
    import torch

    from finetune_mile.learning.losses import bce_entries

    entries = bce_entries(logits, targets, step.class_weights)
    negative = targets <= 0
    candidates = step.gather(entries.detach().masked_fill(~negative, -torch.inf)).flatten()
    rejected = int(phase.values * step.step / step.total_steps * int(candidates.isfinite().sum()))
    if rejected:
        smallest = candidates.topk(rejected).values[-1]
        entries = entries.masked_fill(negative & (entries.detach() >= smallest), 0.0)
    return entries.sum(1).mean()


METHOD = Method(
    name="large-loss", phases=phases, Block=Block, needs=frozenset({"whole_batch", "hard_labels"}), loss=loss
)
