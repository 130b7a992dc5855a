"""Mixup and cutmix: each image of a batch is mixed with its neighbour. B batch, C classes, H and W height and width.

Images 0 and 1, 2 and 3, ... are pairs: the order of a batch is random already. Processes and accumulated parts have an
even number of images each, so that pairs, and with them the run, do not depend on how a batch is divided.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np
from torch import Tensor

from finetune_mile.images.order import uniforms

TRIES = 256  # at a draw from Beta(a, a); the likelihood that none is accepted is 1e-20 at a = 2 and less below
NO_IMAGE = np.array([-1])  # a sample that no view has: these draws are not theirs


class Mix(NamedTuple):
    """What happens to every pair of a step's batch."""

    share: float  # that an image keeps of itself, and of its targets
    box: tuple[slice, slice] | None  # rows and columns that are exchanged; None: all pixels are averaged

    def images(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), each with a part of its neighbour."""
        if self.box is None:
            return self.rows(images)
        rows, columns = self.box
        mixed = images.clone()
        mixed[:, :, rows, columns] = _neighbours(images)[:, :, rows, columns]
        return mixed

    def rows(self, values: Tensor) -> Tensor:
        """Targets (B, C), each with its part of the neighbour's."""
        return self.share * values + (1 - self.share) * _neighbours(values)


def _neighbours(values: Tensor) -> Tensor:
    """1, 0, 3, 2, ... of (B, ...)."""
    return values.view(-1, 2, *values.shape[1:]).flip(1).view_as(values)


def draw_mix(seed: int, step: int, height: int, width: int, *, mixup: float, cutmix: float) -> Mix:
    """How step number `step` mixes its images; where both are on, one of the two with equal chances.

    Args:
        seed: of the run.
        step: from 0.
        height: H.
        width: W.
        mixup: alpha of Beta(alpha, alpha), which the share is drawn from; 0: off.
        cutmix: the same, for the area that stays; the box is cut off at the borders, and the share is what stays.
    """
    which, top_draw, left_draw, *rest = uniforms(seed, step, NO_IMAGE, 3 + 2 * TRIES)[0]
    if mixup and not (cutmix and which < 0.5):
        return Mix(symmetric_beta(mixup, np.array(rest)), None)
    half = sqrt(1 - symmetric_beta(cutmix, np.array(rest))) / 2
    (top, bottom), (left, right) = (
        (max(middle - int(half * side), 0), min(middle + int(half * side), side))
        for middle, side in ((int(top_draw * height), height), (int(left_draw * width), width))
    )
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return Mix(kept, (slice(top, bottom), slice(left, right)))


def symmetric_beta(alpha: float, draws: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """A number from Beta(alpha, alpha) by Jöhnk's method: the first pair of draws that it accepts."""
    first, second = np.log1p(-draws).reshape(2, -1) / alpha
    accepted = np.flatnonzero(np.exp(first) + np.exp(second) <= 1)
    if not len(accepted):
        return 0.5
    at = accepted[0]
    return float((1 + np.tanh((first[at] - second[at]) / 2)) / 2)
