"""Tables of `eval` for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from finetune_mile.measures import CLOSING
from finetune_mile.measures.intervals import Comparison

MEANING = {key: (meaning, unit) for key, meaning, unit in CLOSING} | {
    "top5": ("given label among the best five", "%"),
    "map": ("mean average precision over classes", "%"),
    "recovery_map": ("mean average precision of true labels that were not given (0-1)", ""),
}
SHOWN = (
    "accuracy", "top5", "real_acc", "f1@0.25", "f1@0.5", "f1@rho", "f1@best", "trivial_f1", "lrap", "map",
    "recovery_map", "coverage@0.25",
)  # fmt: skip


def scores_table(results: Mapping[str, float], about: Mapping[str, Any]) -> Table:
    """The main scores, their intervals and what they mean; `about` the predictions."""
    title = f"{about['model']} on {int(results['images']):,} images of {about['data']}"
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for key in (key for key in SHOWN if key in results):
        meaning, unit = MEANING.get(key, ("F1 at the run's rho", "%"))
        digits = _digits(key)
        low, high = results.get(f"{key}_low"), results.get(f"{key}_high")
        between = "" if low is None or high is None else f"[dim]{low:.{digits}f} - {high:.{digits}f}"
        table.add_row(f"[bold]{key}", f"{results[key]:.{digits}f}{unit and ' ' + unit}", between, meaning)
    return table


def comparison_table(names: Sequence[str], differences: Mapping[str, Comparison]) -> Table:
    """Two models, paired; positive: the first one is ahead."""
    table = Table(title=f"A {names[0]} - B {names[1]}, paired", title_justify="left", box=None, pad_edge=False)
    for column in ("", "A", "B", "A - B", "95 %", "A ahead", "B ahead", "p (signs)"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for key in (key for key in SHOWN if key in differences):
        d, digits = differences[key], _digits(key)
        table.add_row(
            f"[bold]{key}", *(f"{v:.{digits}f}" for v in (d.a, d.b)), f"{d.difference:+.{digits}f}",
            f"{d.low:+.{digits}f} .. {d.high:+.{digits}f}", str(d.wins), str(d.losses), f"{d.p_value:.2g}",
        )  # fmt: skip
    return table


def _digits(key: str) -> int:
    return 4 if key == "recovery_map" else 2
