"""Measures of predictions against labels and label sets: pure, vectorised torch. N images, C classes.

Values are shares in [0, 1]; `evaluation` turns them into percent where results.json wants that.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

SetRule = Literal["threshold", "argmax_or_threshold"]


def top_k(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """Is the given label among the k best scores? (N,) booleans.

    Args:
        scores: (N, C).
        labels: (N,) integers.
        k: how many; more than C counts as C.
    """
    best = scores.topk(min(k, scores.shape[1]), dim=1).indices
    return (best == labels.unsqueeze(1)).any(1)


def top_1_in_set(scores: Tensor, truth: Tensor) -> Tensor:
    """Is the best score's class in the true set (ReaL accuracy)? (N,) booleans; truth (N, C) booleans."""
    return truth.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)


def predicted_set(probabilities: Tensor, threshold: float, rule: SetRule) -> Tensor:
    """Classes that count as predicted, (N, C) booleans: p > threshold, or that and the best class."""
    found = probabilities > threshold
    if rule == "argmax_or_threshold":
        found = found.scatter(1, probabilities.argmax(1, keepdim=True), True)
    return found


def sample_f1(predicted: Tensor, truth: Tensor) -> Tensor:
    """F1 of each image's predicted set against its true set, (N,); 0 where both are empty.

    Its mean is scikit-learn's `f1_score(average="samples", zero_division=0)`.
    """
    both = (predicted & truth).sum(1)
    sizes = predicted.sum(1) + truth.sum(1)
    return 2 * both / sizes.clamp(min=1)


def ranking_precision(scores: Tensor, truth: Tensor) -> Tensor:
    """Label ranking average precision of each image, (N,): free of any threshold; 1 for an empty or a full set.

    For each true label: of the classes scored at least as high, the share that is true; averaged over true labels.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    sorted_scores = scores.gather(1, order)
    sorted_truth = truth.gather(1, order)
    count = scores.shape[1]
    # Ties share the worst rank: the last position in the sorted row that has the same score.
    ahead = torch.searchsorted(-sorted_scores.contiguous(), -sorted_scores.contiguous(), right=True)
    hits = sorted_truth.cumsum(1).gather(1, ahead - 1)
    precision = torch.where(sorted_truth, hits / ahead, 0.0).sum(1)
    sizes = truth.sum(1)
    trivial = (sizes == 0) | (sizes == count)
    return torch.where(trivial, 1.0, precision / sizes.clamp(min=1))


def constant_f1(truth: Tensor) -> tuple[float, Tensor]:
    """The best F1 that one constant set of classes reaches, and that set (C,) booleans.

    Among sets of k classes the k commonest ones are tried for every k: what any score must be compared with.
    """
    order = truth.float().mean(0).argsort(dim=0, descending=True, stable=True)
    both = truth[:, order].cumsum(1)  # (N, C): hits of the k commonest, k = 1 .. C
    sizes = truth.sum(1, keepdim=True) + torch.arange(1, truth.shape[1] + 1, device=truth.device)
    scores = (2 * both / sizes).mean(0)
    best = int(scores.argmax())
    chosen = torch.zeros(truth.shape[1], dtype=torch.bool, device=truth.device)
    chosen[order[: best + 1]] = True
    return float(scores[best]), chosen


def best_threshold_f1(probabilities: Tensor, truth: Tensor, rule: SetRule, steps: int = 99) -> tuple[float, float]:
    """The best sample F1 over a grid of thresholds in logit space, and where: (F1, threshold)."""
    grid = torch.linspace(-7, 7, steps).sigmoid().tolist()
    scores = [float(sample_f1(predicted_set(probabilities, t, rule), truth).mean()) for t in grid]
    best = max(range(steps), key=scores.__getitem__)
    return scores[best], grid[best]


def churn(before: Tensor, now: Tensor) -> float:
    """Share of pseudo-labels that changed hands between two generations: |A xor B| / |A or B| over all images."""
    either = (before | now).sum()
    return float((before ^ now).sum() / either.clamp(min=1))
