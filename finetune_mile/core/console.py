"""Progress on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_SECONDS = 10.0  # without a terminal: a line this often


@contextmanager
def progress(
    title: str, total: int | None, *, start: int = 0, in_bytes: bool = False, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar that is gone when the block ends, or lines; the block gets a function that adds to it."""
    from rich.console import Console  # here: --help must not wait for it

    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        yield _lines(title, total, start, in_bytes=in_bytes)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    units = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *units)
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(title, total=total, completed=start)
        yield lambda amount: bar.advance(task, amount)


def _lines(title: str, total: int | None, done: int, *, in_bytes: bool) -> Callable[[int], None]:
    """Add to a count that is printed every PLAIN_SECONDS."""
    last = time.monotonic()

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last > PLAIN_SECONDS:
            from rich.filesize import decimal

            last = time.monotonic()
            shown = [decimal(number) if in_bytes else f"{number:,}" for number in (done, total) if number is not None]
            sys.stderr.write(f"{title}: {' of '.join(shown)}\n")

    return advance
