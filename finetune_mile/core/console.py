"""Progress on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from finetune_mile.core.problems import inert

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_SECONDS = 10.0  # without a terminal: a line this often


def open_console(**options: Any) -> Console:
    """A rich console that shows control characters in names escaped, whatever is printed. `options` are rich's."""
    return _inert_console()(**options)


@cache
def _inert_console() -> type[Console]:
    from rich.console import Console  # here: --help must not wait for it
    from rich.segment import Segment

    class InertConsole(Console):
        def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*args, **options):
                if not segment.control and not segment.text.isprintable():
                    lines = [inert(line, 10 * len(line)) for line in segment.text.split("\n")]
                    segment = segment._replace(text="\n".join(lines))
                yield segment

    return InertConsole


@contextmanager
def progress(
    title: str, total: int | None, *, start: int = 0, in_bytes: bool = False, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar that is gone when the block ends, or lines; the block gets a function that adds to it."""
    out = open_console(stderr=True)
    if not quiet and not out.is_terminal:
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
    with Progress(*columns, console=out, transient=True, disable=quiet) as bar:
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
            sys.stderr.write(f"{inert(title)}: {' of '.join(shown)}\n")

    return advance
