"""Risks of environments, for IRM and V-REx. B batch, C classes, E environments.

Both are functions of each environment's mean over the whole batch, so they are made of sums that processes can add up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, stack

from finetune_mile.learning.state import StepView


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
    logits = logits.float()
    shares = targets / targets.sum(1, keepdim=True).clamp(min=1.0)
    if class_weights is not None:
        shares = shares * class_weights
    log_chances = logits.log_softmax(1)
    losses = -(shares * log_chances).sum(1)
    slopes = ((log_chances.exp() * shares.sum(1, keepdim=True) - shares) * logits).sum(1)
    columns = stack([losses.new_ones(len(losses)), losses, slopes], 1)
    return F.one_hot(environment, count).float().T @ columns


def over_processes(sums: Tensor, add_up: Callable[[Tensor], Tensor], world: int) -> Tensor:
    """The sums over all processes, whose gradient is right once each process's own gradients are averaged.

    Args:
        sums: this process's, (E, 3).
        add_up: sums a tensor over the processes, without a gradient.
        world: how many processes there are.
    """
    if world == 1:
        return sums
    return add_up(sums.detach()) + world * (sums - sums.detach())


def risks_and_slopes(logits: Tensor, targets: Tensor, step: StepView) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, mean cross-entropies and mean slopes of the environments, over the complete batch: (E,) each.

    The weights are equal for the environments that occur in the batch and zero for the others.

    Args:
        logits: (B, C) of this process.
        targets: (B, C).
        step: whose environments they are.
    """
    assert step.environment is not None
    sums = environment_sums(logits, targets, step.environment, step.environments, step.class_weights)
    sums = over_processes(sums, step.add_up, step.processes)
    images, losses, slopes = sums.detach()[:, 0], sums[:, 1], sums[:, 2]
    shares = (images > 0).float() / (images > 0).sum()
    return shares, losses / images.clamp(min=1), slopes / images.clamp(min=1)
