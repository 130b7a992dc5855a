"""BYOL: DeepMind's haiku pickles, and byol-convert's flat torch files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from finetune_mile.checkpoints.adapters.adapter import Adapter, Tensors, UnknownKey, leaves, tensors_of, unwrapped
from finetune_mile.checkpoints.adapters.vocabularies import torchvision
from finetune_mile.core.types import Preprocess

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

# Mean and deviation are subtracted inside the haiku graph; the crop comes first, then a bicubic
# resize.
BYOL_PREPROCESS = Preprocess(interpolation="bicubic", antialias=False)
_PAIRS = (("online_params", "online_state"), ("backbone_params", "backbone_state"))
_TRUNK = re.compile(
    r"res_net\d+/~/(?:initial_(?P<stem>conv|batchnorm)(?:_1)?"
    r"|block_group_(?P<group>\d)/~/block_(?P<block>\d+)/~/(?P<layer>(?:shortcut_)?(?:conv|batchnorm)(?:_\d)?))"
    r"(?P<ema>/~/(?:mean|var)_ema)?/(?P<leaf>\w+)"
)
_LEAVES = {"w": "weight", "b": "bias", "scale": "weight", "offset": "bias"}


def _experiment(contents: Contents) -> tuple[Mapping[str, object], tuple[str, str]] | None:
    """The mapping of parameters and state, and the names they have in it."""
    for tree in (contents.tree.get("experiment_state"), contents.tree):
        for pair in _PAIRS:
            if isinstance(tree, Mapping) and pair[0] in tree and pair[1] in tree:
                return tree, pair
    return None


def _recognise(contents: Contents) -> str | None:
    found = _experiment(contents)
    return None if found is None else f"entries {found[1][0]} and {found[1][1]}"


def _unwrap(contents: Contents) -> Tensors:
    found = _experiment(contents)
    if found is None:
        return {}
    tree, pair = found
    return {f"{part}/{key}": value for part, name in zip(("params", "state"), pair, strict=True)
            for key, value in leaves(tree[name])}  # fmt: skip


def _rename(key: str) -> str | None:
    inner = key.partition("/")[2]
    if inner.startswith(("projector/", "predictor/")):
        return None
    if inner in ("classifier/w", "classifier/b"):  # trained on the side, on 100 % of the labels
        return f"fc.{_LEAVES[inner[-1]]}"
    found = _TRUNK.fullmatch(inner)
    if found is None:
        raise UnknownKey(key)
    if found["ema"]:
        if found["leaf"] not in ("average", "hidden", "counter"):
            raise UnknownKey(key)
        # inference uses the zero-debiased average, not the hidden sum
        leaf = "running_mean" if "mean" in found["ema"] else "running_var"
        return f"{_module(found)}.{leaf}" if found["leaf"] == "average" else None
    if found["leaf"] not in _LEAVES:
        raise UnknownKey(key)
    return f"{_module(found)}.{_LEAVES[found['leaf']]}"


def _module(found: re.Match[str]) -> str:
    if found["stem"]:
        return "conv1" if found["stem"] == "conv" else "bn1"
    block = f"layer{int(found['group']) + 1}.{found['block']}"
    layer: str = found["layer"]
    if layer.startswith("shortcut_"):
        return f"{block}.downsample.{0 if layer == 'shortcut_conv' else 1}"
    kind, _, number = layer.partition("_")
    return f"{block}.{'conv' if kind == 'conv' else 'bn'}{int(number) + 1}"


def _relayout(key: str, tensor: Tensor) -> Tensor:
    if key.endswith("/w"):
        return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.t()
    return tensor.flatten() if tensor.ndim > 1 else tensor  # scale, offset, average: (1, 1, 1, C)


def _is_converted(contents: Contents) -> str | None:
    """byol-convert names as torchvision does; what tells it apart is how it was made.

    It writes no batch counters, all parameters before all running statistics, and convolutions as
    permuted views of HWIO arrays, whose strides the file keeps.
    """
    weights = tensors_of(contents.tree)
    keys = [key for key in weights if torchvision(key)]
    if "conv1.weight" not in keys or len(keys) + 2 < len(weights):
        return None
    if any(key.endswith("num_batches_tracked") for key in keys):
        return None
    running = [".running_" in key for key in keys]
    if weights["conv1.weight"].stride(0) == 1:
        return "flat torchvision names without batch counters, convolutions stored as HWIO views"
    if running == sorted(running) and any(running) and len(keys) > 20:
        return "flat torchvision names without batch counters, all statistics after all parameters"
    return None


def _rename_converted(key: str) -> str | None:
    if key in ("fc.weight", "fc.bias"):
        return key
    name = torchvision(key)
    if name is None:
        raise UnknownKey(key)
    return name


BYOL = Adapter(
    recognise=_recognise,
    unwrap=_unwrap,
    rename=_rename,
    relayout=_relayout,
    method="byol",
    padding="same",
    preprocess=BYOL_PREPROCESS,
)
BYOL_CONVERT = Adapter(
    recognise=_is_converted,
    unwrap=lambda contents: unwrapped(tensors_of(contents.tree)),
    rename=_rename_converted,
    method="byol",
    padding="same",
    preprocess=BYOL_PREPROCESS,
    plain=True,
)
