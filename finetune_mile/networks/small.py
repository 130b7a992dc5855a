"""Small networks: for 3x3 grids of digits, one that knows nothing of the grid and one that does; for ColoredMNIST.

B batch, D features, C classes, S image side. Each has a head `fc`, an identity until there is one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from finetune_mile.core.in_memory import SCHEME
from finetune_mile.core.problems import Problem

CELLS = 3


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class OnFeatures(nn.Module):
    """A network of a classifier `fc` alone, behind a batch norm if there is one.

    It is given the features (B, D) of a backbone that does not learn.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.norm: nn.Module = nn.Identity()
        self.fc: nn.Module = nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, D) to logits (B, C)."""
        out: Tensor = self.fc(self.norm(features))
        return out


class WithHead(nn.Module):
    """A backbone that a Python user brings, with a classifier `fc` behind it, an identity until there is one."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_features = count_features(backbone)
        self.fc: nn.Module = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to logits (B, C), or to features (B, D) where there is no head."""
        features = self.backbone(images)
        shape = tuple(getattr(features, "shape", ()))
        if len(shape) != 2 or shape[1] != self.num_features:
            raise Problem(
                f"--init {SCHEME}:{type(self.backbone).__name__}: it returns {shape or type(features).__name__}, "
                f"expected features (B, {self.num_features}), as its num_features says"
            )
        logits: Tensor = self.fc(features)
        return logits


def count_features(backbone: nn.Module) -> int:
    """The `num_features` of a backbone that a user brings."""
    count = getattr(backbone, "num_features", None)
    if not isinstance(count, int):
        raise Problem(
            f"--init {SCHEME}:{type(backbone).__name__}: it needs an attribute num_features, the number D of the "
            "features (B, D) that it returns"
        )
    return count


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
        out: Tensor = self.fc(self.hidden(self.trunk(x)))
        return out


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
        out: Tensor = self.fc(self.hidden(torch.unflatten(self.trunk(cells), 0, (x.shape[0], -1)).flatten(1)))
        return out


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
        x = torch.flatten(self.pool(x), 1)
        x = self.relu(self.hidden2(self.relu(self.hidden1(x))))
        out: Tensor = self.fc(x)
        return out


SMALL: dict[str, Callable[[], nn.Module]] = {"grid-cnn": GridCNN, "grid-cell": GridCell, "mlp": Mlp}
