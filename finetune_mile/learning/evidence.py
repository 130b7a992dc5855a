"""Which labels a teacher may add, decided on held-out images with their given labels. Pure functions.

N held-out images, C classes, top = the class that the teacher ranks first. docs/auto.md says why each part is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

FOUND_RATES = torch.linspace(0.02, 0.98, 97, dtype=torch.float64)
CLEAR_SHARE, CLEAR_LEAST, CLEAR_MOST = 0.05, 50, 0.2  # the images that the teacher is surest of: share, number, share


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a teacher's outputs on the held-out images say, and what follows."""

    generation: int
    open: bool  # labels are added in this generation; closed: it trains on the given labels
    v: float  # how much better than chance the added labels hit given labels; 1 = chance
    v_error: float  # standard error of v, relative
    g: float  # misses among the surest images against misses among all
    g_error: float
    found_rate: float  # share of the slots behind the top class that is found, kappa
    labels_found: float  # per image, the top class included
    images: int
    thresholds: tuple[float, ...]  # (C,) on the logits
    misses: float = math.nan  # share of the images whose given label is not the top class


def judge(
    logits: Tensor, labels: Tensor, prior: Tensor, *, generation: int, bars: tuple[float, float] | None, was_open: bool
) -> Verdict:
    """Thresholds for the next imitation, and whether there is anything to find.

    To open the gate, v must be above chance by two standard errors and g above its bar by one. Once open, g may lie one
    below: closing throws away what the student learned, so it takes evidence too.

    Args:
        logits: (N, C) of the teacher, in eval mode on the plain view.
        labels: (N,) given.
        prior: (C,) how often each class is given.
        generation: goes into the verdict.
        bars: v must lie two errors above the first, g one error above the second; None: the gate is open whatever the
            images say.
        was_open: the verdict of the generation before.
    """
    v, v_error, found_rate, thresholds = lee_liu(logits, labels, prior)
    g, g_error = clear_misses(logits, labels)
    least_v, least_g = bars or (-math.inf, -math.inf)
    above_chance = v * (1 - 2 * v_error) >= least_v
    something = g + (g_error if was_open else -g_error) >= least_g
    return Verdict(
        generation=generation, open=above_chance and something, v=v, v_error=v_error, g=g, g_error=g_error,
        found_rate=found_rate, labels_found=float((logits.double() > thresholds).sum(1).double().mean()),
        images=len(labels), thresholds=tuple(thresholds.tolist()),
        misses=float((logits.argmax(1) != labels).double().mean()),
    )  # fmt: skip


def lee_liu(logits: Tensor, labels: Tensor, prior: Tensor) -> tuple[float, float, float, Tensor]:
    """The pooled criterion of Lee and Liu (2003): recall squared over the share that is found.

    It is proportional to precision x recall and needs positives and unlabelled examples only. The slots are (image,
    class) pairs whose class is not the image's top; the positives are the given labels among them.

    Args:
        logits: (N, C).
        labels: (N,).
        prior: (C,), any scale.

    Returns:
        v, the largest value (1 = chance); its relative standard error; the found-rate, a mean over all that are within
        that error of the largest; and the thresholds (C,) that it means. v is 0 where the top is always given.
    """
    scores, top = logits.double(), logits.argmax(1)
    num_classes = scores.shape[1]
    shares = (FOUND_RATES.unsqueeze(1) * num_classes * prior.double() / prior.sum()).clamp(0.005, 0.98)  # (K, C)
    columns = [scores[top != c, c] for c in range(num_classes)]
    cuts = torch.stack([_upper_quantiles(column, shares[:, c]) for c, column in enumerate(columns)], 1)  # (K, C)
    slots = torch.tensor([float(len(column)) for column in columns], dtype=torch.float64)
    found = (shares * slots).sum(1) / slots.sum()
    second = labels != top
    positives = int(second.sum())
    if positives == 0:
        return 0.0, 0.0, 0.0, torch.full((num_classes,), torch.inf, dtype=torch.float64)
    given = labels[second]
    recall = (cuts[:, given] < scores[second].gather(1, given.unsqueeze(1)).T).double().mean(1)
    value = recall.square() / found
    best = int(value.argmax())
    v = float(value[best])
    hit = (float(recall[best]) * positives + 1) / (positives + 2)  # ten hits of ten are not certain to go on
    error = 2 * math.sqrt((1 - hit) / (hit * positives))
    rate = float(FOUND_RATES[value >= v * (1 - error)].mean())
    nearest = (rate * num_classes * prior.double() / prior.sum()).clamp(0.005, 0.98)
    thresholds = [_upper_quantiles(column, nearest[c : c + 1]) for c, column in enumerate(columns)]
    return v, error, rate, torch.cat(thresholds)


def _upper_quantiles(column: Tensor, shares: Tensor) -> Tensor:
    """Values (K,) that the shares (K,) of a column (n,) lie above; below everything for a class that is always top."""
    if len(column) == 0:
        return torch.full_like(shares, -torch.inf)
    ordered = column.sort().values
    place = (1 - shares) * (len(column) - 1)
    low = place.floor().long()
    high = (low + 1).clamp(max=len(column) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def clear_misses(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Misses of the given label among the surest images, relative to those among all: g, and its standard error.

    A weak classifier misses rarely where it is sure (g near 0); with several objects in an image it misses there as
    often as anywhere (g near 1), because which of them is given is chance.
    """
    missed = (logits.argmax(1) != labels).double()
    overall = float(missed.mean())
    if overall == 0:
        return 0.0, 0.0
    count = surest_images(len(labels))
    clear = float(missed[logits.amax(1).topk(count).indices].mean())
    return clear / overall, math.sqrt(clear * (1 - clear) / count) / overall


def surest_images(images: int) -> int:
    """How many of so many images count as the surest ones."""
    return max(min(max(CLEAR_LEAST, round(CLEAR_SHARE * images)), round(CLEAR_MOST * images)), 1)


@lru_cache(maxsize=4)
def _on_device(thresholds: tuple[float, ...], device: torch.device) -> Tensor:
    """(C,), copied once per imitation: in each step the copy would wait for the device."""
    return torch.tensor(thresholds).to(device)


def labels_above(thresholds: tuple[float, ...], beta: float, teacher_logits: Tensor) -> Tensor:
    """Labels (B, C): between beta and 1, in the order of the teacher's outputs; 0 where they are not above.

    Args:
        thresholds: (C,) on the logits.
        beta: the least value of a label.
        teacher_logits: (B, C).
    """
    logits = teacher_logits.float()
    above = logits > _on_device(thresholds, logits.device)
    return above * (beta + (1 - beta) * logits.sigmoid())
