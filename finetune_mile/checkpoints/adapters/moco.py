"""MoCo v1 and v2 (`encoder_q`) and v3 (`base_encoder`), as their training scripts save them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_mile.checkpoints.adapters.adapter import Adapter, UnknownKey, below, state_dict_of, tops
from finetune_mile.checkpoints.adapters.vocabularies import torchvision_or_vit

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

# `fc` is the projection to the embedding (v1: one layer, v2 and v3: an MLP), never a classifier.
_PROJECTIONS = ("fc.", "head.")


def _of_encoder(prefix: str, key: str) -> str | None:
    """Our name for a tensor of the encoder that is fine-tuned; None for its projection."""
    inner = below(prefix, key)
    if inner is None:
        raise UnknownKey(key)
    if inner.startswith(_PROJECTIONS):
        return None
    name = torchvision_or_vit(inner)
    if name is None:
        raise UnknownKey(key)
    return name


def _is_moco(contents: Contents) -> str | None:
    return "names begin with encoder_q" if "encoder_q" in tops(state_dict_of(contents)) else None


def _rename(key: str) -> str | None:
    if key in ("queue", "queue_ptr") or key.startswith("encoder_k."):
        return None
    return _of_encoder("encoder_q.", key)


def _is_moco_v3(contents: Contents) -> str | None:
    found = {"base_encoder", "momentum_encoder"} <= tops(state_dict_of(contents))
    return "names begin with base_encoder and momentum_encoder" if found else None


def _rename_v3(key: str) -> str | None:
    if key.startswith(("momentum_encoder.", "predictor.")):
        return None
    return _of_encoder("base_encoder.", key)


MOCO = Adapter(recognise=_is_moco, unwrap=state_dict_of, rename=_rename, method="moco")
MOCO_V3 = Adapter(recognise=_is_moco_v3, unwrap=state_dict_of, rename=_rename_v3, method="mocov3", small_vit_heads=12)
