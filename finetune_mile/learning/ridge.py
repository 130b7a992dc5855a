"""A linear classifier by least squares, whose answer for each photo without that photo has a closed form.

n photos, D features, C classes. One decomposition serves every strength of the penalty and every photo left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetune_mile.learning.probe import LEAST_SPREAD

STRENGTHS = tuple(10.0 ** (-half / 2) for half in range(2, 13))  # of the L2 penalty, from strong to weak


class LeftOut:
    """Scores of photos by a ridge regression that has not seen them, nor their near-duplicates."""

    def __init__(self, features: Tensor, *, keep: Tensor, groups: Tensor | None = None) -> None:
        """Decompose the features.

        Args:
            features: (n, D).
            keep: (n,) photos to learn from; the others are only scored.
            groups: (n,) near-duplicates have the same number and are left out together; -1: alone.
        """
        self.keep, rows = keep, features.float()
        spread = rows[keep].std(0, correction=0)
        scale = torch.where(spread > LEAST_SPREAD * spread.max().clamp(min=1e-30), 1 / spread.clamp(min=1e-30), 0.0)
        rows = (rows - rows[keep].mean(0)) * scale / max(float((scale > 0).sum()), 1.0) ** 0.5
        kept = rows[keep]
        if len(kept) < rows.shape[1]:  # as many directions as photos say it all
            values, turn = torch.linalg.eigh(kept @ kept.T)
            large = values > 1e-6 * values.max().clamp(min=1e-30)
            values, turn = values[large], kept.T @ turn[:, large] / values[large].sqrt()
        else:
            values, turn = torch.linalg.eigh(kept.T @ kept)
        self.values, self.turned = values.clamp(min=0), rows @ turn
        number = torch.full((len(rows),), -1) if groups is None else groups
        together = [((number == one) & keep).nonzero().flatten() for one in number[number >= 0].unique().tolist()]
        self.together = [members for members in together if len(members) > 1]

    def scores(self, targets: Tensor, strength: float) -> Tensor:
        """(n, C) for targets (n, C) of 0 and 1."""
        keep, count = self.keep, int(self.keep.sum())
        wanted, factor = targets.float(), 1 / (self.values + strength * count)
        mean = wanted[keep].mean(0)
        inner = self.turned[keep].T @ (wanted[keep] - mean)
        scores = self.turned @ (inner * factor.unsqueeze(1)) + mean
        missed = wanted - scores
        own = (self.turned.square() @ factor + 1 / count).clamp(max=1 - 1e-6)  # a photo's weight in its own score
        result = torch.where(keep.unsqueeze(1), wanted - missed / (1 - own).unsqueeze(1), scores)
        for members in self.together:
            part = self.turned[members]
            own_block = part * factor @ part.T + 1 / count
            rest = torch.eye(len(members)) * (1 + 1e-6) - own_block
            result[members] = wanted[members] - torch.linalg.solve(rest, missed[members])
        return result
