"""What a table is, as data: recipes/tables/NAME.yaml, checked as a whole before any work. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from finetune_mile.config.resolve import read_yaml
from finetune_mile.core.files import shipped
from finetune_mile.core.problems import Problem, did_you_mean

Settings = dict[str, Any]  # recipe keys, dotted or nested; also `recipe`
Seeds = tuple[int, ...]


class Part(BaseModel):
    """Immutable; unknown keys raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(Part):
    """One way of training: a row of a block, in some or all of its columns."""

    settings: Settings = {}
    note: str = ""
    only: tuple[str, ...] | None = Field(default=None, description="columns where the row exists; null: all")
    needs: dict[str, str] = Field(default={}, description="name: ROW, BLOCK/ROW or BLOCK/ROW/COLUMN to run before")
    verb: str = Field(default="run", description="another command of finetune-mile, such as pretrain")
    seeds: Seeds | None = None
    hidden: bool = Field(default=False, description="a prerequisite that is no result")


class Bar(Part):
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
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value that meets it."""
        low, high = self.between or (float("-inf"), float("inf"))
        low = low if self.at_least is None else max(low, self.at_least)
        return low, high if self.at_most is None else min(high, self.at_most)


class Heatmap(Part):
    """Draw a sweep as maps: x and y are settings, the colour of each map is a measure (its shown name)."""

    x: str
    y: str
    measures: tuple[str, ...] = Field(min_length=1)


class Curve(Part):
    """Draw a trade-off: rows in their order, one measure against another (their shown names), and rivals beside."""

    x: str
    y: str
    rows: tuple[str, ...] | None = Field(default=None, description="rows that a line joins; null: all")
    rivals: tuple[str, ...] = Field(default=(), description="rows that are points beside the line")
    rivals_y: str | None = Field(default=None, description="their measure, where it is another one than y")


class Block(Part):
    """Rows and columns that share measures."""

    name: str
    about: str = ""
    hidden: bool = False
    seeds: Seeds | None = None
    settings: Settings = {}
    columns: dict[str, Settings] = {"": {}}
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
        """Rows that are results."""
        return [] if self.hidden else [name for name, row in self.rows.items() if not row.hidden]

    def columns_of(self, row: str) -> list[str]:
        """Columns in which a row exists."""
        only = self.rows[row].only
        return [c for c in self.columns if only is None or c in only]

    @property
    def shown_columns(self) -> list[str]:
        """Columns of runs, then those that are means of them."""
        return [*self.columns, *self.means]

    def shown_columns_of(self, row: str) -> list[str]:
        """The same for a row; a mean is there where all its columns are."""
        own = self.columns_of(row)
        return [*own, *(name for name, parts in self.means.items() if set(parts) <= set(own))]


class QuickBlock(Part):
    """What --quick leaves of a block."""

    columns: tuple[str, ...] | None = None
    rows: tuple[str, ...] | None = None
    seeds: Seeds | None = None
    settings: Settings = {}


class Quick(Part):
    """What --quick runs; blocks that are not named are left out, unless no block is named."""

    seeds: Seeds | None = None
    settings: Settings = {}
    blocks: dict[str, QuickBlock] = {}


class Table(Part):
    """A whole table."""

    title: str
    about: str = ""
    runs: str
    settings: Settings = {}
    seeds: Seeds = (0,)
    blocks: tuple[Block, ...] = Field(min_length=1)
    quick: Quick | None = None

    def block(self, name: str) -> Block:
        """A block by name."""
        return next(b for b in self.blocks if b.name == name)

    def seeds_of(self, block: Block, row: str) -> Seeds:
        """The seeds of a row: its own, else the block's, else the table's."""
        own = block.rows[row].seeds
        return own if own is not None else block.seeds if block.seeds is not None else self.seeds

    def find(self, reference: str, block: Block) -> tuple[Block, str] | None:
        """The block and row that `ROW` (of `block`) or `BLOCK/ROW` means; None: there is no such row."""
        if reference in block.rows:
            return block, reference
        name, _, row = reference.partition("/")
        for other in self.blocks:
            if other.name == name and row in other.rows:
                return other, row
        return None

    def find_need(self, reference: str, block: Block) -> tuple[Block, str, str | None] | None:
        """Block, row and, where it is fixed, column that a `needs` entry means."""
        place = self.find(reference, block)
        if place is not None:
            return (*place, None)
        front, _, column = reference.rpartition("/")
        place = self.find(front, block)
        return (*place, column) if place is not None and column in place[0].columns_of(place[1]) else None


Kind = Literal["block", "row", "column", "measure"]


def find_table(name: str) -> Path:
    """A description by path, or by its name below recipes/tables/."""
    folder = shipped("recipes") / "tables"
    for path in (Path(name), folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return path
    names = sorted(p.stem for p in folder.glob("*.yaml"))
    raise Problem(f"table {name}: no such table or file; {did_you_mean(name, names)}")


def read_table(path: Path) -> Table:
    """A checked description, or everything that is wrong with it at once."""
    try:
        table = Table.model_validate(read_yaml(path))
    except ValidationError as error:
        raise Problem(*(_sentence(path, item) for item in error.errors())) from error
    wrong = wrong_with(table)
    if wrong:
        raise Problem(*(f"table {path.name}: {sentence}" for sentence in wrong))
    return table


def _sentence(path: Path, item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"table {path.name}: {where or 'it'}: {message[0].lower()}{message[1:]}"


# ------------------------------------------------------------------------------- references, all at once


def wrong_with(table: Table) -> list[str]:
    """Every reference of a description that leads nowhere, as sentences."""
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


def _wrong_in_block(table: Table, block: Block) -> list[str]:
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
            wrong.append(f"means {name}: must name some columns, and be no column itself")
    wrong += _missing("paper", "row", block.paper, block.rows)
    for name, columns in block.paper.items():
        wrong += _missing(f"paper {name}", "column", columns, block.shown_columns)
        wrong += _missing(f"paper {name}", "measure", {m for ms in columns.values() for m in ms}, block.measures)
    pairs = [r for pair in block.differences for r in pair if table.find(r, block) is None]
    wrong += _missing("differences", "row", pairs, block.rows)
    for bar in block.bars:
        unknown = [r for r in bar.rows or (bar.row or "",) if table.find(r, block) is None]
        wrong += _missing("bars", "row", unknown, block.rows)
        wrong += _missing("bars", "column", [bar.column], block.shown_columns)
        wrong += [f"bars: row {r} has no column {bar.column!r}" for r in _rows_without(table, block, bar)]
        wrong += _missing("bars", "measure", [bar.measure, bar.against or bar.measure], block.measures)
    if block.heatmap is not None:
        wrong += _missing("heatmap", "measure", block.heatmap.measures, block.measures)
    if (curve := block.curve) is not None:
        wrong += _missing("curve", "row", (*(curve.rows or ()), *curve.rivals), block.rows)
        wrong += _missing("curve", "measure", [curve.x, curve.y, curve.rivals_y or curve.y], block.measures)
    return list(dict.fromkeys(wrong))


def _rows_without(table: Table, block: Block, bar: Bar) -> list[str]:
    """Rows of a bar that its column does not have; another block's only column stands for any."""
    if bar.column not in block.shown_columns:
        return []
    without = []
    for reference in bar.rows or (bar.row or "",):
        place = table.find(reference, block)
        columns = [bar.column] if place is None else place[0].shown_columns_of(place[1])
        elsewhere = place is not None and place[0].name != block.name
        if columns and bar.column not in columns and not (elsewhere and len(columns) == 1):
            without.append(reference)
    return without


def _missing(where: str, kind: Kind, used: Iterable[str], names: Collection[str]) -> list[str]:
    """A sentence for each used name that is not among the names."""
    unknown = [name for name in used if name not in names]
    return [f"{where}: there is no {kind} {n!r}; {did_you_mean(repr(n), map(repr, names))}" for n in unknown]


# ------------------------------------------------------------------------------------------- --quick: a smaller table


def quick_table(table: Table) -> Table:
    """Select the rows for --quick. Rows that others depend on are kept but not shown."""
    quick = table.quick
    if quick is None:
        raise Problem(f"--quick: the table {table.title!r} does not say what its quick form is (a block quick:)")
    parts = quick.blocks or {b.name: QuickBlock() for b in table.blocks}
    wanted: dict[str, set[str]] = {name: set(part.rows or table.block(name).shown_rows) for name, part in parts.items()}
    shown = {name: set(rows) for name, rows in wanted.items()}
    _add_needed(table, wanted)
    blocks = [
        _shrink(table, block, parts.get(block.name), wanted[block.name], shown.get(block.name, set()))
        for block in table.blocks
        if wanted.get(block.name)
    ]
    return table.model_copy(
        update={
            "title": f"{table.title} (quick)", "blocks": tuple(blocks), "quick": None, "runs": f"{table.runs}-quick",
            "settings": {**table.settings, **quick.settings}, "seeds": _fewer(table.seeds, quick.seeds),
        }
    )  # fmt: skip


def _add_needed(table: Table, wanted: dict[str, set[str]]) -> None:
    """Add the rows that wanted rows need, and those that these need."""
    todo = [(table.block(name), row) for name, rows in wanted.items() for row in rows]
    for block, row in todo:  # it grows
        for reference in block.rows[row].needs.values():
            need = table.find_need(reference, block)
            assert need is not None  # checked when it was read
            if need[1] not in wanted.setdefault(need[0].name, set()):
                wanted[need[0].name].add(need[1])
                todo.append(need[:2])


def _shrink(table: Table, block: Block, part: QuickBlock | None, rows: set[str], shown: set[str]) -> Block:
    assert table.quick is not None
    part = part or QuickBlock()
    seeds = part.seeds if part.seeds is not None else table.quick.seeds
    columns = {c: s for c, s in block.columns.items() if part.columns is None or c in part.columns}
    means = {name: parts for name, parts in block.means.items() if set(parts) <= set(columns)}
    shown_columns = {*columns, *means}
    kept = {}
    for name, row in block.rows.items():
        if name not in rows:
            continue
        only = None if row.only is None else tuple(c for c in row.only if c in columns)
        own = None if row.seeds is None else _fewer(row.seeds, seeds)
        kept[name] = row.model_copy(update={"only": only, "seeds": own, "hidden": row.hidden or name not in shown})

    def here(reference: str) -> bool:
        place = table.find(reference, block)
        return place is not None and (place[0].name != block.name or place[1] in kept)

    return block.model_copy(
        update={
            "columns": columns, "means": means, "rows": kept, "settings": {**block.settings, **part.settings},
            "seeds": _fewer(block.seeds if block.seeds is not None else table.seeds, seeds),
            "paper": {
                r: {c: n for c, n in cs.items() if c in shown_columns} for r, cs in block.paper.items() if r in kept
            },
            "differences": tuple(pair for pair in block.differences if all(map(here, pair))),
            "bars": tuple(
                b for b in block.bars if b.column in shown_columns and all(map(here, b.rows or (b.row or "",)))
            ),
        }
    )  # fmt: skip


def _fewer(seeds: Seeds, wanted: Seeds | None) -> Seeds:
    """The wanted ones among `seeds`; all where none is among them (a row with one seed of its own)."""
    return tuple(s for s in seeds if wanted is None or s in wanted) or seeds
