"""Small networks: for 3x3 grids of digits, one that knows nothing of the grid and one that does; for ColoredMNIST.

B batch, D features, C classes, S image side. Each has a head `fc`, an identity until there is one.
"""

from torch import Tensor, nn, unflatten

CELLS = 3


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class GridCNN(nn.Module):
    """Three strided convolutions and one hidden layer: 153,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.num_features = 56
        self.trunk = nn.Sequential(*_block(3, 16), *_block(16, 32), *_block(32, 64), nn.AdaptiveAvgPool2d(6))
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(64 * 36, self.num_features), nn.ReLU(inplace=True))
        self.fc: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, S, S) to logits (B, C), or to features (B, D) where there is no head."""
        logits: Tensor = self.fc(self.hidden(self.trunk(x)))
        return logits


class GridCell(nn.Module):
    """The same small network on each cell of a 3x3 grid, then one hidden layer over the cells' features."""

    def __init__(self) -> None:
        super().__init__()
        side, width = 14, 64
        self.num_features = 128
        self.resize = nn.AdaptiveAvgPool2d(CELLS * side)
        self.trunk = nn.Sequential(
            nn.Linear(side**2, 128), nn.BatchNorm1d(128), nn.ReLU(inplace=True),
            nn.Linear(128, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.hidden = nn.Sequential(nn.Linear(width * CELLS**2, self.num_features), nn.ReLU(inplace=True))
        self.fc: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, S, S), whose colours it does not see, to logits (B, C) or features (B, D)."""
        grey = self.resize(x.mean(1))
        side = grey.shape[-1] // CELLS
        cells = grey.unfold(1, side, side).unfold(2, side, side).flatten(0, 2).flatten(1)  # (B * 9, side * side)
        logits: Tensor = self.fc(self.hidden(unflatten(self.trunk(cells), 0, (x.shape[0], -1)).flatten(1)))
        return logits


class Mlp(nn.Module):
    """Two hidden layers on a 14x14 colour image, for ColoredMNIST; larger images are averaged down to that first."""

    def __init__(self) -> None:
        super().__init__()
        side, self.num_features = 14, 256
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.hidden1 = nn.Linear(3 * side * side, self.num_features)
        self.hidden2 = nn.Linear(self.num_features, self.num_features)
        self.relu = nn.ReLU(inplace=True)
        self.fc: nn.Module = nn.Identity()
        for layer in (self.hidden1, self.hidden2):
            if not layer.weight.is_meta:
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, S, S) to logits (B, C), or to features (B, D) where there is no head."""
        x = self.pool(x).flatten(1)
        logits: Tensor = self.fc(self.relu(self.hidden2(self.relu(self.hidden1(x)))))
        return logits
