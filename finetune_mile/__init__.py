"""Fine-tune self-supervised image models with MILe, multi-label iterated learning (docs/python.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from finetune_mile.api import Run, embed, evaluate, probe, train
    from finetune_mile.checkpoints.classifier import ImageClassifier
    from finetune_mile.core.problems import Problem

__all__ = [
    "ImageClassifier", "Problem", "Run", "__version__", "embed", "evaluate", "load", "load_classifier", "probe",
    "train",
]  # fmt: skip
__version__ = "0.1.0"

# Imported when they are asked for: torch takes seconds.
_LATE = {
    "ImageClassifier": "finetune_mile.checkpoints.classifier",
    "Problem": "finetune_mile.core.problems",
    **dict.fromkeys(("Run", "embed", "evaluate", "probe", "train"), "finetune_mile.api"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__") and name not in __all__)]


def load(
    init: str,
    num_classes: int | None = None,
    arch: str | None = None,
    format: str | None = None,
    prefix: str | None = None,
) -> nn.Module:
    """The network behind `init`, in eval mode.

    Args:
        init: what `--init` takes: a card's name, a file, a folder, `timm:NAME`, `hf:owner/name`.
        num_classes: None for pooled features (B, D), else C for logits (B, C) of a new, untrained head.
            For the head that a run trained use `load_classifier`.
        arch: what `--arch` takes: the network, where the file does not show it.
        format: what `--format` takes: whose file it is, such as solo-learn, where the file does not show it.
        prefix: of the backbone, where the file has several, as in `--init FILE::PREFIX`.

    Returns:
        A module that takes images (B, 3, H, W) in the checkpoint's own convention. It has `.card`,
        `.report` (what became of every tensor) and `.preprocess`. `.preprocess` turns one RGB image
        (PIL, a uint8 array (H, W, 3), or a uint8 tensor (3, H, W)) into that convention.
    """
    from finetune_mile.checkpoints.loading import load_public  # late: torch takes seconds to import

    return load_public(init, num_classes, arch, format, prefix)


def load_classifier(source: str | Path, network: nn.Module | None = None) -> ImageClassifier:
    """The trained classifier of a run, in eval mode: images (B, 3, H, W) to logits (B, C).

    Args:
        source: a run folder, its export folder, or a checkpoint file that has a classifier.
        network: for a run that was given a network of the user's own (`train(init=network)`): such a network again.
            Its weights do not matter, the run's are put into a copy.

    Returns:
        A module with `.predict`, `.classes` (C names, or None where the file names none), `.preprocess`, `.card` and
        `.report`. `.predict` takes a path, a PIL image, a uint8 array (H, W, 3), a uint8 tensor (3, H, W), or a list of
        those. For one image it returns a list of (class, probability), the most likely class first; for a list of
        images, a list of such lists.
    """
    from finetune_mile.checkpoints.classifier import ImageClassifier
    from finetune_mile.core.in_memory import named

    with named(network):
        return ImageClassifier.open(str(source))
