"""Run jobs with a bar, a line for each that ends, and what failed at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from finetune_mile.tables.cells import Job, Key
from finetune_mile.tables.running import Order, Outcome, run_jobs
from finetune_mile.tables.sheets import duration


def run_with_progress(jobs: Sequence[Job], orders: Sequence[Order], *, workers: int, threads: int) -> int:
    """0 all went well, 1 some failed, 130 stopped."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)  # names and errors have brackets
    logs = {order.key: order.log for order in orders}
    failed: list[Outcome] = []
    busy: list[Key] = []
    began, ended = time.monotonic(), 0
    together = min(workers, len(orders))
    console.print(f"{len(orders)} runs, {together} at a time with {threads} thread{'s' * (threads > 1)} each")
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"), console=console,
    )  # fmt: skip
    task = bar.add_task("starting", total=len(orders), left="")

    def on_start(key: Key) -> None:
        busy.append(key)
        bar.update(task, description=f"{key.cell}, seed {key.seed}")

    def on_end(outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        key = outcome.key
        if key in busy:
            busy.remove(key)
        name = f"{key.cell}, seed {key.seed}"
        left = (time.monotonic() - began) / ended * (len(orders) - ended)
        words = f"about {duration(left)} left" if ended < len(orders) else ""
        bar.update(task, completed=ended, left=words)
        if outcome.code in (130, 143):
            console.print(f"  stopped {name}; the next call goes on with it", style="yellow")
        elif outcome.code:
            failed.append(outcome)
            console.print(f"  FAILED {name}: {outcome.last_line}", style="red")
        else:
            console.print(f"  {ended}/{len(orders)} {name}: {duration(outcome.seconds)}. {words}", style="dim")

    with bar:
        whole = run_jobs(jobs, orders, workers=workers, threads=threads, on_start=on_start, on_end=on_end)
    if failed:
        console.print(f"{len(failed)} of {len(orders)} runs failed:", style="red")
        for outcome in failed:
            console.print(f"  {outcome.key.cell}, seed {outcome.key.seed}: {outcome.last_line}")
            console.print(f"    {logs[outcome.key]}")
    return 130 if not whole else 1 if failed else 0
