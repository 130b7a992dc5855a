"""Grids of small pictures with one given label: the label of one cell, the true set is known. Nothing is stored.

The paper's Multi-MNIST is the 3x3 case: the centre is the given label with probability 0.6, each other cell with 0.05.
The demo is that case with the handwritten digits that come with scikit-learn: nothing to download.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finetune_mile.images.order import Indices, permutation, uniforms
from finetune_mile.images.sets import Data, ImageSet

CENTRE = 0.6
DEMO_GRIDS = 12000  # for training, and a quarter of that for validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The cells of a grid, and how its label is drawn."""

    rows: int = 3  # and as many columns
    share: float = CENTRE  # how often the main cell's label is the given one; the other cells share the rest
    single: float = 0.0  # share of images that show the main cell alone

    @property
    def main(self) -> int:
        """The main cell: the centre, or the first one where there is no centre."""
        return self.rows**2 // 2 if self.rows % 2 else 0


def load(where: str, flag: str = "--data demo") -> Data:
    """The demo: grids of 24x24 pixels, one given label each, the true label set known.

    Training and validation grids are made of different digits. The grids do not depend on a run's seed.

    Args:
        where: how many training grids (`demo:400`); empty for the whole demo.
        flag: not used; a demo has no options.
    """
    del flag
    from sklearn.datasets import load_digits

    count = int(where) if where.isdigit() else DEMO_GRIDS
    pixels, labels = load_digits(return_X_y=True)
    digits = torch.from_numpy((pixels.reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8))
    order = permutation(0, 0, len(digits))
    cut = len(order) * 2 // 3
    train, val = (
        make_grids(
            digits[part], labels[part].astype(np.int64), size, num_classes=10, layout=Layout(), seed=seed, name=name
        )
        for part, size, seed, name in ((order[:cut], count, 1, "train"), (order[cut:], max(count // 4, 1), 2, "val"))
    )  # fmt: skip
    return Data(name="demo", classes=tuple(str(d) for d in range(10)), train=train, val=val)


def make_grids(
    pictures: Tensor, labels: Indices, count: int, *, num_classes: int, layout: Layout, seed: int, name: str
) -> ImageSet:
    """`count` grids of pictures, drawn from `seed`.

    Args:
        pictures: (N, s, s) or (N, 3, s, s) uint8.
        labels: (N,) classes.
        count: how many grids.
        num_classes: C.
        layout: rows, and how the label is drawn.
        seed: of the draw.
        name: goes into the ids.
    """
    cells_in_grid = layout.rows**2
    draws = uniforms(seed, 0, np.arange(count), cells_in_grid + 2)
    cells = (draws[:, :cells_in_grid] * len(labels)).astype(np.int64)  # (count, cells)
    shares = np.full(cells_in_grid, (1 - layout.share) / max(cells_in_grid - 1, 1))
    shares[layout.main] = layout.share
    chosen = np.searchsorted(np.cumsum(shares)[:-1], draws[:, cells_in_grid], side="right")
    alone = draws[:, cells_in_grid + 1] < layout.single
    chosen = np.where(alone, layout.main, chosen)
    present = torch.from_numpy(labels[cells])  # (count, cells)
    main = present[:, layout.main].clone()
    given = present[torch.arange(count), torch.from_numpy(chosen)]
    present[torch.from_numpy(alone)] = main[torch.from_numpy(alone)].unsqueeze(1)
    truth = torch.zeros(count, num_classes, dtype=torch.bool).scatter_(1, present, True)
    return ImageSet(
        ids=[f"{name}-{i:05d}" for i in range(count)], given=given, truth=truth, main=main, in_memory=True,
        content=Grids(pictures, torch.from_numpy(cells), torch.from_numpy(alone), layout),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Grids:
    """Grid number i, put together when it is read; it travels to loader processes."""

    pictures: Tensor  # (P, [3,] s, s)
    cells: Tensor  # (N, cells) which picture stands where
    alone: Tensor  # (N,) only the main cell is shown
    layout: Layout

    def __call__(self, index: int) -> Tensor:
        """The grid (3, H, W)."""
        rows, main, side = self.layout.rows, self.layout.main, self.pictures.shape[-1]
        parts = self.pictures[self.cells[index]]  # (cells, [3,] s, s)
        if self.alone[index]:
            parts = torch.zeros_like(parts)
            parts[main] = self.pictures[self.cells[index, main]]
        parts = parts.reshape(rows, rows, -1, side, side).permute(2, 0, 3, 1, 4)
        return parts.reshape(-1, rows * side, rows * side).expand(3, -1, -1)
