"""The files of a ledger: runs.jsonl and prices.json, and everything that follows from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune_mile.core.files import whole_file, write_json
from finetune_mile.core.problems import Problem
from finetune_mile.display import wide_console
from finetune_mile.tables import formats
from finetune_mile.tables.description import Table
from finetune_mile.tables.ledger import Ledger, make_ledger
from finetune_mile.tables.plot import draw
from finetune_mile.tables.records import Record, read_records, records_of, write_records
from finetune_mile.tables.states import State

EXTRA = {"html": "ledger.html", "csv": "ledger.csv", "latex": "ledger.tex"}  # written on demand: `--format`


def write_ledger(
    folder: Path, name: str, table: Table, states: Sequence[State], *, quick: bool, prices: bool
) -> Ledger:
    """Write every file of a ledger, and show it in the terminal."""
    records = records_of(states)
    recipes = {s.job.key.cell: s.meaning.hash for s in states}
    known = _prices(folder, recipes)
    if prices:
        known |= missing_prices(states, known)
    known = {cell: known[cell] for cell in recipes if cell in known}
    of = {cell: recipes[cell] for cell in known}
    ledger = make_ledger(table, records, known)
    folder.mkdir(parents=True, exist_ok=True)
    write_records(folder / "runs.jsonl", records)
    write_json(folder / "prices.json", {"table": Path(name).stem, "quick": quick, "cells": known, "recipes": of})
    plot = draw(ledger)
    if plot is None:
        (folder / "plot.png").unlink(missing_ok=True)
    else:
        with whole_file(folder / "plot.png") as part:
            part.write_bytes(plot)
    _write(folder / "ledger.md", formats.markdown(ledger, plot=plot is not None))
    console = wide_console()
    console.print(formats.terminal(ledger))
    console.print(f"{folder / 'ledger.md'}, plot.png, runs.jsonl", soft_wrap=True)
    return ledger


def write_extra(folder: Path, table: Table, names: Sequence[str]) -> list[Path]:
    """Write a ledger in other formats (keys of `EXTRA`), from the runs.jsonl that is in its folder."""
    ledger, _ = read_ledger(folder, table)
    plot = folder / "plot.png"
    for name in names:
        if name == "html":
            text = formats.html(ledger, plot.read_bytes() if plot.is_file() else None)
        else:
            text = formats.csv_text(ledger) if name == "csv" else formats.latex(ledger)
        _write(folder / EXTRA[name], text)
    return [folder / EXTRA[name] for name in names]


def read_ledger(folder: Path, table: Table) -> tuple[Ledger, list[Record]]:
    """Compute a ledger from the runs.jsonl and prices.json of its folder."""
    path = folder / "runs.jsonl"
    if not path.is_file():
        raise Problem(f"{path}: not found. `finetune-mile table NAME` writes it; --out DIR names another folder.")
    prices = folder / "prices.json"
    cells = json.loads(prices.read_text(encoding="utf-8"))["cells"] if prices.is_file() else {}
    records = read_records(path)
    return make_ledger(table, records, cells), records


def _write(path: Path, text: str) -> None:
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def _prices(folder: Path, recipes: Mapping[str, str]) -> dict[str, str]:
    """Prices that were estimated before; not those of a cell whose recipe is another one now."""
    path = folder / "prices.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    of = kept.get("recipes", {})
    return {cell: price for cell, price in kept.get("cells", {}).items() if of.get(cell) == recipes.get(cell)}


def missing_prices(states: Sequence[State], known: Mapping[str, str]) -> dict[str, str]:
    """Estimate what cells that have no finished run would take here; needs torch."""
    done = {s.job.key.cell for s in states if s.status == "done"}
    todo = [s for s in states if not s.job.hidden and s.job.key.cell not in {*done, *known}]
    if not todo:
        return {}
    from rich.console import Console

    from finetune_mile import devices
    from finetune_mile.pricing.table_prices import in_words, price_cells

    devices.use_threads()
    with Console(stderr=True).status("timing a few steps, for the price of what was not run ..."):
        offers = price_cells([s for s in states if s.job.key.cell in {t.job.key.cell for t in todo}], others=states)
    return {cell: in_words(offer) for cell, offer in offers.items()}
