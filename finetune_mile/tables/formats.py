"""A ledger as Markdown, CSV, LaTeX, HTML and as a table in the terminal. Pure functions to text. No torch here."""

from __future__ import annotations

import base64
import csv
import io

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from finetune_mile.tables.ledger import Ledger
from finetune_mile.tables.sheets import Section, Sheet, head_lines, sections, status_lines

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
