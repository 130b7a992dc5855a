"""Networks by name, and the linear classifier on top of a backbone."""

import copy
import math
import pkgutil
from typing import Literal

import torch
from torch import Tensor, nn

from finetune_mile.core.in_memory import SCHEME, get_object
from finetune_mile.core.problems import Problem
from finetune_mile.networks.resnets import Padding, ResNet, parse_arch
from finetune_mile.networks.vits import build_timm, is_short

# networks of the paper's tables, as strings: `paper/` is imported late
SMALL = {
    "grid-cnn": "finetune_mile.paper.networks:GridCNN",
    "grid-cell": "finetune_mile.paper.networks:GridCell",
    "mlp": "finetune_mile.paper.networks:Mlp",
}
HeadBias = Literal["zero", "prior"]
HeadWeight = Literal["normal", "zero"]


def build(arch: str, *, padding: Padding = "torch") -> nn.Module:
    """Build a network without a head, with random weights: one of ours, `timm:NAME` or `timm:NAME:key=value,...`."""
    shape = parse_arch(arch)
    if shape is not None:
        return ResNet(shape, padding=padding)
    if arch in SMALL:
        network: nn.Module = pkgutil.resolve_name(SMALL[arch])()
        return network
    if arch.startswith(f"{SCHEME}:"):
        fix = "give the same network again, as in load_classifier(RUN, network=...)"
        return WithHead(copy.deepcopy(get_object(arch, "the network", fix)))
    if not arch.startswith("timm:") and not is_short(arch):
        raise Problem(
            f"--arch {arch}: unknown; use resnet18, resnet50, resnet50w2, resnet50-sk, resnet18-cifar, resnet-demo, "
            "resnet-mini, mlp, grid-cnn, grid-cell, vit_small, ... or timm:NAME"
        )
    return build_timm(arch)


def new_head(network: nn.Module, num_classes: int, bias: HeadBias, weight: HeadWeight = "normal") -> None:
    """Put a new linear classifier on a backbone, in place.

    Args:
        network: a backbone from `build`.
        num_classes: C.
        bias: `prior` starts every sigmoid at about 1 / C (bias -log C); `zero` starts it at one half.
        weight: `normal` draws it with a standard deviation of 0.01; `zero` makes all logits equal.
    """
    if hasattr(network, "reset_classifier"):  # timm's
        network.reset_classifier(num_classes)  # type: ignore[operator]
    else:
        network.fc = nn.Linear(network.num_features, num_classes)  # type: ignore[arg-type]
    head = get_head(network)
    with torch.no_grad():
        head.weight.normal_(std=0.01)
        if weight == "zero":
            head.weight.zero_()
        head.bias.fill_(-math.log(num_classes) if bias == "prior" else 0.0)


class OnFeatures(nn.Module):
    """A network of a classifier `fc` alone, behind a batch norm if there is one.

    It is given the features (B, D) of a backbone that does not learn.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.norm: nn.Module = nn.Identity()
        self.fc: nn.Module = nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, D) to logits (B, C)."""
        logits: Tensor = self.fc(self.norm(features))
        return logits


class WithHead(nn.Module):
    """A backbone that a Python user brings, with a classifier `fc` behind it, an identity until there is one."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_features = getattr(backbone, "num_features", None)
        if not isinstance(self.num_features, int):
            raise Problem(
                f"--init {SCHEME}:{type(backbone).__name__}: it needs an attribute num_features, the number D of the "
                "features (B, D) that it returns"
            )
        self.fc: nn.Module = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to logits (B, C), or to features (B, D) where there is no head."""
        features = self.backbone(images)
        shape = tuple(getattr(features, "shape", ()))
        if len(shape) != 2 or shape[1] != self.num_features:
            raise Problem(
                f"--init {SCHEME}:{type(self.backbone).__name__}: it returns {shape or type(features).__name__}, "
                f"expected features (B, {self.num_features}), as its num_features says"
            )
        logits: Tensor = self.fc(features)
        return logits


class StandardisedLinear(nn.Linear):
    """A linear classifier on (features - mean) * scale, which stay as they are. D features, C classes."""

    mean: Tensor  # (D,)
    scale: Tensor  # (D,)

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.register_buffer("mean", torch.zeros(in_features))
        self.register_buffer("scale", torch.ones(in_features))

    def forward(self, features: Tensor) -> Tensor:
        """(B, D) to (B, C)."""
        return super().forward((features - self.mean) * self.scale)


def set_head(network: nn.Module, head: nn.Linear) -> None:
    """Put a linear layer in the place of the classifier."""
    old = get_head(network)
    name = next(name for name, module in network.named_modules() if module is old)
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, head)


class Features(nn.Module):
    """The features (B, D) that a network's classifier sees."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = get_head(self.network).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self.network(images)
        finally:
            handle.remove()
        return seen[0]


def get_head(network: nn.Module) -> nn.Linear:
    """The linear layer that makes the logits."""
    head = network.get_classifier() if hasattr(network, "get_classifier") else network.fc  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise Problem(f"the classifier of {type(network).__name__} is a {type(head).__name__}, not a linear layer")
    return head
