"""How well fixed features tell the classes apart: k-NN and linear probes on several draws of labels. C classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from finetune_mile.compute.passes import Outputs
from finetune_mile.compute.rows import Store
from finetune_mile.images.order import Indices
from finetune_mile.images.sets import Data
from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.probe import Activation, fit_probe, neighbour_votes
from finetune_mile.measures.intervals import compare, intervals
from finetune_mile.measures.metrics import class_precisions, hits, top_k

KINDS = ("k-NN", "softmax", "sigmoid")
LINEAR: tuple[Activation, ...] = ("softmax", "sigmoid")


def probe(store: Store, data: Data, labelled: Sequence[Indices], *, k: int) -> dict[str, Tensor]:
    """What each probe scores, (draws, units): as `scored` has it for the validation images.

    Args:
        store: the features of its images.
        data: whose labels count.
        labelled: for each draw, the training images that keep their label.
        k: of k-NN.
    """
    queries, good = store.rows("val")
    given, classes = data.val.given, len(data.classes)
    right: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for seed, rows in enumerate(labelled):
        bank, read = store.rows("train", rows)
        bank, labels = bank[read], data.train.given[torch.from_numpy(rows)][read]
        outputs = torch.full((len(queries), classes), torch.nan)
        outputs[good] = neighbour_votes(queries[good], bank, labels, classes, k=k)
        right["k-NN"].append(scored(Outputs(outputs, good), given, "sigmoid"))
        for activation in LINEAR:
            fitted = fit_probe(bank, given_matrix(labels, classes), activation, seed=seed)
            outputs[good] = fitted.logits(queries[good])
            right[activation].append(scored(Outputs(outputs, good), given, activation))
    return {kind: torch.stack(rows) for kind, rows in right.items()}


def scored(outputs: Outputs, given: Tensor, activation: Activation) -> Tensor:
    """What two models are compared by, in per cent; its mean is the score.

    One label per image: 100 or 0 for each image (N,). Sets of labels: the average precision of each class (C,). NaN
    where an image or a class does not count.

    Args:
        outputs: logits (N, C).
        given: (N,) classes, below 0: no label; or (N, C) of 0 and 1.
        activation: how logits become probabilities.
    """
    logits, good = outputs
    if given.ndim == 1:
        return hits(top_k(logits.nan_to_num(), 1), given).masked_fill_(~good, torch.nan)
    known = good & (given > 0).any(1)
    scores = logits[known] if activation == "sigmoid" else logits[known].log_softmax(1)
    return 100 * class_precisions(scores, [(given[known] > 0, None)])[0]


def measure_of(given: Tensor) -> str:
    """The name of the mean of `scored` in results.json."""
    return "accuracy" if given.ndim == 1 else "map"


def floor(data: Data) -> tuple[str, float]:
    """A score in per cent that needs no training, and its name.

    The accuracy of always answering the most frequent class of the validation images; with sets of labels the mean
    average precision of a random order.
    """
    given = given_matrix(data.val.given, len(data.classes))
    shares = given.sum(0) / given.any(1).sum()
    if data.val.given.ndim == 1:
        return "the most frequent class", 100 * float(shares.max())
    return "photos in random order", 100 * float(shares[shares > 0].mean())


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
