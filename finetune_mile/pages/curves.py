"""Charts of a run's page, as data for uPlot (templates/page.js), and the figures that trackers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from finetune_mile.learning.phases import Phase
from finetune_mile.measures.verdicts import SCORES, score_of

MOST_POINTS = 400  # of a line; more are averaged
Records = Sequence[Mapping[str, Any]]
Chart = dict[str, Any]
LOSSES = (("interaction", "given labels", "teacher"), ("imitation", "teacher's labels", "student"))


def charts_of(records: Records, results: Mapping[str, float], phases: Sequence[Phase]) -> list[Chart]:
    """The charts of a run that have something to show."""
    bands = imitations(phases)
    found = [score_chart(records, results), loss_chart(records), *label_charts(records), *gate_charts(records)]
    return [{**chart, "bands": bands, "id": f"chart-{number}"} for number, chart in enumerate(found) if chart]


def imitations(phases: Sequence[Phase]) -> list[tuple[int, int]]:
    """From which step to which the network learns from the teacher's labels."""
    ends = np.cumsum([phase.steps for phase in phases]).tolist()
    return [(end - p.steps, end) for p, end in zip(phases, ends, strict=True) if p.name == "imitation"]


def joined(lines: Sequence[tuple[Sequence[float], Sequence[float | None]]]) -> list[list[float | None]]:
    """Lines of x and y as uPlot takes them: all x once, then the y of each line or None."""
    places = sorted({x for xs, _ in lines for x in xs})
    tables = [dict(zip(xs, ys, strict=True)) for xs, ys in lines]
    return [[*places], *([table.get(x) for x in places] for table in tables)]


def thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float | None]]:
    """At most MOST_POINTS points: means of neighbours; a mean that is no number is None."""
    parts = min(MOST_POINTS, len(xs))
    groups = zip(np.array_split(np.array(xs), parts), np.array_split(np.array(ys, dtype=float), parts), strict=True)
    mean = [(float(x.max()), float(y.mean())) for x, y in groups]
    return [x for x, _ in mean], [round(y, 5) if np.isfinite(y) else None for _, y in mean]


def score_chart(records: Records, results: Mapping[str, float]) -> Chart | None:
    """The score that a run is judged by, step by step, with what it must beat."""
    key = score_of(results)
    points = [r for r in records if r["kind"] == "curve" and key in r]
    complete = [r for r in records if r["kind"] == "evaluation" and key in r]
    if key is None or not (points or complete):
        return None
    roles = [("teacher", "after given labels", "teacher"), ("student", "after the teacher's labels", "student")]
    shown = [(name, colour, [r for r in points or complete if r["role"] == role]) for role, name, colour in roles]
    shown = [each for each in shown if each[2]]
    if points or len(shown) == 1:  # phases are shaded; at their ends, teacher and student are two networks
        shown = [(SCORES[key], "student", points or shown[0][2])]
    images = int((points or complete)[0].get("images", 0))
    lines = [([r["step"] for r in mine], [round(r[key], 3) for r in mine]) for _, _, mine in shown]
    series: list[Chart] = [{"label": name, "colour": colour} for name, colour, _ in shown]
    last = max(r["step"] for r in (*points, *complete))
    if points and complete:
        lines.append(([r["step"] for r in complete], [round(r[key], 3) for r in complete]))
        series.append({"label": f"on {int(complete[0]['images']):,} photos", "colour": "third", "points": True})
    lines.append(([last], [round(results[key], 3)]))
    series.append({"label": f"final weights, all {int(results['images']):,}", "colour": "good", "points": True})
    for name, label in (("own_size_probe_", "probe, checkpoint's size"), ("probe_", "linear probe")):
        if name + key in results:
            ends = [min(line[0][0] for line in lines), last]
            lines.append((ends, [round(results[name + key], 3)] * 2))
            series.append({"label": label, "colour": "soft", "dash": True, "rival": True})
    title = f"{SCORES[key].capitalize()} on {images:,} validation photos, the same ones at each point"
    return {"title": title, "x": "step", "y": "%", "series": series, "data": joined(lines)}


def loss_chart(records: Records) -> Chart | None:
    """The training loss; given labels and a teacher's are different targets, so they are different lines."""
    lines, series = [], []
    for phase, label, colour in LOSSES:
        mine = [r for r in records if r["kind"] == "train" and r["phase"] == phase]
        if mine:
            lines.append(thinned([r["step"] for r in mine], [r["loss"] for r in mine]))
            series.append({"label": label, "colour": colour, "thin": True})
    return {"title": "Training loss", "x": "step", "y": "", "series": series, "data": joined(lines)} if lines else None


def label_charts(records: Records) -> list[Chart]:
    """How many labels the teacher gave."""
    mine = [r for r in records if r["kind"] == "train" and "labels_per_image" in r]
    if not mine:
        return []
    steps = [r["step"] for r in mine]
    columns = (("labels_per_image", "labels per photo", "student"), ("empty_share", "photos without one", "soft"))
    lines = [thinned(steps, [r[key] for r in mine]) for key, _, _ in columns]
    series = [{"label": label, "colour": colour, "thin": True} for _, label, colour in columns]
    return [{"title": "The teacher's labels", "x": "step", "y": "", "series": series, "data": joined(lines)}]


def gate_charts(records: Records) -> list[Chart]:
    """What `rho: auto` measured before each imitation."""
    mine = [r for r in records if r["kind"] == "gate"]
    if not mine:
        return []
    columns = (("v", "v: better than chance", "teacher"), ("g", "g: sure and not given", "student"))
    lines = [([r["step"] for r in mine], [round(r[key], 4) for r in mine]) for key, _, _ in columns]
    series = [{"label": label, "colour": colour} for _, label, colour in columns]
    title = "Evidence for further labels, on held-out photos"
    return [{"title": title, "x": "step", "y": "", "series": series, "data": joined(lines)}]
