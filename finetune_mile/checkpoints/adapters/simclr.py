"""SimCLR v1 and v2: TensorFlow's files, and the PyTorch ports by Separius and tonylins.

TF1 numbers convolutions and batch norms in the order in which they were made. TF2 (object graphs, SavedModels) hides
the same numbers in each variable's full name. `_unwrap` brings both into one form, `resnet50-sk/conv2d/17/kernel`,
and `_rename` looks the number up in a list of targets that is written out below, block by block.
"""

import re
from functools import cache
from itertools import pairwise

from torch import Tensor

from finetune_mile.checkpoints.adapters.adapter import (
    UNIT_RANGE,
    Adapter,
    Tensors,
    UnknownKey,
    Vocabulary,
    in_parts,
    renaming,
    separius,
    separius_sk,
    state_dict_of,
    tensors_of,
    torchvision,
)
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.core.problems import Problem
from finetune_mile.networks.resnets import Arch, parse_arch

_ARCHS = (
    *("resnet18-proj", "resnet34-proj", "resnet50", "resnet101", "resnet152", "resnet200"),
    *("resnet50-sk", "resnet101-sk", "resnet152-sk", "resnet200-sk"),
)
_LEAVES = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
_NUMBERED = re.compile(
    r"(?:base_model|resnet(?:_\d+)?)/(?:.*/)?(conv2d|batch_normalization)(?:_(\d{1,9}))?"
    r"/(kernel|gamma|beta|moving_mean|moving_variance)"
)
_PROJECTION = re.compile(
    r"(?:head_contrastive|projection_head(?:_\d+)?)/nl_(\d)/(?:.*/)?(dense|batch_normalization)(?:_\d+)?/(\w+)"
)
_CLASSIFIER = re.compile(r"head_supervised(?:_\d+)?/linear_layer/dense(?:_\d+)?/(kernel|bias)")
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
    if arch.sk:
        convs, norms = ["conv1.0", "conv1.3", "conv1.6"], ["conv1.1", "conv1.4", "bn1"]
        shortcut = ("downsample.1", "downsample.2")
        block_convs = ["conv1", "conv2.conv", "conv2.down", "conv2.up", "conv3"]
        block_norms = ["bn1", "conv2.bn", "conv2.down_bn", "bn3"]
    else:
        convs, norms = ["conv1"], ["bn1"]
        shortcut = ("downsample.0", "downsample.1")
        layers = (1, 2) if arch.block == "basic" else (1, 2, 3)
        block_convs, block_norms = [f"conv{i}" for i in layers], [f"bn{i}" for i in layers]
    for stage, depth in enumerate(arch.layers, start=1):
        for index in range(depth):
            before = f"layer{stage}.{index}."
            # the projection shortcut, in the first block of each group, is made before the block's own layers
            convs += [before + c for c in ([shortcut[0]] if index == 0 else []) + block_convs]
            norms += [before + n for n in ([shortcut[1]] if index == 0 else []) + block_norms]
    return tuple(convs), tuple(norms)


def _named(contents: Contents) -> Tensors:
    """Variables by name: TF1's own keys, or the full names of TF2's object graph."""
    return {
        contents.full_names.get(key, key): value
        for key, value in tensors_of(contents.tree).items()
        if key.split("/", 1)[0] not in _BESIDE and ".OPTIMIZER_SLOT" not in key
    }


def _recognise(contents: Contents) -> str | None:
    if not contents.container.startswith("tf-"):
        return None
    numbered = [key for key in _named(contents) if _NUMBERED.fullmatch(key)]
    return f"TensorFlow variables such as {min(numbered)}" if numbered else None


def _unwrap(contents: Contents) -> Tensors:
    named = _named(contents)
    matches = {key: match for key in named if (match := _NUMBERED.fullmatch(key))}
    first, counts = {}, []
    for kind in ("conv2d", "batch_normalization"):
        numbers = {int(match[2] or 0) for match in matches.values() if match[1] == kind}
        first[kind] = min(numbers, default=0)
        counts.append(len(numbers))
        missing = next((number + 1 for number in sorted(numbers)[:-1] if number + 1 not in numbers), None)
        if missing is not None:
            raise Problem(f"the TensorFlow checkpoint is incomplete: {kind}_{missing} is missing; fetch it again")
    name = next((arch for arch in _ARCHS if list(map(len, targets(arch))) == counts), None)
    if name is None:
        raise Problem(
            f"the TensorFlow checkpoint has {counts[0]} convolutions and {counts[1]} batch norms. No ResNet of "
            "SimCLR has these numbers (ResNet-50: 53 and 53; with selective kernels 87 and 71); it may be incomplete"
        )
    numbered = {key: f"{name}/{m[1]}/{int(m[2] or 0) - first[m[1]]}/{m[3]}" for key, m in matches.items()}
    return {numbered.get(key, key): value for key, value in named.items()}


def _rename(key: str) -> str | None:
    if key.rsplit("/", 1)[-1] in _SLOTS or key.startswith("ema_model/"):
        return None
    if match := _CLASSIFIER.fullmatch(key):  # linear evaluation: trained on 100 % of the labels
        return "fc.weight" if match[1] == "kernel" else "fc.bias"
    if match := _PROJECTION.fullmatch(key):
        if match[1] != "0":
            return None
        if match[2] != "dense" and match[3] not in _LEAVES:
            raise UnknownKey(key)
        return "proj.0.weight" if match[2] == "dense" else f"proj.1.{_LEAVES[match[3]]}"
    parts = key.split("/")
    if len(parts) != 4 or parts[0] not in _ARCHS:
        raise UnknownKey(key)
    convs, norms = targets(parts[0])
    order, leaf = (convs, "weight") if parts[1] == "conv2d" else (norms, _LEAVES.get(parts[3]))
    if leaf is None or int(parts[2]) >= len(order):
        raise UnknownKey(key)
    return f"{order[int(parts[2])]}.{leaf}"


def _from_tensorflow(key: str, tensor: Tensor) -> Tensor:
    """HWIO to OIHW for convolutions, (in, out) to (out, in) for dense layers."""
    if not key.endswith("kernel"):
        return tensor
    return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.t()


SIMCLR_TF = Adapter(
    recognise=_recognise,
    unwrap=_unwrap,
    rename=_rename,
    relayout=_from_tensorflow,
    method="simclr",
    padding="tf",
    preprocess=UNIT_RANGE,
    mark="^tf-",
)

# ------------------------------ Separius/SimCLRv2-Pytorch: `{"resnet": ..., "head": ...}`, and the
# ------------------------------ same with selective kernels


def _separius(vocabulary: Vocabulary, *, sk: bool) -> Adapter:
    def unwrap(contents: Contents) -> Tensors:
        return in_parts(contents.tree, "resnet", "head")

    def recognise(contents: Contents) -> str | None:
        keys = unwrap(contents)
        if "resnet/net.0.0.weight" not in keys or sk != any("mixing_conv" in key for key in keys):
            return None
        return f"entry resnet with net.*.blocks, {'with' if sk else 'without'} mixing_conv"

    later = tuple(f"head/layers.{number}" for number in (3, 4, 6, 7))
    # resnet/fc is linear evaluation: 100 % of the labels
    of_trunk = renaming(vocabulary, trunks=("resnet/",), classifier="resnet/fc", dropped=later)

    def rename(key: str) -> str | None:
        if key.startswith(("head/layers.0.", "head/layers.1.")):
            return key.replace("head/layers.", "proj.")
        return of_trunk(key)

    return Adapter(
        recognise=recognise, unwrap=unwrap, rename=rename, method="simclrv2", padding="tf", preprocess=UNIT_RANGE,
        mark="^resnet$",
    )  # fmt: skip


SEPARIUS = _separius(separius, sk=False)
SEPARIUS_SK = _separius(separius_sk, sk=True)

# ----------------------------------------- tonylins' SimCLR v1: torchvision's names, another input


def _is_tonylins(contents: Contents) -> str | None:
    """Nothing but `state_dict`, and in each stage the shortcut is registered right before conv1."""
    weights = tensors_of(contents.tree.get("state_dict"))
    if set(contents.tree) != {"state_dict"} or "conv1.weight" not in weights:
        return None
    followed = dict(pairwise(dict.fromkeys(key.rsplit(".", 1)[0] for key in weights)))
    if all(followed.get(f"layer{stage}.0.downsample.1") == f"layer{stage}.0.conv1" for stage in (1, 2, 3, 4)):
        return "only state_dict, torchvision names, each shortcut before its conv1"
    return None


TONYLINS = Adapter(
    recognise=_is_tonylins,
    unwrap=state_dict_of,
    rename=renaming(torchvision, classifier="fc", dropped=("fc",)),
    method="simclr",
    padding="tf",
    preprocess=UNIT_RANGE,
    plain=True,
    mark=r"^state_dict/conv1\.weight$",
)
