"""Losses against a target matrix. B batch, C classes. The reduction is part of each definition."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from finetune_mile.learning.phases import Auto, Phase
from finetune_mile.learning.targets import given_matrix

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
    phase: Phase, logits: Tensor, targets: Tensor, given: Tensor, class_weights: Tensor | None = None
) -> Tensor:
    """The loss of a batch in a phase: a scalar.

    With `rho: auto` a softmax term on the given label comes on top. It does not change when all logits move together,
    so it keeps the given label's rank without pushing found labels down; images without a given label add nothing.

    Args:
        phase: says which loss.
        logits: (B, C).
        targets: (B, C).
        given: (B,) or (B, C), the given labels.
        class_weights: (C,), or None for ones.
    """
    loss = LOSSES[phase.loss](logits, targets, class_weights)
    if not isinstance(phase.targets, Auto) or phase.targets.ce == 0:
        return loss
    return loss + phase.targets.ce * cross_entropy(logits, given_matrix(given, logits.shape[1]), class_weights)
