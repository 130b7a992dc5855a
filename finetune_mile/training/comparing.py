"""Several finished runs on one page: `finetune-mile report`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_mile.config.resolve import flat
from finetune_mile.core.files import is_finished
from finetune_mile.core.problems import Problem
from finetune_mile.core.times import bookkeeping, duration
from finetune_mile.measures.intervals import Comparison, compare
from finetune_mile.measures.verdicts import SCORES, score_of, units_of
from finetune_mile.pages.curves import joined, thinned
from finetune_mile.pages.findings import name_of, said, score_rows
from finetune_mile.pages.report import write_page
from finetune_mile.training.folder import VALIDATION, RunFolder, read_info

COLOURS = ("accent", "teacher", "third", "good", "level", "bad")
NOT_COMPARED = ("seed", "steps")  # shown in the table of runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What the folder of a finished run says. Numbers are as in its files."""

    name: str
    results: dict[str, float]
    settings: dict[str, Any]  # by dotted key
    info: dict[str, Any]
    records: list[dict[str, Any]]  # of metrics.jsonl
    seen: dict[str, Any]  # of validation.json; empty for a run of an earlier version


def read_run(path: Path) -> Finished:
    """Read the folder of a finished run, or a `Problem`."""
    if not is_finished(path):
        raise Problem(f"{path}: not the folder of a finished run (a finished run has results.json and run.json)")
    results = json.loads((path / "results.json").read_text(encoding="utf-8"))
    if score_of(results) is None:
        raise Problem(f"{path}: its results.json has neither accuracy nor map, so there is nothing to compare")
    seen, info, folder = path / VALIDATION, read_info(path), RunFolder.reopen(path)
    return Finished(
        name=path.name, results=results, settings=flat(info.get("recipe", {})), info=info, records=folder.metrics(),
        seen=json.loads(seen.read_text(encoding="utf-8")) if seen.is_file() else {},
    )  # fmt: skip


def write_comparison(runs: Sequence[Finished], path: Path) -> None:
    """Write the page; the first run is the one that others are compared with."""
    key = score_of(runs[0].results)
    assert key is not None
    if odd := [run.name for run in runs if score_of(run.results) != key]:
        raise Problem(
            f"report: {runs[0].name} has {SCORES[key]} and {odd[0]} has not; compare runs of one kind of labels"
        )
    names = _distinct([run.name for run in runs])
    changed = _differing(runs)
    pairs = [paired(runs[0], run, key) for run in runs[1:]]
    rows = [
        {
            "name": name, "method": run.settings.get("method", ""), "seed": run.settings.get("seed"),
            "images": int(run.results["images"]), "steps": run.settings.get("steps"),
            "time": duration(float(run.info.get("seconds", 0.0))),
            "bookkeeping": bookkeeping(run.info.get("times", {}), float(run.info.get("seconds", 0.0))),
        }
        for name, run in zip(names, runs, strict=True)
    ]  # fmt: skip
    write_page(
        path, "compare.html", title=f"{len(runs)} runs compared", names=names, rows=rows, changed=changed,
        scores=_scores(names, runs), score=SCORES[key], sentences=[
            say_pair(names[0], name, pair, SCORES[key]) for name, pair in zip(names[1:], pairs, strict=True)
        ],
        charts=charts(names, runs, key),
    )  # fmt: skip


def paired(first: Finished, other: Finished, key: str) -> Comparison | None:
    """The difference of another run to the first one on the same validation images; None where they differ."""
    if not first.seen or first.seen.get("sha256") != other.seen.get("sha256"):
        return None
    return compare({key: units_of(other.seen)}, {key: units_of(first.seen)}).get(key)


def say_pair(first: str, other: str, pair: Comparison | None, score: str) -> dict[str, str]:
    """A sentence about two runs, and its tone."""
    if pair is None:
        return {"tone": "", "text": f"{other} and {first} were not scored on the same photos and classes: "
                "their intervals are all that can be compared."}  # fmt: skip
    gap = f"{pair.difference:+.1f} points (95 % interval {pair.low:+.1f} to {pair.high:+.1f}, photo by photo)"
    if score != SCORES["accuracy"]:
        gap = gap.replace("photo by photo", "class by class")
    if pair.low > 0:
        return {"tone": "good", "text": f"{other} is better than {first}: {gap}."}
    if pair.high < 0:
        return {"tone": "bad", "text": f"{other} is worse than {first}: {gap}."}
    return {"tone": "level", "text": f"No clear difference between {other} and {first}: {gap}."}


def charts(names: Sequence[str], runs: Sequence[Finished], key: str) -> list[dict[str, Any]]:
    """The scores of all runs, and their losses."""
    found = []
    points = "curve" if all(any(r["kind"] == "curve" for r in run.records) for run in runs) else "evaluation"
    drawn = (
        (f"{SCORES[key].capitalize()} on validation photos", "%", key, points),
        ("Training loss on given labels", "", "loss", "train"),
    )
    for number, (title, unit, field, kind) in enumerate(drawn):
        lines, series = [], []
        for name, run, colour in zip(names, runs, itertools.cycle(COLOURS), strict=False):
            mine = [r for r in run.records if r["kind"] == kind and field in r]
            mine = [r for r in mine if kind != "train" or r["phase"] == "interaction"]  # others have other targets
            if mine:
                lines.append(thinned([r["step"] for r in mine], [r[field] for r in mine]))
                series.append({"label": name, "colour": colour, "thin": kind == "train"})
        if lines:
            chart = {"id": f"chart-{number}", "title": title, "x": "step", "y": unit, "series": series}
            found.append(chart | {"data": joined(lines)})
    return found


def _scores(names: Sequence[str], runs: Sequence[Finished]) -> dict[str, Any]:
    """Each run's score, and the strongest linear probe, on one scale."""
    tables = [score_rows(run.results) for run in runs]
    rows = [{**table["rows"][0], "name": name} for name, table in zip(names, tables, strict=True)]
    tested = [
        {**row, "name": f"{name}, test photos", "model": False}
        for name, table in zip(names, tables, strict=True)
        for row in table["rows"][1:2]
        if row["model"]
    ]
    probes = [row for table in tables for row in table["rows"] if "probe" in row["name"]]
    best = max(probes, key=lambda row: row["value"], default=None)
    return {"rows": [*rows, *tested, *([best] if best else [])], "low": min(table["low"] for table in tables),
            "high": max(table["high"] for table in tables)}  # fmt: skip


def _differing(runs: Sequence[Finished]) -> list[dict[str, Any]]:
    """The settings that are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [
        {"name": name_of(key), "key": key, "values": [said(run.settings.get(key)) for run in runs]}
        for key in keys
        if key not in NOT_COMPARED and len({said(run.settings.get(key)) for run in runs}) > 1
    ]


def _distinct(names: Sequence[str]) -> list[str]:
    """Names with a number where two would be the same."""
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, 1)]
