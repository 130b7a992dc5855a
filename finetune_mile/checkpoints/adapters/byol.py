"""BYOL: DeepMind's haiku pickles, and byol-convert's flat torch files."""

import re
from collections.abc import Mapping

from torch import Tensor

from finetune_mile.checkpoints.adapters.adapter import (
    Adapter,
    Tensors,
    UnknownKey,
    renaming,
    tensors_of,
    torchvision,
    unwrapped,
)
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.checkpoints.readers.torch_files import leaves
from finetune_mile.core.types import Preprocess

# Mean and deviation are subtracted inside the haiku graph; the crop comes first, then a bicubic resize.
_PREPROCESS = Preprocess(interpolation="bicubic", antialias=False)
_PAIRS = (("online_params", "online_state"), ("backbone_params", "backbone_state"))
_TRUNK = re.compile(
    r"res_net\d+/~/(?:initial_(?P<stem>conv|batchnorm)(?:_1)?"
    r"|block_group_(?P<group>\d)/~/block_(?P<block>\d+)/~/(?P<layer>(?:shortcut_)?(?:conv|batchnorm)(?:_\d)?))"
    r"(?P<ema>/~/(?:mean|var)_ema)?/(?P<leaf>\w+)"
)
_LEAVES = {"w": "weight", "b": "bias", "scale": "weight", "offset": "bias"}


def _entries(contents: Contents) -> tuple[str, Tensors]:
    """The names of the entries with parameters and state, and their tensors; empty where there are none."""
    for tree in (contents.tree.get("experiment_state"), contents.tree):
        for params, state in _PAIRS:
            if isinstance(tree, Mapping) and params in tree and state in tree:
                parts = {"params": tree[params], "state": tree[state]}
                return f"{params} and {state}", dict(leaves(parts))
    return "", {}


def _recognise(contents: Contents) -> str | None:
    names, _ = _entries(contents)
    return f"entries {names}" if names else None


def _rename(key: str) -> str | None:
    inner = key.partition("/")[2]
    if inner.startswith(("projector/", "predictor/")):
        return None
    if inner in ("classifier/w", "classifier/b"):  # trained on the side, on 100 % of the labels
        return f"fc.{_LEAVES[inner[-1]]}"
    match = _TRUNK.fullmatch(inner)
    if match is None:
        raise UnknownKey(key)
    if match["ema"] and match["leaf"] in ("hidden", "counter"):
        return None  # inference uses the zero-debiased average, not the hidden sum
    if match["ema"]:
        leaf = {"average": "running_mean" if "mean" in match["ema"] else "running_var"}.get(match["leaf"])
    else:
        leaf = _LEAVES.get(match["leaf"])
    if leaf is None:
        raise UnknownKey(key)
    return f"{_module(match)}.{leaf}"


def _module(match: re.Match[str]) -> str:
    if match["stem"]:
        return "conv1" if match["stem"] == "conv" else "bn1"
    block = f"layer{int(match['group']) + 1}.{match['block']}"
    kind, _, number = match["layer"].removeprefix("shortcut_").partition("_")
    if match["layer"].startswith("shortcut_"):
        return f"{block}.downsample.{0 if kind == 'conv' else 1}"
    return f"{block}.{'conv' if kind == 'conv' else 'bn'}{int(number) + 1}"


def _relayout(key: str, tensor: Tensor) -> Tensor:
    if key.endswith("/w"):
        return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.t()
    return tensor.flatten() if tensor.ndim > 1 else tensor  # scale, offset, average: (1, 1, 1, C)


def _is_converted(contents: Contents) -> str | None:
    """byol-convert names as torchvision does; what tells it apart is how it was made.

    It writes no batch counters, all parameters before all running statistics, and convolutions as permuted views of
    HWIO arrays, whose strides the file keeps.
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


BYOL = Adapter(
    recognise=_recognise,
    unwrap=lambda contents: _entries(contents)[1],
    rename=_rename,
    relayout=_relayout,
    method="byol",
    padding="same",
    preprocess=_PREPROCESS,
    mark=r"^(experiment_state|\w+_params)$",
)
BYOL_CONVERT = Adapter(
    recognise=_is_converted,
    unwrap=lambda contents: unwrapped(tensors_of(contents.tree)),
    rename=renaming(torchvision, classifier="fc"),
    method="byol",
    padding="same",
    preprocess=_PREPROCESS,
    plain=True,
    mark=r"^conv1\.weight$",
)
