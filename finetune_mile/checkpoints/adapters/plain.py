"""Flat torchvision or timm names, and tonylins' SimCLR v1: same names, another input."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from finetune_mile.checkpoints.adapters.adapter import UNIT_RANGE, Adapter, UnknownKey, state_dict_of, tensors_of
from finetune_mile.checkpoints.adapters.vocabularies import torchvision, vit

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents


def _is_torchvision(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    if not any(torchvision(key) for key in weights if key.startswith("layer1.")):
        return None
    if not all(torchvision(key) or key.startswith("fc.") for key in weights):
        return None
    return "torchvision names and nothing else"


def _rename(key: str) -> str | None:
    if key in ("fc.weight", "fc.bias"):
        return key
    if key.startswith("fc."):  # an MLP in the classifier's place
        return None
    name = torchvision(key)
    if name is None:
        raise UnknownKey(key)
    return name


def _is_vit(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    found = {"cls_token", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= set(weights)
    return "names of a vision transformer" if found else None


def _rename_vit(key: str) -> str | None:
    if key in ("head.weight", "head.bias"):
        return key.replace("head.", "fc.")
    if key.startswith("head."):
        return None
    name = vit(key)
    if name is None:
        raise UnknownKey(key)
    return name


def _is_tonylins(contents: Contents) -> str | None:
    """Nothing but `state_dict`, and in each stage the shortcut is registered right before conv1."""
    weights = tensors_of(contents.tree.get("state_dict"))
    if set(contents.tree) != {"state_dict"} or "conv1.weight" not in weights:
        return None
    order = list(dict.fromkeys(key.rsplit(".", 1)[0] for key in weights))
    followed = dict(pairwise(order))
    stages = [f"layer{stage}.0" for stage in (1, 2, 3, 4)]
    if all(followed.get(f"{s}.downsample.1") == f"{s}.conv1" for s in stages):
        return "only state_dict, torchvision names, each shortcut before its conv1"
    return None


TORCHVISION = Adapter(
    recognise=_is_torchvision,
    unwrap=state_dict_of,
    rename=_rename,
    method="torchvision",
    cifar_stem=None,  # an extracted backbone of solo-learn has the same names
    plain=True,
    padding_known=False,
)
VIT = Adapter(recognise=_is_vit, unwrap=state_dict_of, rename=_rename_vit, method="vit", plain=True)
TONYLINS = Adapter(
    recognise=_is_tonylins,
    unwrap=state_dict_of,
    rename=_rename,
    method="simclr",
    padding="tf",
    preprocess=UNIT_RANGE,
    plain=True,
)
