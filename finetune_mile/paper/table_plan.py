"""`finetune-mile plan --table NAME`: what every cell of a table would take, and the sum of what is missing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as RichTable

from finetune_mile.paper.table import settings_of
from finetune_mile.paper.tables.description import find_table, quick_table, read_table
from finetune_mile.paper.tables.runs import make_jobs, resolve_all, states_of
from finetune_mile.training.display import duration, wide_console
from finetune_mile.verbs.plan import all_warnings, size_words

if TYPE_CHECKING:
    from finetune_mile.pricing.making import Offer


def plan_table(options: argparse.Namespace) -> int:
    """Every cell of a table, and the sum of what is missing."""
    table = read_table(find_table(options.table))
    if options.quick:
        table = quick_table(table)
    runs = options.runs or Path(table.runs)
    jobs = make_jobs(table, runs, settings_of(options.sets))
    states = states_of(jobs, resolve_all(jobs), runs)

    from finetune_mile.paper.table_prices import price_cells
    from finetune_mile.training import processes

    processes.use_threads()
    with Console(stderr=True).status("timing a few steps ...") as status:
        offers = price_cells(states, lambda cell: status.update(f"looking at {cell} ..."))
    missing: dict[str, int] = {}
    seeds: dict[str, int] = {}
    for state in states:
        cell = state.job.key.cell
        seeds[cell] = seeds.get(cell, 0) + 1
        missing[cell] = missing.get(cell, 0) + (state.status != "done")
    console = wide_console()
    console.print(table_of(table.title, offers, seeds, missing))
    for line in sums(offers, seeds, missing):
        console.print(line, soft_wrap=True)
    return 0


def table_of(title: str, offers: dict[str, Offer | str], seeds: dict[str, int], missing: dict[str, int]) -> RichTable:
    """One line a cell."""
    shown = RichTable(
        "cell", "runs", "missing", "steps", "epochs", "generations", "teacher", "disk", "memory", "a run",
        title=title, title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for column in shown.columns[1:]:
        column.justify = "right"
    for cell, offer in offers.items():
        if isinstance(offer, str):
            shown.add_row(cell, str(seeds[cell]), str(missing[cell]), offer)
            continue
        counts, found = offer.counts, offer.estimate
        shown.add_row(
            cell, str(seeds[cell]), str(missing[cell]), f"{counts.plan.total_steps:,}", f"{counts.epochs:.1f}",
            str(counts.generations), _millions(counts.teacher_images), size_words(found.disk_bytes),
            size_words(found.memory_bytes), duration(found.seconds.middle),
        )  # fmt: skip
    return shown


def _millions(images: int) -> str:
    return f"{images / 1e6:.1f} M" if images >= 1e6 else f"{images:,}"


def sums(offers: dict[str, Offer | str], seeds: dict[str, int], missing: dict[str, int]) -> list[str]:
    """Totals over cells and seeds, and the warnings of all cells, each once."""
    from finetune_mile.pricing.timing import NOTHING, device_words

    priced = {cell: offer for cell, offer in offers.items() if not isinstance(offer, str)}
    lines = []
    for name, times in (("all", seeds), ("missing", missing)):
        total = NOTHING
        for cell, offer in priced.items():
            total = total + offer.estimate.seconds * times[cell]
        lines.append(
            f"{name} {sum(times.values())} runs: {duration(total.middle)} ({duration(total.low)} to "
            f"{duration(total.high)}) on {device_words()}, one after another"
        )
    disk = sum(offer.estimate.disk_bytes * seeds[cell] for cell, offer in priced.items())
    lines.append(f"disk {size_words(disk)}, if every run folder is kept")
    if any(not offer.scene.here for offer in priced.values()):
        lines.append("some data is not on this machine: images are counted from its description, reading is not timed")
    if len(priced) < len(offers):
        lines.append(f"{len(offers) - len(priced)} cells have no estimate and are not in the sums")
    said: dict[str, list[str]] = {}
    for cell, offer in priced.items():
        for sentence in all_warnings(offer):
            said.setdefault(sentence, []).append(cell)
    lines += [
        f"warning: {sentence} ({cells[0]}" + (f" and {len(cells) - 1} more cells)" if len(cells) > 1 else ")")
        for sentence, cells in said.items()
    ]
    return lines
