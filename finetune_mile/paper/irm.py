"""IRM (Arjovsky et al. 2019): softmax training over environments with IRMv1's penalty on the risks' slopes.

A risk is an environment's mean over the complete batch, so it is made of sums that processes can add up. B batch,
C classes, E environments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Amount, Section
from finetune_mile.learning.phases import Budget, MethodState, Phase, RunView, StepView
from finetune_mile.methods import Method, Traits

if TYPE_CHECKING:
    from torch import Tensor


class Block(Section):
    """IRM and REx: softmax training whose risks should not differ between environments."""

    weight: float = Field(ge=0, description="of the penalty")
    anneal: Amount | Literal[0] = Field(description="steps before that weight; 0: none")
    anneal_weight: float = Field(ge=0, description="of the penalty until then; DomainBed: 1")
    optimizer_state: Literal["keep", "reset"] = Field(description="momentum where the weight changes; DomainBed: reset")


def phases(block: Block, budget: Budget) -> list[Phase]:
    """The penalty's weight changes where a phase ends."""
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


class Environments(MethodState):
    """Which environment each training image comes from."""

    def __init__(self, run: RunView) -> None:
        assert run.environment is not None
        self.environment, self.count = run.environment, int(run.environment.max()) + 1


def loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    """The mean risk of the environments in the batch, and the penalty: a scalar."""
    shares, risks, slopes = risks_and_slopes(logits, targets, step)
    weight: float = phase.values
    return (shares * risks).sum() + weight * (shares * slopes.square()).sum()


def untrained_loss(*_: object) -> None:
    """A penalty changes the loss on purpose: there is nothing to compare it with."""


def risks_and_slopes(logits: Tensor, targets: Tensor, step: StepView) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, mean cross-entropies and mean slopes of the environments, over the complete batch: (E,) each.

    The weights are equal for the environments that occur in the batch and zero for the others.

    Args:
        logits: (B, C) of this process.
        targets: (B, C).
        step: whose environments they are.
    """
    from finetune_mile.learning.losses import upload

    state: Environments = step.state
    environment = upload(state.environment[step.samples], logits.device)
    sums = environment_sums(logits, targets, environment, state.count, step.class_weights)
    if step.processes > 1:  # this gradient is right once each process's own gradients are averaged
        sums = step.add_up(sums.detach()) + step.processes * (sums - sums.detach())
    images, losses, slopes = sums.detach()[:, 0], sums[:, 1], sums[:, 2]
    shares = (images > 0).float() / (images > 0).sum()
    return shares, losses / images.clamp(min=1), slopes / images.clamp(min=1)


def environment_sums(
    logits: Tensor, targets: Tensor, environment: Tensor, count: int, class_weights: Tensor | None = None
) -> Tensor:
    """Images, cross-entropies and slopes, each summed over the images of an environment: (E, 3).

    The slope is IRMv1's gradient, written out: the derivative of the cross-entropy by a factor on the logits, at 1.

    Args:
        logits: (B, C).
        targets: (B, C); several given labels share the mass equally.
        environment: (B,) in [0, E).
        count: E.
        class_weights: (C,), or None for ones.
    """
    import torch

    from finetune_mile.learning.losses import shared

    logits = logits.float()
    shares = shared(targets)
    if class_weights is not None:
        shares = shares * class_weights
    log_chances = logits.log_softmax(1)
    losses = -(shares * log_chances).sum(1)
    slopes = ((log_chances.exp() * shares.sum(1, keepdim=True) - shares) * logits).sum(1)
    columns = torch.stack([losses.new_ones(len(losses)), losses, slopes], 1)
    return torch.nn.functional.one_hot(environment, count).float().T @ columns


METHOD = Method(
    name="irm", phases=phases, Block=Block, needs=frozenset({"environments", "whole_batch"}),
    traits=lambda block: Traits(activation="softmax", optimizer_state=block.optimizer_state),
    loss=loss, untrained_loss=untrained_loss, State=Environments,
)  # fmt: skip
