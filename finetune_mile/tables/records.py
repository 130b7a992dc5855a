"""runs.jsonl: one line a run, all that a ledger is computed from besides its description. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune_mile.core.files import whole_file
from finetune_mile.core.problems import Problem
from finetune_mile.tables.cells import Key
from finetune_mile.tables.states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a run folder says about itself."""

    block: str
    row: str
    column: str
    seed: int
    status: str  # done, stale, stopped or failed
    recipe: str  # hash of the resolved recipe, without seed and places
    results: dict[str, float]
    seconds: float | None
    device: str | None
    threads: int | None
    commit: str | None
    why: str = ""

    @property
    def key(self) -> Key:
        """Which run."""
        return Key(self.block, self.row, self.column, self.seed)


def record_of(state: State) -> Record:
    """A looked-at run folder as a line; only a done run has results."""
    key, info, done = state.job.key, state.info, state.status == "done"
    return Record(
        block=key.block, row=key.row, column=key.column, seed=key.seed, status=state.status,
        recipe=state.meaning.hash, results=dict(state.results) if done else {}, seconds=info.get("seconds"),
        device=info.get("device"), threads=info.get("threads"), commit=info.get("git"),
        why=state.why,
    )  # fmt: skip


def records_of(states: Iterable[State]) -> list[Record]:
    """A line for each run that was begun."""
    return [record_of(s) for s in states if s.status != "not run"]


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write runs.jsonl at once."""
    with whole_file(path) as part:
        part.write_text("".join(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in records), encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """Read runs.jsonl."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            value: dict[str, Any] = json.loads(line)
            records.append(Record(**value))
        except (json.JSONDecodeError, TypeError) as error:
            raise Problem(f"{path} line {number} is not a run ({error}); write it anew with --ledger-only") from error
    return records
