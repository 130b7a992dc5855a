"""solo-learn: Lightning files with `backbone.` (in 2021 `encoder.`), every method."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from finetune_mile.checkpoints.adapters.adapter import Adapter, UnknownKey, below, state_dict_of, tops
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


def _has_own_marks(contents: Contents) -> bool:
    """Whether a file is certainly solo-learn's: its names alone are common ones.

    It is a Lightning file without hyper-parameters, the online probe `classifier` is there beside a part of the method,
    and there is a momentum copy, or the convolutions are stored channels last (its default since April 2022).
    """
    weights = state_dict_of(contents)
    parts = tops(weights)
    lightning = "pytorch-lightning_version" in contents.tree and "hyper_parameters" not in contents.tree
    if not lightning or "classifier" not in parts or not parts & _DROPPED:
        return False
    if parts & {"momentum_backbone", "momentum_encoder"}:
        return True
    convolutions = [t for k, t in weights.items() if k.startswith(_TRUNKS) and t.ndim == 4 and min(t.shape) > 1]
    return bool(convolutions) and all(t.is_contiguous(memory_format=torch.channels_last) for t in convolutions)


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
    is_certain=_has_own_marks,
    columns_first=True,
)
