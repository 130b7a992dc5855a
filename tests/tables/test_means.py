"""Columns that are means of other columns, and settings that hold the seed."""

import copy
from pathlib import Path

import yaml
from shortcuts import refused

from finetune_mile.paper.table import dry_run
from finetune_mile.paper.tables.description import find_table, quick_table, read_table
from finetune_mile.paper.tables.ledger import make_ledger
from finetune_mile.paper.tables.runs import RunRecord, make_jobs, resolve_all, states_of

TABLE = {
    "title": "T", "runs": "runs/t", "seeds": [0, 1], "settings": {"recipe": "demo"},
    "blocks": [{
        "name": "b", "columns": {"x": {"steps": 600}, "y": {"steps": 700}}, "means": {"both": ["x", "y"]},
        "rows": {"one": {}, "two": {"only": ["x"]}, "three": {}}, "measures": {"accuracy": "accuracy"},
        "paper": {"one": {"both": {"accuracy": 20.0}}}, "differences": [["one", "three"]],
        "bars": [{"row": "one", "column": "both", "measure": "accuracy", "between": [10, 30]}],
    }],
    "quick": {"blocks": {"b": {"columns": ["x"]}}},
}  # fmt: skip


def read(tmp_path, tree):
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return read_table(path)


def record(row, column, seed, accuracy):
    return RunRecord(
        block="b", row=row, column=column, seed=seed, status="done", recipe=column, results={"accuracy": accuracy},
        seconds=10.0, device="cpu", threads=1, commit="abc",
    )  # fmt: skip


def test_a_mean_is_taken_seed_by_seed_where_all_columns_are_there(tmp_path):
    table = read(tmp_path, TABLE)
    runs = [record("one", "x", 0, 10.0), record("one", "y", 0, 20.0), record("one", "x", 1, 30.0),
            record("one", "y", 1, 40.0), record("three", "x", 0, 1.0), record("three", "y", 0, 3.0),
            record("three", "x", 1, 5.0), record("two", "x", 0, 7.0)]  # fmt: skip
    ledger = make_ledger(table, runs, {})
    block = ledger.blocks[0]
    assert block.cell("one", "both").numbers["accuracy"].ours.values == (15.0, 35.0)
    assert block.cell("one", "both").numbers["accuracy"].paper == 20.0
    assert block.cell("one", "both").seconds == 20.0
    assert block.cell("three", "both").numbers["accuracy"].ours.values == (2.0,), "seed 1 lacks a column"
    assert block.cell("two", "both") is None
    found = [d.paired.values for d in block.differences if d.column == "both"]
    assert found == [(13.0,)]
    assert block.bars[0].outcome == "met"
    assert (ledger.runs, ledger.expected) == (8, 10), "a mean is no run"


def test_a_mean_goes_with_its_columns(tmp_path):
    table = read(tmp_path, TABLE)
    assert {job.key.column for job in make_jobs(table, Path("runs"), {})} == {"x", "y"}
    quick = quick_table(table).blocks[0]
    assert (quick.means, quick.bars, quick.paper["one"]) == ({}, (), {})
    wrong = copy.deepcopy(TABLE)
    wrong["blocks"][0]["means"] = {"x": ["x", "z"]}
    with refused("no column 'z'", "column itself"):
        read(tmp_path, wrong)


def test_a_setting_with_the_seed_is_the_seed_s_own_and_has_one_hash():
    table = read_table(find_table("ood"))
    jobs = [job for job in make_jobs(table, Path("runs"), {}) if job.key[:3] == ("ColoredMNIST", "IRM", "10 %")]
    meanings = resolve_all(jobs)
    assert [m.tree["data"].partition("draw=")[2] for m in meanings] == ["10", "11", "12", "13", "14"]
    assert len({m.hash for m in meanings}) == 1
    shown = dry_run(states_of(jobs, meanings, Path("nowhere")), "run")
    assert "and --seed 11, 12, 13, 14; data is their own, such as colored-mnist:?side=14&protocol=10%&draw=11" in shown


def test_the_table_of_the_paper_is_complete():
    table = read_table(find_table("ood"))
    for block in table.blocks:
        assert block.shown_columns_of("ERM") == ["+90 %", "+80 %", "-90 %", "random colours", "10 %", "leave-one-out"]
        assert (
            set(block.paper) == set(block.rows) - {"Sigmoid"} == {"ERM", "IRM", "REx", "MILe paper", "MILe published"}
        )
    cells = [(block.name, row, column) for block in table.blocks for row in block.rows for column in block.columns]
    jobs = make_jobs(table, Path("runs"), {})
    assert sorted(job.key for job in jobs) == sorted((*cell, seed) for cell in cells for seed in range(10, 15))
