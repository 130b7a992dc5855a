"""Optimisers, their parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from inspect import signature
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
    restart: int = 0,
) -> float:
    """The share of the base learning rate that step `step` (from 0) is taken with.

    A warm-up rises linearly and reaches 1 at its last step; the cosine falls from there to 0 after the last step.
    After `restart` steps the schedule has ended, and begins anew for the steps that are left.
    """
    if restart:
        step, total_steps = (step, restart) if step < restart else (step - restart, total_steps - restart)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "cosine":
        done = (step - warmup) / max(total_steps - warmup, 1)
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    if schedule == "step":
        return gamma ** sum(step >= m for m in milestones)
    return 1.0


def parameter_groups(
    network: nn.Module, *, lr: float, head_lr: float | None, weight_decay: float, layer_decay: float = 1.0
) -> list[dict[str, object]]:
    """Trunk and head, each with and without weight decay: vectors (biases, norms) are never decayed.

    Each group carries its `base_lr`, which `set_rate` multiplies. With `layer_decay` below 1, each layer of the trunk
    has groups of its own.
    """
    in_head = {id(p) for p in get_head(network).parameters()}
    groups = []
    for below, layer in list_layers(network, in_head) if layer_decay < 1 else ():
        groups += decay_groups(layer, lr=lr * layer_decay**below, weight_decay=weight_decay)
    for head in (True,) if layer_decay < 1 else (False, True):
        members = [p for p in network.parameters() if (id(p) in in_head) == head]
        rate = head_lr if head and head_lr is not None else lr
        # LARS adapts the trunk's matrices also where they do not decay, and never biases and norms; nor a new
        # head that does not decay (as in SimCLR): adapted to its own tiny norm it would hardly learn.
        groups += decay_groups(members, lr=rate, weight_decay=weight_decay, always_adapt=not head)
    return groups


def list_layers(network: nn.Module, without: set[int]) -> list[tuple[int, list[nn.Parameter]]]:
    """The layers of a trunk, as timm groups them (stem and positions, blocks), each with its distance from the head.

    Args:
        network: one of timm's networks, or a ResNet of ours, whose layers are its blocks.
        without: ids of the head's parameters.
    """
    from timm.models import group_parameters

    if hasattr(network, "group_matcher"):
        matcher = network.group_matcher(coarse=False)  # type: ignore[operator]
    else:
        matcher = {"stem": r"^conv1|^bn1", "blocks": [(r"^layer(\d+)\.(\d+)", None), (r"^(proj|norm)", (99999,))]}
    layers: dict[int, list[nn.Parameter]] = {}
    numbers = group_parameters(network, matcher, reverse=True)
    last = max(numbers.values())
    for name, parameter in network.named_parameters():
        if id(parameter) not in without:
            layers.setdefault(numbers.get(name, last), []).append(parameter)
    return [(last - number, layers[number]) for number in sorted(layers)]


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
    groups: list[dict[str, object]] = [
        {
            "params": [p for p in learning if (p.ndim > 1) == decayed], "lr": lr, "base_lr": lr,
            "weight_decay": weight_decay if decayed else 0.0, "always_adapt": decayed and always_adapt,
        }
        for decayed in (False, True)
    ]  # fmt: skip
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
    fused: bool = False,
) -> torch.optim.Optimizer:
    """SGD, AdamW (momentum is its first beta), timm's LARS, or Adam for `relative_groups`.

    Args:
        name: which one.
        groups: of parameters, on their device.
        momentum: of SGD and LARS; the first beta of Adam.
        nesterov: for SGD.
        fused: SGD and Adam in one kernel. LARS has none: all tensors of a group together, where timm has that (1.0.31).
    """
    one_kernel = True if fused else None  # None: as torch chooses for the device
    if name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=momentum, nesterov=nesterov and momentum > 0, fused=one_kernel)
    if name in ("adamw", "relative"):
        eps = 1e-12 if name == "relative" else 1e-8
        return torch.optim.AdamW(groups, lr=1.0, betas=(momentum, 0.999), eps=eps, fused=one_kernel)
    from timm.optim import Lars

    together = {"foreach": True} if fused and "foreach" in signature(Lars).parameters else {}
    optimizer: torch.optim.Optimizer = Lars(groups, lr=1.0, momentum=momentum, **together)
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set every group's learning rate to `share` of its own base."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * share
