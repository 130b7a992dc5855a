"""A ledger in words and rows: what Markdown, LaTeX, HTML and the terminal all show. Pure. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from finetune_mile.tables.ledger import BlockLedger, Cell, CheckedBar, Difference, Ledger, Spread

WIDE = 6  # column x measure pairs that still go side by side
NOISE = (
    "Ours: mean ± standard deviation over seeds. Verdict: within noise where the paper's number lies inside the 95 % "
    "prediction interval of one more run, t(n - 1) x sd x sqrt(1 + 1/n) around our mean; one seed has no verdict."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One table: a caption, a head, rows; the first `names` columns are words, the others numbers."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A block: sheets, and lines of words."""

    title: str
    about: str
    sheets: tuple[Sheet, ...]
    notes: tuple[str, ...]


def head_lines(ledger: Ledger) -> list[str]:
    """What stands above everything."""
    lines = [" ".join(ledger.table.about.split())] if ledger.table.about else []
    lines += status_lines(ledger)
    return [*lines, NOISE] if any(block.block.paper for block in ledger.blocks) else lines


def status_lines(ledger: Ledger) -> list[str]:
    """How much of it is there."""
    where = f" ({'; '.join(ledger.devices)})" if ledger.devices else ""
    took = f"; they took {duration(ledger.seconds)}{where}" if ledger.runs else ""
    lines = [f"{ledger.runs} of {ledger.expected} runs are done{took}."]
    bars = [b for block in ledger.blocks for b in block.bars]
    if bars:
        met = sum(b.outcome == "met" for b in bars)
        late = sum(b.outcome in ("not run", "seeds missing") for b in bars)
        lines.append(f"{met} of {len(bars)} bars are met" + (f"; {late} wait for runs." if late else "."))
    return lines


def sections(ledger: Ledger) -> list[Section]:
    """Every block."""
    return [section(block) for block in ledger.blocks]


def section(ledger: BlockLedger) -> Section:
    """One block."""
    block = ledger.block
    sheets = [*results(ledger), against_paper(ledger), differences(ledger), bars(ledger), constants(ledger)]
    notes = [f"{name}: {' '.join(row.note.split())}" for name, row in block.rows.items() if row.note]
    notes += [
        f"{place(cell)}, seed {r.seed}: {r.status}{f' ({r.why})' if r.why else ''}; not counted"
        for cell in ledger.cells
        for r in cell.others
    ]
    return Section(
        title=block.name, about=" ".join(block.about.split()),
        sheets=tuple(s for s in sheets if s is not None and s.rows), notes=tuple(notes),
    )  # fmt: skip


def results(ledger: BlockLedger) -> list[Sheet]:
    """Ours: all columns side by side where they fit, else a sheet a column."""
    block = ledger.block
    measures = list(block.measures)
    if not measures or all(not c.runs and any(n.paper is not None for n in c.numbers.values()) for c in ledger.cells):
        return []  # nothing was run: the sheet beside the paper's numbers says so
    if len(block.shown_columns) * len(measures) <= WIDE and len(block.shown_columns) > 1:
        head = tuple(f"{m}, {c}" if len(measures) > 1 else c for c in block.shown_columns for m in measures)
        caption = "Ours" if len(measures) > 1 else f"Ours: {measures[0]}"
        rows = []
        for row in block.shown_rows:
            found = {c: ledger.cell(row, c) for c in block.shown_columns}
            shown = [_ours(ledger, found[c], m) for c in block.shown_columns for m in measures]
            cells = [c for c in found.values() if c is not None and c.column in block.columns]
            rows.append((row, *shown, *_facts(cells)))
        return [Sheet(caption=caption, head=("", *head, *FACTS), rows=tuple(rows))]
    sheets = []
    for column in block.shown_columns:
        found_rows = [c for c in ledger.cells if c.column == column]
        rows = [(c.row, *(_ours(ledger, c, m) for m in measures), *_facts([c])) for c in found_rows]
        caption = f"Ours: {column}" if column else "Ours"
        sheets.append(Sheet(caption=caption, head=("", *measures, *FACTS), rows=tuple(rows)))
    return sheets


FACTS = ("seeds", "cost of a run", "commit", "recipe")


def _facts(cells: Sequence[Cell]) -> tuple[str, str, str, str]:
    """Seeds, cost, commit and recipe of a row's cells, joined where they differ."""
    seeds = _joined(_seeds(len(c.runs), c.seeds) for c in cells)
    cost = _joined(duration(c.seconds) if c.seconds is not None else _price(c) for c in cells)
    return seeds, cost, _joined(c.commit for c in cells), _joined(c.recipe for c in cells)


def _seeds(found: int, expected: int) -> str:
    return str(found) if found == expected else f"{found} of {expected}"


def _price(cell: Cell) -> str:
    return f"not run, {cell.price}" if cell.price else "not run"


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(p for p in parts if p))


def _ours(ledger: BlockLedger, cell: Cell | None, measure: str) -> str:
    if cell is None:
        return ""
    return spread(cell.numbers[measure].ours, decimals(ledger, measure))


def against_paper(ledger: BlockLedger) -> Sheet | None:
    """Every number that the paper prints, beside ours."""
    rows = []
    for cell in ledger.cells:
        for name, number in cell.numbers.items():
            if number.paper is None:
                continue
            places = decimals(ledger, name)
            delta = "" if number.delta is None else f"{number.delta:+.{places}f}"
            n = _seeds(number.ours.n, cell.seeds) if number.ours.n else ""
            cost = duration(cell.seconds) if cell.seconds is not None else cell.price
            rows.append((
                cell.row, cell.column, name, f"{number.paper:g}", spread(number.ours, places, missing=""), n, delta,
                number.verdict, cost, cell.commit, cell.recipe,
            ))  # fmt: skip
    head = ("", "", "", "paper", "ours", "seeds", "delta", "verdict", "cost", "commit", "recipe")
    return Sheet(caption="Against the paper", head=head, rows=tuple(rows), names=3)


def differences(ledger: BlockLedger) -> Sheet | None:
    """Paired by seed: mean ± sd, and in how many seeds it is above zero."""
    measures = list(ledger.block.measures)
    grid: dict[tuple[str, str, str], dict[str, Difference]] = {}
    for d in ledger.differences:
        grid.setdefault((d.first, d.second, d.column), {})[d.measure] = d
    rows = []
    for (first, second, column), found in grid.items():
        shown = [paired(found[m], decimals(ledger, m)) for m in measures]
        rows.append((f"{first} - {second}", column, *shown))
    caption = "Differences, paired by seed (in how many seeds the first is higher)"
    return Sheet(caption=caption, head=("", "", *measures), rows=tuple(rows), names=2)


def paired(difference: Difference, places: int) -> str:
    """`+1.20 ± 0.40 (5/6)`."""
    found = difference.paired
    if not found.n:
        return "not run"
    sd = "" if found.sd is None else f" ± {found.sd:.{places}f}"
    return f"{found.mean:+.{places}f}{sd} ({difference.up}/{found.n})"


def bars(ledger: BlockLedger) -> Sheet | None:
    """What was asked for, and whether it is so."""
    rows = []
    for checked in ledger.bars:
        places = decimals(ledger, checked.bar.measure)
        seeds = _seeds(checked.found.n, checked.expected)
        found = _range(checked.found) if checked.bar.each else spread(checked.found, places)
        rows.append((subject(checked), wanted(checked), found, seeds, checked.outcome))
    caption = "Bars, on means over seeds"
    return Sheet(caption=caption, head=("", "wanted", "found", "seeds", ""), rows=tuple(rows), names=2)


def subject(checked: CheckedBar) -> str:
    """What a bar is about."""
    bar = checked.bar
    if bar.against is not None:
        first, second = bar.rows or ("", "")
        what = f"{bar.measure} of {first} - {bar.against} of {second}"
    else:
        what = f"{bar.measure}: {bar.row or ' - '.join(bar.rows or ())}"
    return what + (f", {bar.column}" if bar.column else "") + (", each seed" if bar.each else "")


def wanted(checked: CheckedBar) -> str:
    """The bounds of a bar."""
    low, high = checked.bar.bounds
    sign = "+" if checked.bar.rows else ""
    parts = [f"at least {low:{sign}g}"] if low > float("-inf") else []
    parts += [f"at most {high:{sign}g}"] if high < float("inf") else []
    return ", ".join(parts)


def constants(ledger: BlockLedger) -> Sheet | None:
    """What a constant prediction reaches, in each column."""
    columns = list(ledger.block.shown_columns)
    rows = [
        (name, *(_range(found[c]) for c in columns)) for name, found in ledger.constants.items()
    ]  # fmt: skip
    head = ("", *(c or "value" for c in columns))
    return Sheet(caption="Trivial baselines", head=head, rows=tuple(rows))


def _range(found: Spread) -> str:
    if not found.n:
        return "not run"
    low, high = min(found.values), max(found.values)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


# ------------------------------------------------------------------------------------------- numbers


def decimals(ledger: BlockLedger, measure: str) -> int:
    """Two for percent, three for shares of one."""
    known = [v for c in ledger.cells for v in c.numbers[measure].ours.values]
    return 3 if 0 < max((abs(v) for v in known), default=0.0) <= 1.0 else 2


def spread(found: Spread, places: int, missing: str = "not run") -> str:
    """`48.30 ± 0.21`."""
    if not found.n:
        return missing
    return f"{found.mean:.{places}f}" + ("" if found.sd is None else f" ± {found.sd:.{places}f}")


def duration(seconds: float) -> str:
    """Seconds in the unit that a reader would use."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.{1 if seconds < 360_000 else 0}f} h"


def place(cell: Cell) -> str:
    """A cell in words."""
    return f"{cell.row}, {cell.column}" if cell.column else cell.row
