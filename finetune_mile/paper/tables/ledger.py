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
from finetune_mile.paper.tables.description import Bar, Table, TableBlock
from finetune_mile.paper.tables.runs import RunKey, RunRecord, layered


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Values over seeds: their mean (NaN of none) and sample standard deviation (None for one seed)."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def sd(self) -> float | None:
        return statistics.stdev(self.values) if self.n > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One measure of one cell beside the paper's."""

    ours: Spread
    paper: float | None

    @property
    def delta(self) -> float | None:
        return None if self.paper is None or not self.ours.n else self.ours.mean - self.paper

    @property
    def verdict(self) -> str:
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
    seeds: int  # expected
    runs: Sequence[RunRecord]  # that are done
    others: Sequence[RunRecord]  # stale, stopped, failed
    price: str  # estimated time of a run, where none is done
    seconds: float | None  # mean of the runs
    commit: str  # of the runs, short
    recipe: str  # hash of the resolved recipe


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
        return sum(v > 0 for v in self.paired.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBar:
    """A bar and its measured values."""

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
    """A block with its numbers."""

    block: TableBlock
    cells: tuple[Cell, ...]
    differences: tuple[Difference, ...]
    bars: tuple[CheckedBar, ...]
    constants: Mapping[str, Mapping[str, Spread]]  # name: column: values
    rules: Mapping[str, tuple[str, ...]]  # prediction set that the description asks for: rows

    def cell(self, row: str, column: str) -> Cell | None:
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
    """Largest distance of one more run from our mean by chance (95 %)."""
    from scipy.stats import t

    assert ours.sd is not None
    return float(t.ppf(0.975, ours.n - 1)) * ours.sd * math.sqrt(1 + 1 / ours.n)


Grid = dict[tuple[str, str, str], dict[int, RunRecord]]  # block, row, column: seed: record


def make_ledger(table: Table, records: Sequence[RunRecord], prices: Mapping[str, str]) -> Ledger:
    """Compute all numbers; `prices` are cells in words and their prices in words."""
    done: Grid = {}
    others: Grid = {}
    for record in records:
        grid = done if record.status == "done" else others
        grid.setdefault((record.block, record.row, record.column), {})[record.seed] = record
    _check_measures(table, done)
    _add_means(table, done)
    blocks = [_block(table, block, done, others, prices) for block in table.blocks if block.shown_rows]
    finished = [r for r in records if r.status == "done"]
    expected = sum(len(table.seeds_of(b, row)) * len(b.columns_of(row)) for b in table.blocks for row in b.rows)
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


def _mean_of(runs: Sequence[RunRecord], column: str) -> RunRecord:
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


def _block(table: Table, block: TableBlock, done: Grid, others: Grid, prices: Mapping[str, str]) -> BlockLedger:
    cells = []
    for row in block.shown_rows:
        for column in block.shown_columns_of(row):
            place = (block.name, row, column)
            runs = _by_seed(done, place)
            seconds = [r.seconds for r in runs if r.seconds is not None]
            commits = ["?" if r.commit is None else r.commit[:7] + "+" * r.commit.endswith("-dirty") for r in runs]
            paper = block.paper.get(row, {}).get(column, {})
            cells.append(
                Cell(
                    row=row, column=column, seeds=len(table.seeds_of(block, row)), runs=runs,
                    others=_by_seed(others, place), price=prices.get(RunKey(*place, 0).cell, ""),
                    seconds=statistics.fmean(seconds) if seconds else None, commit=", ".join(dict.fromkeys(commits)),
                    recipe=", ".join(dict.fromkeys(r.recipe for r in runs)),
                    numbers={
                        name: Number(ours=_spread(runs, key), paper=paper.get(name))
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
            if (paired := _values(table, block, ((a, name), (b, name)), column, done)) is not None
        ),
        bars=tuple(_checked(table, block, bar, done) for bar in block.bars),
        constants={
            name: {column: _constant(block, column, key, done) for column in block.shown_columns}
            for name, key in block.constants.items()
        },
        rules=_prediction_sets(table, block),
    )  # fmt: skip


def _prediction_sets(table: Table, block: TableBlock) -> dict[str, tuple[str, ...]]:
    """The rows of each prediction set, where the description of the table says which: F1 and coverage depend on it."""
    rows: dict[str, tuple[str, ...]] = {}
    for row in block.shown_rows:
        settings = layered(table.settings, block.settings, block.rows[row].settings)
        if (rule := settings.get("evaluate.prediction_set")) is not None:
            rows[rule] = (*rows.get(rule, ()), row)
    return rows


def _by_seed(grid: Grid, place: tuple[str, str, str]) -> list[RunRecord]:
    return [run for _, run in sorted(grid.get(place, {}).items())]


def _spread(runs: Sequence[RunRecord], key: str) -> Spread:
    return Spread(values=tuple(r.results[key] for r in runs if key in r.results))


def _values(
    table: Table, block: TableBlock, subjects: Sequence[tuple[str, str]], column: str, done: Grid
) -> Spread | None:
    """Values of a row and measure; of two of them first minus second, for the seeds that both have.

    None: one of the rows is not in the column, or --quick left its block out.
    """
    values: list[dict[int, float]] = []
    for reference, measure in subjects:
        cell = table.find_cell(reference, block, column)
        if cell is None:
            return None
        other, row, own_column = cell
        key = other.measures.get(measure, block.measures[measure])
        runs = _by_seed(done, (other.name, row, own_column))
        values.append({r.seed: r.results[key] for r in runs if key in r.results})
    if len(values) == 1:
        return Spread(values=tuple(values[0].values()))
    first, second = values
    return Spread(values=tuple(first[seed] - second[seed] for seed in first if seed in second))


def _checked(table: Table, block: TableBlock, bar: Bar, done: Grid) -> CheckedBar:
    seeds = [set(table.seeds_of(*place)) for row in bar.subject if (place := table.find(row, block)) is not None]
    expected = len(set.intersection(*seeds)) if len(seeds) == len(bar.subject) else 0  # --quick left a block out
    measures = (bar.measure, bar.against or bar.measure)
    measured = _values(table, block, list(zip(bar.subject, measures, strict=False)), bar.column, done)
    return CheckedBar(bar=bar, measured=measured or Spread(values=()), expected=expected)


def _constant(block: TableBlock, column: str, key: str, done: Grid) -> Spread:
    """Values of a constant in a column, over all rows and seeds; they are the same unless the data differ."""
    runs = [run for row in block.shown_rows for run in _by_seed(done, (block.name, row, column))]
    return Spread(values=tuple(dict.fromkeys(_spread(runs, key).values)))
