"""`finetune-mile plan --table NAME`: what the cells of a table would take here, and the sum of what is missing."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as RichTable

from finetune_mile.core.problems import Problem
from finetune_mile.paper.table import settings_of
from finetune_mile.paper.tables.description import find_table, quick_table, read_table
from finetune_mile.paper.tables.runs import RunKey, RunState, make_jobs, resolve_all, states_of
from finetune_mile.training.display import duration, wide_console

if TYPE_CHECKING:
    from finetune_mile.training.pricing import Estimate, Network


def plan_table(options: argparse.Namespace) -> int:
    """Print what a table would take; 1 where no cell could be priced."""
    table = read_table(find_table(options.table))
    if options.quick:
        table = quick_table(table)
    runs = options.runs or Path(table.runs)
    jobs = make_jobs(table, runs, settings_of(options.sets))
    states = states_of(jobs, resolve_all(jobs), runs)
    with Console(stderr=True).status("timing a few steps ...") as status:
        prices = price_cells(states, lambda cell: status.update(f"timing {cell} ..."))
    every = Counter(state.job.key.cell for state in states)
    missing = Counter(state.job.key.cell for state in states if state.status != "done")
    console = wide_console()
    console.print(table_of(table.title, prices, every, missing))
    for line in sums(prices, every, missing):
        console.print(line, soft_wrap=True)
    return 0 if any(not isinstance(price, str) for price in prices.values()) or not prices else 1


# ------------------------------------------------------------------------------------ prices


def price_cells(
    states: Sequence[RunState], tell: Callable[[str], None] = lambda _: None, *, others: Sequence[RunState] = ()
) -> dict[str, Estimate | str]:
    """Estimate one run of each cell, or say why that is not possible; imports torch.

    Args:
        states: runs to price; the first seed of a cell stands for all.
        tell: called with each cell before it is timed.
        others: runs that these may need.
    """
    from finetune_mile.training.pricing import estimate
    from finetune_mile.training.processes import use_threads

    use_threads()
    by_key = {s.job.key: s for s in [*others, *states]}
    prices: dict[str, Estimate | str] = {}
    for state in states:
        job, resolved = state.job, state.meaning.resolved
        if job.key.cell in prices:
            continue
        tell(job.key.cell)
        if resolved is None:
            prices[job.key.cell] = f"no estimate for finetune-mile {job.verb}"
            continue
        recipe = resolved.recipe
        filled = {key: job.filled(getattr(recipe, key)) for key in ("data", "truth", "init", "teacher", "split")}
        try:
            prices[job.key.cell] = estimate(
                recipe.model_copy(update={**filled, "seed": job.key.seed}),
                network=None if recipe.arch else _network_of_need(state, by_key, "init"),
                teacher=_network_of_need(state, by_key, "teacher"),
            )
        except Problem as problem:
            prices[job.key.cell] = problem.sentences[0]
    return prices


def _network_of_need(state: RunState, by_key: Mapping[RunKey, RunState], field: str) -> Network | None:
    """The network of another run of the table that a setting names, also before that run exists."""
    from finetune_mile.training.pricing import find_network

    assert state.meaning.resolved is not None
    recipe = state.meaning.resolved.recipe
    needs = [by_key[key] for name, key in state.job.needs.items()
             if f"{{{name}}}" in str(getattr(recipe, field)) and key in by_key]  # fmt: skip
    if not needs:
        return None
    other = needs[0]
    if other.meaning.resolved is None:
        arch = other.meaning.tree.get("arch")
        return None if arch is None else find_network("none", str(arch), recipe.size)
    theirs = other.meaning.resolved.recipe
    deeper = None if theirs.arch else _network_of_need(other, by_key, "init")
    return deeper or find_network(theirs.init, theirs.arch, theirs.size)


def in_words(price: Estimate | str) -> str:
    """A price for a ledger: `about 3.1 h a run`."""
    return f"no price: {price}" if isinstance(price, str) else f"about {duration(float(price.seconds[1]))} per run"


# ------------------------------------------------------------------------------------ printing


def table_of(title: str, prices: Mapping[str, Estimate | str], every: Counter[str], missing: Counter[str]) -> RichTable:
    """One line per cell."""
    shown = RichTable(
        "cell", "runs", "missing", "steps", "epochs", "generations", "teacher", "disk", "memory", "a run",
        title=title, title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for column in shown.columns[1:]:
        column.justify = "right"
    for cell, price in prices.items():
        facts = [price] if isinstance(price, str) else _facts(price)
        shown.add_row(cell, str(every[cell]), str(missing[cell]), *facts)
    return shown


def _facts(price: Estimate) -> list[str]:
    work, images = price.work, price.work.teacher_images
    return [
        f"{work.plan.total_steps:,}", f"{work.epochs:.1f}", str(work.generations),
        f"{images / 1e6:.1f} M" if images >= 1e6 else f"{images:,}",
        decimal(sum(price.disk.values())), decimal(price.memory), duration(float(price.seconds[1])),
    ]  # fmt: skip


def sums(prices: Mapping[str, Estimate | str], every: Counter[str], missing: Counter[str]) -> list[str]:
    """Totals over cells and seeds, and the warnings of all cells, each once."""
    import torch

    from finetune_mile.training.pricing import time_words

    priced = {cell: price for cell, price in prices.items() if not isinstance(price, str)}
    lines = []
    for name, runs in (("all", every), ("missing", missing)):
        total = sum((price.seconds * runs[cell] for cell, price in priced.items()), start=torch.zeros(3))
        lines.append(f"{name} {runs.total()} runs: {time_words(total)}, one after another")
    disk = sum(price.left * every[cell] for cell, price in priced.items())
    most = max((price.disk["checkpoints"] for price in priced.values()), default=0)
    lines.append(f"disk {decimal(disk)}, if every run folder is kept, and up to {decimal(most)} for a run at work")
    if not all(price.work.here for price in priced.values()):
        lines.append("some data is not on this machine: images are counted from its description, reading is not timed")
    if len(priced) < len(prices):
        lines.append(f"{len(prices) - len(priced)} cells have no estimate and are not in the sums")
    cells_of: dict[str, list[str]] = {}
    for cell, price in priced.items():
        for sentence in price.warnings():
            cells_of.setdefault(sentence, []).append(cell)
    for sentence, cells in cells_of.items():
        more = f" and {len(cells) - 1} more cells" if len(cells) > 1 else ""
        lines.append(f"warning: {sentence} ({cells[0]}{more})")
    return lines
