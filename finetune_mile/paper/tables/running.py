"""Run commands in worker processes that stay alive. No torch here.

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
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from finetune_mile.core.console import open_console
from finetune_mile.paper.tables.runs import Job, RunKey, RunState, shell_line
from finetune_mile.training.display import duration

STOP_SECONDS = 120.0  # a run that was told to stop may finish its step and save


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that brings one run to its end."""

    key: RunKey
    verb: str
    arguments: tuple[str, ...]
    log: str
    launch: str | None  # start it as a process of its own with these words


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended."""

    key: RunKey
    code: int
    seconds: float
    last_line: str


def command_for(state: RunState, runs: Path, launch: str | None, *, requeued: bool = False) -> Command:
    """The command that starts a run, resumes it, or replaces it.

    Args:
        state: of the run.
        runs: the folder of all runs.
        launch: words to start it with as a process of its own; None: in a worker.
        requeued: the same command may come again, after a part of the run is done.
    """
    job = state.job
    arguments = job.arguments()
    if state.replace:
        arguments.append("--overwrite")
    elif state.status in ("stopped", "failed"):
        arguments = ["--resume", job.folder.as_posix()]
    elif requeued:
        arguments += ["--resume", "auto"]
    log = runs / "logs" / job.folder.relative_to(runs).with_suffix(".txt")
    return Command(key=job.key, verb=job.verb, arguments=tuple(arguments), log=str(log), launch=launch)


# ------------------------------------------------------------------------------------------------------ in the worker


def work(channel: Connection, threads: int) -> None:
    """The main function of a worker: run one command after another, until the channel closes."""
    os.setsid()  # Ctrl-C reaches the main process only, which tells the workers once
    threading.Thread(target=_stop_without_table, daemon=True).start()
    os.environ["FINETUNE_MILE_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(threads)
    while True:
        try:
            command: Command | None = channel.recv()
        except EOFError:
            return
        if command is None:
            return
        began = time.monotonic()
        code = _execute(command)
        last = last_line(Path(command.log)) if code else ""
        with contextlib.suppress(BrokenPipeError):  # the main process was killed
            channel.send(Outcome(key=command.key, code=code, seconds=time.monotonic() - began, last_line=last))


def _stop_without_table() -> None:
    """When the main process was killed, tell this worker's run to stop: the same command will continue it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _execute(command: Command) -> int:
    """Run a command with its output in the log; return the exit code."""
    Path(command.log).parent.mkdir(parents=True, exist_ok=True)
    with Path(command.log).open("a", encoding="utf-8") as log, _output_to(log.fileno()):
        if command.launch is not None:
            return _launch(shlex.split(shell_line(command.verb, command.arguments, command.launch)))
        try:
            cli = importlib.import_module("finetune_mile.cli")
            return int(cli.main([command.verb, *command.arguments]))
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
    """Run a command in a process group of its own; SIGTERM is sent to the complete group."""
    child = subprocess.Popen(words, start_new_session=True)
    before = signal.signal(signal.SIGTERM, lambda *_: os.killpg(child.pid, signal.SIGTERM))
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _output_to(file: int) -> Iterator[None]:
    """Send stdout and stderr, also those of libraries and children, to a file."""
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
    """Accelerate keeps one state per process; the next run may need another precision."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def last_line(path: Path) -> str:
    if not path.is_file():
        return ""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


# ---------------------------------------------------------------------------------- in the one process


@dataclass(slots=True)
class _Worker:
    process: Any
    channel: Connection
    key: RunKey | None = None


def run_jobs(
    jobs: Sequence[Job],
    commands: Sequence[Command],
    *,
    workers: int,
    threads: int,
    on_start: Callable[[RunKey], None],
    on_end: Callable[[Outcome], None],
) -> bool:
    """Run the commands, each after those that it needs. Returns False if it was stopped.

    If a run fails, those that need it are not run (they get an outcome with code 1). The others continue.
    """
    needs = {job.key: set(job.needs.values()) for job in jobs}
    waiting = {command.key: command for command in commands}
    pool: list[_Worker] = []
    before = {s: signal.signal(s, signal.default_int_handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        pool = [_start(threads) for _ in range(min(workers, len(commands)))]
        _supply(pool, threads, waiting, needs, on_start, on_end)
        return True
    except KeyboardInterrupt:
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


def _start(threads: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, threads))
    process.start()
    theirs.close()
    return _Worker(process, mine)


def _supply(
    pool: list[_Worker],
    threads: int,
    waiting: dict[RunKey, Command],
    needs: dict[RunKey, set[RunKey]],
    on_start: Callable[[RunKey], None],
    on_end: Callable[[Outcome], None],
) -> None:
    while waiting or any(w.key for w in pool):
        for worker in (w for w in pool if w.key is None):
            busy = {w.key for w in pool if w.key is not None}
            ready = next((k for k in waiting if not needs[k] & (waiting.keys() | busy)), None)
            if ready is not None:
                worker.channel.send(waiting.pop(ready))
                worker.key = ready
                on_start(ready)
        ended = multiprocessing.connection.wait([w.channel for w in pool if w.key is not None])
        for index, worker in enumerate(pool):
            if worker.channel not in ended:
                continue
            outcome = _outcome_of(worker)
            on_end(outcome)
            failed = [outcome.key] if outcome.code else []
            for key in list(waiting):  # prerequisites come first
                need = next((other for other in failed if other in needs[key]), None)
                if need is not None:
                    del waiting[key]
                    failed.append(key)
                    why = f"not run: {need.cell}, seed {need.seed}, failed"
                    on_end(Outcome(key=key, code=1, seconds=0.0, last_line=why))
            if not worker.process.is_alive():
                pool[index] = _start(threads)


def _outcome_of(worker: _Worker) -> Outcome:
    assert worker.key is not None
    key, worker.key = worker.key, None
    try:
        outcome: Outcome = worker.channel.recv()
    except (EOFError, OSError):
        worker.process.join(STOP_SECONDS)
        code = worker.process.exitcode
        if code == -signal.SIGTERM:  # it came before the run had a handler for it
            return Outcome(key=key, code=128 + signal.SIGTERM, seconds=0.0, last_line="stopped")
        return Outcome(
            key=key, code=1, seconds=0.0, last_line=f"its process ended (exit code {code}), perhaps out of memory"
        )
    return outcome


def _stop(pool: list[_Worker], on_end: Callable[[Outcome], None]) -> None:
    """Send SIGTERM to every busy worker once; a run then saves a checkpoint and ends."""
    for worker in pool:
        if worker.key is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for worker in (w for w in pool if w.key is not None):
        if worker.channel.poll(max(deadline - time.monotonic(), 0.0)):
            on_end(_outcome_of(worker))


# --------------------------------------------------------------------------------------------------------- with a bar


def run_with_progress(jobs: Sequence[Job], commands: Sequence[Command], *, workers: int, threads: int) -> int:
    """Run the commands and show progress. Returns 0, 1 if some failed, 130 if stopped."""
    console = open_console(stderr=True, highlight=False, soft_wrap=True, markup=False)  # names and errors have brackets
    failed: list[Outcome] = []
    began, ended = time.monotonic(), 0
    together = min(workers, len(commands))
    console.print(f"{len(commands)} runs, {together} at a time with {threads} thread{'s' * (threads > 1)} each")
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"), console=console,
    )  # fmt: skip
    task = bar.add_task("starting", total=len(commands), left="")

    def on_start(key: RunKey) -> None:
        bar.update(task, description=f"{key.cell}, seed {key.seed}")

    def on_end(outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        key = outcome.key
        name = f"{key.cell}, seed {key.seed}"
        left = (time.monotonic() - began) / ended * (len(commands) - ended)
        words = f"about {duration(left)} left" if ended < len(commands) else ""
        bar.update(task, completed=ended, left=words)
        if outcome.code in (130, 143):
            console.print(f"  stopped {name}; run the same command again to continue it", style="yellow")
        elif outcome.code:
            failed.append(outcome)
            console.print(f"  FAILED {name}: {outcome.last_line}", style="red")
        else:
            console.print(f"  {ended}/{len(commands)} {name}: {duration(outcome.seconds)}. {words}", style="dim")

    with bar:
        complete = run_jobs(jobs, commands, workers=workers, threads=threads, on_start=on_start, on_end=on_end)
    if failed:
        console.print(f"{len(failed)} of {len(commands)} runs failed:", style="red")
        for outcome in failed:
            console.print(f"  {outcome.key.cell}, seed {outcome.key.seed}: {outcome.last_line}")
            console.print(f"    {next(command.log for command in commands if command.key == outcome.key)}")
    return 130 if not complete else int(bool(failed))
