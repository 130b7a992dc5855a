"""From logits and labels to every number of results.json. Pure and vectorised, on the CPU. N images, C classes.

`measure` takes all measures; its values are percent where results.json has percent. The functions below it return
shares in [0, 1]. True sets are small compared with the number of classes, so rankings sort the scores once and look up
the true labels only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Activation = Literal["softmax", "sigmoid"]
SetRule = Literal["threshold", "argmax_or_threshold", "argmax"]
BLOCK = 1 << 23  # scores that are ranked at once
THRESHOLDS = (0.25, 0.5)
GRID = torch.linspace(-7, 7, 99).sigmoid()  # thresholds, evenly spread in logit space, 0.0009 to 0.9991
PRIOR = 20  # positives of all classes together that each class's own are mixed with, to choose its threshold
RULES: tuple[SetRule, ...] = ("threshold", "argmax_or_threshold", "argmax")
TABLE_THRESHOLD = 0.25  # of the per-class table
TAKEN_FOR = "taken_for"  # in the per-class table: the class that most mistakes on this class's images name
FIRST = (  # in results.json, before all F1
    "images", "images_with_label", "accuracy", "balanced_accuracy", "chance_accuracy", "majority_accuracy",
    "main_accuracy", "top5", "coverage@0.25", "images_with_set", "real_acc", "lrap", "trivial_f1",
)  # fmt: skip
LAST = ("best_threshold", "map", "chance_map", "recovery_map")


@dataclass(slots=True, kw_only=True)
class Measured:
    """All measures, in the units of results.json, and what they are of. N images, C classes."""

    logits: Tensor  # (N, C)
    activation: Activation
    given: Tensor  # (N,) or (N, C)
    truth: Tensor | None  # (N, C) sets of labels: the true ones, else the given ones
    facts: dict[str, float] = field(default_factory=dict)  # one number
    samples: dict[str, Tensor] = field(default_factory=dict)  # (N,), NaN where an image does not count: their mean
    by_class: dict[str, Tensor] = field(default_factory=dict)  # (C,), NaN where a class does not count: their mean

    @property
    def probabilities(self) -> Tensor:
        return self.logits.softmax(1) if self.activation == "softmax" else self.logits.sigmoid()

    @property
    def ranked(self) -> Tensor:
        """(N, C) that can be compared between images."""
        return self.logits.log_softmax(1) if self.activation == "softmax" else self.logits

    def results(self) -> dict[str, float]:
        """The flat dictionary of results.json, without measures that no image or class counts for."""
        every = self.facts | {key: float(values.nanmean()) for key, values in (self.samples | self.by_class).items()}
        f1 = [key for key in self.samples if key.startswith("f1")]
        ordered = dict.fromkeys((*FIRST, *f1, *LAST, *every))
        return {key: every[key] for key in ordered if key in every and every[key] == every[key]}


def measure(
    logits: Tensor,
    given: Tensor,
    truth: Tensor | None,
    *,
    activation: Activation,
    prediction_set: SetRule,
    main: Tensor | None = None,
    thresholds: Mapping[str, float | None] = MappingProxyType({}),
) -> Measured:
    """Measure all that the labels allow: percent 0-100, except coverage (labels per image) and recovery_map (0-1).

    Args:
        logits: (N, C).
        given: (N,) integers, -1 = unlabelled, or (N, C) of 0 and 1.
        truth: (N, C) booleans where the true label sets are known; images with an empty set do not count there.
        activation: how logits become probabilities.
        prediction_set: the rule of the plain `f1@...` and `coverage@...`; F1 by the other rules has those rules' names.
            The best class alone (`argmax`) has no threshold: its F1 is the same at each, and there is no best one.
        main: (N,) the class of the main object, where it is known.
        thresholds: more of them for f1@NAME, such as that of the pseudo-labels (rho); None is left out.
    """
    sets = given > 0 if truth is None and given.ndim == 2 else truth
    measured = Measured(logits=logits, activation=activation, given=given, truth=sets, facts={"images": len(logits)})
    if given.ndim == 1:
        _given_scores(measured)
    elif truth is None:
        counts, known = count_true(given > 0, 0).double(), int(count_true(given > 0).count_nonzero())
        if known:  # random scores rank a class's images as its share of all
            measured.facts["chance_map"] = 100 * float(counts[counts > 0].mean()) / known
    if main is not None:
        measured.samples["main_accuracy"] = hits(top_k(logits, 1), main)
    sizes = count_true(measured.probabilities > 0.25)
    measured.samples["coverage@0.25"] = sizes.where(~best_alone(sizes, prediction_set), 1).double()
    if sets is not None:
        _set_scores(measured, sets, prediction_set, thresholds)
        if main is not None:  # the score of a perfect classifier of the main object
            alone = torch.nn.functional.one_hot(main, logits.shape[1]).bool()
            measured.facts["main_only_f1"] = 100 * float(sample_f1(alone, sets)[sets.any(1)].mean())
        _class_scores(measured, sets)
    return measured


def _given_scores(measured: Measured) -> None:
    logits, given = measured.logits, measured.given
    known = given[given >= 0]
    if len(known):  # the scores of guessing, and of always answering the most frequent class
        most = int(torch.bincount(known).max())
        measured.facts |= {"chance_accuracy": 100 / logits.shape[1], "majority_accuracy": 100 * most / len(known)}
    if len(known) < len(given):
        measured.facts["images_with_label"] = float(len(known))
    measured.samples |= {"accuracy": hits(top_k(logits, 1), given), "top5": hits(top_k(logits, 5), given)}
    measured.by_class["balanced_accuracy"] = class_means(measured.samples["accuracy"], given, logits.shape[1])


def _set_scores(measured: Measured, truth: Tensor, prediction_set: SetRule, more: Mapping[str, float | None]) -> None:
    """The measures of sets: F1 at all thresholds comes from one table of counts."""
    logits, sizes = measured.logits, count_true(truth)
    known = sizes > 0

    def percent(values: Tensor) -> Tensor:
        return torch.where(known, 100 * values.double(), torch.nan)

    best_is_true = truth.gather(1, top_k(logits, 1))  # (N, 1): ReaL accuracy
    measured.facts |= {"images_with_set": float(known.sum()), "trivial_f1": 100 * constant_f1(truth[known])}
    measured.samples |= {
        "real_acc": percent(best_is_true.squeeze(1)),
        "lrap": percent(ranking_precision(logits, truth)),
    }
    named = {f"{t:g}": t for t in THRESHOLDS} | {name: t for name, t in more.items() if t is not None}
    thresholds = torch.cat([GRID, torch.tensor(list(named.values()))]).unique()  # ascending
    # Each image is sorted once and the thresholds are looked up, instead of a pass over all probabilities for each.
    edges = thresholds.to(logits).expand(len(logits), -1)
    true, _ = _listed(measured.probabilities, truth, -torch.inf)
    predicted, found = _count_above(measured.probabilities, edges), _count_above(true, edges)  # (N, T) each
    for rule in RULES:
        alone = best_alone(predicted, rule)
        f1 = f1_of_counts(predicted.where(~alone, 1), found.where(~alone, best_is_true.long()), sizes.unsqueeze(1))
        columns = {name: int(torch.searchsorted(thresholds, torch.tensor(t))) for name, t in named.items()}
        if rule == "argmax":
            measured.samples["f1_argmax"] = percent(f1[:, 0])
        else:
            on_grid = torch.isin(thresholds, GRID)
            columns["best"] = int(torch.where(on_grid, f1[known].mean(0), -1.0).argmax())
            for name, column in columns.items():
                measured.samples[f"f1_{rule}@{name}"] = percent(f1[:, column])
        if rule == prediction_set:
            measured.samples |= {f"f1@{name}": percent(f1[:, column]) for name, column in columns.items()}
            if "best" in columns:
                measured.facts["best_threshold"] = float(thresholds[columns["best"]])


def _class_scores(measured: Measured, truth: Tensor) -> None:
    """Rankings of images for each class: of all true labels, and of those that are not the given one.

    `recovery_map` is the paper's: the labels of the true set without the given one are right, all else is wrong.
    `recovery_map_others` leaves (image, given label) out of the ranking, so that a perfect model reaches 1.
    Images without a true set are left out.
    """
    known = truth.any(1)
    truth, given = truth[known], is_given(measured.given[known], truth.shape[1])
    other = truth & ~given
    every, paper, fair = class_precisions(measured.ranked[known], [(truth, None), (other, None), (other, given)])
    measured.by_class |= {"map": 100 * every, "recovery_map": paper, "recovery_map_others": fair}


def class_table(measured: Measured) -> dict[str, Tensor]:
    """The columns (C,) of per_class.csv."""
    given, truth, num_classes = measured.given, measured.truth, measured.logits.shape[1]
    table: dict[str, Tensor] = {}
    if given.ndim == 1:
        known = given >= 0
        table |= {
            "given": torch.bincount(given[known], minlength=num_classes),
            "accuracy": measured.by_class["balanced_accuracy"],
            "top5": class_means(measured.samples["top5"], given, num_classes),
            TAKEN_FOR: most_confused(measured.logits[known].argmax(1), given[known], num_classes),
        }
    if truth is not None:
        known = truth.any(1)
        truth, predicted, at = truth[known], measured.probabilities[known] > TABLE_THRESHOLD, f"@{TABLE_THRESHOLD:g}"
        found, sizes, true = (count_true(flags, 0) for flags in (predicted & truth, predicted, truth))
        table |= {
            "true": true, "average_precision": measured.by_class["map"],
            "other_true": count_true(truth & ~is_given(given[known], num_classes), 0),
            "other_average_precision": 100 * measured.by_class["recovery_map"],
            f"found{at}": sizes,
            f"precision{at}": 100 * found / torch.where(sizes > 0, sizes, torch.nan),
            f"recall{at}": 100 * found / torch.where(true > 0, true, torch.nan),
            f"f1{at}": 200 * found / torch.where(sizes + true > 0, sizes + true, torch.nan),
        }  # fmt: skip
    return table


# ----------------------------------------------------------------------------------------------- single measures


def top_k(scores: Tensor, k: int) -> Tensor:
    """The classes (N, k) of the k best scores of (N, C); a k above C counts as C."""
    return scores.argmax(1, keepdim=True) if k == 1 else scores.topk(min(k, scores.shape[1]), dim=1).indices


def hits(guesses: Tensor, given: Tensor) -> Tensor:
    """(N,) 100 where one of the guesses (N, k) is a given label, 0 where none is, NaN where no label is given.

    Args:
        guesses: (N, k) classes.
        given: (N,) classes, below 0: no label; or (N, C) of 0 and 1.
    """
    if given.ndim == 1:
        right, known = guesses == given.unsqueeze(1), given >= 0
    else:
        right, known = given.gather(1, guesses) > 0, (given > 0).any(1)
    return torch.where(known, 100 * right.any(1).double(), torch.nan)


def class_means(values: Tensor, given: Tensor, num_classes: int) -> Tensor:
    """The mean of values (N,) over the images of each given class (N,): (C,), NaN where a class has none."""
    known = given >= 0
    counts = torch.bincount(given[known], minlength=num_classes)
    sums = torch.bincount(given[known], values[known], minlength=num_classes)
    return sums / torch.where(counts > 0, counts, torch.nan)


def is_given(given: Tensor, num_classes: int) -> Tensor:
    """Given labels, (N,) or (N, C), as booleans (N, C)."""
    if given.ndim == 2:
        return given > 0
    flags = torch.zeros(len(given), num_classes, dtype=torch.bool)
    return flags.scatter_(1, given.clamp(min=0).unsqueeze(1), (given >= 0).unsqueeze(1))


def most_confused(best: Tensor, given: Tensor, num_classes: int) -> Tensor:
    """For each class the wrong class that its images are taken for most often, (C,); -1 where none is.

    Args:
        best: (N,) predicted classes.
        given: (N,) labels.
        num_classes: C.
    """
    wrong = best != given
    pairs, counts = (given[wrong] * num_classes + best[wrong]).unique(return_counts=True)
    ordered = pairs[counts.argsort(stable=True)].numpy()  # numpy: of several values for one place the last one stays
    taken_for = np.full(num_classes, -1)
    taken_for[ordered // num_classes] = ordered % num_classes
    return torch.from_numpy(taken_for)


def best_alone(sizes: Tensor, rule: SetRule) -> Tensor:
    """Where the predicted set is the best class alone, booleans; `sizes` are those of {p > threshold}.

    Where it is not, the set is {p > threshold}, which has the best class too.
    """
    return sizes == 0 if rule == "argmax_or_threshold" else torch.full_like(sizes, rule == "argmax", dtype=torch.bool)


def count_true(flags: Tensor, dim: int = 1) -> Tensor:
    """Number of true elements in each row of (N, C), (N,) integers; in each column, (C,), with dim 0."""
    # Several times as fast as torch's sum, which widens every element first.
    return torch.from_numpy(np.count_nonzero(flags.numpy(), axis=dim))


def sample_f1(predicted: Tensor, truth: Tensor) -> Tensor:
    """F1 of each image's predicted set against its true set, (N,); 0 where both are empty.

    Its mean is scikit-learn's `f1_score(average="samples", zero_division=0)`.
    """
    return f1_of_counts(count_true(predicted), count_true(predicted & truth), count_true(truth))


def f1_of_counts(predicted: Tensor, hits: Tensor, true: Tensor) -> Tensor:
    """F1 from the sizes of the predicted set, of its hits, and of the true set."""
    return 2 * hits.double() / (predicted + true).clamp(min=1)


def class_thresholds(probabilities: Tensor, truth: Tensor) -> Tensor:
    """A threshold for each class, (C,), with the best F1 of that class's images; 0.5 where nothing is true.

    A class counts with PRIOR further positives whose scores are those of all classes together: few images of a class
    alone would choose by chance.

    Args:
        probabilities: (N, C).
        truth: (N, C) booleans.
    """
    if not bool(truth.any()):
        return torch.full((truth.shape[1],), 0.5)
    true = count_true(truth, 0).double()
    hits, sizes = (
        torch.stack([count_true((probabilities > t) & among, 0) for t in GRID.tolist()]).double()
        for among in (truth, torch.ones_like(truth))
    )  # (T, C)
    all_hits, all_sizes = hits.sum(1, keepdim=True), (sizes + true).sum(1, keepdim=True)
    weight = PRIOR / true.sum()
    f1 = (hits + weight * all_hits) / (sizes + true + weight * all_sizes)
    return GRID[f1.argmax(0)]


def average_precisions(scores: Tensor, targets: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """Average precision of the ranking of each row, (R,), for several kinds of positives; the scores are ranked once.

    For each positive: of all that is scored at least as high, the share that is positive; averaged over positives. NaN
    where nothing is positive. Ties share the worst rank. Equal to scikit-learn's `average_precision_score` of the row.

    Args:
        scores: (R, M).
        targets: pairs (positive, left_out) of (R, M) booleans; what is left out is neither right nor wrong.
    """
    listed = [_listed(scores, positive, torch.inf) for positive, _ in targets]
    ranks = _count_above(scores, torch.cat([values for values, _ in listed], 1), ties=True)
    precisions = []
    pairs = zip(targets, listed, ranks.split([values.shape[1] for values, _ in listed], 1), strict=True)
    for (_, left_out), (values, sizes), among in pairs:
        places = torch.arange(values.shape[1])
        pads = values.shape[1] - sizes.unsqueeze(1)
        hits = _count_above(values, values, ties=True) - pads
        if left_out is not None:
            others, _ = _listed(scores, left_out, -torch.inf)
            among = among - _count_above(others, values, ties=True)
        precision = torch.where(places < sizes.unsqueeze(1), hits.double() / among.clamp(min=1), 0.0).sum(1)
        precisions.append(precision / torch.where(sizes > 0, sizes, torch.nan))
    return precisions


def _listed(scores: Tensor, flags: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """The flagged scores of each row, packed to the left (R, K) and filled up, and their number (R,)."""
    rows, columns = flags.nonzero(as_tuple=True)
    sizes = torch.bincount(rows, minlength=len(flags))
    starts = sizes.cumsum(0) - sizes
    shape = (len(flags), int(sizes.max()) if len(sizes) else 0)
    packed = torch.full(shape, fill, dtype=scores.dtype)
    packed[rows, torch.arange(len(rows)) - starts[rows]] = scores[rows, columns]
    return packed, sizes


def _count_above(scores: Tensor, values: Tensor, *, ties: bool = False) -> Tensor:
    """How many scores of each row (R, M) are above each of its values (R, K), or with `ties` no less: (R, K)."""
    ordered = torch.from_numpy(np.sort(scores.numpy(), axis=1))  # several times as fast as torch's sort of values
    return scores.shape[1] - torch.searchsorted(ordered.contiguous(), values.contiguous(), right=not ties)


def ranking_precision(scores: Tensor, truth: Tensor) -> Tensor:
    """Label ranking average precision of each image, (N,): free of any threshold; 1 for an empty or a full set."""
    sizes = count_true(truth)
    trivial = (sizes == 0) | (sizes == scores.shape[1])
    return torch.where(trivial, 1.0, average_precisions(scores, [(truth, None)])[0])


def class_precisions(scores: Tensor, targets: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """Average precision of each class over images, (C,), NaN without a positive, for several kinds of positives.

    Args:
        scores: (N, C), comparable between images: probabilities, or their logarithms.
        targets: pairs (positive, left_out) of average_precisions, each (N, C).
    """
    step = max(BLOCK // max(len(scores), 1), 1)
    blocks = []
    for at in range(0, scores.shape[1], step):
        columns = slice(at, at + step)
        turned = [(positive[:, columns].t(), None if out is None else out[:, columns].t()) for positive, out in targets]
        blocks.append(average_precisions(scores[:, columns].t().contiguous(), turned))
    return [torch.cat(parts) for parts in zip(*blocks, strict=True)]


def constant_f1(truth: Tensor) -> float:
    """The best F1 that one constant set of classes reaches.

    Among sets of k classes the k commonest ones are tried for every k: the baseline for any score.
    """
    count, num_classes = truth.shape
    rows, columns = truth.nonzero(as_tuple=True)
    sizes = torch.bincount(rows, minlength=count)
    order = torch.bincount(columns, minlength=num_classes).argsort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(num_classes)
    # Images with sets of one size have one denominator: (sizes, C) hits of the k commonest, k = 1 .. C.
    kinds, kind = sizes.unique(return_inverse=True)
    hits = torch.bincount(kind[rows] * num_classes + place[columns], minlength=len(kinds) * num_classes)
    hits = hits.view(len(kinds), num_classes).cumsum(1)
    totals = kinds.unsqueeze(1) + torch.arange(1, num_classes + 1)
    scores = (2 * hits.double() / totals).sum(0) / max(count, 1)
    return float(scores.max())
