"""What the scores of a run mean: their intervals, and sentences about a model. N images, C classes.

A sentence that calls a model worse or better needs a difference that is beyond its 95 % interval.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from finetune_mile.measures.guards import RATES
from finetune_mile.measures.intervals import NORMAL, compare, map_interval, wilson
from finetune_mile.measures.metrics import TAKEN_FOR, Measured, class_thresholds, sample_f1
from finetune_mile.measures.predictions import PER_CLASS

LEAST_DIFFERENCE = 1.0  # points: a model that is less than this below another is not called worse
FEW_IMAGES = 200  # an interval of 14 points or more
SCORES = {"accuracy": "accuracy", "map": "mean average precision"}  # a run is judged by the first that it has
SHARES = (
    "accuracy", "probe_accuracy", "knn_accuracy", "real_acc", "main_accuracy", "own_size_probe_accuracy",
    "first_stage_accuracy",
)  # fmt: skip


def score_of(results: Mapping[str, Any]) -> str | None:
    """The key of the score that a run is judged by: accuracy, or map where images have several given labels."""
    return next((key for key in SCORES if key in results), None)


def edges(results: Mapping[str, float], measured: Measured | None = None) -> dict[str, float]:
    """95 % intervals of the scores among the results, as `accuracy_low` and `accuracy_high`.

    Args:
        results: of results.json.
        measured: what the results are means of, for the intervals of balanced_accuracy and map.
    """
    found: dict[str, float] = {}
    for key in (key for key in SHARES if key in results):
        counted = "images_with_set" if key == "real_acc" else "images_with_label"
        images = int(results.get(counted, results["images"]))
        low, high = wilson(results[key] / 100, images)
        found |= {f"{key}_low": 100 * low, f"{key}_high": 100 * high}
    if measured is not None and "balanced_accuracy" in results:
        counts = torch.bincount(measured.given[measured.given >= 0], minlength=measured.logits.shape[1]).double()
        right = measured.by_class["balanced_accuracy"].nan_to_num().double() / 100
        seen = counts > 0
        share = (right * counts + 1)[seen] / (counts + 2)[seen]  # not quite 0 or 1: few images a class prove neither
        half = 100 * NORMAL * float((share * (1 - share) / counts[seen]).sum().sqrt() / seen.sum())
        middle = results["balanced_accuracy"]
        found |= {"balanced_accuracy_low": max(middle - half, 0.0), "balanced_accuracy_high": min(middle + half, 100.0)}
    if measured is not None and measured.truth is not None and measured.given.ndim == 2 and "map" in results:
        known = measured.truth.any(1)
        _, found["map_low"], found["map_high"] = map_interval(measured.ranked[known], measured.truth[known])
    return found


def with_edges(results: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, float]:
    """A score and its interval, where they are known, with a prefix to their names."""
    return {f"{prefix}{key}{end}": results[key + end] for end in ("", "_low", "_high") if key + end in results}


def chosen_thresholds(measured: Measured) -> tuple[list[float], dict[str, float]]:
    """Thresholds of the classes for `predict` where images have sets of given labels (N, C), and their F1; or nothing.

    The F1 (`f1@chosen`) of each half of the images is that of thresholds chosen on the other half.
    """
    truth = measured.truth
    if truth is None or measured.given.ndim == 1 or int(truth.any(1).sum()) < 2:
        return [], {}
    probabilities, truth = measured.probabilities[truth.any(1)], truth[truth.any(1)]
    first = torch.arange(len(truth)) % 2 == 0
    f1 = torch.zeros(len(truth), dtype=torch.float64)
    for half in (first, ~first):
        found = probabilities[half] > class_thresholds(probabilities[~half], truth[~half])
        found.scatter_(1, probabilities[half].argmax(1, keepdim=True), True)  # always the best one, as `predict`
        f1[half] = sample_f1(found, truth[half])
    return class_thresholds(probabilities, truth).tolist(), {"f1@chosen": 100 * float(f1.mean())}


# ------------------------------------------------------------------------------------ against a probe, image by image


def compared(measured: Measured) -> Tensor:
    """What models are compared by: 100 or 0 for each image (N,), or the average precision of each class (C,)."""
    return measured.samples["accuracy"] if "accuracy" in measured.samples else measured.by_class["map"]


def units(measured: Measured, rows: Tensor | None = None) -> dict[str, object]:
    """What start.json keeps of a probe, so that a run can be compared with it image by image, or class by class.

    Args:
        measured: of the probe, or of a run.
        rows: only these images, where they are compared one by one.
    """
    if "accuracy" in measured.samples:
        right = measured.samples["accuracy"] > 0
        return {"right": np.packbits((right if rows is None else right[rows]).numpy()).tobytes().hex()}
    return {"average_precision": [None if v != v else v for v in measured.by_class["map"].tolist()]}


def units_of(lines: Mapping[str, Any]) -> Tensor:
    """What `units` packed: 100 or 0 for each of the `images`, or the average precision of each class."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(lines.get("right", "")), dtype=np.uint8))[: int(lines["images"])]
    precisions = [torch.nan if v is None else v for v in lines.get("average_precision", ())]
    return torch.tensor(precisions, dtype=torch.float64) if precisions else torch.from_numpy(100.0 * bits)


def over(measured: Measured, lines: Mapping[str, Any], name: str) -> dict[str, float]:
    """The difference to a probe and its 95 % interval: `NAME`, `NAME_low`, `NAME_high`; empty if it is unknown.

    Args:
        measured: of the run.
        lines: `units` of the probe, on the same images.
        name: of the difference.
    """
    mine = compared(measured)
    theirs = units_of({**lines, "images": len(mine)})
    if len(theirs) != len(mine):
        return {}
    found = compare({name: mine}, {name: theirs}).get(name)
    return {} if found is None else {name: found.difference, f"{name}_low": found.low, f"{name}_high": found.high}


def worse_than_probe(results: Mapping[str, float]) -> str | None:
    """A sentence if the score is below that of a linear probe of the checkpoint, beyond chance."""
    key, below = score_of(results), _clearly_below(results, "over_probe")
    if key is None or below is None:
        return None
    return (
        f"Fine-tuning made this model worse: {SCORES[key]} {results[key]:.1f} %, and the linear probe of its "
        f"checkpoint has {results[f'probe_{key}']:.1f} % ({below}). Use --keep best, or "
        "the default --steps; if the images must not be mirrored or cropped (digits, text), set augment.flip=false and "
        "augment.crop=none."
    )


def below_own_size(results: Mapping[str, float], size: int) -> str | None:
    """A sentence if a linear probe at the checkpoint's own image size beats a run at `size` pixels, beyond chance."""
    key, below = score_of(results), _clearly_below(results, "over_own_size_probe")
    if key is None or below is None:
        return None
    own = int(results["own_size"])
    return (
        f"This model, at {size} pixels, is worse than a linear probe at the checkpoint's own {own} pixels: "
        f"{SCORES[key]} {results[key]:.1f} % and {results[f'own_size_probe_{key}']:.1f} % "
        f"({below}). Run again without --size and with --trunk frozen: that "
        f"trains a classifier on the features at {own} pixels, which takes little time."
    )


def _clearly_below(results: Mapping[str, float], name: str) -> str | None:
    """A difference in words, if it is below zero, with its interval, and large enough for anybody to care."""
    difference, low, high = (results.get(name + end, 0.0) for end in ("", "_low", "_high"))
    if high >= 0 or difference > -LEAST_DIFFERENCE:
        return None
    return f"difference {difference:+.1f}, 95 % interval {low:+.1f} to {high:+.1f}"


# ------------------------------------------------------------------------------------ in one sentence


class Summary(NamedTuple):
    """What came out of a run, for people."""

    tone: Literal["good", "level", "bad"]  # against the strongest of what it must beat
    sentence: str
    advice: str  # what to do next


def verdict(results: Mapping[str, float], warning: str | None, *, frozen: bool = False) -> Summary | None:
    """What the score of a run means, and what to do next; None where it has no score.

    Args:
        results: of results.json.
        warning: the sentence that the run ended with.
        frozen: only a classifier was trained.
    """
    key = score_of(results)
    if key is None:
        return None
    images, score = int(results["images"]), results[key]
    interval = (
        f" (95 % interval {results[f'{key}_low']:.1f} to {results[f'{key}_high']:.1f})"
        if f"{key}_low" in results
        else ""
    )
    what = (
        f"{score:.1f} % of {images:,} validation photos are right"
        if key == "accuracy"
        else (f"The mean average precision on {images:,} validation photos is {score:.1f} %")
    )
    what += interval
    probes = (
        ("over_own_size_probe", "the linear probe at the checkpoint's own image size", "own_size_probe_"),
        ("over_probe", "the linear probe of its checkpoint", "probe_"),
    )
    measured = [each for each in probes if each[0] in results]
    if warning is not None:
        return Summary("bad", f"{what}. That is not good enough to use.", warning)
    if not measured:
        return _against_constant(results, key, what)
    name, rival, prefix = min(measured, key=lambda each: results[each[0]])
    difference, low, high = (results[f"{name}{end}"] for end in ("", "_low", "_high"))
    gap = f"difference {difference:+.1f}, 95 % interval {low:+.1f} to {high:+.1f}"
    beside = f"{rival} has {results[prefix + key]:.1f} % ({gap})"
    if low > 0:
        few = f" With {FEW_IMAGES} validation photos or more the interval gets narrower." if images < FEW_IMAGES else ""
        return Summary(
            "good",
            f"{what}, clearly more than the probe.",
            f"{beside[0].upper()}{beside[1:]}. Look at the worst photos below: "
            f"wrong labels cost most now. Then label new photos with predict.{few}",
        )
    return Summary(
        "level",
        f"{what}, no clear difference to the probe.",
        f"{beside[0].upper()}{beside[1:]}. "
        + ("" if frozen else "A frozen trunk (--trunk frozen) is as good and takes a fraction of the time. ")
        + "More labelled photos, a better checkpoint (--init) or more pixels (--size) help more than more steps.",
    )


def _against_constant(results: Mapping[str, float], key: str, what: str) -> Summary:
    """A verdict where no probe was computed."""
    name = "majority_accuracy" if key == "accuracy" else "chance_map"
    rival = "the most frequent class" if key == "accuracy" else "guessing"
    if name not in results:
        return Summary(
            "level", f"{what}. Nothing to compare with was measured.", "Compare with the probe command below."
        )
    better = results.get(f"{key}_low", results[key]) > results[name]
    return Summary(
        "good" if better else "level",
        f"{what}; {rival} has {results[name]:.1f} %.",
        "No probe of the checkpoint was computed, so it is not known whether fine-tuning helped. The probe command "
        "below tells.",
    )


# ------------------------------------------------------------------------------------ against guessing


def learned_nothing(results: Mapping[str, float], *, steps: int, data: str, advice: str) -> str | None:
    """A sentence if the score is that of guessing, or less than a constant answer has; None if it is better.

    Where few images cannot tell guessing from learning, the sentence says this instead.

    Args:
        results: of results.json.
        steps: of the run.
        data: --data, for the advice.
        advice: the flags that lower the learning rates.
    """
    key = score_of(results)
    if key is None or f"chance_{key}" not in results:
        return None
    score, chance, constant = results[key], results[f"chance_{key}"], results.get("majority_accuracy", 0.0)
    images = int(results.get("images_with_label", results.get("images_with_set", results["images"])))
    bounds = {**edges(results), **results}
    if f"{key}_low" not in bounds:
        return None
    low, high = bounds[f"{key}_low"], bounds[f"{key}_high"]
    interval = f"95 % interval of the {SCORES[key]} {low:.1f} to {high:.1f}"
    causes = (
        f"{RATES} (try {advice}), {steps:,} steps are too few (raise --steps or --epochs), the checkpoint or the image "
        "size does not suit the images (--init, --size), or the labels are wrong "
        f"(finetune-mile check --data {shlex.quote(data)})."
    )
    rival, its_score = "guessing", chance
    if not low <= chance <= high:
        rival, its_score = "always answering the most frequent class", constant
        if score >= constant:
            return None
    if its_score <= high and images < FEW_IMAGES:
        return (
            f"{images:,} validation images are too few to tell whether this model learned anything: {SCORES[key]} "
            f"{score:.1f} %, {rival} has {its_score:.1f} % ({interval}). Use {FEW_IMAGES} validation images or more. "
            f"Likely causes if the {SCORES[key]} stays there: {causes}"
        )
    return (
        f"This model learned nothing useful: {SCORES[key]} {score:.1f} % on {images:,} validation images is "
        f"{'no better' if its_score <= high else 'less'} than {rival} ({its_score:.1f} %; {interval}). "
        f"Likely causes: {causes}"
    )


def lowest_class(classes: tuple[str, ...], table: Mapping[str, Tensor]) -> list[str]:
    """A sentence about the class with the lowest score; none where all are right. Columns of `table` are (C,)."""
    key = next((key for key in ("accuracy", "average_precision") if key in table), None)
    if key is None or bool((table[key].isnan() | (table[key] == 100)).all()):
        return []
    low = int(table[key].nan_to_num(nan=torch.inf).argmin())
    if key == "average_precision":
        return [
            f"Lowest average precision of a class: {classes[low]}, {table[key][low]:.1f} %, with "
            f"{int(table['true'][low]):,} images that have it. All classes are in {PER_CLASS}."
        ]
    return [
        f"Lowest accuracy of a class: {classes[low]}, {table[key][low]:.1f} % of {int(table['given'][low]):,} images, "
        f"most often taken for {classes[int(table[TAKEN_FOR][low])]}. All classes are in {PER_CLASS}."
    ]
