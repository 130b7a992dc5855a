"""Write a ledger: its sheets as Markdown, CSV, LaTeX, HTML and in the terminal, and the files. No torch here."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from finetune_mile.core.console import open_console
from finetune_mile.core.files import write_json, write_whole
from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables.description import EXTRA, Table
from finetune_mile.paper.tables.ledger import BlockLedger, Cell, Ledger, Spread, make_ledger
from finetune_mile.paper.tables.plot import draw
from finetune_mile.paper.tables.runs import RunRecord, RunState, read_records, records_of, write_records
from finetune_mile.training.display import duration, wide_console

PREDICTED = {
    "threshold": "the classes above the threshold (`threshold`)",
    "argmax": "the best class alone (`argmax`)",
    "argmax_or_threshold": "the best class and those above the threshold (`argmax_or_threshold`)",
}
WIDE = 6  # column x measure pairs that fit side by side
NOISE = (
    "Ours: mean ± standard deviation over seeds. Verdict: within noise where the paper's number is inside the 95 % "
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
class BlockSheets:
    """A block: sheets, and lines of words."""

    title: str
    about: str
    sheets: tuple[Sheet, ...]
    notes: tuple[str, ...]


def status_lines(ledger: Ledger) -> list[str]:
    where = f" ({'; '.join(ledger.devices)})" if ledger.devices else ""
    took = f"; they took {duration(ledger.seconds)}{where}" if ledger.runs else ""
    lines = [f"{ledger.runs} of {ledger.expected} runs are done{took}."]
    outcomes = [bar.outcome for block in ledger.blocks for bar in block.bars]
    if outcomes:
        late = sum(outcome in ("not run", "seeds missing") for outcome in outcomes)
        wait = f"; {late} wait for runs." if late else "."
        lines.append(f"{outcomes.count('met')} of {len(outcomes)} bars are met{wait}")
    return lines


def head_lines(ledger: Ledger) -> list[str]:
    about = [" ".join(ledger.table.about.split())] if ledger.table.about else []
    return [*about, *status_lines(ledger), *([NOISE] if any(block.block.paper for block in ledger.blocks) else [])]


def block_sheets(ledger: BlockLedger) -> BlockSheets:
    block = ledger.block
    sheets = [*results(ledger), against_paper(ledger), differences(ledger), bars(ledger), constants(ledger)]
    notes = [f"F1 and label coverage of {PREDICTED[rule]}: {', '.join(rows)}" for rule, rows in ledger.rules.items()]
    notes += [f"{name}: {' '.join(row.note.split())}" for name, row in block.rows.items() if row.note]
    for cell in ledger.cells:
        place = f"{cell.row}, {cell.column}" if cell.column else cell.row
        for run in cell.others:
            why = f" ({run.why})" if run.why else ""
            notes.append(f"{place}, seed {run.seed}: {run.status}{why}; not counted")
    return BlockSheets(
        title=block.name, about=" ".join(block.about.split()),
        sheets=tuple(s for s in sheets if s.rows), notes=tuple(notes),
    )  # fmt: skip


def results(ledger: BlockLedger) -> list[Sheet]:
    """Ours: all columns side by side where they fit, else one sheet per column."""
    block, measures = ledger.block, list(ledger.block.measures)
    if not measures or all(not c.runs and any(n.paper is not None for n in c.numbers.values()) for c in ledger.cells):
        return []  # nothing was run: the sheet beside the paper's numbers says so
    facts = ("seeds", "cost of a run", "commit", "recipe")

    def row_of(row: str, columns: Sequence[str]) -> tuple[str, ...]:
        """The measures of all columns, then seeds, cost, commit and recipe, joined where the cells differ."""
        by_column = {column: ledger.cell(row, column) for column in columns}
        shown = [
            "" if cell is None else spread(cell.numbers[m].ours, decimals(ledger, m))
            for cell in by_column.values()
            for m in measures
        ]
        cells = [c for c in by_column.values() if c is not None and (c.column in block.columns or len(columns) == 1)]
        known = [(seeds_of(len(c.runs), c.seeds), cost_of(c), c.commit, c.recipe) for c in cells] or [("",) * 4]
        return row, *shown, *(", ".join(dict.fromkeys(filter(None, parts))) for parts in zip(*known, strict=True))

    columns = block.shown_columns
    if len(columns) * len(measures) <= WIDE and len(columns) > 1:
        head = tuple(f"{m}, {c}" if len(measures) > 1 else c for c in columns for m in measures)
        caption = "Ours" if len(measures) > 1 else f"Ours: {measures[0]}"
        rows = tuple(row_of(row, columns) for row in block.shown_rows)
        return [Sheet(caption=caption, head=("", *head, *facts), rows=rows)]
    return [
        Sheet(
            caption=f"Ours: {column}" if column else "Ours", head=("", *measures, *facts),
            rows=tuple(row_of(cell.row, [column]) for cell in ledger.cells if cell.column == column),
        )
        for column in columns
    ]  # fmt: skip


def against_paper(ledger: BlockLedger) -> Sheet:
    """Every number that the paper prints, beside ours."""
    rows = []
    for cell in ledger.cells:
        for name, number in cell.numbers.items():
            if number.paper is None:
                continue
            places = decimals(ledger, name)
            delta = "" if number.delta is None else f"{number.delta:+.{places}f}"
            n = seeds_of(number.ours.n, cell.seeds) if number.ours.n else ""
            cost = duration(cell.seconds) if cell.seconds is not None else cell.price
            rows.append((
                cell.row, cell.column, name, f"{number.paper:g}", spread(number.ours, places, missing=""), n, delta,
                number.verdict, cost, cell.commit, cell.recipe,
            ))  # fmt: skip
    head = ("", "", "", "paper", "ours", "seeds", "delta", "verdict", "cost", "commit", "recipe")
    return Sheet(caption="Against the paper", head=head, rows=tuple(rows), names=3)


def differences(ledger: BlockLedger) -> Sheet:
    """Paired by seed: `+1.20 ± 0.40 (5/6)`, the mean, its sd, and in how many seeds it is above zero."""
    measures = list(ledger.block.measures)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for d in ledger.differences:
        places = decimals(ledger, d.measure)
        shown = f"{d.paired.mean:+.{places}f}" + ("" if d.paired.sd is None else f" ± {d.paired.sd:.{places}f}")
        row = rows.setdefault((f"{d.first} - {d.second}", d.column), {})
        row[d.measure] = f"{shown} ({d.up}/{d.paired.n})" if d.paired.n else "not run"
    return Sheet(
        caption="Differences, paired by seed (in how many seeds the first is higher)", head=("", "", *measures),
        rows=tuple((*names, *(values[m] for m in measures)) for names, values in rows.items()), names=2,
    )  # fmt: skip


def bars(ledger: BlockLedger) -> Sheet:
    rows = []
    for checked in ledger.bars:
        bar, measured = checked.bar, checked.measured
        subject = f"{bar.measure}: {' - '.join(bar.subject)}"
        if bar.against is not None:
            subject = f"{bar.measure} of {bar.subject[0]} - {bar.against} of {bar.subject[1]}"
        subject += (f", {bar.column}" if bar.column else "") + (", each seed" if bar.each else "")
        (low, high), sign = bar.bounds, "+" if bar.rows else ""
        bounds = [f"at least {low:{sign}g}"] if low > float("-inf") else []
        bounds += [f"at most {high:{sign}g}"] if high < float("inf") else []
        values = _range(measured) if bar.each else spread(measured, decimals(ledger, bar.measure))
        rows.append((subject, ", ".join(bounds), values, seeds_of(measured.n, checked.expected), checked.outcome))
    caption = "Bars, on means over seeds"
    return Sheet(caption=caption, head=("", "wanted", "found", "seeds", ""), rows=tuple(rows), names=2)


def constants(ledger: BlockLedger) -> Sheet:
    """The score of a constant prediction, in each column."""
    columns = list(ledger.block.shown_columns)
    rows = tuple((name, *(_range(spreads[c]) for c in columns)) for name, spreads in ledger.constants.items())
    return Sheet(caption="Trivial baselines", head=("", *(c or "value" for c in columns)), rows=rows)


def _range(ours: Spread) -> str:
    if not ours.n:
        return "not run"
    low, high = f"{min(ours.values):.2f}", f"{max(ours.values):.2f}"
    return low if low == high else f"{low} to {high}"


def seeds_of(count: int, expected: int) -> str:
    return str(count) if count == expected else f"{count} of {expected}"


def cost_of(cell: Cell) -> str:
    if cell.seconds is not None:
        return duration(cell.seconds)
    return f"not run, {cell.price}" if cell.price else "not run"


def decimals(ledger: BlockLedger, measure: str) -> int:
    """Two for percent, three for shares of one."""
    known = [v for c in ledger.cells for v in c.numbers[measure].ours.values]
    return 3 if 0 < max((abs(v) for v in known), default=0.0) <= 1.0 else 2


def spread(ours: Spread, places: int, missing: str = "not run") -> str:
    """`48.30 ± 0.21`."""
    if not ours.n:
        return missing
    return f"{ours.mean:.{places}f}" + ("" if ours.sd is None else f" ± {ours.sd:.{places}f}")


# ------------------------------------------------------------------------------------------------------------- formats

MADE_BY = "Written by `finetune-mile table`; not to be edited by hand."
MARKS = {
    "met": "good", "higher": "good", "NOT met": "bad", "lower": "bad", "within noise": "even", "not run": "none",
    "seeds missing": "none",
}  # fmt: skip
SIGNS = {"good": "✓", "bad": "✗", "even": "≈", "none": "–"}  # beside the colour
COST = ("seeds", "cost of a run", "cost", "commit", "recipe")  # columns that say how, not what
STYLES = {"good": "green", "bad": "red", "even": "", "none": "dim"}
_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def markdown(ledger: Ledger, *, plot: bool = False) -> str:
    """ledger.md; `plot`: there is a plot.png beside it."""

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"

    paragraphs = [f"# {ledger.table.title}", *head_lines(ledger), *(["![plot](plot.png)"] if plot else [])]
    for block in map(block_sheets, ledger.blocks):
        paragraphs += [f"## {block.title}", *([block.about] if block.about else [])]
        for sheet in block.sheets:
            rule = "|" + "|".join("---" if i < sheet.names else "---:" for i in range(len(sheet.head))) + "|"
            paragraphs += [f"**{sheet.caption}**", "\n".join([line(sheet.head), rule, *map(line, sheet.rows)])]
        paragraphs += ["\n".join(f"- {note}" for note in block.notes)] if block.notes else []
    return "\n\n".join([*paragraphs, f"<sub>{MADE_BY}</sub>"]) + "\n"


def csv_text(ledger: Ledger) -> str:
    """ledger.csv: one line per number, with everything that is known about it."""

    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.6g}"

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
                    block.block.name, cell.row, cell.column, name, text(number.paper),
                    text(ours.mean if ours.n else None), text(ours.sd), ours.n, cell.seeds, text(number.delta),
                    number.verdict, text(cell.seconds), cell.price, cell.commit, cell.recipe,
                    " ".join(text(v) for v in ours.values),
                ])  # fmt: skip
    return out.getvalue()


def plotted_hash(ledger: Ledger) -> str:
    """Hash of the numbers that a plot shows (the ledger as CSV). The plot carries it."""
    return hashlib.sha256(csv_text(ledger).encode()).hexdigest()[:16]


def latex(ledger: Ledger) -> str:
    """ledger.tex: tables to include, which need booktabs."""

    def tex(text: str) -> str:
        return "".join(_TEX.get(c, c) for c in text)

    def line(cells: tuple[str, ...]) -> str:
        return " & ".join(map(tex, cells)) + r" \\"

    lines = [f"% {ledger.table.title}. {MADE_BY.replace('`', '')} Needs \\usepackage{{booktabs}}.", ""]
    for block in map(block_sheets, ledger.blocks):
        for sheet in block.sheets:
            form = "l" * sheet.names + "r" * (len(sheet.head) - sheet.names)
            lines += [
                r"\begin{table}", rf"\caption{{{tex(block.title)}. {tex(sheet.caption)}}}", r"\centering\small",
                rf"\begin{{tabular}}{{{form}}}", r"\toprule", line(sheet.head), r"\midrule", *map(line, sheet.rows),
                r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
            ]  # fmt: skip
    return "\n".join(lines)


def html(ledger: Ledger, plot: bytes | None) -> str:
    """ledger.html: one file that needs nothing from outside; what came out is first."""
    from finetune_mile.pages.report import data_url, render

    return render(
        "ledger.html", title=ledger.table.title, head=head_lines(ledger), plot=None if plot is None else data_url(plot),
        sections=[block_sheets(block) for block in ledger.blocks], made_by=MADE_BY.replace("`", ""), marks=MARKS,
        answers=answers(ledger), not_run=not_run, signs=SIGNS,
    )  # fmt: skip


def answers(ledger: Ledger) -> list[tuple[str, str, str]]:
    """What came out: block, sentence and mark of each bar that has runs; of a block without bars, its best row."""
    found: list[tuple[str, str, str]] = []
    for block in ledger.blocks:
        rows = bars(block).rows
        for checked, (subject, wanted, measured, _, outcome) in zip(block.bars, rows, strict=True):
            if checked.measured.n:
                mark = MARKS.get(outcome, "")
                found.append((block.block.name, f"{subject}: {measured}, expected {wanted} ({outcome})", mark))
        measure = next(iter(block.block.measures), "")
        cells = [cell for cell in block.cells if cell.numbers[measure].ours.n] if measure else []
        if not rows and cells:
            best = max(cells, key=lambda cell: cell.numbers[measure].ours.mean)
            place = f"{best.row}, {best.column}" if best.column else best.row
            ours = spread(best.numbers[measure].ours, decimals(block, measure))
            found.append((block.block.name, f"highest {measure} of {len(cells)}: {place}, {ours}", "even"))
    return found


def not_run(sheet: Sheet, row: tuple[str, ...]) -> bool:
    """Does a row have nothing that was measured here?"""
    facts = {*COST, "paper", "wanted"}
    measured = zip(sheet.head[sheet.names :], row[sheet.names :], strict=True)
    cells = [cell for title, cell in measured if title not in facts]
    return "not run" in cells and all(cell in ("", "not run", "seeds missing") for cell in cells)


def terminal(ledger: Ledger) -> Group:
    parts: list[RichTable | Text] = []
    for block in map(block_sheets, ledger.blocks):
        parts.append(Text(f"\n{block.title}", style="bold"))
        for sheet in block.sheets:
            table = RichTable(title=sheet.caption, title_justify="left", title_style="italic", box=None, pad_edge=False)
            kept = [i for i, name in enumerate(sheet.head) if name not in ("commit", "recipe")]  # the files have them
            for i in kept:
                table.add_column(sheet.head[i], justify="left" if i < sheet.names else "right", overflow="fold")
            for row in sheet.rows:
                table.add_row(*(Text(row[i], style=STYLES.get(MARKS.get(row[i], ""), "")) for i in kept))
            parts.append(table)
        parts += [Text(f"  {note}", style="dim") for note in block.notes]
    return Group(*parts, Text("\n" + "\n".join(status_lines(ledger))))


# -------------------------------------------------------------------------------------------------------------- files


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
        write_whole(folder / "plot.png", plot)
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
    write_whole(path, text)


def _prices(folder: Path, recipes: Mapping[str, str]) -> dict[str, str]:
    """Prices that were estimated before, without those of cells whose recipe has changed."""
    path = folder / "prices.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    of = kept.get("recipes", {})
    return {cell: price for cell, price in kept.get("cells", {}).items() if of.get(cell) == recipes.get(cell)}


def missing_prices(states: Sequence[RunState], known: Mapping[str, str]) -> dict[str, str]:
    """Estimate the time of cells that have no finished run, on this machine; needs torch."""
    done = {s.job.key.cell for s in states if s.status == "done"}
    todo = [s for s in states if not s.job.hidden and s.job.key.cell not in {*done, *known}]
    if not todo:
        return {}
    from finetune_mile.paper.table_plan import in_words, price_cells

    with open_console(stderr=True).status("timing a few steps, to estimate the time of missing runs ..."):
        offers = price_cells([s for s in states if s.job.key.cell in {t.job.key.cell for t in todo}], others=states)
    return {cell: in_words(offer) for cell, offer in offers.items()}
