"""A teacher from outside: any architecture, its own input convention, the same classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finetune_mile.checkpoints.cards import Card
from finetune_mile.checkpoints.init import Init, parse_source
from finetune_mile.checkpoints.loading import Activation, LoadReport, keep_own_head, open_trunk
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.networks.heads import get_head


class Renormalised(nn.Module):
    """A network that is shown images in another network's normalisation."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, seen: Preprocess, wanted: Preprocess) -> None:
        """Wrap.

        Args:
            network: takes images in the convention `wanted`.
            seen: the convention of what it will be given.
            wanted: its own.
        """
        super().__init__()
        self.network = network
        seen_mean, seen_std, mean, std = (
            torch.tensor(v).view(3, 1, 1) for v in (seen.mean, seen.std, wanted.mean, wanted.std)
        )
        self.register_buffer("scale", seen_std / std)
        self.register_buffer("shift", (seen_mean - mean) / std)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to logits (B, C)."""
        logits: Tensor = self.network(images * self.scale + self.shift)
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class WithHead:
    """A network with the classifier of its file, and what the file says about it."""

    network: nn.Module  # in eval mode
    card: Card
    report: LoadReport
    classes: tuple[str, ...] | None  # C names, where the file has them
    activation: Activation | None  # how the network was trained, where the file says it


def open_with_head(source: str | Init, flag: str) -> WithHead:
    """A network with the head that its file holds; the file is read once.

    Args:
        source: a run folder, an export, or a checkpoint file with a classifier.
        flag: for messages.
    """
    opened = open_trunk(parse_source(source, flag))
    if not opened.report.classifier:
        raise Problem(f"{flag} {source}: it has no classifier; give a finished run or a fine-tuned checkpoint")
    network, report = keep_own_head(opened)
    return WithHead(
        network=network.eval(), card=opened.card, report=report, classes=opened.classes, activation=opened.activation
    )  # fmt: skip


def load_with_head(source: str | Init, flag: str) -> tuple[nn.Module, Preprocess, tuple[str, ...] | None]:
    """The same as a tuple: the network, its input convention, and its classes where the file names them."""
    opened = open_with_head(source, flag)
    return opened.network, opened.card.preprocess, opened.classes


def load_teacher(source: Init, *, classes: tuple[str, ...], seen: Preprocess) -> nn.Module:
    """The network behind --teacher, with its own head, ready for images in the convention `seen`."""
    network, wanted, known = load_with_head(source, "--teacher")
    size = get_head(network).out_features
    if size != len(classes):
        raise Problem(f"--teacher {source}: it knows {size} classes, the data has {len(classes)}")
    if known is not None and known != classes:
        raise Problem(f"--teacher {source}: its classes have other names or another order than the data's")
    return network if (wanted.mean, wanted.std) == (seen.mean, seen.std) else Renormalised(network, seen, wanted)
