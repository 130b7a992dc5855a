"""Which given labels are likely wrong or missing, and which photos are like no other, from features.

n photos, D features, C classes. Every photo is judged by a linear classifier that has not seen it, nor its
near-duplicates. How many labels are wrong follows from the same scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.optimize
import scipy.special
import torch
from torch import Tensor
from torch.nn.functional import normalize

from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.probe import QUERIES
from finetune_mile.learning.ridge import STRENGTHS, LeftOut

FEW = 3  # photos of a class that stay to learn from
NEAREST = 10  # photos whose distance tells how unusual one is
FAR = 3.0  # quartile ranges above the upper quartile: an outlier
SCALES = (-1.0, 5.0)  # logarithms, of what scores are multiplied by
LIKELY = 1.92  # of the logarithm of the likelihood, for 95 %: half of the quantile of chi-square
LARGEST_SHARE = 0.45  # of wrong labels that is considered
MOST_CELLS = 400_000  # (photo, class) pairs that shares are estimated from
FEWEST_FITTED = 500  # photos that the share of wrong labels is fitted on, where there are more
SIMILAR = 0.5  # of the wrong labels: classes that are mixed up with the right one; the others are any class
HIDDEN = 0.5  # of the share of errors, at most: labels that are wrong without a sign of it

Floats = npt.NDArray[np.float64]
Share = tuple[float, float, float]  # and its 95 % interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a classifier of other photos says about each photo."""

    scores: Tensor  # (n, C) as they come
    logits: Tensor  # (n, C) scaled: their softmax (sigmoid with sets of labels) is the held-out probability
    wrong: Tensor  # (n,) probability that the given label is wrong; (n, C) with sets, 0 where it is not given
    missing: Tensor  # (n, C) probability that the photo has a class that is not given; 0 for one label per photo
    shares: Mapping[str, Share]  # wrong, missing: of the labels


def judge_labels(features: Tensor, labels: Tensor, num_classes: int, groups: Tensor | None = None) -> Judged:
    """Judge the labels of photos, all of which have some.

    With one label per photo it is done twice: the second classifier learns without the photos whose label the first one
    finds wrong.

    Args:
        features: (n, D).
        labels: (n,) classes, or (n, C) of 0 and 1.
        num_classes: C.
        groups: (n,) near-duplicates have the same number, -1: alone.
    """
    targets = given_matrix(labels, num_classes)
    judge = judge_one if labels.ndim == 1 else judge_sets
    ridge = LeftOut(features, keep=torch.ones(len(targets), dtype=torch.bool), groups=groups)
    best, least, strength = None, math.inf, STRENGTHS[0]
    for each in STRENGTHS:
        scores = ridge.scores(targets, each)
        loss = held_out_loss(scores, targets, several=labels.ndim == 2)
        if loss < least:
            best, least, strength = scores, loss, each
        elif loss > 1.02 * least:
            break
    assert best is not None
    judged = judge(best, targets)
    if labels.ndim == 2:
        return judged
    keep = (judged.wrong <= 0.5) | (best.argmax(1) == labels)
    keep |= (torch.bincount(labels[keep], minlength=num_classes) < FEW)[labels]
    if bool(keep.all()):
        return judged
    again = LeftOut(features, keep=keep, groups=groups).scores(targets, strength)
    return judge((best + again) / 2, targets)


def held_out_loss(scores: Tensor, targets: Tensor, *, several: bool) -> float:
    """The loss of scores (n, C) at their best scale: squared with sets of labels, else cross-entropy."""
    if several:
        return float((scores - targets).square().mean())
    labels = targets.argmax(1, keepdim=True)

    def loss(log_scale: float) -> float:
        return -float((scores * math.exp(log_scale)).log_softmax(1).gather(1, labels).mean())

    return float(scipy.optimize.minimize_scalar(loss, bounds=SCALES, method="bounded", options={"xatol": 0.1}).fun)


def suspects(judged: Judged) -> list[int]:
    """Rows whose label is more likely wrong than that of an average photo, the most likely error first."""
    rows = (judged.wrong > judged.wrong.mean()).nonzero().flatten()
    order: list[int] = rows[(-judged.wrong[rows]).argsort(stable=True)].tolist()
    return order


def suggested(judged: Judged, labels: Tensor) -> Tensor:
    """(n,) the best class beside the given one (n,)."""
    return judged.scores.scatter(1, labels.unsqueeze(1), -torch.inf).argmax(1)


# ------------------------------------------------------------------------------------ how many labels are wrong


def judge_one(scores: Tensor, targets: Tensor) -> Judged:
    """One label per photo: P(given = y) = (1 - e) ((1 - h) p[y] + h w[y]) + e w[y], p = softmax(scale * scores).

    w[y] says how likely y is as a wrong label: half of the wrong labels are any class, half are classes that are mixed
    up with the right one. A class of m photos shows only some of what it may look like: the next one is like none of
    them with h = 1 / m (Laplace's rule of succession). Such a photo looks wrong, and is right. Where the classifier
    disputes a share d < 1/2 of the labels, classes are easier than that: h = 2 d / m.

    The share e cannot tell wrong labels between similar classes from hard photos. So its interval begins where no such
    errors are assumed, and ends where all errors are such.
    """
    classes, labels = scores.shape[1], targets.argmax(1)
    disputed = float((scores.argmax(1) != labels).float().mean())
    rare = (min(1.0, 2 * disputed) / torch.bincount(labels, minlength=classes).clamp(min=1))[labels].double()
    drawn = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    some = drawn[: max(MOST_CELLS // (4 * classes), FEWEST_FITTED)]

    def likely(rows: Tensor, scale: float, similar: float, mixed: Tensor | None) -> tuple[Tensor, Tensor]:
        """P(given) of rows if the label is right, and if it is wrong."""
        own = labels[rows].unsqueeze(1)
        chances = (scores[rows].double() * scale).softmax(1)
        right = chances.gather(1, own).squeeze(1)
        wrong = (1 - right) / (classes - 1)
        if mixed is not None:
            wrong = (1 - similar) * wrong + similar * (chances.scatter(1, own, 0.0) * mixed[labels[rows]]).sum(1)
        hard = rare[rows]
        return (1 - hard) * right + hard * wrong, wrong

    def fitted(similar: float, mixed: Tensor | None = None) -> tuple[float, tuple[float, float], float]:
        """The share of wrong labels, its interval, and the scale."""

        def at(share: float) -> tuple[float, float]:
            def loss(log_scale: float) -> float:
                right, wrong = likely(some, math.exp(log_scale), similar, mixed)
                return -float(((1 - share) * right + share * wrong + 1e-300).log().sum())

            found = scipy.optimize.minimize_scalar(loss, bounds=SCALES, method="bounded", options={"xatol": 0.02})
            return float(found.fun), math.exp(found.x)

        _, edges = likely_share(lambda share: at(share)[0])
        shares = np.linspace(*edges, 15)  # their mean, because the likeliest one is 0 where there are few photos
        losses = np.array([at(each)[0] for each in shares])
        share = float(np.average(shares, weights=np.exp(losses.min() - losses)))
        return share, edges, at(share)[1]

    _, (low, _), scale = fitted(0.0)
    mixed = mixed_up((scores * scale).softmax(1).double(), labels)
    share, (_, high), scale = fitted(SIMILAR, mixed)
    high = max(high, fitted(1.0, mixed)[1][1])
    parts = [likely(rows, scale, SIMILAR, mixed) for rows in torch.arange(len(scores)).split(QUERIES)]
    right, wrong = torch.cat([each[0] for each in parts]), torch.cat([each[1] for each in parts])
    odds = share * wrong / ((1 - share) * right + 1e-300)
    return Judged(
        scores=scores, logits=(scores * scale).log_softmax(1), wrong=(odds / (1 + odds)).float(),
        missing=torch.zeros_like(scores), shares={"wrong": (share, min(low, share), high)},
    )  # fmt: skip


def mixed_up(chances: Tensor, labels: Tensor) -> Tensor:
    """(C, C) how often photos of the class in the column are taken for the one in the row, of those that are mistaken.

    Args:
        chances: (n, C) held-out probabilities.
        labels: (n,).
    """
    sums = torch.zeros(chances.shape[1], chances.shape[1], dtype=chances.dtype).index_add_(0, labels, chances)
    sums.fill_diagonal_(0.0)
    return (sums / sums.sum(1, keepdim=True).clamp(min=1e-30)).T.contiguous()


def judge_sets(scores: Tensor, targets: Tensor) -> Judged:
    """Sets of labels: each class of each photo is given with 1 - m where it is there, and with w where it is not.

    P(given) = (1 - m) p + w (1 - p), p = sigmoid(scale * score + shift). A class that the classifier is sure of, and
    that is still not given in a share m of the photos, is missing there.
    """
    given = targets > 0
    drawn = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    some = drawn[: max(MOST_CELLS // scores.shape[1], 1)]
    values, known = scores[some].double(), given[some]

    def loss(log_scale: float, shift: float, missing: float, wrong: float) -> float:
        there = (values * math.exp(log_scale) + shift).sigmoid()
        likely = (1 - missing) * there + wrong * (1 - there)
        return -float((torch.where(known, likely, 1 - likely) + 1e-300).log().sum())

    def best(held: int | None = None, share: float = 0.0) -> tuple[float, Floats]:
        start = np.array([1.5, -3.0, 0.02, 0.002])
        bounds = [SCALES, (-12.0, 3.0), (0.0, LARGEST_SHARE), (0.0, LARGEST_SHARE)]
        if held is not None:
            start[held], bounds[held] = share, (share, share)
        found = scipy.optimize.minimize(lambda point: loss(*point), start, method="L-BFGS-B", bounds=bounds)
        return float(found.fun), found.x

    least, (log_scale, shift, missing, wrong) = best()

    def share_at(place: int, value: float) -> Share:
        return value, *interval(lambda share: best(place, share)[0], value, least)

    shares = {"missing": share_at(2, float(missing)), "wrong": share_at(3, float(wrong))}
    logits = scores * math.exp(log_scale) + shift
    there, away = logits.sigmoid(), (-logits).sigmoid()
    is_wrong = wrong * away / ((1 - missing) * there + wrong * away + 1e-30)
    is_missing = missing * there / (missing * there + (1 - wrong) * away + 1e-30)
    return Judged(scores=scores, logits=logits, wrong=is_wrong * given, missing=is_missing * ~given, shares=shares)


def likely_share(loss: Callable[[float], float]) -> tuple[float, tuple[float, float]]:
    """The share with the least loss, and its 95 % interval."""
    found = scipy.optimize.minimize_scalar(loss, bounds=(0.0, LARGEST_SHARE), method="bounded", options={"xatol": 1e-4})
    share, least = (float(found.x), float(found.fun)) if found.fun < loss(0.0) else (0.0, loss(0.0))
    return share, interval(loss, share, least)


def interval(loss: Callable[[float], float], share: float, least: float) -> tuple[float, float]:
    """Where the loss of a share is LIKELY above the least one, below and above it: a profile likelihood."""

    def beyond(value: float) -> float:
        return loss(value) - least - LIKELY

    low, high = 0.0, LARGEST_SHARE
    if share > 0 and beyond(0.0) > 0:
        low = float(scipy.optimize.brentq(beyond, 0.0, share, xtol=1e-3))
    if beyond(LARGEST_SHARE) > 0:
        high = float(scipy.optimize.brentq(beyond, share, LARGEST_SHARE, xtol=1e-3))
    return min(low, share), max(high, share)


def errors_left(judged: Floats, wrong: npt.NDArray[np.bool_], others: Floats, counts: Floats) -> Share:
    """How many errors are left among the other labels, and a 95 % interval, from what the judged ones were.

    The probabilities may all be too high or too low, and too far apart or too close: P' = f + (1 - f) sigmoid(a + b
    log-odds), with a of 0 +- 0.5 and b of 1 +- 0.25 before a label is judged. A part f of the labels may be wrong
    without a sign of it: up to half of the share of all errors, and less is more likely.

    Args:
        judged: probabilities (m,) of the judged labels.
        wrong: (m,) which of them were.
        others: probabilities (k,) of labels that were not judged.
        counts: (k,) how many labels have each.
    """
    count = len(judged) + counts.sum()
    most = HIDDEN * (judged.sum() + (others * counts).sum()) / max(count, 1)
    axes = (np.linspace(-2, 2, 17), np.linspace(0, 2, 17), np.linspace(0, most, 6))
    shift, slope, hidden = (axis.reshape(-1, 1) for axis in np.meshgrid(*axes))

    def chances(before: Floats) -> Floats:
        before = before.clip(1e-6, 1 - 1e-6)
        found: Floats = hidden + (1 - hidden) * scipy.special.expit(shift + slope * scipy.special.logit(before))
        return found

    weight = (-(shift**2) / (2 * 0.5**2) - (slope - 1) ** 2 / (2 * 0.25**2) - 2 * hidden / max(most, 1e-9)).ravel()
    said = chances(judged)
    weight = weight + np.where(wrong, np.log(said), np.log1p(-said)).sum(1)
    weight = np.exp(weight - weight.max())
    rate = chances(others)
    mean, spread = rate @ counts, np.sqrt((rate * (1 - rate)) @ counts)
    draw = np.random.default_rng(0)
    some = draw.choice(len(weight), 4000, p=weight / weight.sum())
    left = draw.normal(mean[some], spread[some]).clip(0, counts.sum())
    return float(np.median(left)), float(np.quantile(left, 0.025)), float(np.quantile(left, 0.975))


# ------------------------------------------------------------------------------------ photos like no other


def outliers(features: Tensor, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """How far each photo is from its nearest ones (n,), and which are outliers (n,): far beyond the upper quartile.

    Args:
        features: (n, D).
        groups: as in `judge_labels`; near-duplicates do not count as near.
    """
    rows = normalize(features.float() - features.float().mean(0), dim=1)
    number = torch.arange(len(rows)) + len(rows)
    if groups is not None:
        number = torch.where(groups >= 0, groups, number)
    far = []
    for at in range(0, len(rows), QUERIES):
        cosines = rows[at : at + QUERIES] @ rows.T
        cosines[number[at : at + QUERIES].unsqueeze(1) == number] = -1.0
        far.append(1 - cosines.topk(min(NEAREST, len(rows)), dim=1).values.mean(1))
    distance = torch.cat(far)
    low, high = np.quantile(distance.numpy(), [0.25, 0.75])
    return distance, distance > high + FAR * (high - low)
