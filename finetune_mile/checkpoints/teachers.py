"""A teacher from outside: any architecture, its own input convention, the same classes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from finetune_mile.checkpoints.cards import Preprocess
from finetune_mile.checkpoints.loading import load_network, open_trunk
from finetune_mile.checkpoints.locating import locate
from finetune_mile.networks.heads import get_head
from finetune_mile.problems import Problem


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


def load_with_head(source: str, flag: str) -> tuple[nn.Module, Preprocess, tuple[str, ...] | None]:
    """A network with the head that its file holds, its input convention, and its classes where the file names them.

    Args:
        source: a run folder, an export, or a checkpoint file with a classifier.
        flag: for messages.
    """
    if not Path(source.partition("::")[0]).exists():
        raise Problem(f"{flag} {source}: there is no such run folder or file")
    opened = open_trunk(source)
    if "fc.weight" not in opened.classifier:
        raise Problem(f"{flag} {source}: it has no classifier; give a finished run or a fine-tuned checkpoint")
    ours = opened.report.format == "finetune-mile"
    name = "fc" if ours else opened.classifier_names["fc.weight"].removesuffix(".weight")
    network, card, _ = load_network(
        source, arch=None, num_classes=len(opened.classifier["fc.weight"]), head_bias="zero", keep_head=name
    )
    classes = locate(source.partition("::")[0]).config.get("classes")
    return network.eval(), card.preprocess, None if classes is None else tuple(classes)


def load_teacher(source: str, *, classes: tuple[str, ...], seen: Preprocess) -> nn.Module:
    """The network behind --teacher, with its own head, ready for images in the convention `seen`."""
    network, wanted, known = load_with_head(source, "--teacher")
    size = get_head(network).out_features
    if size != len(classes):
        raise Problem(f"--teacher {source}: it knows {size} classes, the data has {len(classes)}")
    if known is not None and known != classes:
        raise Problem(f"--teacher {source}: its classes have other names or another order than the data's")
    return network if (wanted.mean, wanted.std) == (seen.mean, seen.std) else Renormalised(network, seen, wanted)
