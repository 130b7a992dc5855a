"""Every ledger in docs/tables is what its runs.jsonl says, to the byte; and that is what the run folders say."""

from pathlib import Path

import pytest
from PIL import Image
from shortcuts import ROOT

from finetune_mile.tables.cells import make_jobs
from finetune_mile.tables.description import find_table, read_table
from finetune_mile.tables.plot import plotted_hash
from finetune_mile.tables.records import records_of
from finetune_mile.tables.resolving import resolve_all
from finetune_mile.tables.states import look
from finetune_mile.tables.writing import recompute

LEDGERS = sorted(p.parent for p in (ROOT / "docs/tables").glob("*/runs.jsonl"))
TABLES = sorted((ROOT / "recipes/tables").glob("*.yaml"))


@pytest.mark.parametrize("folder", LEDGERS, ids=lambda p: p.name)
def test_a_committed_ledger_is_recomputed_to_the_byte(folder):
    _, _, texts = recompute(folder)
    for name, text in texts.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"{folder / name}: write it with --ledger-only"
    if (folder / "plot.png").is_file():
        with Image.open(folder / "plot.png") as picture:
            assert picture.info["Description"] == plotted_hash(texts["ledger.csv"])


@pytest.mark.parametrize("folder", LEDGERS, ids=lambda p: p.name)
def test_a_committed_ledger_agrees_with_its_run_folders(folder):
    ledger, records, _ = recompute(folder)
    runs = ROOT / ledger.table.runs
    if not runs.is_dir():
        pytest.skip(f"needs {ledger.table.runs}, the run folders, which are not committed")
    jobs = make_jobs(ledger.table, runs, {})
    there = {r.key: r for r in records_of(look(jobs, resolve_all(jobs), runs))}
    for record in records:
        if record.key in there and there[record.key].status == "done":
            assert there[record.key].results == record.results, record.key


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_a_shipped_table_is_whole_and_its_settings_resolve(path):
    table = read_table(find_table(path.stem))
    meanings = resolve_all(make_jobs(table, Path(table.runs), {}))
    assert meanings
