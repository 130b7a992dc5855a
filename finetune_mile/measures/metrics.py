"""Measures of predictions against labels and label sets: pure and vectorised. N images, C classes.

Values are shares in [0, 1]; `scoring` turns them into percent where results.json wants that. True sets are small next
to the number of classes, so that what needs a ranking sorts the scores once and looks up the true labels only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SetRule = Literal["threshold", "argmax_or_threshold"]
BLOCK = 1 << 23  # scores that are looked at in one go
BUCKETS = 1 << 14  # rows at least this long are counted in buckets, shorter ones are sorted

Floats = npt.NDArray[np.floating[Any]]


def top_k(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """Is the given label among the k best scores? (N,) booleans.

    Args:
        scores: (N, C).
        labels: (N,) integers.
        k: how many; more than C counts as C.
    """
    best = scores.argmax(1, keepdim=True) if k == 1 else scores.topk(min(k, scores.shape[1]), dim=1).indices
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


def count_true(flags: Tensor, dim: int = 1) -> Tensor:
    """How many booleans of each row (N, C) are true, (N,) integers; of each column, (C,), with dim 0."""
    if flags.device.type == "cpu":  # several times as fast as a sum, which widens every element first
        return torch.from_numpy(np.count_nonzero(flags.numpy(), axis=dim))
    return flags.sum(dim)


def sample_f1(predicted: Tensor, truth: Tensor) -> Tensor:
    """F1 of each image's predicted set against its true set, (N,); 0 where both are empty.

    Its mean is scikit-learn's `f1_score(average="samples", zero_division=0)`.
    """
    return f1_of_counts(count_true(predicted), count_true(predicted & truth), count_true(truth))


def f1_of_counts(predicted: Tensor, hits: Tensor, true: Tensor) -> Tensor:
    """F1 from the sizes of the predicted set, of what it hits, and of the true set."""
    return 2 * hits.double() / (predicted + true).clamp(min=1)


def threshold_counts(probabilities: Tensor, truth: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """For every image and threshold the size of {p > threshold} and how many of it are true: two (N, T).

    Each image is sorted once and the thresholds are looked up, instead of T passes over all probabilities.

    Args:
        probabilities: (N, C).
        truth: (N, C) booleans.
        thresholds: (T,), ascending.
    """
    wanted = thresholds.to(probabilities).expand(len(probabilities), -1).contiguous()
    true, _ = _listed(probabilities, truth, -torch.inf)
    rows = (sorted_rows(probabilities), sorted_rows(true))
    predicted, hits = (row.shape[1] - torch.searchsorted(row, wanted, right=True) for row in rows)
    return predicted, hits


def apply_rule(predicted: Tensor, hits: Tensor, best_is_true: Tensor, rule: SetRule) -> tuple[Tensor, Tensor]:
    """Counts (N, T) of {p > threshold} turned into those of a set rule: a set that is empty gets the best class.

    Args:
        predicted: (N, T).
        hits: (N, T).
        best_is_true: (N,) booleans.
        rule: of predicted_set.
    """
    if rule == "threshold":
        return predicted, hits
    return predicted.clamp(min=1), torch.where(predicted == 0, best_is_true.long().unsqueeze(1), hits)


def threshold_grid(steps: int = 99) -> Tensor:
    """(steps,) thresholds that are evenly spread in logit space, 0.0009 to 0.9991."""
    return torch.linspace(-7, 7, steps).sigmoid()


def best_threshold_f1(probabilities: Tensor, truth: Tensor, rule: SetRule, steps: int = 99) -> tuple[float, float]:
    """The best sample F1 over a grid of thresholds in logit space, and where: (F1, threshold)."""
    grid = threshold_grid(steps)
    predicted, hits = threshold_counts(probabilities, truth, grid)
    predicted, hits = apply_rule(predicted, hits, top_1_in_set(probabilities, truth), rule)
    scores = f1_of_counts(predicted, hits, count_true(truth).unsqueeze(1)).mean(0)
    best = int(scores.argmax())
    return float(scores[best]), float(grid[best])


def sorted_rows(scores: Tensor) -> Tensor:
    """Each row (R, M) in ascending order; numpy's sort of values is several times as fast as torch's."""
    if scores.device.type == "cpu" and scores.dtype is not torch.bfloat16:
        return torch.from_numpy(np.sort(scores.numpy(), axis=1))
    return scores.sort(1).values


def average_precision(scores: Tensor, positive: Tensor, left_out: Tensor | None = None) -> Tensor:
    """Average precision of the ranking of each row, (R,); NaN where nothing is positive. Ties share the worst rank.

    For each positive: of all that is scored at least as high, the share that is positive; averaged over positives.
    Equal to scikit-learn's `average_precision_score` of the row.

    Args:
        scores: (R, M).
        positive: (R, M) booleans.
        left_out: (R, M) booleans, apart from `positive`: neither right nor wrong.
    """
    return average_precisions(scores, [(positive, left_out)])[0]


def average_precisions(scores: Tensor, targets: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """`average_precision` for several pairs (positive, left_out); the scores are ranked once."""
    listed = [_listed(scores, positive, torch.inf) for positive, _ in targets]
    ranks = count_at_least(scores, torch.cat([values for values, _ in listed], 1))
    found = []
    pairs = zip(targets, listed, ranks.split([values.shape[1] for values, _ in listed], 1), strict=True)
    for (_, left_out), (values, sizes), among in pairs:
        places = torch.arange(values.shape[1], device=scores.device)
        pads = values.shape[1] - sizes.unsqueeze(1)
        hits = _at_least(sorted_rows(values), values) - pads
        if left_out is not None:
            others, _ = _listed(scores, left_out, -torch.inf)
            among = among - _at_least(sorted_rows(others), values)
        precision = torch.where(places < sizes.unsqueeze(1), hits.double() / among.clamp(min=1), 0.0).sum(1)
        found.append(precision / torch.where(sizes > 0, sizes, torch.nan))
    return found


def _listed(scores: Tensor, flags: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """The flagged scores of each row, packed to the left (R, K) and filled up, and their number (R,)."""
    rows, columns = where_true(flags)
    sizes = torch.bincount(rows, minlength=len(flags))
    starts = sizes.cumsum(0) - sizes
    shape = (len(flags), int(sizes.max()) if len(sizes) else 0)
    packed = torch.full(shape, fill, dtype=scores.dtype, device=scores.device)
    packed[rows, torch.arange(len(rows), device=scores.device) - starts[rows]] = scores[rows, columns]
    return packed, sizes


def where_true(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of what is true in (N, C), row by row."""
    if flags.device.type != "cpu":
        rows, columns = flags.nonzero(as_tuple=True)
        return rows, columns
    flat = torch.from_numpy(np.flatnonzero(flags.contiguous().numpy()))
    width = max(flags.shape[1], 1)
    return flat // width, flat % width


def _at_least(ordered: Tensor, values: Tensor) -> Tensor:
    """How many of each ascending row (R, M) are no less than each of its values (R, K): (R, K)."""
    return ordered.shape[1] - torch.searchsorted(ordered.contiguous(), values.contiguous())


def count_at_least(scores: Tensor, values: Tensor) -> Tensor:
    """How many scores of each row (R, M) are no less than some of its own scores, or infinity, (R, K): (R, K)."""
    if scores.device.type != "cpu" or scores.shape[1] < BUCKETS:
        return _at_least(sorted_rows(scores), values)
    found = np.zeros(values.shape, dtype=np.int64)
    for row, wanted, counts in zip(scores.numpy(), values.numpy(), found, strict=True):
        real = wanted < np.inf
        counts[real] = _count_in_long_row(row, wanted[real])
    return torch.from_numpy(found)


def _count_in_long_row(row: Floats, wanted: Floats) -> npt.NDArray[np.int64]:
    """How many of (M,) are no less than each of the (K,) of them, K being small: exact, and without a sort of all.

    The range is cut into buckets, which are counted; only what shares a bucket with a wanted value is sorted.
    """
    low, high = row.min(), row.max()
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scale = row.dtype.type(BUCKETS - 1) / (high - low)
    if not (np.isfinite(low) and np.isfinite(high) and np.isfinite(scale)):
        return len(row) - np.searchsorted(np.sort(row), wanted)
    bucket, wanted_bucket = (((part - low) * scale).astype(np.intp) for part in (row, wanted))
    marked = np.zeros(BUCKETS, dtype=bool)
    marked[wanted_bucket] = True
    near = np.sort(row[marked[bucket]])
    counts = np.where(marked, 0, np.bincount(bucket, minlength=BUCKETS))
    above = counts.sum() - counts.cumsum()
    found: npt.NDArray[np.int64] = len(near) - np.searchsorted(near, wanted) + above[wanted_bucket]
    return found


def ranking_precision(scores: Tensor, truth: Tensor) -> Tensor:
    """Label ranking average precision of each image, (N,): free of any threshold; 1 for an empty or a full set."""
    sizes = count_true(truth)
    trivial = (sizes == 0) | (sizes == scores.shape[1])
    return torch.where(trivial, 1.0, average_precision(scores, truth))


def class_precisions(scores: Tensor, targets: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """Average precision of each class over images, (C,), NaN without a positive, for several kinds of positives.

    Args:
        scores: (N, C), comparable between images: probabilities, or their logarithms.
        targets: pairs (positive, left_out) of average_precision, each (N, C).
    """
    step = max(BLOCK // max(len(scores), 1), 1)
    blocks = []
    for at in range(0, scores.shape[1], step):
        columns = slice(at, at + step)
        turned = [(positive[:, columns].t(), None if out is None else out[:, columns].t()) for positive, out in targets]
        blocks.append(average_precisions(scores[:, columns].t().contiguous(), turned))
    return [torch.cat(parts) for parts in zip(*blocks, strict=True)]


def constant_f1(truth: Tensor) -> tuple[float, Tensor]:
    """The best F1 that one constant set of classes reaches, and that set (C,) booleans.

    Among sets of k classes the k commonest ones are tried for every k: what any score must be compared with.
    """
    count, num_classes = truth.shape
    rows, columns = where_true(truth)
    sizes = torch.bincount(rows, minlength=count)
    order = torch.bincount(columns, minlength=num_classes).argsort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(num_classes, device=truth.device)
    # Images with sets of one size have one denominator: (sizes, C) hits of the k commonest, k = 1 .. C.
    kinds, kind = sizes.unique(return_inverse=True)
    hits = torch.bincount(kind[rows] * num_classes + place[columns], minlength=len(kinds) * num_classes)
    hits = hits.view(len(kinds), num_classes).cumsum(1)
    totals = kinds.unsqueeze(1) + torch.arange(1, num_classes + 1, device=truth.device)
    scores = (2 * hits.double() / totals).sum(0) / max(count, 1)
    best = int(scores.argmax())
    chosen = torch.zeros(num_classes, dtype=torch.bool, device=truth.device)
    chosen[order[: best + 1]] = True
    return float(scores[best]), chosen


def churn(before: Tensor, now: Tensor) -> float:
    """Share of pseudo-labels that changed hands between two generations: |A xor B| / |A or B| over all images."""
    either = (before | now).sum()
    return float((before ^ now).sum() / either.clamp(min=1))
