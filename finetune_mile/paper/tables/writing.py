"""A ledger as sheets; these as Markdown, CSV, LaTeX, HTML and in the terminal; and the files. No torch here."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

from finetune_mile.core.files import whole_file, write_json
from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables.description import Table
from finetune_mile.paper.tables.ledger import BlockLedger, Cell, CheckedBar, Difference, Ledger, Spread, make_ledger
from finetune_mile.paper.tables.plot import draw
from finetune_mile.paper.tables.runs import RunRecord, RunState, read_records, records_of, write_records
from finetune_mile.training.display import duration, wide_console

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
        sheets=tuple(s for s in sheets if s.rows), notes=tuple(notes),
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
            by_column = {c: ledger.cell(row, c) for c in block.shown_columns}
            shown = [_ours(ledger, by_column[c], m) for c in block.shown_columns for m in measures]
            cells = [c for c in by_column.values() if c is not None and c.column in block.columns]
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


def _seeds(count: int, expected: int) -> str:
    return str(count) if count == expected else f"{count} of {expected}"


def _price(cell: Cell) -> str:
    return f"not run, {cell.price}" if cell.price else "not run"


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(p for p in parts if p))


def _ours(ledger: BlockLedger, cell: Cell | None, measure: str) -> str:
    if cell is None:
        return ""
    return spread(cell.numbers[measure].ours, decimals(ledger, measure))


def against_paper(ledger: BlockLedger) -> Sheet:
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


def differences(ledger: BlockLedger) -> Sheet:
    """Paired by seed: mean ± sd, and in how many seeds it is above zero."""
    measures = list(ledger.block.measures)
    grid: dict[tuple[str, str, str], dict[str, Difference]] = {}
    for d in ledger.differences:
        grid.setdefault((d.first, d.second, d.column), {})[d.measure] = d
    rows = []
    for (first, second, column), by_measure in grid.items():
        shown = [paired(by_measure[m], decimals(ledger, m)) for m in measures]
        rows.append((f"{first} - {second}", column, *shown))
    caption = "Differences, paired by seed (in how many seeds the first is higher)"
    return Sheet(caption=caption, head=("", "", *measures), rows=tuple(rows), names=2)


def paired(difference: Difference, places: int) -> str:
    """`+1.20 ± 0.40 (5/6)`."""
    ours = difference.paired
    if not ours.n:
        return "not run"
    sd = "" if ours.sd is None else f" ± {ours.sd:.{places}f}"
    return f"{ours.mean:+.{places}f}{sd} ({difference.up}/{ours.n})"


def bars(ledger: BlockLedger) -> Sheet:
    """What was asked for, and whether it is so."""
    rows = []
    for checked in ledger.bars:
        places = decimals(ledger, checked.bar.measure)
        seeds = _seeds(checked.measured.n, checked.expected)
        measured = _range(checked.measured) if checked.bar.each else spread(checked.measured, places)
        rows.append((subject(checked), wanted(checked), measured, seeds, checked.outcome))
    caption = "Bars, on means over seeds"
    return Sheet(caption=caption, head=("", "wanted", "found", "seeds", ""), rows=tuple(rows), names=2)


def subject(checked: CheckedBar) -> str:
    """What a bar is about."""
    bar = checked.bar
    if bar.against is not None:
        first, second = bar.rows or ("", "")
        words = f"{bar.measure} of {first} - {bar.against} of {second}"
    else:
        words = f"{bar.measure}: {bar.row or ' - '.join(bar.rows or ())}"
    return words + (f", {bar.column}" if bar.column else "") + (", each seed" if bar.each else "")


def wanted(checked: CheckedBar) -> str:
    """The bounds of a bar."""
    low, high = checked.bar.bounds
    sign = "+" if checked.bar.rows else ""
    parts = [f"at least {low:{sign}g}"] if low > float("-inf") else []
    parts += [f"at most {high:{sign}g}"] if high < float("inf") else []
    return ", ".join(parts)


def constants(ledger: BlockLedger) -> Sheet:
    """What a constant prediction reaches, in each column."""
    columns = list(ledger.block.shown_columns)
    rows = [
        (name, *(_range(spreads[c]) for c in columns)) for name, spreads in ledger.constants.items()
    ]  # fmt: skip
    head = ("", *(c or "value" for c in columns))
    return Sheet(caption="Trivial baselines", head=head, rows=tuple(rows))


def _range(ours: Spread) -> str:
    if not ours.n:
        return "not run"
    low, high = min(ours.values), max(ours.values)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


# ------------------------------------------------------------------------------------------- numbers


def decimals(ledger: BlockLedger, measure: str) -> int:
    """Two for percent, three for shares of one."""
    known = [v for c in ledger.cells for v in c.numbers[measure].ours.values]
    return 3 if 0 < max((abs(v) for v in known), default=0.0) <= 1.0 else 2


def spread(ours: Spread, places: int, missing: str = "not run") -> str:
    """`48.30 ± 0.21`."""
    if not ours.n:
        return missing
    return f"{ours.mean:.{places}f}" + ("" if ours.sd is None else f" ± {ours.sd:.{places}f}")


def place(cell: Cell) -> str:
    """A cell in words."""
    return f"{cell.row}, {cell.column}" if cell.column else cell.row


# --------------------------------------------------------------------------------------------------------------- text


MADE_BY = "Written by `finetune-mile table`; not to be edited by hand."


def markdown(ledger: Ledger, *, plot: bool = False) -> str:
    """ledger.md; `plot`: there is a plot.png beside it."""
    shown = ["![plot](plot.png)"] if plot else []
    lines = [f"# {ledger.table.title}", "", *_paragraphs([*head_lines(ledger), *shown])]
    for part in sections(ledger):
        lines += [f"## {part.title}", "", *_paragraphs([part.about] if part.about else [])]
        for sheet in part.sheets:
            lines += [f"**{sheet.caption}**", "", *_markdown_sheet(sheet), ""]
        lines += [*(f"- {note}" for note in part.notes), *([""] if part.notes else [])]
    return "\n".join([*lines, f"<sub>{MADE_BY}</sub>", ""])


def _paragraphs(texts: list[str]) -> list[str]:
    return [line for text in texts for line in (text, "")]


def _markdown_sheet(sheet: Sheet) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"

    rule = "|" + "|".join("---" if i < sheet.names else "---:" for i in range(len(sheet.head))) + "|"
    return [line(sheet.head), rule, *(line(row) for row in sheet.rows)]


def csv_text(ledger: Ledger) -> str:
    """ledger.csv: one line a number, everything that is known about it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([
        "block", "row", "column", "measure", "paper", "ours", "sd", "n", "seeds", "delta", "verdict", "seconds",
        "price", "commit", "recipe", "values",
    ])  # fmt: skip
    for block in ledger.blocks:
        for cell in block.cells:
            for name, number in cell.numbers.items():
                ours = number.ours
                writer.writerow([
                    block.block.name, cell.row, cell.column, name, _text(number.paper),
                    _text(ours.mean if ours.n else None), _text(ours.sd), ours.n, cell.seeds, _text(number.delta),
                    number.verdict, _text(cell.seconds), cell.price, cell.commit, cell.recipe,
                    " ".join(_text(v) for v in ours.values),
                ])  # fmt: skip
    return out.getvalue()


def plotted_hash(ledger: Ledger) -> str:
    """Hash of the numbers that a plot shows (the ledger as CSV). The plot carries it."""
    return hashlib.sha256(csv_text(ledger).encode()).hexdigest()[:16]


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


# ---------------------------------------------------------------------------------------------- LaTeX

_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def latex(ledger: Ledger) -> str:
    """ledger.tex: tables to include, which need booktabs."""
    lines = [f"% {ledger.table.title}. {MADE_BY.replace('`', '')} Needs \\usepackage{{booktabs}}.", ""]
    for part in sections(ledger):
        for sheet in part.sheets:
            lines += _latex_sheet(part, sheet)
    return "\n".join(lines)


def _latex_sheet(part: Section, sheet: Sheet) -> list[str]:
    form = "l" * sheet.names + "r" * (len(sheet.head) - sheet.names)
    rows = [" & ".join(map(tex, row)) + r" \\" for row in sheet.rows]
    return [
        r"\begin{table}", rf"\caption{{{tex(part.title)}. {tex(sheet.caption)}}}", r"\centering\small",
        rf"\begin{{tabular}}{{{form}}}", r"\toprule", " & ".join(map(tex, sheet.head)) + r" \\", r"\midrule", *rows,
        r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
    ]  # fmt: skip


def tex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_TEX.get(c, c) for c in text)


# ----------------------------------------------------------------------------------------------- HTML


def html(ledger: Ledger, plot: bytes | None) -> str:
    """ledger.html: one file that needs nothing from outside."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    pages = Environment(loader=PackageLoader("finetune_mile.pages"), autoescape=select_autoescape())
    image = None if plot is None else "data:image/png;base64," + base64.b64encode(plot).decode()
    return pages.get_template("ledger.html").render(
        title=ledger.table.title, head=head_lines(ledger), sections=sections(ledger), plot=image,
        made_by=MADE_BY.replace("`", ""), marks=MARKS,
    )  # fmt: skip


MARKS = {
    "met": "good", "higher": "good", "NOT met": "bad", "lower": "bad", "within noise": "even", "not run": "none",
    "seeds missing": "none",
}  # fmt: skip
STYLES = {"good": "green", "bad": "red", "even": "", "none": "dim"}


def terminal(ledger: Ledger) -> Group:
    """The same sheets for a terminal."""
    parts: list[RichTable | Text] = []
    for part in sections(ledger):
        parts.append(Text(f"\n{part.title}", style="bold"))
        for sheet in part.sheets:
            parts.append(_rich_sheet(sheet))
        parts += [Text(f"  {note}", style="dim") for note in part.notes]
    return Group(*parts, Text("\n" + "\n".join(status_lines(ledger))))


def _rich_sheet(sheet: Sheet) -> RichTable:
    table = RichTable(title=sheet.caption, title_justify="left", title_style="italic", box=None, pad_edge=False)
    kept = [i for i, name in enumerate(sheet.head) if name not in ("commit", "recipe")]  # the files have them
    for i in kept:
        table.add_column(sheet.head[i], justify="left" if i < sheet.names else "right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*(Text(row[i], style=STYLES.get(MARKS.get(row[i], ""), "")) for i in kept))
    return table


# -------------------------------------------------------------------------------------------------------------- files


EXTRA = {"html": "ledger.html", "csv": "ledger.csv", "latex": "ledger.tex"}  # written on demand: `--format`


def write_ledger(
    folder: Path, name: str, table: Table, states: Sequence[RunState], *, quick: bool, prices: bool
) -> None:
    """Write the files of a ledger, those of other formats where they exist, and show it in the terminal."""
    records = records_of(states)
    recipes = {s.job.key.cell: s.meaning.hash for s in states}
    known = _prices(folder, recipes)
    if prices:
        known |= missing_prices(states, known)
    known = {cell: known[cell] for cell in recipes if cell in known}
    of = {cell: recipes[cell] for cell in known}
    ledger = make_ledger(table, records, known)
    folder.mkdir(parents=True, exist_ok=True)
    write_records(folder / "runs.jsonl", records)
    write_json(folder / "prices.json", {"table": Path(name).stem, "quick": quick, "cells": known, "recipes": of})
    plot = draw(ledger, plotted_hash(ledger))
    if plot is None:
        (folder / "plot.png").unlink(missing_ok=True)
    else:
        with whole_file(folder / "plot.png") as part:
            part.write_bytes(plot)
    _write(folder / "ledger.md", markdown(ledger, plot=plot is not None))
    write_extra(folder, table, [name for name, file in EXTRA.items() if (folder / file).is_file()])
    console = wide_console()
    console.print(terminal(ledger))
    console.print(f"{folder / 'ledger.md'}, plot.png, runs.jsonl", soft_wrap=True)


def write_extra(folder: Path, table: Table, names: Sequence[str]) -> list[Path]:
    """Write a ledger in other formats (keys of `EXTRA`), from the runs.jsonl that is in its folder."""
    ledger, _ = read_ledger(folder, table)
    plot = folder / "plot.png"
    for name in names:
        if name == "html":
            text = html(ledger, plot.read_bytes() if plot.is_file() else None)
        else:
            text = csv_text(ledger) if name == "csv" else latex(ledger)
        _write(folder / EXTRA[name], text)
    return [folder / EXTRA[name] for name in names]


def read_ledger(folder: Path, table: Table) -> tuple[Ledger, list[RunRecord]]:
    """Compute a ledger from the runs.jsonl and prices.json of its folder."""
    path = folder / "runs.jsonl"
    if not path.is_file():
        raise Problem(f"{path}: not found. `finetune-mile table NAME` writes it; --out DIR names another folder.")
    prices = folder / "prices.json"
    cells = json.loads(prices.read_text(encoding="utf-8"))["cells"] if prices.is_file() else {}
    records = read_records(path)
    return make_ledger(table, records, cells), records


def _write(path: Path, text: str) -> None:
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def _prices(folder: Path, recipes: Mapping[str, str]) -> dict[str, str]:
    """Prices that were estimated before; not those of a cell whose recipe is another one now."""
    path = folder / "prices.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    of = kept.get("recipes", {})
    return {cell: price for cell, price in kept.get("cells", {}).items() if of.get(cell) == recipes.get(cell)}


def missing_prices(states: Sequence[RunState], known: Mapping[str, str]) -> dict[str, str]:
    """Estimate what cells that have no finished run would take here; needs torch."""
    done = {s.job.key.cell for s in states if s.status == "done"}
    todo = [s for s in states if not s.job.hidden and s.job.key.cell not in {*done, *known}]
    if not todo:
        return {}
    from finetune_mile.paper.table_prices import in_words, price_cells
    from finetune_mile.training import processes

    processes.use_threads()
    with Console(stderr=True).status("timing a few steps, for the price of what was not run ..."):
        offers = price_cells([s for s in states if s.job.key.cell in {t.job.key.cell for t in todo}], others=states)
    return {cell: in_words(offer) for cell, offer in offers.items()}
