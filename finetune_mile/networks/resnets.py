"""ResNets in torchvision's names: one class for every flavour that checkpoints come in.

B batch, C channels or classes, D features, H and W height and width.
"""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

Padding = Literal["torch", "tf", "same", "port"]
Stem = Literal["imagenet", "cifar", "cifar-pad2", "small", "deep"]

DEPTHS: dict[int, tuple[Literal["basic", "bottleneck"], tuple[int, ...]]] = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
    200: ("bottleneck", (3, 24, 36, 3)),
}
SK_RATIO = 0.0625  # SimCLR-v2: channels of the attention path, at least 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """A ResNet's shape: everything that its name says."""

    block: Literal["basic", "bottleneck"]
    layers: tuple[int, ...]
    width: int = 64  # channels of the first stage: 64 times the width multiplier
    stem: Stem = "imagenet"
    sk: bool = False  # SimCLR-v2's selective kernels (with its stem and its pooled shortcuts)
    pooled_shortcut: bool = False  # ResNet-D: average-pool, then a 1x1 convolution with stride 1
    project_first: bool = False  # SimCLR and haiku ResNet-18/34: a 1x1 shortcut also in layer1.0
    norm: Literal["batch", "group"] = "batch"
    stem_pool: bool = True  # max-pooling after a 7x7 or a deep stem; lightning-bolts leaves it out on STL-10
    small_pool: bool = False  # max-pooling after a 3x3 stem, as people keep it for pictures of 64 pixels
    stem_relu: bool = True  # ReLU after bn1; a Sequential of the children of lightly's ResNetGenerator has none
    groups: int = 1  # of the 3x3 convolutions of bottlenecks: 32 in ResNeXt-50 32x4d
    inner: int = 64  # channels of a group in a bottleneck, for 64 of the first stage: 128 in a Wide ResNet-50-2
    stride_first: bool = False  # the stride is in the first 1x1 of a bottleneck: ResNet v1, caffe; else in the 3x3


DEMO = Arch(block="basic", layers=(1, 1, 1, 1), width=16, stem="cifar")
# For pictures of about 30 pixels, where hundreds of runs must fit an hour: a stride-2 stem and three blocks.
MINI = Arch(block="basic", layers=(1, 1, 1), width=16, stem="small")
NAMED = {"resnet-demo": DEMO, "resnet-mini": MINI}
_SUFFIX: dict[str, dict[str, object]] = {
    "sk": {"sk": True, "stem": "deep", "pooled_shortcut": True},
    "d": {"stem": "deep", "pooled_shortcut": True},
    "cifar": {"stem": "cifar"},
    "cifar2": {"stem": "cifar-pad2"},
    "proj": {"project_first": True},
    "gn": {"norm": "group"},
    "nopool": {"stem_pool": False},
    "norelu": {"stem_relu": False},
    "pool": {"small_pool": True},
    "v1": {"stride_first": True},
}
_BASE = re.compile(
    r"(?P<wide>wide_)?resne(?P<x>x)?t(?P<depth>\d{1,3})(?:w(?P<w>\d{1,2})|_(?:(?P<g>\d{1,3})x(?P<d>\d{1,3})d|(?P<n>\d{1,2})))?"
)


def parse_arch(name: str) -> Arch | None:
    """Parse a name such as `resnet50`, `resnet50w2` or `resnet50-sk`; None if it is not one of ours.

    `resnext50_32x4d` and `wide_resnet50_2` are named as in torchvision: a wide ResNet is wider inside its bottlenecks
    only, `resnet50w2` everywhere. The parts after a dash: `sk` selective kernels, `d` ResNet-D, `cifar` a 3x3 stem
    without pooling (`cifar2`: with solo-learn's padding of 2), `proj` a projection in layer1.0 of a ResNet-18/34,
    `gn` group instead of batch norm, `nopool` no max-pooling after the stem, `pool` max-pooling after a 3x3 stem,
    `norelu` no ReLU after bn1, `v1` the stride in the first 1x1 of a bottleneck.
    """
    base, *suffixes = name.split("-")
    if "-".join([base, *suffixes[:1]]) in NAMED:
        arch, suffixes = NAMED["-".join([base, suffixes[0]])], suffixes[1:]
    else:
        match = _BASE.fullmatch(base)
        if match is None or int(match["depth"]) not in DEPTHS or len(base) > 30:
            return None
        block, layers = DEPTHS[int(match["depth"])]
        if (bool(match["wide"]), bool(match["x"])) != (bool(match["n"]), bool(match["g"])):
            return None
        if block == "basic" and (match["n"] or match["g"]):
            return None
        arch = Arch(
            block=block, layers=layers, width=64 * int(match["w"] or 1), groups=int(match["g"] or 1),
            inner=int(match["d"] or 64 * int(match["n"] or 1)),
        )  # fmt: skip
    for suffix in suffixes:
        if suffix not in _SUFFIX:
            return None
        arch = replace(arch, **_SUFFIX[suffix])  # type: ignore[arg-type]
    return arch


def name_arch(arch: Arch) -> str:
    """The inverse of `parse_arch`; raises LookupError for a shape that has no name."""
    suffixes = [s for s, part in _SUFFIX.items() if all(getattr(arch, k) == v for k, v in part.items())]
    if arch.sk:
        suffixes.remove("d")  # the selective-kernel form implies it
    shape = (arch.block, arch.layers, arch.width, arch.stem)
    named = next((n for n, a in NAMED.items() if (a.block, a.layers, a.width, a.stem) == shape), None)
    if named is not None:
        base, suffixes = named, [s for s in suffixes if s != "cifar"]
    else:
        depth = next((d for d, s in DEPTHS.items() if s == (arch.block, arch.layers)), None)
        if depth is None or arch.width % 64:
            raise LookupError(f"{arch.block} blocks {arch.layers}, width {arch.width}")
        if (arch.groups, arch.inner) == (1, 64):
            base = f"resnet{depth}" + (f"w{arch.width // 64}" if arch.width != 64 else "")
        elif arch.width != 64 or (arch.groups == 1 and arch.inner % 64):
            raise LookupError(f"{arch.groups} groups of {arch.inner} channels, width {arch.width}")
        elif arch.groups == 1:
            base = f"wide_resnet{depth}_{arch.inner // 64}"
        else:
            base = f"resnext{depth}_{arch.groups}x{arch.inner}d"
    return "-".join([base, *suffixes])


# ----------------------------------------------------------------------------------------- padding


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zero-pad (B, C, H, W) as TensorFlow's SAME does: the odd cell goes to the end."""
    height, width = (max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in (x.shape[-2], x.shape[-1]))
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


class SameConv2d(nn.Conv2d):
    """A convolution with SAME padding, as in haiku; on even maps torch's differs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_same(x, self.kernel_size[0], self.stride[0]))


class SameMaxPool2d(nn.MaxPool2d):
    """3x3 max-pooling, stride 2, SAME padding; zeros are right after a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = super().forward(pad_same(x, 3, 2))
        return pooled


class TFShortcutPool(nn.Module):
    """SimCLR-v2's 2x2 average before a shortcut: at stride 1 only cells of the map count."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        # A repeated last row and column gives the mean over the valid cells of a 2x2 window exactly.
        padded = F.pad(x, (0, 1, 0, 1), mode="replicate" if self.stride == 1 else "constant")
        return F.avg_pool2d(padded, 2, self.stride)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _norm(arch: Arch, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if arch.norm == "batch" else nn.GroupNorm(8, channels)


# ------------------------------------------------------------------------------------------ blocks


class SelectiveKernel(nn.Module):
    """SimCLR-v2's selective kernel: two 3x3 branches, mixed by a softmax for each channel."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        squeezed = max(int(channels * SK_RATIO), 32)
        self.conv = _conv(channels, 2 * channels, 3, stride)
        self.bn = nn.BatchNorm2d(2 * channels)
        self.down = nn.Conv2d(channels, squeezed, 1, bias=False)
        self.down_bn = nn.BatchNorm2d(squeezed)
        self.up = nn.Conv2d(squeezed, 2 * channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        branches = torch.unflatten(F.relu(self.bn(self.conv(x))), 1, (2, -1))  # (B, 2, C, H, W)
        context = branches.sum(1).mean((2, 3), keepdim=True)
        mix = torch.unflatten(self.up(F.relu(self.down_bn(self.down(context)))), 1, (2, -1))
        return (branches * mix.softmax(1)).sum(1)


class SelectiveBottleneck(Bottleneck):  # type: ignore[misc]
    """torchvision's bottleneck with a selective kernel in the place of its 3x3 convolution and the norm behind it."""

    def __init__(self, arch: Arch, inputs: int, channels: int, stride: int, downsample: nn.Module | None) -> None:
        nn.Module.__init__(self)  # without the 3x3 convolution of torchvision's, which would take random numbers
        inner, outputs = channels * arch.inner // 64 * arch.groups, channels * self.expansion
        self.conv1, self.bn1 = _conv(inputs, inner, 1), _norm(arch, inner)
        self.conv2, self.bn2 = SelectiveKernel(inner, stride), nn.Identity()
        self.conv3, self.bn3 = _conv(inner, outputs, 1), _norm(arch, outputs)
        self.relu, self.downsample = nn.ReLU(inplace=True), downsample


def _block(arch: Arch, inputs: int, channels: int, stride: int, downsample: nn.Module | None) -> Any:
    """A residual block: torchvision's, or one with selective kernels."""
    if arch.sk:
        block: Any = SelectiveBottleneck(arch, inputs, channels, stride, downsample)
    else:
        kind = BasicBlock if arch.block == "basic" else Bottleneck
        norm = partial(_norm, arch)
        block = kind(inputs, channels, stride, downsample, arch.groups, arch.inner, norm_layer=norm)
    if arch.stride_first and arch.block == "bottleneck":
        second = block.conv2.conv if arch.sk else block.conv2
        block.conv1.stride, second.stride = second.stride, block.conv1.stride
    return block


def _shortcut(arch: Arch, inputs: int, outputs: int, stride: int, padding: Padding) -> nn.Sequential:
    if not arch.pooled_shortcut:
        return nn.Sequential(_conv(inputs, outputs, 1, stride), _norm(arch, outputs))
    pool: nn.Module
    if padding == "tf":
        pool = TFShortcutPool(stride)
    elif padding == "port":
        pool = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.AvgPool2d(2, stride))
    elif stride == 1:
        pool = nn.Identity()
    else:
        pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False)
    return nn.Sequential(pool, _conv(inputs, outputs, 1), _norm(arch, outputs))


class ResNet(nn.Module):
    """A ResNet whose parameters carry torchvision's names.

    `padding` is the convention of the framework that made the weights: `torch` (symmetric), `tf`
    (SimCLR: SAME in the pooling layers only), `same` (haiku: SAME everywhere) or `port` (the
    PyTorch port of SimCLR-v2 as it runs: symmetric, and shortcut pooling that counts zeros
    outside the map). It has no parameters, so only outputs show a wrong choice.
    """

    def __init__(self, arch: Arch, padding: Padding = "torch") -> None:
        super().__init__()
        self.arch = arch
        self.conv1 = _stem(arch)
        self.bn1 = _norm(arch, arch.width)
        self.relu: nn.Module = nn.ReLU(inplace=True) if arch.stem_relu else nn.Identity()
        pool = SameMaxPool2d(3, 2) if padding in ("tf", "same") else nn.MaxPool2d(3, 2, padding=1)
        small = arch.stem.startswith("cifar") or arch.stem == "small"
        self.maxpool = pool if (arch.small_pool if small else arch.stem_pool) else nn.Identity()
        inputs = arch.width
        for stage, depth in enumerate(arch.layers):
            channels, stride = arch.width * 2**stage, 2 if stage else 1
            outputs = channels * (4 if arch.block == "bottleneck" else 1)
            changes = stride > 1 or inputs != outputs or arch.project_first
            shortcut = _shortcut(arch, inputs, outputs, stride, padding) if changes else None
            blocks = [_block(arch, inputs, channels, stride, shortcut)]
            blocks += [_block(arch, outputs, channels, 1, None) for _ in range(1, depth)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
            inputs = outputs
        self.num_features = inputs  # D, the size of the pooled features
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.proj: nn.Module = nn.Identity()  # SimCLR-v2's first projection layer, if kept
        self.fc: nn.Module = nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                if not module.weight.is_meta:
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if padding == "same" and module.stride != (1, 1):  # also those inside of torchvision's blocks
                    module.__class__, module.padding = SameConv2d, (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) to logits (B, C), or to features (B, D) where there is no head."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(len(self.arch.layers)):
            x = getattr(self, f"layer{stage + 1}")(x)  # torch 2.6 cannot export get_submodule
        logits: Tensor = self.fc(self.proj(torch.flatten(self.avgpool(x), 1)))
        return logits


def _stem(arch: Arch) -> nn.Module:
    width, half = arch.width, arch.width // 2
    if arch.stem == "imagenet":
        return _conv(3, width, 7, 2)
    if arch.stem == "deep":
        return nn.Sequential(
            _conv(3, half, 3, 2),
            _norm(arch, half),
            nn.ReLU(inplace=True),
            _conv(half, half, 3),
            _norm(arch, half),
            nn.ReLU(inplace=True),
            _conv(half, width, 3),
        )
    if arch.stem == "small":
        return _conv(3, width, 3, 2)
    return nn.Conv2d(3, width, 3, padding=2 if arch.stem == "cifar-pad2" else 1, bias=False)
