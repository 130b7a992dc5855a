"""`--quick`: the same table with fewer rows, columns and seeds, as a description of its own. No torch here."""

from __future__ import annotations

from finetune_mile.core.problems import Problem
from finetune_mile.tables.description import Block, QuickBlock, Seeds, Table


def quick_table(table: Table) -> Table:
    """What --quick runs; rows that others need stay, hidden."""
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
    todo = [(name, row) for name, rows in wanted.items() for row in rows]
    while todo:
        name, row = todo.pop()
        block = table.block(name)
        for reference in block.rows[row].needs.values():
            found = table.find_need(reference, block)
            assert found is not None  # checked when it was read
            if found[1] not in wanted.setdefault(found[0].name, set()):
                wanted[found[0].name].add(found[1])
                todo.append((found[0].name, found[1]))


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
        found = table.find(reference, block)
        return found is not None and (found[0].name != block.name or found[1] in kept)

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
