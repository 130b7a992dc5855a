"""The description of a table, recipes/tables/NAME.yaml: all of it is checked before any work. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from finetune_mile.config.resolve import read_yaml
from finetune_mile.core.files import shipped
from finetune_mile.core.problems import Problem, did_you_mean
from finetune_mile.core.types import Section

Settings = dict[str, Any]  # recipe keys, dotted or nested; also `recipe`
Seeds = tuple[int, ...]
EXTRA = {"html": "ledger.html", "csv": "ledger.csv", "latex": "ledger.tex"}  # written on demand: `--format`


class Row(Section):
    """One way of training: a row of a block, in some or all of its columns."""

    settings: Settings = Field(default={})
    note: str = ""
    only: tuple[str, ...] | None = Field(default=None, description="columns where the row exists; null: all")
    needs: dict[str, str] = Field(default={}, description="name: ROW, BLOCK/ROW or BLOCK/ROW/COLUMN to run before")
    verb: str = Field(default="run", description="another command of finetune-mile, such as pretrain")
    seeds: Seeds | None = None
    hidden: bool = Field(default=False, description="a prerequisite that is no result")


class Bar(Section):
    """A bound on a mean over seeds, or on each seed: of a row, or of the paired difference of two."""

    row: str | None = None
    rows: tuple[str, str] | None = Field(default=None, description="first minus second, paired by seed")
    column: str = ""
    measure: str
    against: str | None = Field(default=None, description="the second row's measure, where it is another one")
    each: bool = Field(default=False, description="every seed must meet it, not only their mean")
    at_least: float | None = None
    at_most: float | None = None
    between: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _one_subject(self) -> Bar:
        if (self.row is None) == (self.rows is None):
            raise ValueError("a bar is about either row: or rows:")
        if self.against is not None and self.rows is None:
            raise ValueError("against: is the measure of a second row; name both in rows:")
        if self.at_least is None and self.at_most is None and self.between is None:
            raise ValueError("a bar needs at_least:, at_most: or between:")
        if self.between is not None and self.between[0] > self.between[1]:
            raise ValueError("between: is [lowest, highest]")
        return self

    @property
    def subject(self) -> tuple[str, ...]:
        return self.rows or (self.row or "",)

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = self.between or (float("-inf"), float("inf"))
        low = low if self.at_least is None else max(low, self.at_least)
        return low, high if self.at_most is None else min(high, self.at_most)


class Heatmap(Section):
    """Draw a sweep as maps: x and y are settings, the colour of each map is a measure (its shown name)."""

    x: str
    y: str
    measures: tuple[str, ...] = Field(min_length=1)


class Curve(Section):
    """Draw a trade-off: rows in their order, one measure against another (their shown names), and rivals beside."""

    x: str
    y: str
    rows: tuple[str, ...] | None = Field(default=None, description="rows that a line joins; null: all")
    rivals: tuple[str, ...] = Field(default=(), description="rows that are points beside the line")
    rivals_y: str | None = Field(default=None, description="their measure, where it is another one than y")


class TableBlock(Section):
    """Rows and columns that share measures."""

    name: str
    about: str = ""
    hidden: bool = False
    seeds: Seeds | None = None
    settings: Settings = Field(default={})
    columns: dict[str, Settings] = Field(default={"": {}})
    means: dict[str, tuple[str, ...]] = Field(default={}, description="a column that is the mean of these, per seed")
    rows: dict[str, Row]
    measures: dict[str, str] = Field(default={}, description="shown name: key of results.json")
    paper: dict[str, dict[str, dict[str, float | None]]] = Field(
        default={}, description="row: column: measure: the paper's number"
    )
    differences: tuple[tuple[str, str], ...] = ()
    bars: tuple[Bar, ...] = ()
    constants: dict[str, str] = Field(default={}, description="shown name: key of results.json; once per block")
    heatmap: Heatmap | None = None
    curve: Curve | None = None

    @property
    def shown_rows(self) -> list[str]:
        return [] if self.hidden else [name for name, row in self.rows.items() if not row.hidden]

    def columns_of(self, row: str) -> list[str]:
        only = self.rows[row].only
        return [c for c in self.columns if only is None or c in only]

    @property
    def shown_columns(self) -> list[str]:
        """Columns of runs, then those that are means of them."""
        return [*self.columns, *self.means]

    def shown_columns_of(self, row: str) -> list[str]:
        """The same for one row: a mean exists where all its columns do."""
        own = self.columns_of(row)
        return [*own, *(name for name, parts in self.means.items() if set(parts) <= set(own))]


class QuickBlock(Section):
    """The part of a block that --quick runs."""

    columns: tuple[str, ...] | None = None
    rows: tuple[str, ...] | None = None
    seeds: Seeds | None = None
    settings: Settings = Field(default={})


class Quick(Section):
    """The part of a table that --quick runs. Blocks that are not named are left out, unless no block is named."""

    seeds: Seeds | None = None
    settings: Settings = Field(default={})
    blocks: dict[str, QuickBlock] = Field(default={})


class Table(Section):
    """All that recipes/tables/NAME.yaml says."""

    title: str
    about: str = ""
    runs: str
    settings: Settings = Field(default={})
    seeds: Seeds = (0,)
    blocks: tuple[TableBlock, ...] = Field(min_length=1)
    quick: Quick | None = None

    def block(self, name: str) -> TableBlock:
        return next(b for b in self.blocks if b.name == name)

    def seeds_of(self, block: TableBlock, row: str) -> Seeds:
        """The seeds of a row: its own, else the block's, else the table's."""
        own = block.rows[row].seeds
        return own if own is not None else block.seeds if block.seeds is not None else self.seeds

    def find(self, reference: str, block: TableBlock) -> tuple[TableBlock, str] | None:
        """The block and row of a reference: `ROW` (of `block`) or `BLOCK/ROW`. None: there is no such row."""
        if reference in block.rows:
            return block, reference
        name, _, row = reference.partition("/")
        for other in self.blocks:
            if other.name == name and row in other.rows:
                return other, row
        return None

    def find_cell(self, reference: str, block: TableBlock, column: str) -> tuple[TableBlock, str, str] | None:
        """Block, row and column of a reference; None: no such cell. Another block's only column stands for any."""
        place = self.find(reference, block)
        if place is None:
            return None
        other, row = place
        columns = other.shown_columns_of(row)
        if other.name != block.name and len(columns) == 1:
            return other, row, columns[0]
        return (other, row, column) if column in columns else None

    def find_need(self, reference: str, block: TableBlock) -> tuple[TableBlock, str, str | None] | None:
        """Block, row and, if the reference names it, column of a `needs` entry. None: it does not exist."""
        place = self.find(reference, block)
        if place is not None:
            return (*place, None)
        front, _, column = reference.rpartition("/")
        place = self.find(front, block)
        return (*place, column) if place is not None and column in place[0].columns_of(place[1]) else None


def shipped_tables() -> list[Path]:
    return sorted((shipped("recipes") / "tables").glob("*.yaml"))


def find_table(name: str) -> Path:
    folder = shipped("recipes") / "tables"
    for path in (Path(name), folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return path
    names = [each.stem for each in shipped_tables()]
    raise Problem(f"table {name}: no such table or file; {did_you_mean(name, names)}")


def read_table(path: Path, *, quick: bool = False) -> Table:
    """Read and check a description, or its short form; the `Problem` lists everything that is wrong with it."""
    try:
        table = Table.model_validate(read_yaml(path))
    except ValidationError as error:
        wrong = []
        for item in error.errors():
            key, message = ".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")
            wrong.append(f"{key or 'it'}: {message[0].lower()}{message[1:]}")
        raise Problem(*(f"table {path.name}: {sentence}" for sentence in wrong)) from error
    if wrong := wrong_with(table):
        raise Problem(*(f"table {path.name}: {sentence}" for sentence in wrong))
    return quick_table(table) if quick else table


# ------------------------------------------------------------------------------- references, all at once


def wrong_with(table: Table) -> list[str]:
    """A sentence for every name in a description that does not exist."""
    wrong: list[str] = []
    names = [b.name for b in table.blocks]
    wrong += [f"two blocks are named {n}" for n in sorted({n for n in names if names.count(n) > 1})]
    for block in table.blocks:
        wrong += [f"block {block.name}: {sentence}" for sentence in _wrong_in_block(table, block)]
    for name, part in (table.quick.blocks if table.quick else {}).items():
        if name not in names:
            wrong += _missing("quick", "block", [name], names)
            continue
        wrong += _missing(f"quick {name}", "row", part.rows or (), table.block(name).rows)
        wrong += _missing(f"quick {name}", "column", part.columns or (), table.block(name).columns)
    return wrong


def _wrong_in_block(table: Table, block: TableBlock) -> list[str]:
    wrong = []
    if not block.columns:
        wrong.append("columns: is empty; leave it out for a block without columns")
    for kind, names in (("block", [block.name]), ("row", block.rows), ("column", block.shown_columns)):
        wrong += [f"{kind} {n}: a name must not hold a slash" for n in names if "/" in n]
    for name, row in block.rows.items():
        wrong += _missing(f"row {name}: only", "column", row.only or (), block.columns)
        wrong += [
            f"row {name}: needs {need}: there is no row {where}; write ROW, BLOCK/ROW or BLOCK/ROW/COLUMN"
            for need, where in row.needs.items()
            if table.find_need(where, block) is None
        ]
    for name, parts in block.means.items():
        wrong += _missing(f"means {name}", "column", parts, block.columns)
        if name in block.columns or not parts:
            wrong.append(f"means {name}: must name columns, and must not be a column itself")
    wrong += _missing("paper", "row", block.paper, block.rows)
    for name, columns in block.paper.items():
        wrong += _missing(f"paper {name}", "column", columns, block.shown_columns)
        wrong += _missing(f"paper {name}", "measure", {m for ms in columns.values() for m in ms}, block.measures)
    unknown = [r for pair in block.differences for r in pair if table.find(r, block) is None]
    wrong += _missing("differences", "row", unknown, block.rows)
    for bar in block.bars:
        unknown = [r for r in bar.subject if table.find(r, block) is None]
        wrong += _missing("bars", "row", unknown, block.rows)
        wrong += _missing("bars", "column", [bar.column], block.shown_columns)
        if bar.column in block.shown_columns:
            without = [r for r in bar.subject if table.find_cell(r, block, bar.column) is None]
            known = [r for r in without if (place := table.find(r, block)) and place[0].columns_of(place[1])]
            wrong += [f"bars: row {r} has no column {bar.column!r}" for r in known]
        wrong += _missing("bars", "measure", [bar.measure, bar.against or bar.measure], block.measures)
    if block.heatmap is not None:
        wrong += _missing("heatmap", "measure", block.heatmap.measures, block.measures)
    if (curve := block.curve) is not None:
        wrong += _missing("curve", "row", (*(curve.rows or ()), *curve.rivals), block.rows)
        wrong += _missing("curve", "measure", [curve.x, curve.y, curve.rivals_y or curve.y], block.measures)
    return list(dict.fromkeys(wrong))


def _missing(where: str, kind: str, used: Iterable[str], names: Collection[str]) -> list[str]:
    unknown = [name for name in used if name not in names]
    return [f"{where}: there is no {kind} {n!r}; {did_you_mean(repr(n), map(repr, names))}" for n in unknown]


# ------------------------------------------------------------------------------------------- --quick: a smaller table


def quick_table(table: Table) -> Table:
    """Select the rows for --quick. Rows that others depend on are kept but not shown."""
    quick = table.quick
    if quick is None:
        raise Problem(f"--quick: the table {table.title!r} has no short form. Add a block quick: to it.")
    parts = quick.blocks or {b.name: QuickBlock() for b in table.blocks}
    shown = {(name, row) for name, part in parts.items() for row in part.rows or table.block(name).shown_rows}
    kept = list(shown)
    for name, row in kept:  # grows by the rows that these need
        block = table.block(name)
        for reference in block.rows[row].needs.values():
            need = table.find_need(reference, block)
            assert need is not None  # checked when it was read
            if (need[0].name, need[1]) not in kept:
                kept.append((need[0].name, need[1]))
    return table.model_copy(
        update={
            "title": f"{table.title} (quick)", "quick": None, "runs": f"{table.runs}-quick",
            "settings": {**table.settings, **quick.settings}, "seeds": _fewer(table.seeds, quick.seeds),
            "blocks": tuple(
                _shrink(table, block, parts.get(block.name, QuickBlock()), kept, shown)
                for block in table.blocks
                if block.name in dict(kept)
            ),
        }
    )  # fmt: skip


def _shrink(
    table: Table, block: TableBlock, part: QuickBlock, kept: list[tuple[str, str]], shown: set[tuple[str, str]]
) -> TableBlock:
    """A block for --quick; `kept` and `shown` are blocks and rows."""
    assert table.quick is not None
    seeds = part.seeds if part.seeds is not None else table.quick.seeds
    columns = {c: s for c, s in block.columns.items() if part.columns is None or c in part.columns}
    means = {name: parts for name, parts in block.means.items() if set(parts) <= set(columns)}
    shown_columns = {*columns, *means}
    rows = {
        name: row.model_copy(
            update={
                "only": None if row.only is None else tuple(c for c in row.only if c in columns),
                "seeds": None if row.seeds is None else _fewer(row.seeds, seeds),
                "hidden": row.hidden or (block.name, name) not in shown,
            }
        )
        for name, row in block.rows.items()
        if (block.name, name) in kept
    }

    def here(reference: str) -> bool:
        place = table.find(reference, block)
        return place is not None and (place[0].name != block.name or place[1] in rows)

    return block.model_copy(
        update={
            "columns": columns, "means": means, "rows": rows, "settings": {**block.settings, **part.settings},
            "seeds": _fewer(block.seeds if block.seeds is not None else table.seeds, seeds),
            "paper": {
                r: {c: n for c, n in cs.items() if c in shown_columns} for r, cs in block.paper.items() if r in rows
            },
            "differences": tuple(pair for pair in block.differences if all(map(here, pair))),
            "bars": tuple(b for b in block.bars if b.column in shown_columns and all(map(here, b.subject))),
        }
    )  # fmt: skip


def _fewer(seeds: Seeds, chosen: Seeds | None) -> Seeds:
    """The chosen ones among `seeds`; all of them if none was chosen (a row with one seed of its own)."""
    return tuple(s for s in seeds if chosen is None or s in chosen) or seeds
