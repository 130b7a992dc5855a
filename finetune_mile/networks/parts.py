"""Which part of a network learns: the classifier alone, norm layers, the last blocks."""

from __future__ import annotations

import copy
import re

from torch import nn

from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import get_head
from finetune_mile.networks.small import OnFeatures


def split_head(network: nn.Module) -> tuple[nn.Module, OnFeatures]:
    """Copies of the backbone without its classifier, and of the classifier alone."""
    backbone, head = copy.deepcopy(network), OnFeatures(get_head(network).in_features)
    head.fc = copy.deepcopy(get_head(network))
    if hasattr(backbone, "reset_classifier"):  # timm's
        backbone.reset_classifier(0)  # type: ignore[operator]
    else:
        backbone.fc = nn.Identity()
    return backbone.requires_grad_(False), head


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


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The residual or transformer blocks in the order of the forward pass; empty where a network has none."""
    names = [name for name, _ in network.named_children() if re.fullmatch(r"layer\d|layers|stages|blocks", name)]
    stages = [stage for name in names for stage in network.get_submodule(name).children()]
    inner = [getattr(stage, "blocks", stage if isinstance(stage, nn.Sequential) else None) for stage in stages]
    return [
        block for stage, blocks in zip(stages, inner, strict=True)
        for block in ([stage] if blocks is None else blocks.children())
    ]  # fmt: skip
