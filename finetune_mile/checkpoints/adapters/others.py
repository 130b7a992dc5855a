"""Small formats: DINO's training files, PAWS, detectron2, and the published MILe code's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.adapters.adapter import (
    Adapter,
    Tensors,
    UnknownKey,
    Vocabulary,
    below,
    tensors_of,
    tops,
    unwrapped,
)
from finetune_mile.checkpoints.adapters.vocabularies import (
    detectron2,
    separius,
    separius_sk,
    torchvision,
    torchvision_or_vit,
)
from finetune_mile.networks.resnets import Padding

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

# -------------------------------------------------------------------------------------------- DINO


def _dino_teacher(contents: Contents) -> Tensors:
    """DINO releases and evaluates the teacher; the student is dropped."""
    return unwrapped(tensors_of(contents.tree.get("teacher")))


def _is_dino(contents: Contents) -> str | None:
    found = _dino_teacher(contents) and tensors_of(contents.tree.get("student"))
    return "entries teacher and student" if found else None


def _rename_dino(key: str) -> str | None:
    if key.startswith("head."):
        return None
    inner = below("backbone.", key)
    name = None if inner is None else torchvision_or_vit(inner)
    if name is None:
        raise UnknownKey(key)
    return name


DINO = Adapter(recognise=_is_dino, unwrap=_dino_teacher, rename=_rename_dino, method="dino")

# -------------------------------------------------------------------------------------------- PAWS


def _paws_encoder(contents: Contents) -> Tensors:
    return unwrapped(tensors_of(contents.tree.get("encoder")))


def _is_paws(contents: Contents) -> str | None:
    return "entry encoder in torchvision names" if "conv1.weight" in _paws_encoder(contents) else None


def _rename_paws(key: str) -> str | None:
    if key in ("fc.weight", "fc.bias"):
        return key
    name = torchvision(key)
    if name is None and not key.startswith(("fc.", "pred.")):
        raise UnknownKey(key)
    return name


PAWS = Adapter(recognise=_is_paws, unwrap=_paws_encoder, rename=_rename_paws, method="paws")

# -------------------------------------------------------------------------------------- detectron2


def _d2_model(contents: Contents) -> Tensors:
    return tensors_of(contents.tree.get("model"))


def _is_d2(contents: Contents) -> str | None:
    return "detectron2's names, stem and res2" if "stem.conv1.weight" in _d2_model(contents) else None


def _rename_d2(key: str) -> str | None:
    name = detectron2(key)
    if name is None and not key.startswith(("fc.", "stem.fc.")):
        raise UnknownKey(key)
    return name


DETECTRON2 = Adapter(recognise=_is_d2, unwrap=_d2_model, rename=_rename_d2, method="moco")

# -------------------------------------------------------------------------------------------- MILe


def _mappings(tree: Any) -> Iterator[Tensors]:
    """Every mapping of a tree that holds tensors."""
    if isinstance(tree, Mapping):
        found = tensors_of(tree)
        if found:
            yield found
        for value in tree.values():
            yield from _mappings(value)


def _mile_model(contents: Contents) -> Tensors:
    """The state dict with `backbone.module.`, and perhaps `teacher.module.`, wherever it lies."""
    for found in _mappings(contents.tree):
        if tops(found) <= {"backbone", "teacher"} and any(k.startswith("backbone.module.") for k in found):
            return found
    return {}


def _mile(vocabulary: Vocabulary, says: str, padding: Padding) -> Adapter:
    def recognise(contents: Contents) -> str | None:
        keys = [key.removeprefix("backbone.module.") for key in _mile_model(contents)]
        if any("mixing_conv" in key for key in keys) != (vocabulary is separius_sk):
            return None
        stages = [name for key in keys if (name := vocabulary(key)) and name.startswith("layer1.")]
        return f"backbone.module.* in {says}" if len(stages) > 5 else None

    return Adapter(
        recognise=recognise, unwrap=_mile_model, rename=_rename_mile(vocabulary), method="mile", padding=padding
    )


def _rename_mile(vocabulary: Vocabulary) -> Callable[[str], str | None]:
    def rename(key: str) -> str | None:
        if key.startswith("teacher."):
            return None
        inner = below("backbone.", key) or ""
        if inner in ("fc.weight", "fc.bias"):
            return inner
        name = vocabulary(inner)
        if name is None:
            raise UnknownKey(key)
        return name

    return rename


MILE = _mile(torchvision, "torchvision names", "torch")
# That code runs SimCLR-v2's networks as its PyTorch port does, padding mistakes included, and was
# trained so.
MILE_SIMCLRV2_SK = _mile(separius_sk, "the names of SimCLR-v2's port, selective kernels", "port")
MILE_SIMCLRV2 = _mile(separius, "the names of SimCLR-v2's port", "port")
