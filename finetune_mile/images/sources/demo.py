"""The demo: 3x3 grids of handwritten digits that come with scikit-learn; nothing to download."""

from __future__ import annotations

import numpy as np
import torch

from finetune_mile.images.grids import Layout, make_grids
from finetune_mile.images.imageset import Data
from finetune_mile.images.randomness import permutation

TRAIN_GRIDS = 12000  # and a quarter of that for validation


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
    train, val = (
        make_grids(
            digits, labels.astype(np.int64), part, size, num_classes=10, layout=Layout(), seed=seed, name=name
        )
        for part, size, seed, name in ((order[:cut], count, 1, "train"), (order[cut:], max(count // 4, 1), 2, "val"))
    )  # fmt: skip
    return Data(name="demo", classes=tuple(str(d) for d in range(10)), train=train, val=val)
