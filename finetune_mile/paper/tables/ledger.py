"""The ledger of a table: a pure function of its description, its runs.jsonl and its prices. No torch here.

Noise: the paper's number is one more draw of a random process that we know by n seeds, so the two differ by more than
chance where they are further apart than t(0.975, n - 1) * sd * sqrt(1 + 1 / n). One seed has no sd, and no verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables.cells import Key
from finetune_mile.paper.tables.description import Bar, Block, Table
from finetune_mile.paper.tables.states import Record

Verdict = Literal["within noise", "higher", "lower", "one seed", "not run", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Values over seeds."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        """Number of seeds."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Their mean; NaN of none."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def sd(self) -> float | None:
        """Their sample standard deviation; None for one seed."""
        return statistics.stdev(self.values) if self.n > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One measure of one cell beside the paper's."""

    measure: str
    ours: Spread
    paper: float | None

    @property
    def delta(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.paper is None or not self.ours.n else self.ours.mean - self.paper

    @property
    def verdict(self) -> Verdict:
        """Does ours differ from the paper's by more than chance?"""
        if not self.ours.n:
            return "not run"
        if self.delta is None:
            return ""
        if self.ours.sd is None:
            return "one seed"
        if abs(self.delta) <= noise(self.ours):
            return "within noise"
        return "higher" if self.delta > 0 else "lower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row in a column."""

    row: str
    column: str
    numbers: Mapping[str, Number]
    seeds: int  # how many there are to be
    runs: tuple[Record, ...]  # that are done
    others: tuple[Record, ...]  # stale, stopped, failed
    price: str  # what a run would take here, where none is done

    @property
    def seconds(self) -> float | None:
        """Mean cost of a run."""
        known = [r.seconds for r in self.runs if r.seconds is not None]
        return statistics.fmean(known) if known else None

    @property
    def commit(self) -> str:
        """The commits that the runs were made with, short."""
        return ", ".join(dict.fromkeys(short_commit(r.commit) for r in self.runs))

    @property
    def recipe(self) -> str:
        """Hash of the resolved recipe."""
        return ", ".join(dict.fromkeys(r.recipe for r in self.runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """First row minus second, seed by seed."""

    first: str
    second: str
    column: str
    measure: str
    paired: Spread

    @property
    def up(self) -> int:
        """Seeds in which the first is higher."""
        return sum(v > 0 for v in self.paired.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBar:
    """A bar and what was measured."""

    bar: Bar
    measured: Spread
    expected: int  # seeds

    @property
    def outcome(self) -> Literal["met", "NOT met", "not run", "seeds missing"]:
        """The mean over all seeds, or each of them, against the bounds; some of the seeds are not enough."""
        if not self.measured.n:
            return "not run"
        if self.measured.n < self.expected:
            return "seeds missing"
        low, high = self.bar.bounds
        values = self.measured.values if self.bar.each else (self.measured.mean,)
        return "met" if all(low <= value <= high for value in values) else "NOT met"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLedger:
    """All that is shown of a block."""

    block: Block
    cells: tuple[Cell, ...]
    differences: tuple[Difference, ...]
    bars: tuple[CheckedBar, ...]
    constants: Mapping[str, Mapping[str, Spread]]  # name: column: values

    def cell(self, row: str, column: str) -> Cell | None:
        """The cell of a row and column; None where the row does not exist."""
        return next((c for c in self.cells if (c.row, c.column) == (row, column)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """A table with its numbers."""

    table: Table
    blocks: tuple[BlockLedger, ...]
    runs: int  # done
    expected: int
    seconds: float
    devices: tuple[str, ...]


def noise(ours: Spread) -> float:
    """How far a single other draw may lie from our mean by chance (95 %)."""
    from scipy.stats import t

    assert ours.sd is not None
    return float(t.ppf(0.975, ours.n - 1)) * ours.sd * math.sqrt(1 + 1 / ours.n)


def short_commit(commit: str | None) -> str:
    """Seven digits; `+` marks changes that were not committed."""
    if commit is None:
        return "?"
    return commit[:7] + ("+" if commit.endswith("-dirty") else "")


Grid = dict[tuple[str, str, str], dict[int, Record]]  # block, row, column: seed: record


def make_ledger(table: Table, records: Sequence[Record], prices: Mapping[str, str]) -> Ledger:
    """Compute everything that is shown; prices: cell in words -> price in words."""
    done: Grid = {}
    others: Grid = {}
    for record in records:
        grid = done if record.status == "done" else others
        grid.setdefault((record.block, record.row, record.column), {})[record.seed] = record
    _check_measures(table, done)
    _add_means(table, done)
    blocks = [_block(table, block, done, others, prices) for block in table.blocks if block.shown_rows]
    finished = [r for r in records if r.status == "done"]
    expected = sum(
        len(table.seeds_of(b, row)) * len(b.columns_of(row)) for b in table.blocks for row in b.rows
    )  # fmt: skip
    devices = [f"{r.device}, {r.threads} thread{'s' if r.threads != 1 else ''}" for r in finished if r.device]
    return Ledger(
        table=table, blocks=tuple(blocks), runs=len(finished), expected=expected,
        seconds=math.fsum(r.seconds or 0.0 for r in finished), devices=tuple(dict.fromkeys(devices)),
    )  # fmt: skip


def _add_means(table: Table, done: Grid) -> None:
    """Fill the columns that are means of others, for the seeds that all of these have; a cost is the sum."""
    for block in table.blocks:
        for name, columns in block.means.items():
            for row in block.rows:
                parts = [done.get((block.name, row, c), {}) for c in columns]
                seeds = set.intersection(*(set(p) for p in parts))
                done[block.name, row, name] = {seed: _mean_of([p[seed] for p in parts], name) for seed in seeds}


def _mean_of(runs: Sequence[Record], column: str) -> Record:
    keys = [key for key in runs[0].results if all(key in r.results for r in runs)]
    seconds = [r.seconds for r in runs if r.seconds is not None]
    return replace(
        runs[0], column=column, results={key: statistics.fmean(r.results[key] for r in runs) for key in keys},
        seconds=math.fsum(seconds) if seconds else None, recipe=", ".join(dict.fromkeys(r.recipe for r in runs)),
    )  # fmt: skip


def _check_measures(table: Table, done: Grid) -> None:
    """A measure that no finished run of its block has is a mistake in the description."""
    wrong = []
    for block in table.blocks:
        mine = [r for (name, row, _), runs in done.items() for r in runs.values()
                if name == block.name and row in block.shown_rows]  # fmt: skip
        known = {key for r in mine for key in r.results}
        if not mine:
            continue
        for kind, keys in (("measures", block.measures), ("constants", block.constants)):
            wrong += [
                f"block {block.name}: {kind} {name}: no run has {key!r} in its results.json; "
                f"there are {', '.join(sorted(known))}"
                for name, key in keys.items()
                if key not in known
            ]
    if wrong:
        raise Problem(*wrong)


def _block(table: Table, block: Block, done: Grid, others: Grid, prices: Mapping[str, str]) -> BlockLedger:
    cells = []
    for row in block.shown_rows:
        for column in block.shown_columns_of(row):
            place = (block.name, row, column)
            runs = done.get(place, {})
            paper = block.paper.get(row, {}).get(column, {})
            cells.append(
                Cell(
                    row=row, column=column, seeds=len(table.seeds_of(block, row)), runs=_sorted(runs),
                    others=_sorted(others.get(place, {})), price=prices.get(Key(*place, 0).cell, ""),
                    numbers={
                        name: Number(measure=name, ours=_spread(runs, key), paper=paper.get(name))
                        for name, key in block.measures.items()
                    },
                )
            )  # fmt: skip
    return BlockLedger(
        block=block, cells=tuple(cells),
        differences=tuple(
            Difference(first=a, second=b, column=column, measure=name, paired=paired)
            for a, b in block.differences
            for column in block.shown_columns
            for name in block.measures
            if (paired := _paired(table, block, a, b, column, name, done)) is not None
        ),
        bars=tuple(_checked(table, block, bar, done) for bar in block.bars),
        constants={name: _constant(block, key, done) for name, key in block.constants.items()},
    )  # fmt: skip


def _sorted(runs: Mapping[int, Record]) -> tuple[Record, ...]:
    return tuple(runs[seed] for seed in sorted(runs))


def _spread(runs: Mapping[int, Record], key: str) -> Spread:
    return Spread(values=tuple(r.results[key] for r in _sorted(runs) if key in r.results))


def _values(table: Table, block: Block, reference: str, column: str, measure: str, done: Grid) -> dict[int, float]:
    """Seed to value of a row of this or another block."""
    place = table.find(reference, block)
    if place is None:  # --quick left its block out
        return {}
    other, row = place
    columns = other.shown_columns_of(row)
    column = column if column in columns else columns[0] if len(columns) == 1 else column
    key = other.measures.get(measure, block.measures[measure])
    runs = done.get((other.name, row, column), {})
    return {seed: r.results[key] for seed, r in sorted(runs.items()) if key in r.results}


def _paired(
    table: Table, block: Block, a: str, b: str, column: str, measure: str, done: Grid, against: str | None = None
) -> Spread | None:
    """First minus second for the seeds that both have; None where one of the rows is not in the column."""
    for reference in (a, b):
        place = table.find(reference, block)
        if place is None:
            return None
        columns = place[0].shown_columns_of(place[1])
        if column not in columns and (len(columns) != 1 or place[0].name == block.name):
            return None
    pairs = ((a, measure), (b, against or measure))
    first, second = (_values(table, block, row, column, name, done) for row, name in pairs)
    return Spread(values=tuple(first[s] - second[s] for s in first if s in second))


def _checked(table: Table, block: Block, bar: Bar, done: Grid) -> CheckedBar:
    subject = bar.rows or (bar.row or "",)
    seeds = [set(table.seeds_of(*place)) for row in subject if (place := table.find(row, block)) is not None]
    expected = len(set.intersection(*seeds)) if len(seeds) == len(subject) else 0  # --quick left a block out
    if bar.rows is not None:
        paired = _paired(table, block, *bar.rows, bar.column, bar.measure, done, bar.against)
        return CheckedBar(bar=bar, measured=paired or Spread(values=()), expected=expected)
    values = _values(table, block, subject[0], bar.column, bar.measure, done)
    return CheckedBar(bar=bar, measured=Spread(values=tuple(values.values())), expected=expected)


def _constant(block: Block, key: str, done: Grid) -> dict[str, Spread]:
    """Values of a constant in each column, over all rows and seeds; they are the same unless the data differ."""
    spreads = {}
    for column in block.shown_columns:
        places = [done.get((block.name, row, column), {}) for row in block.shown_rows]
        values = [v for runs in places for v in _spread(runs, key).values]
        spreads[column] = Spread(values=tuple(dict.fromkeys(values)))
    return spreads
