"""Where the time of a run went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

PARTS = {  # of `times` in run.json, and what each is for people
    "features": "features and first classifier",
    "trial": "trial with held-out labels",
    "train": "training steps",
    "data": "waiting for images",
    "evaluation": "evaluation during the run",
    "saving": "saving checkpoints",
    "then": "second stage, with images without a label",
    "report": "final scores, export and report",
    "refit": "training again on all labels",
}
REST = "start: imports, opening the data, loading the checkpoint"
BOOKKEEPING = ("evaluation", "saving", "report")  # without these the model would be the same
SHOWN = 0.05  # seconds; less is no row
Item = TypeVar("Item")


@dataclass(slots=True)
class Times:
    """Seconds by part. What a part inside of another one takes counts for the inner one."""

    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count the time inside for a part."""
        self.note()
        self._open.append(part)
        try:
            yield
        finally:
            self.note()
            self._open.pop()

    def note(self) -> None:
        """Count what has passed since the last call for the part that is open."""
        now = time.monotonic()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def waiting(self, items: Iterator[Item], part: str) -> Iterator[Item]:
        """The same endless items; the time until each comes counts for a part."""
        while True:
            with self.of(part):
                item = next(items)
            yield item


def time_rows(times: Mapping[str, float], total: float) -> list[tuple[str, float, float]]:
    """What the time went to, its seconds, and its share of `total` in per cent; what no part has is the last row."""
    rows = [(name, times[part]) for part, name in PARTS.items() if times.get(part, 0.0) >= SHOWN]
    rest = total - sum(times.values())
    rows += [(REST, rest)] if rest >= SHOWN else []
    return [(name, seconds, 100 * seconds / total) for name, seconds in rows]


def bookkeeping(times: Mapping[str, float], total: float) -> float:
    """The share of BOOKKEEPING in `total`, in per cent."""
    return 100 * sum(times.get(part, 0.0) for part in BOOKKEEPING) / total if total else 0.0


def duration(seconds: float) -> str:
    """Seconds in the unit that a reader would use."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.{1 if seconds < 360_000 else 0}f} h"
