"""Bootstrap intervals of means, and the paired difference of two models. N units (images or classes), M measures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune_mile.measures.metrics import class_precisions

DRAWS = 1000
MAP_DRAWS = 100  # each ranks all images again
NORMAL = 1.959964  # the 97.5 % quantile of the normal distribution
BLOCK = 1 << 22  # resampled units that are held at once

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measure of model A against model B on the same images (or classes); positive: A is ahead."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    wins: int  # units on which A is ahead
    losses: int
    p_value: float  # two-sided sign test


def intervals(values: Mapping[str, Tensor], *, draws: int = DRAWS, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap intervals (95 %) of the means: units are drawn again with replacement, `draws` times.

    Args:
        values: by name, (N,) each, about the same N units; NaN where a unit does not count.
        draws: how many times.
        seed: of the draws.
    """
    if not values or not len(next(iter(values.values()))):
        return {}
    matrix = torch.stack([v.double() for v in values.values()], 1).numpy()
    means = resampled_means(matrix, draws=draws, seed=seed)
    edges = np.nanquantile(means, [0.025, 0.975], axis=0)
    return {name: (float(low), float(high)) for name, low, high in zip(values, *edges, strict=True)}


def resampled_means(matrix: Floats, *, draws: int, seed: int) -> Floats:
    """Means (draws, M) of `draws` resamples of the rows of (N, M); NaN does not count."""
    count, known = len(matrix), ~np.isnan(matrix)
    both = np.concatenate([np.where(known, matrix, 0.0), known], axis=1)
    generator = np.random.default_rng(seed)
    step = max(BLOCK // max(count, 1), 1)
    sums = []
    for at in range(0, draws, step):
        rows = min(step, draws - at)
        drawn = generator.integers(0, count, (rows, count), dtype=np.int64)
        drawn += np.arange(0, rows * count, count)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count)  # times that a unit is drawn
        sums.append(weights.astype(np.float64) @ both)
    totals, seen = np.split(np.concatenate(sums), 2, axis=1)
    means: Floats = np.divide(totals, seen, out=np.full_like(totals, np.nan), where=seen > 0)
    return means


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` images; never empty, also at 0 and 1; the share is in it."""
    if count == 0:
        return 0.0, 1.0
    z2 = NORMAL**2 / count
    middle, half = (share + z2 / 2) / (1 + z2), math.sqrt(z2 * share * (1 - share) + z2**2 / 4) / (1 + z2)
    return max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0)  # rounding had put 1 outside


def map_interval(scores: Tensor, truth: Tensor) -> tuple[float, float, float]:
    """The mean average precision over classes, in per cent, and its 95 % interval: 1.96 deviations of resampled images.

    Args:
        scores: (N, C), comparable between images.
        truth: (N, C) booleans, at least one true label for each image.
    """

    def mean_precision(rows: Tensor) -> float:
        return 100 * float(class_precisions(scores[rows], [(truth[rows], None)])[0].nanmean())

    generator, count = torch.Generator().manual_seed(0), len(scores)
    values = [mean_precision(torch.randint(count, (count,), generator=generator)) for _ in range(MAP_DRAWS)]
    point, half = mean_precision(torch.arange(count)), NORMAL * statistics.stdev(values)
    if half == 0:  # all is right, or nothing: few images prove neither
        low, high = wilson(point / 100, count)
        return point, 100 * low, 100 * high
    return point, max(point - half, 0.0), min(point + half, 100.0)


def compare(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Comparison]:
    """A paired comparison: both models are resampled on the same units, so that hard units cancel out.

    Args:
        a: by name, (N,) each; NaN where a unit does not count.
        b: the same for the other model, the same units in the same order.
        draws: of the bootstrap.
        seed: of the draws.
    """
    shared = [name for name in a if name in b and bool((~(a[name] + b[name]).isnan()).any())]
    gaps = {name: a[name].double() - b[name].double() for name in shared}
    edges = intervals(gaps, draws=draws, seed=seed)
    comparisons = {}
    for name, gap in gaps.items():
        counts = ~gap.isnan()
        wins, losses = int((gap > 0).sum()), int((gap < 0).sum())
        comparisons[name] = Comparison(
            a=float(a[name][counts].double().mean()), b=float(b[name][counts].double().mean()),
            difference=float(gap.nanmean()), low=edges[name][0], high=edges[name][1],
            wins=wins, losses=losses, p_value=sign_test(wins, losses),
        )  # fmt: skip
    return comparisons


def clearly_above(values: Tensor, others: Tensor) -> bool:
    """Is the mean of values (N,) above that of others (N,), of the same units, by more than two standard errors?

    Smaller differences are noise where there are few units.
    """
    more = values - others
    return bool(more.mean() > 2 * more.std() / math.sqrt(len(more)))


def sign_test(wins: int, losses: int) -> float:
    """Two-sided probability of a split at least as uneven as this one if both were equally likely to win."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
