"""What `finetune-mile eval` shows and leaves behind."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from finetune_mile.core.files import whole_file, write_json
from finetune_mile.images.bad_images import write_list
from finetune_mile.measures.intervals import Difference, intervals
from finetune_mile.measures.names import CLOSING
from finetune_mile.measures.predictions import Predictions, write_predictions
from finetune_mile.measures.scoring import Measured
from finetune_mile.training.folder import environment

if TYPE_CHECKING:
    from accelerate import Accelerator

MEANING = {key: (meaning, unit) for key, meaning, unit in CLOSING} | {
    "top5": ("given label among the best five", "%"),
    "map": ("mean average precision over classes", "%"),
    "recovery_map": ("mean average precision of true labels that were not given (0-1)", ""),
}
SHOWN = (
    "accuracy", "top5", "real_acc", "f1@0.25", "f1@0.5", "f1@rho", "f1@best", "trivial_f1", "lrap", "map",
    "recovery_map", "coverage@0.25",
)  # fmt: skip


class Bar:
    """Progress over batches, on the first process's terminal."""

    def __init__(self, total: int, what: str, accelerator: Accelerator) -> None:
        console = Console(stderr=True, quiet=not accelerator.is_main_process)
        self.progress = Progress(
            TextColumn(what, markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task(what, total=total)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def tick(self) -> None:
        """One batch is done."""
        self.progress.advance(self.task)


def write_evaluation(
    out: Path,
    found: Predictions,
    measured: Measured,
    facts: dict[str, Any],
    options: argparse.Namespace,
    *,
    activation: str,
) -> dict[str, float]:
    """Write results.json, per_class.csv, eval.json, and logits.parquet if a model made them; returns the results.

    An interval is two more keys, `accuracy_low` and `accuracy_high`: 95 %, drawn over images; for means over classes
    (map, recovery_map) over classes. The threshold of f1@best is held fixed in it.
    """
    results = measured.results()
    bad = found.about.get("bad_images") or {}
    if bad:
        results["bad_images"] = float(len(bad))
    for values in (measured.samples, measured.by_class):
        present = {key: v for key, v in values.items() if key in results}
        edges = intervals(present, draws=options.draws, seed=options.seed) if options.draws > 0 else {}
        for key, (low, high) in edges.items():
            results |= {f"{key}_low": low, f"{key}_high": high}
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("eval.json", "comparison.json", "bad_images.csv"):
        (out / stale).unlink(missing_ok=True)
    write_json(out / "results.json", results)
    with whole_file(out / "per_class.csv") as part:
        write_table(part, found.classes, measured)
    if bad:
        part_of_data = str(found.about.get("part", ""))
        write_list(out / "bad_images.csv", [(part_of_data, name, reason) for name, reason in bad.items()])
    if options.logits is None:
        with whole_file(out / "logits.parquet") as part:
            write_predictions(part, found)
    facts = found.about | facts | {
        "bad_images": len(bad), "activation": activation, "images": len(found.ids), "classes": len(found.classes),
        "logits": str(options.logits or out / "logits.parquet"), "logits_sha256": found.digest(),
        "draws": options.draws, "seed": options.seed, **environment(),
    }  # fmt: skip
    write_json(out / "eval.json", facts)
    return results


def write_table(path: Path, classes: tuple[str, ...], measured: Measured) -> None:
    """per_class.csv: a line per class; percent 0-100, counts as they are, empty where nothing counts."""
    columns = {name: values.tolist() for name, values in measured.table.items()}
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["class", *columns])
        for row in zip(classes, *columns.values(), strict=True):
            writer.writerow([_cell(value) for value in row])


def _cell(value: str | float) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4f}"
    return str(value)


def show(results: Mapping[str, float], found: Predictions, out: Path) -> None:
    """The table of what a reader looks for first."""
    title = f"{found.about['model']} on {int(results['images']):,} images of {found.about['data']}"
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for key in SHOWN:
        if key not in results:
            continue
        meaning, unit = MEANING.get(key, ("F1 at the run's rho", "%"))
        digits = 4 if key == "recovery_map" else 2
        low, high = results.get(f"{key}_low"), results.get(f"{key}_high")
        between = "" if low is None or high is None else f"[dim]{low:.{digits}f} - {high:.{digits}f}"
        table.add_row(f"[bold]{key}", f"{results[key]:.{digits}f}{unit and ' ' + unit}", between, meaning)
    left_out = int(results["images"] - results.get("images_with_set", results["images"]))
    note = f"{left_out:,} images without a true set are left out of set measures\n" if left_out else ""
    if "bad_images" in results:
        note += f"{int(results['bad_images'])} images could not be read and do not count: {out / 'bad_images.csv'}\n"
    Console().print(table, f"{note}{out}", sep="\n", highlight=False, soft_wrap=True)


def write_comparison(out: Path, first: Predictions, other: Predictions, found: Mapping[str, Difference]) -> None:
    """Write comparison.json and show it; positive: the first model is ahead."""
    names = {"a": first.about["model"], "b": other.about["model"]}
    write_json(out / "comparison.json", names | {"measures": {key: d.to_json() for key, d in found.items()}})
    table = Table(title=f"A {names['a']} - B {names['b']}, paired", title_justify="left", box=None, pad_edge=False)
    for column in ("", "A", "B", "A - B", "95 %", "A ahead", "B ahead", "p (signs)"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for key in SHOWN:
        if key in found:
            d = found[key]
            digits = 4 if key == "recovery_map" else 2
            table.add_row(
                f"[bold]{key}", *(f"{v:.{digits}f}" for v in (d.a, d.b)), f"{d.difference:+.{digits}f}",
                f"{d.low:+.{digits}f} .. {d.high:+.{digits}f}", str(d.wins), str(d.losses), f"{d.p_value:.2g}",
            )  # fmt: skip
    Console().print(table, highlight=False, soft_wrap=True)
