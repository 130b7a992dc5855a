"""Given labels and teacher logits become one target matrix. B batch, C classes."""

from __future__ import annotations

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune_mile.learning.auto import found_labels
from finetune_mile.learning.phases import Argmax, Auto, Given, Loss, Soften, Targets, Threshold


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


def make_targets(rule: Targets, labels: Tensor, teacher_logits: Tensor | None, num_classes: int, loss: Loss) -> Tensor:
    """The matrix (B, C) that a learner is trained towards.

    An empty pseudo-label set (no sigmoid above rho) trains every class of that image towards zero, which is what
    Alg. 1 says when read literally; `empty: argmax` takes the teacher's best class instead. Either way the loop counts
    such sets, and a guard warns when there are many.

    Args:
        rule: which labels to use.
        labels: given labels, (B,) or (B, C); see `given_matrix`.
        teacher_logits: (B, C); None for `Given`.
        num_classes: C.
        loss: what the targets are for: soft labels are a softmax for cross-entropy, sigmoids for BCE.
    """
    given = given_matrix(labels, num_classes)
    if isinstance(rule, Given):
        return given
    if teacher_logits is None:
        raise ValueError(f"{type(rule).__name__} needs the teacher's logits")
    match rule:
        case Threshold():
            found = threshold(teacher_logits, rule)
        case Soften():
            scaled = teacher_logits.float() / rule.temperature
            found = scaled.softmax(1) if loss == "cross_entropy" else scaled.sigmoid()
        case Argmax():
            found = F.one_hot(teacher_logits.argmax(1), num_classes).float()
        case Auto():
            found = found_labels(rule, teacher_logits)
        case _:
            assert_never(rule)
    return torch.maximum(found, given) if rule.union else found


def threshold(teacher_logits: Tensor, rule: Threshold) -> Tensor:
    """Multi-hot (B, C): sigmoids strictly above rho."""
    found = (teacher_logits.float().sigmoid() > rule.rho).float()
    if rule.empty == "argmax":
        best = F.one_hot(teacher_logits.argmax(1), teacher_logits.shape[1]).float()
        found = torch.where(found.any(1, keepdim=True), found, best)
    return found


def rank_targets(rule: Targets, labels: Tensor, teacher_logits: Tensor) -> Tensor | None:
    """Targets (B, C) of the softmax term of `rho: auto`, None for other rules.

    The given label is one draw among the objects of an image; the teacher's softmax is what many draws would say, so a
    part of it makes a short imitation less noisy. An image without a given label has the teacher's part alone.

    Args:
        rule: which labels are used.
        labels: given labels, (B,) or (B, C); see `given_matrix`.
        teacher_logits: (B, C).
    """
    if not isinstance(rule, Auto):
        return None
    given = given_matrix(labels, teacher_logits.shape[1])
    return (1 - rule.teacher) * given + rule.teacher * teacher_logits.float().softmax(1)
