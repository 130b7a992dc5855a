"""Tables in the docs that say `<!-- NAME | block | caption -->` hold what the ledger in docs/tables/NAME says."""

import re

import pytest
from shortcuts import ROOT

MARKER = re.compile(r"<!-- (?P<name>[\w-]+) \| (?P<block>.+?) \| (?P<caption>.+?) -->")
PAGES = sorted(p for p in (ROOT / "docs").glob("*.md") if MARKER.search(p.read_text(encoding="utf-8")))


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_rows(lines):
    """A Markdown table to {first cell: {head: cell}}."""
    head = cells(lines[0])
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in map(cells, lines[2:])}


def table_after(lines, start):
    first = next(i for i in range(start, len(lines)) if lines[i].startswith("|"))
    last = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    return lines[first:last]


def in_ledger(name, block, caption):
    lines = (ROOT / f"docs/tables/{name}/ledger.md").read_text(encoding="utf-8").splitlines()
    start = lines.index(f"## {block}")
    return read_rows(table_after(lines, lines.index(f"**{caption}**", start)))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_tables_in_the_docs_are_those_of_the_ledgers(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        found = MARKER.fullmatch(line.strip())
        if found is None:
            continue
        theirs = in_ledger(**found.groupdict())
        for row, mine in read_rows(table_after(lines, number)).items():
            for column, text in mine.items():
                assert theirs[row][column] == text, (page.name, line, row, column)


def test_there_are_such_tables():
    assert "results" in {p.stem for p in PAGES}
