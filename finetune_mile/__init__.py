"""Fine-tune self-supervised image models with MILe, multi-label iterated learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

__all__ = ["__version__", "load", "load_classifier"]
__version__ = "0.1.0"


def load(init: str, num_classes: int | None = None, arch: str | None = None) -> nn.Module:
    """The network behind `init`, in eval mode.

    Args:
        init: what `--init` takes: a card's name, a file, a folder, `timm:NAME`, `hf:owner/name`.
        num_classes: None for pooled features (B, D), else C for logits (B, C) of a new, untrained head.
            For the head that a run trained use `load_classifier`.
        arch: what `--arch` takes: the network, where the file does not show it.

    Returns:
        A module that takes images (B, 3, H, W) in the checkpoint's own convention. It has `.card`,
        `.report` (what became of every tensor) and `.preprocess`, which turns one RGB image (PIL,
        or a uint8 tensor (3, H, W)) into that convention.
    """
    from finetune_mile.checkpoints.loading import load_public  # late: torch takes seconds to import

    return load_public(init, num_classes, arch)


def load_classifier(source: str | Path) -> nn.Module:
    """The trained classifier of a run, in eval mode: images (B, 3, H, W) to logits (B, C).

    Args:
        source: a run folder, its export folder, or a checkpoint file that has a classifier.

    Returns:
        A module with `.classes` (C names, or None where the file names none), `.preprocess`, `.card`, `.report`, and
        `.predict`, which takes a path, a PIL image, or a list of those. For one image it returns a list of
        (class, probability), the most likely class first; for a list of images, a list of such lists. Probabilities
        are softmax or sigmoid, as the network was trained. Where no names are known, classes are "0", "1", ...
    """
    from finetune_mile.checkpoints.classifier import load_public_classifier

    return load_public_classifier(str(source))
