"""A teacher from outside: any architecture, its own input convention, the same classes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from finetune_mile.checkpoints.cards import Preprocess
from finetune_mile.checkpoints.exporting import read_export
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


def load_teacher(source: str, *, classes: tuple[str, ...], seen: Preprocess) -> nn.Module:
    """The network behind --teacher, with its own head, ready for images in the convention `seen`."""
    path = Path(source)
    if not path.exists():
        raise Problem(f"--teacher {source}: there is no such run folder or file")
    network, config = read_export(path)
    if config["num_classes"] != len(classes):
        raise Problem(f"--teacher {source}: it knows {config['num_classes']} classes, the data has {len(classes)}")
    if tuple(config["classes"]) != classes:
        raise Problem(f"--teacher {source}: its classes have other names or another order than the data's")
    wanted = Preprocess(**{key: config[key] for key in Preprocess.model_fields})
    return network if (wanted.mean, wanted.std) == (seen.mean, seen.std) else Renormalised(network, seen, wanted)
