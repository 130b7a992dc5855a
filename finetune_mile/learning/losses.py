"""Losses against a target matrix. B batch, C classes. The reduction is part of each definition."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from finetune_mile.learning.phases import Auto, Phase

LossFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def bce(logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy, summed over classes and averaged over the batch (Eq. 1): a scalar.

    A mean over classes instead would divide the learning rate by C.

    Args:
        logits: (B, C).
        targets: (B, C) in [0, 1].
        class_weights: (C,), or None for ones.
    """
    per_class = F.binary_cross_entropy_with_logits(logits.float(), targets, weight=class_weights, reduction="none")
    return per_class.sum(1).mean()


def cross_entropy(logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Softmax cross-entropy, averaged over the batch: a scalar.

    Args:
        logits: (B, C).
        targets: (B, C), rows that sum to one (one-hot or soft). Several given labels share the mass equally.
        class_weights: (C,), or None for ones.
    """
    shares = targets / targets.sum(1, keepdim=True).clamp(min=1.0)
    if class_weights is not None:
        shares = shares * class_weights
    return -(shares * logits.float().log_softmax(1)).sum(1).mean()


LOSSES: dict[str, LossFunction] = {"bce": bce, "cross_entropy": cross_entropy}


def phase_loss(
    phase: Phase, logits: Tensor, targets: Tensor, ranks: Tensor | None, class_weights: Tensor | None = None
) -> Tensor:
    """The loss of a batch in a phase: a scalar.

    With `rho: auto` a softmax term comes on top. It does not change when all logits of an image move together, so it
    keeps the order of the labels and leaves their level to the other term.

    Args:
        phase: says which loss.
        logits: (B, C).
        targets: (B, C).
        ranks: (B, C), the targets of the softmax term, or None.
        class_weights: (C,), or None for ones.
    """
    loss = LOSSES[phase.loss](logits, targets, class_weights)
    if ranks is None or not isinstance(phase.targets, Auto):
        return loss
    return loss + phase.targets.ce * cross_entropy(logits, ranks, class_weights)
