"""The missing runs: list them, print their commands, or run them in worker processes that stay alive. No torch here.

A worker imports torch once, so that a run of seconds stays one of seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from finetune_mile.paper.tables.cells import Job, Key, head, yaml_value
from finetune_mile.paper.tables.states import State
from finetune_mile.training.display import duration

STOP_SECONDS = 120.0  # a run that was told to stop may finish its step and save


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One command for a worker."""

    key: Key
    verb: str
    arguments: tuple[str, ...]
    log: str
    launch: str | None  # start it as a process of its own with these words


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it ended."""

    key: Key
    code: int
    seconds: float
    last_line: str


def order_for(state: State, runs: Path, launch: str | None) -> Order:
    """The command that brings a run to its end: start it, go on with it, or replace it."""
    job = state.job
    arguments = job.arguments()
    if state.replace:
        arguments.append("--overwrite")
    elif state.status in ("stopped", "failed"):
        arguments = ["--resume", job.folder.as_posix()]
    log = runs / "logs" / job.folder.relative_to(runs).with_suffix(".txt")
    return Order(key=job.key, verb=job.verb, arguments=tuple(arguments), log=str(log), launch=launch)


# ---------------------------------------------------------------------------------------------------------- --dry-run


def dry_run(states: Sequence[State], launch: str) -> str:
    """Every cell: state of its seeds, command, settings that the table gives and where values come from."""
    lines = []
    cells: dict[str, list[State]] = {}
    for state in states:
        cells.setdefault(state.job.key.cell, []).append(state)
    for number, (cell, mine) in enumerate(cells.items(), 1):
        first = mine[0]
        lines += [f"{number}. {cell}" + (" (prerequisite)" if first.job.hidden else "") + f": {_status(mine)}"]
        lines += [f"   {first.job.command(launch)}"]
        if len(mine) > 1:
            lines += [f"   and --seed {', '.join(str(s.job.key.seed) for s in mine[1:])}{_own_settings(mine)}"]
        lines += [f"   needs {name}: {need.cell}" for name, need in first.job.needs.items()]
        lines += [f"     {line}" for line in settings_and_sources(first)]
        lines += [""]
    done = sum(s.status == "done" for s in states)
    return "\n".join([*lines, f"{len(cells)} cells, {len(states)} runs, {done} of them done"])


def _own_settings(states: Sequence[State]) -> str:
    """Settings that depend on the seed, as the second one has them."""
    first, second = (state.meaning.tree for state in states[:2])
    own = [key for key, value in second.items() if key != "seed" and value != first.get(key)]
    return "".join(f"; {key} is their own, such as {yaml_value(second[key])}" for key in own)


def _status(states: Iterable[State]) -> str:
    parts = []
    for status, same in groupby(sorted(states, key=lambda s: s.status), key=lambda s: s.status):
        group = list(same)
        why = next((s.why for s in group if s.why), "")
        seeds = ", ".join(str(s.job.key.seed) for s in group)
        parts.append(f"{status} (seed {seeds})" + (f" [{why}]" if why else ""))
    return "; ".join(parts)


def settings_and_sources(state: State) -> list[str]:
    """Settings that flags gave, or whose source the recipe names: `key = value   who said it; where it is from`."""
    resolved = state.meaning.resolved
    if resolved is None:
        return [f"{key} = {yaml_value(value)}" for key, value in state.meaning.tree.items()]
    sources = resolved.sources
    lines = [f"recipe = {resolved.path.stem}   {resolved.why}"]
    for key, value in state.meaning.tree.items():
        speaker = resolved.said_by.get(key, "")
        source = sources.get(key) or sources.get(key.rpartition(".")[0], "")
        if key == "seed" or (key == "data" and not state.meaning.data_here):
            continue
        if speaker.startswith("--") or source:
            lines.append(f"{key} = {yaml_value(value)}   " + "; ".join(part for part in (speaker, source) if part))
    if not state.meaning.data_here:
        lines.append("data = imagenet   found by IMAGENET_DIR when it is run; it is not on this machine")
    return lines


# -------------------------------------------------------------------------------------------------------- --commands


def shell_lines(orders: Sequence[Order], launch: str) -> str:
    """A line a run, in an order that works."""
    return "\n".join(_line(order, launch) for order in orders)


def _line(order: Order, launch: str) -> str:
    return f"{head(order.verb, launch)} {shlex.join(order.arguments)}"


def slurm_script(orders: Sequence[Order], jobs: Sequence[Job], launch: str, name: str) -> str:
    """A script that submits one array a level: a level needs nothing but the levels before it."""
    level = levels(jobs, [order.key for order in orders])
    groups: dict[int, list[Order]] = {}
    for order in orders:
        groups.setdefault(level[order.key], []).append(order)
    lines = [
        "#!/bin/bash", f"# Runs of the table {name}: bash THIS_FILE submits {len(groups)} array(s), in order.",
        "# SBATCH_OPTIONS takes more options, such as '--gres=gpu:1 --time=24:00:00 --cpus-per-task=8'.",
        "set -euo pipefail", "after=",
    ]  # fmt: skip
    for number, group in sorted(groups.items()):
        lines += [
            "",
            f"job=$(sbatch --parsable --job-name={shlex.quote(Path(name).stem)}-{number} --array=0-{len(group) - 1} "
            "${after:+--dependency=afterok:$after} ${SBATCH_OPTIONS:-} <<'RUNS'",
            "#!/bin/bash",
            "case $SLURM_ARRAY_TASK_ID in",
            *(f"  {i}) {_line(order, launch)} ;;" for i, order in enumerate(group)),
            "esac",
            "RUNS",
            ")",
            "after=$job",
        ]
    return "\n".join(lines)


def levels(jobs: Sequence[Job], wanted: Sequence[Key]) -> dict[Key, int]:
    """How many wanted runs stand one behind the other before each: 0 for those that wait for nothing."""
    chosen, level = set(wanted), dict[Key, int]()
    for job in jobs:  # prerequisites come first
        below = [level[need] + (need in chosen) for need in job.needs.values() if need in level]
        level[job.key] = max(below, default=0)
    return {key: level[key] for key in wanted}


# ------------------------------------------------------------------------------------------------------ in the worker


def work(channel: Connection, threads: int) -> None:
    """A worker's life: one order after another, until the channel closes."""
    os.setsid()  # Ctrl-C reaches the one who gave the orders, and it tells us once
    os.environ["FINETUNE_MILE_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(threads)
    while True:
        try:
            order: Order | None = channel.recv()
        except EOFError:
            return
        if order is None:
            return
        began = time.monotonic()
        code = _carry_out(order)
        last = last_line(Path(order.log)) if code else ""
        channel.send(Outcome(key=order.key, code=code, seconds=time.monotonic() - began, last_line=last))


def _carry_out(order: Order) -> int:
    """Run a command with its output in the log; the exit code."""
    Path(order.log).parent.mkdir(parents=True, exist_ok=True)
    with Path(order.log).open("a", encoding="utf-8") as log, _output_to(log.fileno()):
        if order.launch is not None:
            return _launch([*shlex.split(head(order.verb, order.launch)), *order.arguments])
        try:
            cli = importlib.import_module("finetune_mile.cli")
            return int(cli.main([order.verb, *order.arguments]))
        except KeyboardInterrupt:
            return 130
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
        except BaseException:  # a worker outlives its runs' bugs
            traceback.print_exc()
            return 1
        finally:
            _forget_accelerator()


def _launch(words: list[str]) -> int:
    """A command as processes of its own, which hear of a stop as one group."""
    child = subprocess.Popen(words, start_new_session=True)
    before = signal.signal(signal.SIGTERM, lambda *_: os.killpg(child.pid, signal.SIGTERM))
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _output_to(file: int) -> Any:
    """Stdout and stderr, also those of libraries and children, go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    for number, _ in kept:
        os.dup2(file, number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def _forget_accelerator() -> None:
    """Accelerate keeps one state a process; the next run may want another precision."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    if not path.is_file():
        return ""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


# ---------------------------------------------------------------------------------- in the one process


@dataclass(slots=True)
class _Worker:
    process: Any
    channel: Connection
    threads: int
    key: Key | None = None


class Stopping(Exception):
    """The user wants an end."""


def run_jobs(
    jobs: Sequence[Job],
    orders: Sequence[Order],
    *,
    workers: int,
    threads: int,
    on_start: Callable[[Key], None],
    on_end: Callable[[Outcome], None],
) -> bool:
    """Carry out the orders, each after those that it needs; False: it was stopped.

    A run that fails takes those that need it out (they get an outcome of code 1), and the rest goes on.
    """
    needs = {job.key: set(job.needs.values()) for job in jobs}
    waiting = {order.key: order for order in orders}
    pool: list[_Worker] = []
    before = {s: signal.signal(s, _raise_stopping) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        pool = [_start(threads) for _ in range(min(workers, len(orders)))]
        _supply(pool, waiting, needs, on_start, on_end)
        return True
    except Stopping:
        for signum in before:
            signal.signal(signum, signal.SIG_IGN)  # once is enough
        _stop(pool, on_end)
        return False
    finally:
        for worker in pool:
            with contextlib.suppress(OSError):
                worker.channel.send(None)
        for worker in pool:
            worker.process.join(STOP_SECONDS)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _raise_stopping(*_: object) -> None:
    raise Stopping


def _start(threads: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, threads))
    process.start()
    theirs.close()
    return _Worker(process, mine, threads)


def _supply(
    pool: list[_Worker],
    waiting: dict[Key, Order],
    needs: dict[Key, set[Key]],
    on_start: Callable[[Key], None],
    on_end: Callable[[Outcome], None],
) -> None:
    """Keep the workers busy until nothing is left."""
    while waiting or any(w.key for w in pool):
        for worker in (w for w in pool if w.key is None):
            busy = {w.key for w in pool if w.key is not None}
            ready = next((k for k in waiting if not needs[k] & (waiting.keys() | busy)), None)
            if ready is not None:
                worker.channel.send(waiting.pop(ready))
                worker.key = ready
                on_start(ready)
        ended = multiprocessing.connection.wait([w.channel for w in pool if w.key is not None])
        for worker in (w for w in pool if w.channel in ended):
            outcome = _outcome_of(worker)
            on_end(outcome)
            if outcome.code:
                _drop_dependents(outcome.key, waiting, needs, on_end)
            if not worker.process.is_alive():
                fresh = _start(worker.threads)
                worker.process, worker.channel = fresh.process, fresh.channel


def _outcome_of(worker: _Worker) -> Outcome:
    assert worker.key is not None
    key, worker.key = worker.key, None
    try:
        outcome: Outcome = worker.channel.recv()
    except (EOFError, OSError):
        worker.process.join(STOP_SECONDS)
        code = worker.process.exitcode
        if code == -signal.SIGTERM:  # told to stop before the run listened
            return Outcome(key=key, code=128 + signal.SIGTERM, seconds=0.0, last_line="stopped")
        return Outcome(key=key, code=1, seconds=0.0, last_line=f"its process ended (exit code {code}); out of memory?")
    return outcome


def _drop_dependents(
    key: Key, waiting: dict[Key, Order], needs: dict[Key, set[Key]], on_end: Callable[[Outcome], None]
) -> None:
    for other in [k for k in waiting if key in needs[k]]:
        if waiting.pop(other, None) is not None:
            on_end(Outcome(key=other, code=1, seconds=0.0, last_line=f"not run: {key.cell}, seed {key.seed}, failed"))
            _drop_dependents(other, waiting, needs, on_end)


def _stop(pool: list[_Worker], on_end: Callable[[Outcome], None]) -> None:
    """Tell every busy worker once; a run saves itself and ends."""
    for worker in pool:
        if worker.key is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for worker in (w for w in pool if w.key is not None):
        if worker.channel.poll(max(deadline - time.monotonic(), 0.0)):
            on_end(_outcome_of(worker))


# --------------------------------------------------------------------------------------------------------- with a bar


def run_with_progress(jobs: Sequence[Job], orders: Sequence[Order], *, workers: int, threads: int) -> int:
    """0 all went well, 1 some failed, 130 stopped."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)  # names and errors have brackets
    logs = {order.key: order.log for order in orders}
    failed: list[Outcome] = []
    began, ended = time.monotonic(), 0
    together = min(workers, len(orders))
    console.print(f"{len(orders)} runs, {together} at a time with {threads} thread{'s' * (threads > 1)} each")
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"), console=console,
    )  # fmt: skip
    task = bar.add_task("starting", total=len(orders), left="")

    def on_start(key: Key) -> None:
        bar.update(task, description=f"{key.cell}, seed {key.seed}")

    def on_end(outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        key = outcome.key
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
