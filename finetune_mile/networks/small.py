"""Small networks for 3x3 grids of digits: one that knows nothing of the grid, and one that does.

B batch, D features, C classes, S image side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

CELLS = 3


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class GridCNN(nn.Module):
    """Three convolutions, average-pooled to 3x3 and flattened, then one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_features = 128
        pool = nn.MaxPool2d(2)
        self.trunk = nn.Sequential(
            *_block(3, 32), pool, *_block(32, 64), pool, *_block(64, 64), nn.AdaptiveAvgPool2d(CELLS), nn.Flatten()
        )
        self.hidden = nn.Sequential(nn.Linear(64 * CELLS**2, self.num_features), nn.ReLU(inplace=True))
        self.fc: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, S, S) to logits (B, C), or to features (B, D) where there is no head."""
        out: Tensor = self.fc(self.hidden(self.trunk(x)))
        return out


class GridCell(nn.Module):
    """The same small trunk on each cell of a 3x3 grid; the head sees the cells' features side by side."""

    def __init__(self) -> None:
        super().__init__()
        width = 64
        self.num_features = width * CELLS**2
        self.trunk = nn.Sequential(
            *_block(3, 32), nn.MaxPool2d(2), *_block(32, 64), nn.MaxPool2d(2), *_block(64, 64),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, width), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.fc: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, S, S), S a multiple of 3, to logits (B, C), or to features (B, D) where there is no head."""
        side = x.shape[-1] // CELLS
        cells = x.unfold(2, side, side).unfold(3, side, side)  # (B, 3, 3, 3, side, side)
        cells = cells.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        out: Tensor = self.fc(torch.unflatten(self.trunk(cells), 0, (len(x), -1)).flatten(1))
        return out


SMALL: dict[str, Callable[[], nn.Module]] = {"grid-cnn": GridCNN, "grid-cell": GridCell}
