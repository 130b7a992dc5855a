"""Optimisers, their parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from finetune_mile.networks.heads import get_head

LEAST_SIZE = 0.01  # of a tensor that starts at zero


def rate_at(
    step: int,
    *,
    total_steps: int,
    schedule: Literal["constant", "cosine", "step"],
    warmup: int = 0,
    milestones: tuple[int, ...] = (),
    gamma: float = 0.1,
) -> float:
    """The share of the base learning rate that step `step` (from 0) is taken with.

    A warm-up rises linearly and reaches 1 at its last step; the cosine falls from there to 0 after the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "cosine":
        done = (step - warmup) / max(total_steps - warmup, 1)
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    if schedule == "step":
        return gamma ** sum(step >= m for m in milestones)
    return 1.0


def parameter_groups(
    network: nn.Module, *, lr: float, head_lr: float | None, weight_decay: float
) -> list[dict[str, object]]:
    """Trunk and head, each with and without weight decay: vectors (biases, norms) are never decayed.

    Each group carries its `base_lr`, which `set_rate` multiplies.
    """
    in_head = {id(p) for p in get_head(network).parameters()}
    groups = []
    for head in (False, True):
        members = [p for p in network.parameters() if (id(p) in in_head) == head]
        rate = head_lr if head and head_lr is not None else lr
        # LARS adapts the trunk's matrices also where they do not decay, and never biases and norms; nor a new
        # head that does not decay (as in SimCLR): adapted to its own tiny norm it would hardly learn.
        groups += decay_groups(members, lr=rate, weight_decay=weight_decay, always_adapt=not head)
    return groups


def decay_groups(
    parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float, always_adapt: bool = True
) -> list[dict[str, object]]:
    """What learns of `parameters`: vectors, without weight decay, and the rest, with it.

    Args:
        parameters: of which only those that require gradients are taken.
        lr: the base rate.
        weight_decay: of everything but vectors.
        always_adapt: LARS adapts the rest also where it does not decay.
    """
    learning = [p for p in parameters if p.requires_grad]
    groups: list[dict[str, object]] = []
    for decayed in (False, True):
        groups.append(
            {
                "params": [p for p in learning if (p.ndim > 1) == decayed],
                "lr": lr,
                "base_lr": lr,
                "weight_decay": weight_decay if decayed else 0.0,
                "always_adapt": decayed and always_adapt,
            }
        )
    return [g for g in groups if g["params"]]


def relative_groups(network: nn.Module, *, lr: float, weight_decay: float) -> list[dict[str, object]]:
    """A group for each tensor, whose rate is `lr` times the root mean square of the tensor as it is now.

    A bias can start at zero: it takes the size of the weight of its layer; the classifier's takes the mean length of
    the classifier's rows.
    """
    head, groups = get_head(network), list[dict[str, object]]()
    for module in network.modules():
        weight = getattr(module, "weight", None)
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            size = float(parameter.detach().float().square().mean().sqrt())
            if name == "bias" and isinstance(weight, Tensor):
                size = float(weight.detach().float().square().mean().sqrt())
                if module is head:
                    size = float(weight.detach().float().norm(dim=1).mean())
            rate = lr * (size or LEAST_SIZE)
            decay = weight_decay if parameter.ndim > 1 else 0.0
            groups.append({"params": [parameter], "lr": rate, "base_lr": rate, "weight_decay": decay})
    return groups


def make_optimizer(
    name: Literal["sgd", "adamw", "lars", "relative"],
    groups: list[dict[str, object]],
    *,
    momentum: float,
    nesterov: bool,
) -> torch.optim.Optimizer:
    """SGD, AdamW (momentum is its first beta), timm's LARS, or Adam for `relative_groups`."""
    if name == "relative":
        return torch.optim.AdamW(groups, lr=1.0, betas=(momentum, 0.999), eps=1e-12)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=momentum, nesterov=nesterov and momentum > 0)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=1.0, betas=(momentum, 0.999))
    from timm.optim import Lars

    optimizer: torch.optim.Optimizer = Lars(groups, lr=1.0, momentum=momentum)
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set every group's learning rate to `share` of its own base."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * share
