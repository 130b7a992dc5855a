"""SimCLR v1 and v2 from TensorFlow: TF1 checkpoints, TF2 object graphs and SavedModels.

TF1 numbers convolutions and batch norms in the order in which they were made. TF2 hides the same
numbers in each variable's full name. `unwrap` brings both into one form,
`resnet50-sk/conv2d/17/kernel`, and `rename` looks the number up in a list of targets that is
written out below, block by block.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor

from finetune_mile.checkpoints.adapters.adapter import UNIT_RANGE, Adapter, Tensors, UnknownKey, tensors_of
from finetune_mile.core.problems import Problem
from finetune_mile.networks.resnets import Arch, parse_arch

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

_ARCHS = (
    *("resnet18-proj", "resnet34-proj", "resnet50", "resnet101", "resnet152", "resnet200"),
    *("resnet50-sk", "resnet101-sk", "resnet152-sk", "resnet200-sk"),
)
_LEAVES = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
_NUMBERED = re.compile(
    r"(?:base_model|resnet)/(?:.*/)?(conv2d|batch_normalization)(?:_(\d+))?/(kernel|gamma|beta|moving_mean|moving_variance)"
)
_PROJECTION = re.compile(
    r"(?:head_contrastive|projection_head)/nl_(\d)/(?:.*/)?(dense|batch_normalization)(?:_\d+)?/(\w+)"
)
_CLASSIFIER = re.compile(r"head_supervised/linear_layer/dense(?:_\d+)?/(kernel|bias)")
_SLOTS = ("Momentum", "ExponentialMovingAverage")
_BESIDE = ("global_step", "save_counter", "optimizer", "_CHECKPOINTABLE_OBJECT_GRAPH")


@cache
def targets(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Our names of the convolutions and of the batch norms, in the order SimCLR makes them.

    Args:
        name: one of `_ARCHS`; the width does not matter.
    """
    arch = parse_arch(name)
    assert isinstance(arch, Arch)
    convs = ["conv1.0", "conv1.3", "conv1.6"] if arch.sk else ["conv1"]
    norms = ["conv1.1", "conv1.4", "bn1"] if arch.sk else ["bn1"]
    shortcut = ("downsample.1", "downsample.2") if arch.sk else ("downsample.0", "downsample.1")
    if arch.sk:
        block_convs = ["conv1", "conv2.conv", "conv2.down", "conv2.up", "conv3"]
        block_norms = ["bn1", "conv2.bn", "conv2.down_bn", "bn3"]
    else:
        depth = 2 if arch.block == "basic" else 3
        block_convs = [f"conv{i + 1}" for i in range(depth)]
        block_norms = [f"bn{i + 1}" for i in range(depth)]
    for stage, depth in enumerate(arch.layers, start=1):
        for index in range(depth):
            before = f"layer{stage}.{index}."
            # the projection shortcut, in the first block of each group, is made before the
            # block's own layers
            convs += [before + c for c in ([shortcut[0]] if index == 0 else []) + block_convs]
            norms += [before + n for n in ([shortcut[1]] if index == 0 else []) + block_norms]
    return tuple(convs), tuple(norms)


def _named(contents: Contents) -> Tensors:
    """Variables by name: TF1's own keys, or the full names of TF2's object graph."""
    variables = tensors_of(contents.tree)
    names = contents.full_names
    return {
        names.get(key, key): value
        for key, value in variables.items()
        if key.split("/", 1)[0] not in _BESIDE and ".OPTIMIZER_SLOT" not in key
    }


def _recognise(contents: Contents) -> str | None:
    if not contents.container.startswith("tf-"):
        return None
    numbered = [key for key in _named(contents) if _NUMBERED.fullmatch(key)]
    if not numbered:
        return None
    return f"TensorFlow variables such as {min(numbered)}"


def _unwrap(contents: Contents) -> Tensors:
    named = _named(contents)
    numbers: dict[str, set[int]] = {"conv2d": set(), "batch_normalization": set()}
    for key in named:
        if found := _NUMBERED.fullmatch(key):
            numbers[found[1]].add(int(found[2] or 0))
    for kind, seen in numbers.items():
        gaps = set(range(min(seen, default=0), max(seen, default=-1) + 1)) - seen
        if gaps:
            raise Problem(f"the TensorFlow checkpoint is not whole: {kind}_{min(gaps)} is missing")
    count = len(numbers["conv2d"]), len(numbers["batch_normalization"])
    name = next((a for a in _ARCHS if tuple(map(len, targets(a))) == count), None)
    if name is None:
        raise Problem(
            f"the TensorFlow checkpoint has {count[0]} convolutions and {count[1]} batch norms, "
            "and no ResNet of "
            "SimCLR has: is it whole? (ResNet-50: 53 and 53; with selective kernels 87 and 71)"
        )
    first = {kind: min(seen) for kind, seen in numbers.items()}
    result = {}
    for key, value in named.items():
        found = _NUMBERED.fullmatch(key)
        if found:
            number = int(found[2] or 0) - first[found[1]]
            key = f"{name}/{found[1]}/{number}/{found[3]}"
        result[key] = value
    return result


def _rename(key: str) -> str | None:
    if key.rsplit("/", 1)[-1] in _SLOTS or key.startswith("ema_model/"):
        return None
    if found := _CLASSIFIER.fullmatch(key):  # linear evaluation: trained on 100 % of the labels
        return "fc.weight" if found[1] == "kernel" else "fc.bias"
    if found := _PROJECTION.fullmatch(key):
        if found[1] != "0":
            return None
        return "proj.0.weight" if found[2] == "dense" else f"proj.1.{_LEAVES[found[3]]}"
    parts = key.split("/")
    if len(parts) != 4 or parts[0] not in _ARCHS:
        raise UnknownKey(key)
    convs, norms = targets(parts[0])
    order, leaf = (convs, "weight") if parts[1] == "conv2d" else (norms, _LEAVES.get(parts[3]))
    if leaf is None or int(parts[2]) >= len(order):
        raise UnknownKey(key)
    return f"{order[int(parts[2])]}.{leaf}"


def from_tensorflow(key: str, tensor: Tensor) -> Tensor:
    """HWIO to OIHW for convolutions, (in, out) to (out, in) for dense layers."""
    if not key.endswith("kernel"):
        return tensor
    return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.t()


SIMCLR_TF = Adapter(
    recognise=_recognise,
    unwrap=_unwrap,
    rename=_rename,
    relayout=from_tensorflow,
    method="simclr",
    padding="tf",
    preprocess=UNIT_RANGE,
)
