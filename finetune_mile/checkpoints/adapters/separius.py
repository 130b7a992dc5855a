"""Separius/SimCLRv2-Pytorch: `{"resnet": ..., "head": ...}`, with and without selective kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from finetune_mile.checkpoints.adapters.adapter import (
    UNIT_RANGE,
    Adapter,
    Tensors,
    UnknownKey,
    Vocabulary,
    tensors_of,
    unwrapped,
)
from finetune_mile.checkpoints.adapters.vocabularies import separius, separius_sk

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents


def _unwrap(contents: Contents) -> Tensors:
    parts = {part: unwrapped(tensors_of(contents.tree.get(part))) for part in ("resnet", "head")}
    return {f"{part}/{key}": value for part, found in parts.items() for key, value in found.items()}


def _recognise(contents: Contents, sk: bool) -> str | None:
    keys = _unwrap(contents)
    if "resnet/net.0.0.weight" not in keys or sk != any("mixing_conv" in key for key in keys):
        return None
    return f"entry resnet with net.*.blocks, {'with' if sk else 'without'} mixing_conv"


def _rename_with(vocabulary: Vocabulary) -> Callable[[str], str | None]:
    def rename(key: str) -> str | None:
        part, _, inner = key.partition("/")
        if part == "resnet" and inner in ("fc.weight", "fc.bias"):  # linear evaluation: 100 % of the labels
            return inner
        name = vocabulary(inner) if part == "resnet" else None
        if name is not None:
            return name
        layer = inner.split(".")[1] if inner.startswith("layers.") else ""
        if part != "head" or layer not in ("0", "1", "3", "4", "6", "7"):
            raise UnknownKey(key)
        return inner.replace("layers.", "proj.") if layer in ("0", "1") else None

    return rename


def _adapter(vocabulary: Vocabulary, sk: bool) -> Adapter:
    return Adapter(
        recognise=lambda contents: _recognise(contents, sk),
        unwrap=_unwrap,
        rename=_rename_with(vocabulary),
        method="simclrv2",
        padding="tf",
        preprocess=UNIT_RANGE,
    )


SEPARIUS = _adapter(separius, sk=False)
SEPARIUS_SK = _adapter(separius_sk, sk=True)
