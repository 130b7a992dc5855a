"""The demo: 3x3 grids of handwritten digits that come with scikit-learn; nothing to download."""

from __future__ import annotations

import numpy as np
import torch

from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.randomness import permutation, uniforms

TRAIN_GRIDS = 12000  # and a quarter of that for validation
CENTRE = 0.6  # the paper's rule: the centre digit is the label with 0.6, each other one with 0.05


def load(where: str) -> Data:
    """Grids of 24x24 pixels, one given label each, the true label set known.

    Training and validation grids are made of different digits. The grids do not depend on a run's seed.

    Args:
        where: how many training grids (`demo:400`); empty for the whole demo.
    """
    count = int(where) if where.isdigit() else TRAIN_GRIDS
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    digits = torch.from_numpy((pixels.reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8))
    order = permutation(0, 0, len(digits))
    cut = len(order) * 2 // 3
    return Data(
        name="demo",
        classes=tuple(str(d) for d in range(10)),
        train=grids(digits, labels, order[:cut], count, seed=1, name="train"),
        val=grids(digits, labels, order[cut:], max(count // 4, 1), seed=2, name="val"),
    )


def grids(
    digits: torch.Tensor,
    labels: np.ndarray,
    members: np.ndarray,
    count: int,
    *,
    seed: int,
    name: str,
) -> ImageSet:
    """`count` 3x3 grids of the digits `members`, drawn from `seed`.

    Args:
        digits: (N, 8, 8) uint8.
        labels: (N,) 0 to 9.
        members: which digits may be used.
        count: how many grids.
        seed: of the draw.
        name: goes into the ids.
    """
    draws = uniforms(seed, 0, np.arange(count), 10)
    cells = members[(draws[:, :9] * len(members)).astype(np.int64)]  # (count, 9)
    side = digits.shape[-1]
    pixels = digits[torch.from_numpy(cells)].reshape(count, 3, 3, side, side)
    pixels = pixels.permute(0, 1, 3, 2, 4).reshape(count, 1, 3 * side, 3 * side).contiguous()
    shares = np.full(9, (1 - CENTRE) / 8)
    shares[4] = CENTRE
    chosen = np.searchsorted(np.cumsum(shares)[:-1], draws[:, 9], side="right")
    present = torch.from_numpy(labels[cells].astype(np.int64))  # (count, 9)
    truth = torch.zeros(count, 10, dtype=torch.bool).scatter_(1, present, True)
    return ImageSet(
        ids=[f"{name}-{i:05d}" for i in range(count)],
        given=present[torch.arange(count), torch.from_numpy(chosen)],
        truth=truth,
        read=lambda index: pixels[index].expand(3, -1, -1),
        in_memory=True,
    )
