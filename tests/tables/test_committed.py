"""Every ledger in docs/tables is what its runs.jsonl says, to the byte; and that is what the run folders say."""

import json
import statistics
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from shortcuts import ROOT

from finetune_mile.paper.tables.description import find_table, read_table
from finetune_mile.paper.tables.runs import make_jobs, records_of, resolve_all, states_of
from finetune_mile.paper.tables.writing import markdown, plotted_hash, read_ledger

LEDGERS = sorted(p.parent for p in (ROOT / "docs/tables").glob("*/runs.jsonl"))
TABLES = sorted((ROOT / "recipes/tables").glob("*.yaml"))


def recompute(folder):
    """The ledger and the runs of a committed folder."""
    head = json.loads((folder / "prices.json").read_text(encoding="utf-8"))
    return read_ledger(folder, read_table(find_table(head["table"]), quick=head["quick"]))


@pytest.mark.parametrize("folder", LEDGERS, ids=lambda p: p.name)
def test_a_committed_ledger_is_recomputed_to_the_byte(folder):
    ledger, _ = recompute(folder)
    page, plot = folder / "ledger.md", folder / "plot.png"
    assert page.read_text(encoding="utf-8") == markdown(ledger, plot=plot.is_file()), f"{page}: write it anew"
    if plot.is_file():
        with Image.open(plot) as picture:
            assert picture.info["Description"] == plotted_hash(ledger)


def test_a_ledger_is_few_files():
    assert len(LEDGERS) == len(TABLES) == 9
    for folder in LEDGERS:
        tracked = subprocess.check_output(["git", "ls-files", "."], cwd=folder, text=True).split()
        assert set(tracked) <= {"ledger.md", "plot.png", "prices.json", "runs.jsonl"}


@pytest.mark.parametrize("folder", LEDGERS, ids=lambda p: p.name)
def test_numbers_in_a_committed_page_are_means_and_deviations_of_its_runs(folder):
    """Computed here without our code, so that a mistake in it does not agree with itself."""
    ledger, _ = recompute(folder)
    page = (folder / "ledger.md").read_text(encoding="utf-8")
    seen: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for line in (folder / "runs.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if run["status"] == "done":
            seen.setdefault((run["block"], run["row"], run["column"]), []).append(run["results"])
    for block in (b for b in ledger.table.blocks if b.shown_rows):
        part = page.partition(f"\n## {block.name}\n")[2].partition("\n## ")[0]
        for (name, row, _), results in seen.items():
            if name != block.name or row not in block.shown_rows:
                continue
            lines = [line for line in part.splitlines() if line.startswith(f"| {row} |")]
            for key in block.measures.values():
                if not (values := [r[key] for r in results if key in r]):
                    continue
                numbers = [statistics.fmean(values), *([statistics.stdev(values)] if len(values) > 1 else [])]
                texts = [" ± ".join(f"{number:.{places}f}" for number in numbers) for places in (2, 3)]
                assert any(f"| {text} |" in line for text in texts for line in lines), (name, row, key)


@pytest.mark.parametrize("folder", LEDGERS, ids=lambda p: p.name)
def test_a_committed_ledger_agrees_with_its_run_folders(folder):
    ledger, records = recompute(folder)
    runs = ROOT / ledger.table.runs
    if not runs.is_dir():
        pytest.skip(f"needs {ledger.table.runs}, the run folders, which are not committed")
    jobs = make_jobs(ledger.table, runs, {})

    def key(record):
        return record.block, record.row, record.column, record.seed

    there = {key(r): r for r in records_of(states_of(jobs, resolve_all(jobs), runs))}
    for record in records:
        if key(record) in there and there[key(record)].status == "done":
            assert there[key(record)].results == record.results, key(record)


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_a_shipped_table_is_whole_and_its_settings_resolve(path):
    table = read_table(find_table(path.stem))
    meanings = resolve_all(make_jobs(table, Path(table.runs), {}))
    assert meanings
