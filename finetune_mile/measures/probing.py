"""How well fixed features tell the classes apart: k-NN and linear probes on several draws of labels. C classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune_mile.images.index import Data
from finetune_mile.images.order import Indices
from finetune_mile.images.splits import one_label_each
from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.probe import FOLDS, Activation, fit_probe, folds, neighbours
from finetune_mile.measures.intervals import compare, intervals

KINDS = ("k-NN", "softmax", "sigmoid")
LINEAR: tuple[Activation, ...] = ("softmax", "sigmoid")
Features = npt.NDArray[np.floating[Any]]


def probe(train: Features, val: Features, data: Data, labelled: Sequence[Indices], *, k: int) -> dict[str, Tensor]:
    """Which validation images each probe gets right: 100 or 0, (draws, n); NaN for images without label or features.

    Args:
        train: (N, D); NaN rows are left out.
        val: (n, D).
        data: whose labels count.
        labelled: for each draw, the training images that keep their label.
        k: of k-NN.
    """
    queries = torch.from_numpy(np.array(val, dtype=np.float32))
    good, given, classes = ~queries.isnan().any(1), data.val.given, len(data.classes)
    right: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for seed, rows in enumerate(labelled):
        bank = torch.from_numpy(np.array(train[rows], dtype=np.float32))
        read = ~bank.isnan().any(1)
        bank, labels = bank[read], data.train.given[torch.from_numpy(rows)][read]
        guesses = {"k-NN": neighbours(queries[good], bank, one_label_each(labels), classes, k=k)}
        for activation in LINEAR:
            fitted = fit_probe(bank, given_matrix(labels, classes), activation, seed=seed)
            guesses[activation] = fitted.logits(queries[good]).argmax(1)
        for kind in KINDS:
            row = torch.full((len(queries),), torch.nan, dtype=torch.float64)
            row[good] = hits(guesses[kind], given[good])
            right[kind].append(row)
    return {kind: torch.stack(rows) for kind, rows in right.items()}


def hits(guesses: Tensor, given: Tensor) -> Tensor:
    """(n,) 100 where the guess is a given label, 0 where not, NaN where there is none."""
    if given.ndim == 1:
        return (guesses == given).double().mul(100).masked_fill(given < 0, torch.nan)
    hits = given.gather(1, guesses.unsqueeze(1)).squeeze(1) > 0
    return hits.double().mul(100).masked_fill(~(given > 0).any(1), torch.nan)


def doubtful(
    features: Features, labels: Tensor, num_classes: int
) -> tuple[list[tuple[int, int, float, int, float]], float]:
    """Labels that a probe of the other images would not give, the least likely first.

    Args:
        features: (n, D); rows of NaN are left out.
        labels: (n,) classes; below 0: no label.
        num_classes: C.

    Returns:
        Row, given class and its probability, the class it would give and its probability; and how many of a hundred
        held-out images get their given class, which tells how much such doubts are worth.
    """
    rows = torch.from_numpy(np.array(features, dtype=np.float32))
    places = ((labels >= 0) & ~rows.isnan().any(1)).nonzero().flatten()
    rows, labels = rows[places], labels[places]
    fold = torch.from_numpy(folds(labels.numpy(), 0))
    strength = fit_probe(rows, given_matrix(labels, num_classes), "softmax").strength
    likely = torch.full((len(rows), num_classes), torch.nan)
    for one in range(FOLDS):
        if (fold == one).any() and (fold != one).any():
            others = given_matrix(labels[fold != one], num_classes)
            fitted = fit_probe(rows[fold != one], others, "softmax", strength=strength)
            likely[fold == one] = fitted.logits(rows[fold == one]).softmax(1)
    given = likely.gather(1, labels.unsqueeze(1)).squeeze(1)
    best, guess = likely.max(1)
    wrong = (~best.isnan() & (guess != labels)).nonzero().flatten()
    order = wrong[given[wrong].argsort(stable=True)].tolist()
    listed = [(int(places[i]), int(labels[i]), float(given[i]), int(guess[i]), float(best[i])) for i in order]
    return listed, 100 * (1 - len(listed) / max(int((~best.isnan()).sum()), 1))


def majority(data: Data) -> float:
    """Accuracy in per cent of always answering the most frequent class of the validation images."""
    given = given_matrix(data.val.given, len(data.classes))
    return 100 * float(given.sum(0).max() / given.any(1).sum())


def ranking(probed: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Any]]:
    """Rows of a table, the best checkpoint first.

    For each probe: accuracy in per cent (mean over the draws), its 95 % interval over images, and each draw's own.
    `behind`: the paired difference of the checkpoint's best probe to that of the first row, with its interval.
    """
    rows: list[dict[str, Any]] = []
    for name, right in probed.items():
        means = {kind: right[kind].mean(0) for kind in KINDS}
        edges = intervals(means)
        accuracy: dict[str, Any] = {
            kind: {
                "mean": float(values.nanmean()), "low": edges[kind][0], "high": edges[kind][1],
                "draws": right[kind].nanmean(1).tolist(),
            }
            for kind, values in means.items()
        }  # fmt: skip
        best = max(KINDS, key=lambda kind: accuracy[kind]["mean"])
        rows.append({"init": name, "best": best, "accuracy": accuracy})
    rows.sort(key=lambda row: -row["accuracy"][row["best"]]["mean"])
    first = rows[0]
    for row in rows[1:]:
        mine, leader = (probed[each["init"]][each["best"]].mean(0) for each in (row, first))
        difference = compare({"accuracy": mine}, {"accuracy": leader})["accuracy"]
        row["behind"] = {"difference": difference.difference, "low": difference.low, "high": difference.high}
    return rows
