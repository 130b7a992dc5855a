"""IRM (Arjovsky et al. 2019): softmax training over environments with IRMv1's penalty on the risks' slopes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Amount, Section
from finetune_mile.learning.phases import Budget, Phase
from finetune_mile.learning.state import StepView

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATION = "softmax"
NEEDS = ("environments", "whole_batch")


class Block(Section):
    """IRM and REx: softmax training whose risks should not differ between environments."""

    weight: float = Field(ge=0, description="of the penalty")
    anneal: Amount | Literal[0] = Field(description="steps before that weight; 0: none")
    anneal_weight: float = Field(ge=0, description="of the penalty until then; DomainBed: 1")
    optimizer_state: Literal["keep", "reset"] = Field(description="momentum where the weight changes; DomainBed: reset")


def phases(block: Block, budget: Budget) -> list[Phase]:
    """The penalty's weight changes where a phase ends, so it follows from the step as everything else does."""
    anneal, total = budget.steps(block.anneal), budget.total_steps
    if anneal >= total:
        raise Problem(f"anneal: {anneal} of {total} steps leave none for the penalty; lower it")
    return [
        Phase(
            name="interaction", generation=0, steps=steps, start="student", becomes=("student",),
            loss="cross_entropy", values=weight,
        )
        for steps, weight in ((anneal, block.anneal_weight), (total - anneal, block.weight)) if steps
    ]  # fmt: skip


def loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    """The mean risk of the environments in the batch, and the penalty: a scalar."""
    from finetune_mile.paper.environments import risks_and_slopes

    shares, risks, slopes = risks_and_slopes(logits, targets, step)
    weight: float = phase.values
    return (shares * risks).sum() + weight * (shares * slopes.square()).sum()


def untrained_loss(phase: Phase, num_classes: int, labels: float, head_bias: Literal["zero", "prior"]) -> float | None:
    """A penalty changes the loss on purpose: there is nothing to compare it with."""
    del phase, num_classes, labels, head_bias
    return None
