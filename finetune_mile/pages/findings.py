"""What a run's page says of its scores: rivals, mistakes, calibration, thresholds, settings. N images, C classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from finetune_mile.config.resolve import choose_recipe, flat, read_yaml, resolve_tree
from finetune_mile.config.schema import FullRecipe, Recipe
from finetune_mile.core.problems import Problem
from finetune_mile.measures.metrics import GRID, Measured, count_true, f1_of_counts, is_given
from finetune_mile.measures.verdicts import SCORES, score_of
from finetune_mile.methods import METHODS, get_method

MOST_IN_MATRIX, MOST_PAIRS = 30, 30  # classes of the confusion matrix, and pairs beside or instead of it
MOST_CLASSES = 1000  # rows of a table of classes
BINS = 10  # of confidence
RIVALS = (  # prefix in results.json, name
    ("own_size_probe_", "Linear probe at the checkpoint's own image size"),
    ("probe_", "Linear probe of the checkpoint"),
    ("knn_", "20 nearest neighbours"),
    ("majority_", "Always the most frequent class"),
    ("chance_", "Guessing"),
)
NAMES = {  # of settings whose key does not read by itself
    "init": "checkpoint", "semi": "images that the teacher labels", "optimizer.lr": "learning rate",
    "optimizer.head_lr": "learning rate of the classifier", "optimizer.name": "optimiser",
    "optimizer.ema": "decay of averaged weights", "optimizer.clip": "largest gradient norm", "size": "image size",
    "fraction": "share of the labels", "trunk": "layers that learn", "keep": "which weights are kept",
    "mile.k_t": "steps on given labels in turn", "mile.k_s": "steps on the teacher's labels in turn",
    "mile.rho": "threshold of the teacher's labels", "augment.erase": "share of images with an erased part",
}  # fmt: skip


def name_of(key: str) -> str:
    """A setting's name for people."""
    return NAMES.get(key, key.replace("_", " ").replace(".", ": "))


def score_rows(results: Mapping[str, float]) -> dict[str, Any]:
    """The score of a run above what it must beat, with intervals, and the scale that shows them all."""
    key = score_of(results)
    if key is None:
        return {}
    named = [("", "This model"), ("test_", "This model, on the test photos"), *RIVALS]
    rows: list[dict[str, Any]] = [
        {"name": name, "value": results[prefix + key], "model": prefix in ("", "test_"),
         "low": results.get(f"{prefix}{key}_low"), "high": results.get(f"{prefix}{key}_high")}
        for prefix, name in named if prefix + key in results
    ]  # fmt: skip
    ends = ("", "_low", "_high")
    every = [results[name] for prefix, _ in named for end in ends if (name := f"{prefix}{key}{end}") in results]
    low, high = math.floor(min(every) / 10) * 10, max(math.ceil(max(every) / 10) * 10, 10)
    return {"rows": rows, "low": max(low, 0), "high": min(high, 100), "score": SCORES[key]}


def confusions(measured: Measured, classes: Sequence[str]) -> dict[str, Any]:
    """Which classes are taken for which, where an image has one label: the matrix of few classes, and the pairs."""
    if measured.given.ndim == 2 or not bool((measured.given >= 0).any()):
        return {}
    known, count = measured.given >= 0, len(classes)
    best, given = measured.logits[known].argmax(1), measured.given[known]
    pairs, counts = (given * count + best)[best != given].unique(return_counts=True)
    sizes = torch.bincount(given, minlength=count)
    largest = counts.argsort(descending=True, stable=True)[:MOST_PAIRS]
    listed = [
        {"given": classes[pair // count], "found": classes[pair % count], "count": number,
         "share": 100 * number / int(sizes[pair // count])}
        for pair, number in zip(pairs[largest].tolist(), counts[largest].tolist(), strict=True)
    ]  # fmt: skip
    found: dict[str, Any] = {"pairs": listed, "wrong": int(counts.sum()), "images": len(given)}
    if count <= MOST_IN_MATRIX:
        matrix = torch.bincount(given * count + best, minlength=count**2).view(count, count)
        found["matrix"] = [
            {"name": name, "cells": [(n, n / max(int(size), 1)) for n in row]}
            for name, row, size in zip(classes, matrix.tolist(), sizes, strict=True)
        ]
    return found


def guesses(
    labelled: Tensor, guessed: Measured, measured: Measured, classes: Sequence[str], confidence: float
) -> dict[str, Any]:
    """How many images without a label get one, of which class, and how many such labels are right elsewhere.

    Args:
        labelled: given labels (n,) or (n, C) of the training images that have some.
        guessed: of images without a label.
        measured: of the validation images, whose labels say what is right.
        classes: C names.
        confidence: least probability of a label.
    """
    count = len(classes)
    true = is_given(measured.given, count) if measured.truth is None else measured.truth
    known = true.any(1)
    said = guessed.probabilities >= confidence  # (N, C)
    held_out = (measured.probabilities >= confidence)[known]
    columns = (count_true(is_given(labelled, count), 0), count_true(said, 0), count_true(held_out, 0),
               count_true(held_out & true[known], 0))  # fmt: skip
    rows = [
        {"class": name, "labelled": own, "found": found, "tested": tested,
         "right": 100 * right / tested if tested else None}
        for name, own, found, tested, right in zip(classes, *(column.tolist() for column in columns), strict=True)
    ]  # fmt: skip
    return {
        "images": len(said), "sure": int(said.any(1).sum()), "confidence": confidence,
        "tested": int(held_out.any(1).sum()),
        "rows": sorted(rows, key=lambda row: -row["found"])[:MOST_CLASSES],
    }  # fmt: skip


def calibration(measured: Measured) -> dict[str, Any]:
    """How often the model is right at each confidence; of label sets: how often a label of each probability is true."""
    probabilities, given = measured.probabilities, measured.given
    if given.ndim == 1:
        known = given >= 0
        confidence, best = probabilities[known].max(1)
        right = best == given[known]
    else:
        known = (given > 0).any(1)
        confidence, right = probabilities[known].flatten(), (given[known] > 0).flatten()
    if not len(confidence):
        return {}
    places = (confidence * BINS).long().clamp(0, BINS - 1)
    counts = torch.bincount(places, minlength=BINS).double()
    sure, hit = (torch.bincount(places, v.double(), BINS) / counts for v in (confidence, right.double()))
    seen = counts > 0
    gap = float((counts[seen] * (sure[seen] - hit[seen]).abs()).sum() / counts.sum())
    bins = zip(sure[seen].tolist(), hit[seen].tolist(), counts[seen].long().tolist(), strict=True)
    ends = [0.0, 1.0]
    xs = sorted({*ends, *(round(x, 4) for x in sure[seen].tolist())})
    hits = {round(x, 4): round(y, 4) for x, y in zip(sure[seen].tolist(), hit[seen].tolist(), strict=True)}
    chart = {
        "id": "chart-calibration", "x": "what the model says", "y": "share that is right",
        "range": ends, "xrange": ends,
        "series": [{"label": "perfect", "colour": "soft", "dash": True, "rival": True},
                   {"label": "this model", "colour": "accent"}],
        "data": [xs, xs, [hits.get(x) for x in xs]],
    }  # fmt: skip
    says, is_right = float(confidence.double().mean()), float(right.double().mean())
    return {"chart": chart, "bins": [*bins], "gap": 100 * gap, "over": 100 * (says - is_right),
            "sets": given.ndim == 2}  # fmt: skip


def threshold_curves(measured: Measured) -> dict[str, Any]:
    """What one threshold for all classes gives, over GRID: labels per photo, given ones found, and F1 of label sets."""
    probabilities = measured.probabilities
    given = is_given(measured.given, probabilities.shape[1])
    labelled = given.any(1)
    above = [probabilities > t for t in GRID.tolist()]

    def row(name: str, values: list[float], digits: int, unit: str) -> dict[str, Any]:
        return {"name": name, "values": [round(v, 3) for v in values], "digits": digits, "unit": unit}

    total = max(int(given.sum()), 1)
    rows = [
        row("labels per photo", [float(count_true(each).mean(dtype=torch.double)) for each in above], 2, ""),
        row("of the given labels found", [100 * float((each & given).sum()) / total for each in above], 0, " %"),
    ]
    if measured.truth is not None:
        known = measured.truth.any(1)
        true = measured.truth[known]
        sizes = count_true(true)
        right = [(count_true(each[known]), count_true(each[known] & true)) for each in above]
        rows.append(
            row(
                "of the labels shown are right",
                [100 * float(h.sum()) / max(int(s.sum()), 1) for s, h in right],
                0,
                " %",
            )
        )
        f1 = [100 * float(f1_of_counts(s, h, sizes).mean()) if len(sizes) else 0.0 for s, h in right]
        rows.append(row("F1", f1, 1, ""))
    return {"at": [round(t, 4) for t in GRID.tolist()], "rows": rows} if bool(labelled.any()) else {}


def changed_settings(recipe: Recipe) -> list[dict[str, str]]:
    """The settings that are not those of the recipe which `run` takes by itself for this checkpoint and data."""
    given = {"init": recipe.init, "data": recipe.data, "fraction": recipe.fraction}
    try:
        path, why = choose_recipe(given)
        default = resolve_tree(FullRecipe, read_yaml(path), path, why, given).recipe
    except Problem:  # settings that only a recipe of the user's own has
        return []
    was, now = (flat(each.model_dump(mode="json")) for each in (default, recipe))
    others = {get_method(name).block for name in METHODS} - {*recipe.method_value.blocks}  # of methods not trained
    return [
        {"name": name_of(key), "key": key, "value": said(now.get(key)), "default": said(was.get(key))}
        for key in now
        if now[key] != was.get(key) and not ("." in key and key.partition(".")[0] in others)
    ]


def said(value: object) -> str:
    """A setting's value for people."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
