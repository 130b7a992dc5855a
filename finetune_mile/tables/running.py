"""Run jobs in worker processes that stay alive: torch is imported once, a run of seconds stays one of seconds."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from finetune_mile.tables.cells import Job, Key, head
from finetune_mile.tables.states import State

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


# ------------------------------------------------------------------------------------- in the worker


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
            import traceback

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
