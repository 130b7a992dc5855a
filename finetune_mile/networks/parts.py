"""Which part of a network learns: norm layers, the last blocks, or the classifier alone, of which there are kinds."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import HeadWeight, OnFeatures, StandardisedLinear, get_head, set_head

Head = Literal["linear", "bn-linear", "mlp"]
HIDDEN = 2048  # units of `mlp`


def split_head(network: nn.Module) -> tuple[nn.Module, OnFeatures]:
    """Copies of the backbone without its classifier, and of the classifier alone."""
    backbone, head = copy.deepcopy(network), OnFeatures(get_head(network).in_features)
    head.fc = copy.deepcopy(get_head(network))
    if hasattr(backbone, "reset_classifier"):  # timm's
        backbone.reset_classifier(0)  # type: ignore[operator]
    else:
        backbone.fc = nn.Identity()
    return backbone.requires_grad_(False), head


class HiddenLinear(nn.Linear):
    """A classifier with a hidden layer, `hidden`. D features, H hidden units, C classes."""

    def __init__(self, num_features: int, width: int, num_classes: int) -> None:
        super().__init__(width, num_classes)
        self.hidden = nn.Linear(num_features, width)

    def forward(self, features: Tensor) -> Tensor:
        """(B, D) to (B, C)."""
        return super().forward(self.hidden(features).relu())


def use_head(network: OnFeatures, kind: Head, weight: HeadWeight) -> None:
    """Replace the linear classifier of a network by one of another kind, in place; its bias stays."""
    old = get_head(network)
    if kind == "bn-linear":
        network.norm = nn.BatchNorm1d(network.num_features, affine=False, eps=1e-6)  # as in MAE's linear probing
    elif kind == "mlp":
        head = HiddenLinear(network.num_features, HIDDEN, old.out_features)
        with torch.no_grad():
            head.weight.normal_(std=0.01 if weight == "normal" else 0.0)
            head.bias.copy_(old.bias)
        set_head(network, head)


@torch.no_grad()
def plain_head(network: nn.Module) -> nn.Linear:
    """The classifier of a network for its features: a standardisation or a batch norm before it is folded in."""
    head, norm = get_head(network), getattr(network, "norm", None)
    if isinstance(head, StandardisedLinear):
        mean, scale = head.mean.cpu().double(), head.scale.cpu().double()
    elif isinstance(network, OnFeatures) and isinstance(norm, nn.BatchNorm1d):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean, scale = norm.running_mean.cpu().double(), (norm.running_var.cpu().double() + norm.eps).rsqrt()
    else:
        return copy.deepcopy(head)
    plain = nn.Linear(head.in_features, head.out_features)
    weight = head.weight.cpu().double() * scale  # Apple's GPUs have no doubles
    plain.weight.copy_(weight)
    plain.bias.copy_(head.bias.cpu().double() - weight @ mean)
    return plain


def choose_trainable(network: nn.Module, trunk: str) -> None:
    """Let only a part of the backbone learn: `norm-only`, or `last:N` blocks; the classifier always learns."""
    if trunk == "norm-only":
        layers = [module for module in network.modules() if "norm" in type(module).__name__.lower()]
        chosen = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
    else:
        count, blocks = int(trunk.removeprefix("last:")), blocks_of(network)
        if not 0 <= count <= len(blocks):
            raise Problem(f"--trunk {trunk}: {type(network).__name__} has {len(blocks)} blocks; use last:0 to last:N")
        everything = [id(p) for p in network.parameters()]  # in the order of the layers
        first = next(blocks[-count].parameters()) if count else None
        chosen = set() if first is None else set(everything[everything.index(id(first)) :])
    chosen |= {id(p) for p in get_head(network).parameters()}
    for parameter in network.parameters():
        parameter.requires_grad_(id(parameter) in chosen)


def set_drop_path(network: nn.Module, rate: float) -> None:
    """Leave out residual branches at random in training (stochastic depth), as timm's `drop_path_rate`, in place.

    Args:
        network: one of timm's, whose blocks have a place for it.
        rate: of the last block; earlier ones have less, in proportion to their depth.
    """
    from timm.layers import DropPath

    names = ("drop_path", "drop_path1", "drop_path2")
    places = [[name for name in names if hasattr(module, name)] for module in network.modules()]
    blocks = [(module, found) for module, found in zip(network.modules(), places, strict=True) if found]
    if not blocks:
        raise Problem("drop_path: this network has no blocks for it; timm's transformers, Swin and ConvNeXt have")
    for depth, (block, found) in enumerate(blocks):
        for name in found:
            setattr(block, name, DropPath(rate * depth / max(len(blocks) - 1, 1)))


def recompute_blocks(network: nn.Module) -> None:
    """Keep only the input of each block for the backward pass, which computes the block again; in place."""
    blocks = blocks_of(network)
    if not blocks:
        raise Problem(f"gradient_checkpointing: {type(network).__name__} has no blocks to compute twice; leave it out")
    for block in blocks:
        block.__class__ = _recomputed(type(block))  # a copy of the network has its own blocks; a hook would not


def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """A block of the same kind that does not keep what its backward pass needs."""

    def forward(self: nn.Module, *inputs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return kind.forward(self, *inputs)
        contexts = partial(_first_and_second, self)  # torch.compile takes no closure here
        return checkpoint(partial(kind.forward, self), *inputs, use_reentrant=False, context_fn=contexts)

    return type(kind.__name__, (kind,), {"forward": forward})


def _first_and_second(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What the forward pass of a block runs in: the first time, and when its gradient computes it again."""
    return nullcontext(), _statistics_kept(block)


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Batch norm has counted this batch already: it normalises with it, and its running statistics stay."""
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, counted) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counted


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The residual or transformer blocks in the order of the forward pass; empty where a network has none."""
    names = [name for name, _ in network.named_children() if re.fullmatch(r"layer\d|layers|stages|blocks", name)]
    stages = [stage for name in names for stage in network.get_submodule(name).children()]
    inner = [getattr(stage, "blocks", stage if isinstance(stage, nn.Sequential) else None) for stage in stages]
    return [
        block for stage, blocks in zip(stages, inner, strict=True)
        for block in ([stage] if blocks is None else blocks.children())
    ]  # fmt: skip
