"""solo-learn: Lightning files with `backbone.` (in 2021 `encoder.`), every method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_mile.checkpoints.adapters.adapter import (
    Adapter,
    UnknownKey,
    below,
    state_dict_of,
    tops,
)
from finetune_mile.checkpoints.adapters.vocabularies import torchvision_or_vit

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

_TRUNKS = ("backbone.", "encoder.")
_MARKS = {"projector", "predictor", "classifier", "momentum_backbone", "momentum_encoder", "head"}
_DROPPED = _MARKS - {"classifier"} | {
    "momentum_projector",
    "momentum_predictor",
    "momentum_classifier",
    "momentum_head",
    "momentum_prototypes",
    "key_projector",
    "prototypes",
    "queue",
    "queue_ptr",
    "queue_y",
    "dino_loss_func",
    "whitening",
    "local_memory_index",
    "local_memory_embeddings",
}


def _recognise(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    marks = tops(weights) & _MARKS
    trunk = next((t for t in _TRUNKS if any(_trunk_name(t, key) for key in weights)), None)
    if trunk is None or not marks:
        return None
    return f"{trunk}* in torchvision names beside {', '.join(sorted(marks))}"


def _trunk_name(trunk: str, key: str) -> str | None:
    inner = below(trunk, key)
    return None if inner is None else torchvision_or_vit(inner)


def _rename(key: str) -> str | None:
    if key in ("classifier.weight", "classifier.bias"):  # the online probe: it has seen labels
        return key.replace("classifier.", "fc.")
    if key.split(".", 1)[0] in _DROPPED:
        return None
    name = _trunk_name("backbone.", key) or _trunk_name("encoder.", key)
    if name is None:
        raise UnknownKey(key)
    return name


# On CIFAR solo-learn's 3x3 stem has a padding of 2.
SOLO = Adapter(
    recognise=_recognise,
    unwrap=state_dict_of,
    rename=_rename,
    method="solo-learn",
    cifar_stem="cifar-pad2",
)
