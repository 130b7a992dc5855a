"""Fine-tune self-supervised image models with MILe, multi-label iterated learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def load(init: str, num_classes: int | None = None, arch: str | None = None) -> nn.Module:
    """The network behind `init`, in eval mode.

    Args:
        init: what `--init` takes: a card's name, a file, a folder, `timm:NAME`, `hf:owner/name`.
        num_classes: None for pooled features (B, D), else C for logits (B, C) of a new head.
        arch: what `--arch` takes: the network, where the file does not show it.

    Returns:
        A module that takes images (B, 3, H, W) in the checkpoint's own convention. It has `.card`,
        `.report` (what became of every tensor) and `.preprocess`, which turns one RGB image (PIL,
        or a uint8 tensor (3, H, W)) into that convention.
    """
    from finetune_mile.checkpoints.public import load_public  # late: torch takes seconds to import

    return load_public(init, num_classes, arch)
