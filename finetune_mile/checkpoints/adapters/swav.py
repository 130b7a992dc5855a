"""SwAV, DeepCluster-v2 and SeLa-v2: flat release files and `main_swav`'s training files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_mile.checkpoints.adapters.adapter import Adapter, UnknownKey, state_dict_of, tops
from finetune_mile.checkpoints.adapters.vocabularies import torchvision
from finetune_mile.core.types import IMAGENET_MEAN, Preprocess

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

# Their pre-training and their evaluation both divide the red channel by 0.228, not by 0.229.
SWAV_PREPROCESS = Preprocess(mean=IMAGENET_MEAN, std=(0.228, 0.224, 0.225))


def _recognise(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    marks = tops(weights) & {"prototypes", "projection_head"}
    if "conv1.weight" in weights and marks:
        return f"torchvision names beside {' and '.join(sorted(marks))}"
    return None


def _rename(key: str) -> str | None:
    name = torchvision(key)
    if name is None and not key.startswith(("prototypes.", "projection_head.")):
        raise UnknownKey(key)
    return name


SWAV = Adapter(recognise=_recognise, unwrap=state_dict_of, rename=_rename, method="swav", preprocess=SWAV_PREPROCESS)
