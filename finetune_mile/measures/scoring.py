"""From logits and labels to every number of results.json, per image and per class where there is one. No loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from finetune_mile.measures import metrics

Activation = Literal["softmax", "sigmoid"]
THRESHOLDS = (0.25, 0.5)
RULES: tuple[metrics.SetRule, ...] = ("threshold", "argmax_or_threshold")
TABLE_THRESHOLD = 0.25  # of the per-class table


@dataclass(slots=True)
class Measured:
    """Everything that was measured, in the units of results.json. N images, C classes."""

    facts: dict[str, float] = field(default_factory=dict)  # one number
    samples: dict[str, Tensor] = field(default_factory=dict)  # (N,), NaN where an image does not count: their mean
    by_class: dict[str, Tensor] = field(default_factory=dict)  # (C,), NaN where a class does not count: their mean
    table: dict[str, Tensor] = field(default_factory=dict)  # (C,): columns of per_class.csv, no number of results.json
    order: list[str] = field(default_factory=list)  # how results.json lists them

    def results(self) -> dict[str, float]:
        """The flat dictionary of results.json; what nothing counts for is absent."""
        means = {key: float(values.nanmean()) for key, values in (self.samples | self.by_class).items()}
        every = self.facts | means
        rest = [key for key in every if key not in self.order]
        return {key: every[key] for key in (*self.order, *rest) if key in every and every[key] == every[key]}


def measure(
    logits: Tensor,
    given: Tensor,
    truth: Tensor | None,
    *,
    activation: Activation,
    prediction_set: metrics.SetRule,
    rho: float | None,
    main: Tensor | None = None,
    thresholds: Sequence[float] = (),
) -> Measured:
    """Measure all that the labels allow: percent 0-100, except coverage (labels per image) and recovery_map (0-1).

    Args:
        logits: (N, C).
        given: (N,) integers, -1 = unlabelled, or (N, C) of 0 and 1.
        truth: (N, C) booleans where the true label sets are known; images with an empty set do not count there.
        activation: how logits become probabilities.
        prediction_set: which rule the plain `f1@...` and `coverage@...` use; F1 by the other rule is given by name.
        rho: the pseudo-label threshold, for f1@rho.
        main: (N,) the class of the main object, where it is known.
        thresholds: more of them for f1@...
    """
    probabilities = logits.softmax(1) if activation == "softmax" else logits.sigmoid()
    found = Measured(facts={"images": len(logits)})
    if given.ndim == 1:
        _given_scores(found, logits, given)
    elif truth is None:
        truth = given > 0
    if main is not None:
        found.samples["main_accuracy"] = 100 * metrics.top_k(logits, main, 1).double()
    predicted = metrics.predicted_set(probabilities, 0.25, prediction_set)
    found.samples["coverage@0.25"] = metrics.count_true(predicted).double()
    if truth is not None:
        _set_scores(found, logits, probabilities, truth, prediction_set, rho, thresholds)
        if main is not None:  # what a perfect classifier of the main object would have, and no more
            alone = torch.nn.functional.one_hot(main, logits.shape[1]).bool()
            found.facts["main_only_f1"] = 100 * float(metrics.sample_f1(alone, truth)[truth.any(1)].mean())
        _class_scores(found, logits if activation == "sigmoid" else logits.log_softmax(1), given, truth)
        _class_table(found, probabilities, truth)
    found.order = [
        "images", "images_with_label", "accuracy", "chance_accuracy", "majority_accuracy", "main_accuracy", "top5",
        "coverage@0.25", "images_with_set", "real_acc", "lrap", "trivial_f1",
        *(key for key in found.samples if key.startswith("f1")), "best_threshold", "map", "recovery_map",
    ]  # fmt: skip
    return found


def _given_scores(found: Measured, logits: Tensor, given: Tensor) -> None:
    labelled, num_classes = given >= 0, logits.shape[1]
    counts = torch.bincount(given[labelled], minlength=num_classes)
    found.table["given"] = counts
    known = int(labelled.sum())
    if known:  # what guessing reaches, and what always answering the most frequent class does
        found.facts |= {"chance_accuracy": 100 / num_classes, "majority_accuracy": 100 * int(counts.max()) / known}
    if known < len(given):
        found.facts["images_with_label"] = float(known)
    for key, k in (("accuracy", 1), ("top5", 5)):
        right = torch.where(labelled, 100 * metrics.top_k(logits, given, k).double(), torch.nan)
        found.samples[key] = right
        sums = torch.bincount(given[labelled], right[labelled], minlength=num_classes)
        found.table[key] = sums / torch.where(counts > 0, counts, torch.nan)


def _set_scores(
    found: Measured,
    logits: Tensor,
    probabilities: Tensor,
    truth: Tensor,
    prediction_set: metrics.SetRule,
    rho: float | None,
    more: Sequence[float],
) -> None:
    """The measures of sets: F1 at all thresholds comes from one table of counts."""
    sizes = metrics.count_true(truth)
    known = sizes > 0

    def percent(values: Tensor) -> Tensor:
        return torch.where(known, 100 * values.double(), torch.nan)

    best_is_true = metrics.top_1_in_set(logits, truth)
    found.facts |= {"images_with_set": float(known.sum()), "trivial_f1": 100 * metrics.constant_f1(truth[known])[0]}
    found.samples |= {"real_acc": percent(best_is_true), "lrap": percent(metrics.ranking_precision(logits, truth))}
    grid = metrics.threshold_grid()
    named = {f"{t:g}": t for t in (*THRESHOLDS, *more)} | ({"rho": rho} if rho is not None else {})
    thresholds = torch.cat([grid, torch.tensor(list(named.values()))]).unique()  # ascending
    predicted, hits = metrics.threshold_counts(probabilities, truth, thresholds)
    for rule in RULES:
        f1 = metrics.f1_of_counts(*metrics.apply_rule(predicted, hits, best_is_true, rule), sizes.unsqueeze(1))
        on_grid = torch.isin(thresholds, grid)
        best = int(torch.where(on_grid, f1[known].mean(0), -1.0).argmax())
        columns = {name: int(torch.searchsorted(thresholds, torch.tensor(t))) for name, t in named.items()}
        for name, column in (columns | {"best": best}).items():
            values = percent(f1[:, column])
            found.samples[f"f1_{rule}@{name}"] = values
            if rule == prediction_set:
                found.samples[f"f1@{name}"] = values
        if rule == prediction_set:
            found.facts["best_threshold"] = float(thresholds[best])


def _class_scores(found: Measured, scores: Tensor, given: Tensor, truth: Tensor) -> None:
    """Rankings of images for each class: of all true labels, and of those that are not the given one.

    `recovery_map` is the paper's: the labels of the true set without the given one are right, all else is wrong.
    `recovery_map_others` leaves (image, given label) out of the ranking, so that a perfect model reaches 1.
    Images without a true set are left out.
    """
    known = truth.any(1)
    scores, truth = scores[known], truth[known]
    if given.ndim == 1:
        labels = given[known]
        is_given = torch.zeros_like(truth).scatter_(1, labels.clamp(min=0).unsqueeze(1), (labels >= 0).unsqueeze(1))
    else:
        is_given = given[known] > 0
    other = truth & ~is_given
    every, paper, fair = metrics.class_precisions(scores, [(truth, None), (other, None), (other, is_given)])
    found.table |= {
        "true": metrics.count_true(truth, 0), "average_precision": 100 * every,
        "other_true": metrics.count_true(other, 0), "other_average_precision": 100 * paper,
    }  # fmt: skip
    found.by_class |= {"map": 100 * every, "recovery_map": paper, "recovery_map_others": fair}


def _class_table(found: Measured, probabilities: Tensor, truth: Tensor) -> None:
    predicted = (probabilities > TABLE_THRESHOLD) & truth.any(1, keepdim=True)
    hits, sizes = metrics.count_true(predicted & truth, 0), metrics.count_true(predicted, 0)
    true = found.table["true"]
    at = f"@{TABLE_THRESHOLD:g}"
    found.table |= {
        f"found{at}": sizes,
        f"precision{at}": 100 * hits / torch.where(sizes > 0, sizes, torch.nan),
        f"recall{at}": 100 * hits / torch.where(true > 0, true, torch.nan),
        f"f1{at}": 200 * hits / torch.where(sizes + true > 0, sizes + true, torch.nan),
    }
