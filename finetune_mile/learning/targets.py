"""Given labels as a target matrix. B batch, C classes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
