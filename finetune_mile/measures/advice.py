"""Advice that the numbers bear: which method to take, and whether images hold several classes. N images, C classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from finetune_mile.learning.evidence import surest_images
from finetune_mile.measures.intervals import Comparison, compare, intervals, wilson

LEAST_IMAGES = 30  # held out, of which none is missed: fewer cannot tell whether photos hold several classes


def interval(values: Tensor, measure: str) -> tuple[float, float]:
    """The 95 % interval of the mean of `scored`, or of its mean over seeds: over images, for map over classes."""
    if measure == "map":
        return intervals({measure: values})[measure]
    known = values[~values.isnan()]
    low, high = wilson(float(known.mean()) / 100 if len(known) else 0.0, len(known))
    return 100 * low, 100 * high


def against(scores: Mapping[str, Tensor], simplest: str) -> dict[str, Comparison]:
    """Each other method against the simplest one, paired by image or class; scores are (seeds, units)."""
    base = {"score": scores[simplest].mean(0)}
    pairs = {name: compare({"score": each.mean(0)}, base) for name, each in scores.items() if name != simplest}
    return {name: pair["score"] for name, pair in pairs.items() if pair}


def recommended(gaps: Mapping[str, Comparison], simplest: str) -> str:
    """The method with the largest gain among those whose interval is above zero; else the simplest one."""
    better = {name: gap.difference for name, gap in gaps.items() if gap.low > 0}
    return max(better, key=lambda name: better[name]) if better else simplest


def say_methods(gaps: Mapping[str, Comparison], simplest: str) -> list[str]:
    """Which methods are better, level and worse than the simplest one, with the intervals of the differences."""

    def points(name: str) -> str:
        gap = gaps[name]
        return f"{name} {gap.difference:+.1f} points ({gap.low:+.1f} to {gap.high:+.1f})"

    better = [points(name) for name, gap in gaps.items() if gap.low > 0]
    worse = [points(name) for name, gap in gaps.items() if gap.high < 0]
    level = [points(name) for name, gap in gaps.items() if gap.low <= 0 <= gap.high]
    sentences = [f"Better than {simplest} on the same features: {', '.join(better)}."] if better else []
    if level:
        reason = "" if better else f" No method is clearly better, so the simplest one was taken: {simplest}."
        sentences.append(f"Level with {simplest}, differences within chance: {', '.join(level)}.{reason}")
    return sentences + ([f"Worse than {simplest}: {', '.join(worse)}."] if worse else [])


def several_classes(verdicts: Sequence[Mapping[str, Any]], bar: float) -> Literal["yes", "no", "cannot tell"]:
    """Do images hold more than one of the classes? Arguments as in `say_several`."""
    if sum(bool(each["open"]) for each in verdicts) > len(verdicts) / 2:
        return "yes"
    _, _, high, _ = surest_misses(verdicts)
    return "no" if high < bar else "cannot tell"


def say_several(verdicts: Sequence[Mapping[str, Any]], bar: float) -> str:
    """Do images hold more than one of the classes? Yes, no, or that these images and features cannot tell.

    A gate that stays closed is no answer by itself. The answer is no only if the ratio g, of misses among the surest
    images to misses among all, is below the bar of the gate with its 95 % interval: several objects would have shown.

    Args:
        verdicts: what `auto` measured, for each seed.
        bar: auto.g_min.
    """
    answer = several_classes(verdicts, bar)
    if answer == "yes":
        opened = sum(bool(each["open"]) for each in verdicts)
        labels = sum(each["labels_found"] for each in verdicts) / len(verdicts)
        return (
            f"Many photos seem to hold more than one of the classes: method auto found this for {opened} of "
            f"{len(verdicts)} seeds, with {labels:.1f} labels per photo. Try --method auto on the complete network."
        )
    ratio, low, high, misses = surest_misses(verdicts)
    numbers = f"{ratio:.2f} times as often as among all (95 % interval {low:.2f} to {high:.2f})"
    if answer == "no":
        return (
            "No evidence that photos hold more than one of the classes, and it would have been seen. Where the network "
            f"is surest, it misses the given label {numbers}. Below {bar:g} is one class per photo."
        )
    return (
        "Cannot tell whether photos hold more than one of the classes: these features give "
        f"{100 * (1 - misses):.0f} % of the held-out photos their label. Where the network is surest, it misses it "
        f"{numbers}. Only an interval below {bar:g} means one class per photo; above are several classes, or features "
        "that are too weak. A better checkpoint or more photos can tell."
    )


def surest_misses(verdicts: Sequence[Mapping[str, Any]]) -> tuple[float, float, float, float]:
    """The ratio g over all seeds, its 95 % interval (Wilson's, of the misses among the surest), and all misses."""
    misses = sum(each["misses"] for each in verdicts) / len(verdicts)
    if misses == 0:  # few images without a miss prove little
        return 0.0, 0.0, 0.0 if min(int(each["images"]) for each in verdicts) >= LEAST_IMAGES else 1.0, 0.0
    counts = [surest_images(int(each["images"])) for each in verdicts]
    clear = sum(each["g"] * each["misses"] * n for each, n in zip(verdicts, counts, strict=True)) / sum(counts)
    low, high = wilson(clear, sum(counts))
    return clear / misses, low / misses, high / misses, misses
