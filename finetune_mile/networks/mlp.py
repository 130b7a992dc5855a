"""The small network of the ColoredMNIST experiments. B batch, C classes, D features, H and W height and width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIDE, HIDDEN = 14, 256


class Mlp(nn.Module):
    """Two hidden layers on a 14x14 colour image; larger images are averaged down to that first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_features = HIDDEN
        self.pool = nn.AdaptiveAvgPool2d(SIDE)
        self.hidden1 = nn.Linear(3 * SIDE * SIDE, HIDDEN)
        self.hidden2 = nn.Linear(HIDDEN, HIDDEN)
        self.relu = nn.ReLU(inplace=True)
        self.fc: nn.Module = nn.Identity()
        for layer in (self.hidden1, self.hidden2):
            if not layer.weight.is_meta:
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def reset_classifier(self, num_classes: int) -> None:
        """Put a new linear head on; 0: none."""
        self.fc = nn.Linear(HIDDEN, num_classes) if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.fc

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) to logits (B, C), or to features (B, D) where there is no head."""
        x = torch.flatten(self.pool(x), 1)
        x = self.relu(self.hidden2(self.relu(self.hidden1(x))))
        out: Tensor = self.fc(x)
        return out
