"""`finetune-mile check --table NAME`: what the cells of a table would take here, and the sum of what is missing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table as RichTable

from finetune_mile.checkpoints.cards import SCRATCH, find_card, list_cards
from finetune_mile.core.console import open_console
from finetune_mile.core.problems import Problem
from finetune_mile.paper.table import settings_of
from finetune_mile.paper.tables.description import find_table, read_table
from finetune_mile.paper.tables.runs import RunKey, RunState, make_jobs, resolve_all, states_of
from finetune_mile.training.display import duration, wide_console

if TYPE_CHECKING:
    from finetune_mile.config.schema import Recipe
    from finetune_mile.training.pricing import Pace, Price
    from finetune_mile.training.processes import Signals


def plan_table(name: str, runs: Path | None, sets: Sequence[str], *, quick: bool) -> int:
    """Print what a table would take; 1 where no cell could be priced."""
    table = read_table(find_table(name), quick=quick)
    runs = runs or Path(table.runs)
    jobs = make_jobs(table, runs, settings_of(list(sets)))
    states = states_of(jobs, resolve_all(jobs), runs)
    with open_console(stderr=True).status("timing a few steps ...") as status:
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
) -> dict[str, Price | str]:
    """Price one run of each cell, or say why that is not possible; imports torch.

    Args:
        states: runs to price; the first seed of a cell stands for all.
        tell: called with each cell before it is timed.
        others: runs that these may need.
    """
    from finetune_mile.training.processes import Signals

    by_key = {s.job.key: s for s in [*others, *states]}
    prices: dict[str, Price | str] = {}
    paces: dict[object, Pace] = {}
    with Signals() as signals:
        for state in states:
            cell, resolved = state.job.key.cell, state.meaning.resolved
            if cell in prices:
                continue
            tell(cell)
            if resolved is None:
                prices[cell] = f"no estimate for finetune-mile {state.job.verb}"
                continue
            recipe, teacher = resolved.recipe, _network_of_need(state, by_key, "teacher")
            update = {key: state.job.filled(getattr(recipe, key)) for key in ("data", "init", "teacher", "split")}
            if (network := _network_of_need(state, by_key, "init")) is not None:
                update |= {"init": "none", "arch": recipe.arch or network[0], "size": recipe.size or network[1]}
            recipe = recipe.model_copy(update=update | {"seed": state.job.key.seed, "truth": None})
            try:
                prices[cell] = _price_cell(recipe, None if teacher is None else teacher[0], paces, signals)
            except Problem as problem:
                prices[cell] = problem.sentences[0]
            signals.raise_if_caught()
    return prices


def _price_cell(recipe: Recipe, teacher: str | None, paces: dict[object, Pace], signals: Signals) -> Price:
    """Estimate a run.

    Args:
        recipe: of the run.
        teacher: the network of a teacher that is still to come.
        paces: what was timed for runs of the same kind.
        signals: whether to stop.
    """
    from finetune_mile.networks.heads import build, new_head
    from finetune_mile.training.pricing import BRIEF, find_data, find_weights, price, rehearse, stage
    from finetune_mile.training.task import lay_out

    recipe, data, here = find_data(recipe)
    recipe, init = find_weights(recipe)
    kind = (
        init, recipe.arch, recipe.size, teacher or recipe.teacher, recipe.batch_size, recipe.accumulate,
        recipe.precision, recipe.optimizer.name, recipe.trunk, recipe.data,
    )  # fmt: skip
    if kind not in paces:
        with tempfile.TemporaryDirectory() as folder:
            known = recipe if teacher is None else recipe.model_copy(update={"teacher": None})
            task, model, device = stage(known, init, Path(folder), signals, data)
            if teacher is not None:
                model.teacher = build(teacher)
                new_head(model.teacher, len(data.classes), "prior")
            paces[kind] = rehearse(task, model, device, BRIEF, Path(folder), here=here)
    parts = 1 if recipe.accumulate == "auto" else recipe.accumulate
    data, pools, plan = lay_out(recipe, data)
    return price(recipe.model_copy(update={"accumulate": parts}), data, pools, plan, paces[kind], here=here)


def _network_of_need(
    state: RunState, by_key: Mapping[RunKey, RunState], field: str
) -> tuple[str | None, int | None] | None:
    """Name and image size of the network of another run that a setting names, also before that run exists."""
    assert state.meaning.resolved is not None
    recipe = state.meaning.resolved.recipe
    needs = [by_key[key] for name, key in state.job.needs.items()
             if f"{{{name}}}" in str(getattr(recipe, field)) and key in by_key]  # fmt: skip
    if not needs:
        return None
    other = needs[0].meaning
    if other.resolved is None:  # of a pre-training
        return other.tree.get("arch"), recipe.size
    theirs = other.resolved.recipe
    if theirs.arch is not None:
        return theirs.arch, theirs.size
    card = find_card(theirs.init) if theirs.init in list_cards() else SCRATCH
    return _network_of_need(needs[0], by_key, "init") or (card.arch, theirs.size or card.preprocess.size)


def in_words(price: Price | str) -> str:
    """A price for a ledger: `about 3.1 h a run`."""
    return f"no price: {price}" if isinstance(price, str) else f"about {duration(float(price.seconds[1]))} per run"


# ------------------------------------------------------------------------------------ printing


def table_of(title: str, prices: Mapping[str, Price | str], every: Counter[str], missing: Counter[str]) -> RichTable:
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


def _facts(price: Price) -> list[str]:
    plan, images = price.plan, price.work.teacher_images
    return [
        f"{plan.total_steps:,}", f"{plan.total_steps / plan.steps_per_epoch:.1f}", str(plan.generations),
        f"{images / 1e6:.1f} M" if images >= 1e6 else f"{images:,}",
        decimal(sum(price.disk.values())), decimal(price.memory), duration(float(price.seconds[1])),
    ]  # fmt: skip


def sums(prices: Mapping[str, Price | str], every: Counter[str], missing: Counter[str]) -> list[str]:
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
    if not all(price.here for price in priced.values()):
        lines.append("some data is not on this machine: images are counted from its description, reading is not timed")
    if len(priced) < len(prices):
        lines.append(f"{len(prices) - len(priced)} cells have no estimate and are not in the sums")
    cells_of: dict[str, list[str]] = {}
    for cell, price in priced.items():
        for sentence in [*price.warnings, *_too_large(price)]:
            cells_of.setdefault(sentence, []).append(cell)
    for sentence, cells in cells_of.items():
        more = f" and {len(cells) - 1} more cells" if len(cells) > 1 else ""
        lines.append(f"warning: {sentence} ({cells[0]}{more})")
    return lines


def _too_large(price: Price) -> list[str]:
    """About the disk and memory of this machine."""
    import torch

    disk, free = sum(price.disk.values()), shutil.disk_usage(".").free
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.cuda.is_available():
        memory = int(torch.cuda.get_device_properties(0).total_memory)
    sentences = [f"disk: a run needs {decimal(disk)}, {decimal(free)} are free"] if disk > free else []
    if price.memory > memory:
        sentences.append(
            f"memory: a run needs about {decimal(price.memory)}, this machine has {decimal(memory)}; "
            "set accumulate, or use more processes"
        )
    return sentences
