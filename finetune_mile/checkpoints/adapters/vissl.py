"""VISSL: trunk and heads deep inside `classy_state_dict`, and its zoo's flatter layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.adapters.adapter import (
    UNIT_RANGE,
    Adapter,
    Tensors,
    UnknownKey,
    Vocabulary,
    state_dict_of,
    tensors_of,
)
from finetune_mile.checkpoints.adapters.vocabularies import separius, separius_sk, torchvision_or_vit
from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

_LAYERS = ("trunk/", "trunk.", "base_model.", "_feature_blocks.", "model.", "module.")


def _classy_model(tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`classy_state_dict.base_model.model`, the mapping of trunk and heads, where there is one."""
    inner: Any = tree
    for part in ("classy_state_dict", "base_model", "model"):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner if isinstance(inner, Mapping) and "trunk" in inner else None


def _unwrap(contents: Contents) -> Tensors:
    if contents.tree.get("type") == "shard_list":
        raise Problem("this VISSL file is a list of FSDP shards without tensors; consolidate it in VISSL first")
    model = _classy_model(contents.tree)
    if model is None:
        return state_dict_of(contents)
    parts = {part: tensors_of(model.get(part)) for part in ("trunk", "heads")}
    return {f"{part}/{key}": value for part, found in parts.items() for key, value in found.items()}


def _inner(key: str) -> str:
    while key.startswith(_LAYERS):
        key = next(key.removeprefix(layer) for layer in _LAYERS if key.startswith(layer))
    return key


def _rename_with(vocabulary: Vocabulary) -> Callable[[str], str | None]:
    def rename(key: str) -> str | None:
        if key.startswith(("heads/", "heads.")):
            return None
        name = vocabulary(_inner(key))
        if name is None:
            raise UnknownKey(key)
        return name

    return rename


def _is_vissl(contents: Contents, vocabulary: Vocabulary, needs: str | None) -> str | None:
    if contents.tree.get("type") == "shard_list":
        return "type is shard_list"
    keys = list(_unwrap(contents))
    nested = _classy_model(contents.tree) is not None
    marked = nested or any("_feature_blocks." in key for key in keys)
    named = any(vocabulary(_inner(key)) for key in keys)
    if not (marked and named) or (needs and not any(needs in key for key in keys)):
        return None
    where = "classy_state_dict.base_model.model.trunk" if nested else "names below _feature_blocks"
    return where + (f", blocks with {needs}" if needs else "")


VISSL = Adapter(
    recognise=lambda contents: _is_vissl(contents, torchvision_or_vit, None),
    unwrap=_unwrap,
    rename=_rename_with(torchvision_or_vit),
    method="vissl",
)
# The zoo's SimCLR-v2 trunks were converted from TensorFlow: its padding and its [0, 1] input.
VISSL_SK = Adapter(
    recognise=lambda contents: _is_vissl(contents, separius_sk, "mixing_conv"),
    unwrap=_unwrap,
    rename=_rename_with(separius_sk),
    method="simclrv2",
    padding="tf",
    preprocess=UNIT_RANGE,
)
VISSL_SIMCLRV2 = Adapter(
    recognise=lambda contents: _is_vissl(contents, separius, "projection.shortcut.weight"),
    unwrap=_unwrap,
    rename=_rename_with(separius),
    method="simclrv2",
    padding="tf",
    preprocess=UNIT_RANGE,
)
