"""Given labels as a target matrix, and losses against one. B batch, C classes. Each loss defines its reduction."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LossFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def given_matrix(labels: Tensor, num_classes: int) -> Tensor:
    """Given labels as floats (B, C): one-hot, multi-hot, or a row of zeros where there is none.

    Args:
        labels: (B,) integers, -1 = unlabelled; or (B, C) of 0 and 1, a row of -1 = unlabelled.
        num_classes: C.
    """
    if labels.ndim == 2:
        return labels.clamp(min=0).float()
    matrix = F.one_hot(labels.clamp(min=0), num_classes).float()
    return matrix * (labels >= 0).unsqueeze(1)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device; a GPU copies it while the host goes on, which takes pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def shared(targets: Tensor) -> Tensor:
    """Targets (B, C) with rows that sum to at most one: several labels share it equally."""
    return targets / targets.sum(1, keepdim=True).clamp(min=1.0)


def smoothed(targets: Tensor, smoothing: float) -> Tensor:
    """Targets (B, C) of which a share is divided among all classes."""
    return (1 - smoothing) * targets + smoothing / targets.shape[1]


def bce(logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy, summed over classes and averaged over the batch (Eq. 1): a scalar.

    With SGD, a mean over classes would divide the learning rate by C; `loss_of_new_head` assumes the sum.

    Args:
        logits: (B, C).
        targets: (B, C) in [0, 1].
        class_weights: (C,), or None for ones.
    """
    return bce_rows(logits, targets, class_weights).mean()


def bce_rows(logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of every image (B,), summed over classes; arguments as in `bce`."""
    return bce_entries(logits, targets, class_weights).sum(1)


def bce_entries(logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of every image and class (B, C); arguments as in `bce`."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets, weight=class_weights, reduction="none")


def cross_entropy(logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Softmax cross-entropy, averaged over the batch: a scalar.

    Args:
        logits: (B, C).
        targets: (B, C), rows that sum to one (one-hot or soft). Several given labels share the mass equally.
        class_weights: (C,), or None for ones.
    """
    return cross_entropy_rows(logits, targets, class_weights).mean()


def cross_entropy_rows(logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Softmax cross-entropy of every image (B,); arguments as in `cross_entropy`."""
    shares = shared(targets)
    if class_weights is not None:
        shares = shares * class_weights
    return -(shares * logits.float().log_softmax(1)).sum(1)


LOSSES: dict[str, LossFunction] = {"bce": bce_rows, "cross_entropy": cross_entropy_rows}  # of every image, (B,)
