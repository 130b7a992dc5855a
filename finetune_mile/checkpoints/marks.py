"""What a file tells about its network beside names and shapes: stem, max-pooling, attention heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from finetune_mile.core.problems import Problem
from finetune_mile.networks.resnets import Stem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.adapters import Adapted
    from finetune_mile.checkpoints.detect import Found
    from finetune_mile.checkpoints.readers import Contents


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Properties of a network that none of its tensors shows."""

    cifar_stem: Stem | None = "cifar"  # the form of a 3x3 stem; None: the file does not tell
    stem_pool: bool = True  # max-pooling after a 7x7 stem
    stem_relu: bool = True  # ReLU after bn1
    heads: int | None = None  # attention heads, where they are not those of timm's network of that size


def read_marks(contents: Contents, found: Found, adapted: Adapted, *, source: str) -> Marks:
    """Read the marks of a complete file, also where only a part of it is loaded.

    Args:
        contents: the complete file.
        found: its format.
        adapted: the tensors that are loaded, in our names.
        source: the file's name, for messages.
    """
    stem, pool = found.adapter.cifar_stem, True
    if not found.forced and not found.adapter.is_certain(contents):
        stem = None  # many people call their modules backbone and classifier
    kernel = adapted.tensors["conv1.weight"].shape[-1] if "conv1.weight" in adapted.tensors else 7
    bolts = _bolts(contents)
    if bolts is not None and bolts[0] == (kernel == 7):
        first_conv, pool = bolts
        if pool and not first_conv:
            raise Problem(
                f"{source}: its hyper_parameters say first_conv False and maxpool1 True, "
                "but a 3x3 stem with max-pooling is not supported"
            )
        stem, pool = "cifar", pool or not first_conv
    # solo-learn's backbones have no fc: a network that has its own is not one of them
    if stem is None and (found.forced or adapted.sources.get("fc.weight", "").endswith("fc.weight")):
        stem = "cifar"
    return Marks(
        cifar_stem=stem,
        stem_pool=pool,
        stem_relu=found.adapter.stem_relu,
        heads=_heads(contents, found, adapted.tensors.get("pos_embed")),
    )


def _bolts(contents: Contents) -> tuple[bool, bool] | None:
    """Read lightning-bolts' hyper-parameters first_conv (7x7, not 3x3) and maxpool1 (max-pooling after it)."""
    settings = contents.tree.get("hyper_parameters")
    if not isinstance(settings, Mapping):
        return None
    first_conv, pool = settings.get("first_conv"), settings.get("maxpool1")
    return (first_conv, pool) if isinstance(first_conv, bool) and isinstance(pool, bool) else None


def _heads(contents: Contents, found: Found, positions: Tensor | None) -> int | None:
    """Number of attention heads of MoCo-v3's small transformers: 12, where timm's have 3 (tiny) and 6 (small).

    Their positions are fixed, so a converted file shows them too. solo-learn does the same for MAE.
    """
    if positions is None or positions.ndim != 3 or positions.shape[-1] not in (192, 384):
        return None
    adapter = found.adapter
    if adapter.own:  # its config says with how many heads it was trained
        return None
    fixed = _is_sincos(positions, rows_first=True)
    if not fixed and adapter.columns_first and adapter.is_certain(contents):
        fixed = _is_sincos(positions, rows_first=False)
    return 12 if fixed else adapter.small_vit_heads


def _is_sincos(positions: Tensor, *, rows_first: bool) -> bool:
    """Are positions (1, 1 + side * side, D) the fixed sines and cosines of MoCo-v3 (rows first) or MAE (columns)?"""
    tokens, quarter = positions.shape[1] - 1, positions.shape[2] // 4
    side = round(tokens**0.5)
    if side * side != tokens:
        return False
    index = torch.arange(tokens)
    row, column = index // side, index % side
    frequencies = 10000.0 ** -(torch.arange(quarter) / quarter)
    angles = [torch.outer(place.float(), frequencies) for place in ((row, column) if rows_first else (column, row))]
    fixed = torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)
    return bool(torch.allclose(positions[0, 1:].float(), fixed, atol=2e-3))  # half precision is within 5e-4
