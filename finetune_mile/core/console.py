"""Progress bars on the terminal, on stderr; nothing is shown where that is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(
    title: str, total: int | None, *, start: int = 0, in_bytes: bool = False, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar that is gone when the block ends; the block gets a function that adds to it."""
    from rich.console import Console  # here: --help must not wait for it
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    units = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *units)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, completed=start)
        yield lambda amount: bar.advance(task, amount)
