"""Descriptions: what is refused, all at once, and what --quick leaves."""

import pytest
from shortcuts import refused
from tiny import TINY, write_tiny

from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables.description import Table, find_table, quick_table, read_table
from finetune_mile.paper.tables.runs import RunKey, folder_of, layered, make_jobs, pick, resolve_all, slug


def test_every_wrong_reference_is_told_at_once(tmp_path):
    def spoil(tree):
        block = tree["blocks"][0]
        block["rows"]["student"]["needs"] = {"teacher": "sigmiod"}
        block["rows"]["sigmoid"]["only"] = ["1 %"]
        block["paper"]["sigmoid"]["10 %"]["topone"] = 3.0
        block["differences"].append(["student", "nobody"])
        block["bars"].append({"row": "sigmoid", "column": "5 %", "measure": "top-1", "at_least": 1})
        tree["quick"]["blocks"]["fine-tunning"] = {}

    with pytest.raises(Problem) as caught:
        read_table(write_tiny(tmp_path, spoil))
    text = str(caught.value)
    assert len(caught.value.sentences) == 6
    for part in (
        "needs teacher: there is no row sigmiod",
        "no column '1 %'",
        "no measure 'topone'; did you mean 'top-1'?",
        "no row 'nobody'",
        "no column '5 %'",
        "no block 'fine-tunning'; did you mean 'fine-tuning'?",
    ):
        assert part in text


def test_unknown_keys_and_empty_bars_are_refused(tmp_path):
    def spoil(tree):
        tree["blocks"][0]["row"] = {}
        tree["blocks"][0]["bars"] = [{"row": "sigmoid", "column": "10 %", "measure": "F1"}]

    with pytest.raises(Problem) as caught:
        read_table(write_tiny(tmp_path, spoil))
    assert "blocks.0.row: extra inputs" in str(caught.value)
    assert "a bar needs at_least:, at_most: or between:" in str(caught.value)


def test_a_bar_in_a_column_that_its_row_does_not_have_is_refused(tmp_path):
    def spoil(tree):
        bar = {"row": "sigmoid", "column": "100 %", "measure": "top-1", "at_least": 1}  # it has "10 %" alone
        tree["blocks"][0]["bars"].append(bar)

    with pytest.raises(Problem, match="bars: row sigmoid has no column '100 %'"):
        read_table(write_tiny(tmp_path, spoil))


def test_a_circle_of_needs_is_told(tmp_path):
    def spoil(tree):
        tree["blocks"][0]["rows"]["sigmoid"]["needs"] = {"x": "student"}

    table = read_table(write_tiny(tmp_path, spoil))
    with refused("need each other", "fine-tuning / sigmoid / 10 % -> fine-tuning / student"):
        make_jobs(table, tmp_path, {})


def test_an_unknown_table_is_answered_with_what_there_is():
    with pytest.raises(Problem, match="no such table or file"):
        find_table("nothing-like-it")


def test_jobs_come_in_an_order_that_works_and_know_their_folders(tmp_path):
    table = Table.model_validate(TINY)
    jobs = make_jobs(table, tmp_path, {"batch_size": 4})
    places = [job.key.row for job in jobs]
    assert places == ["sigmoid", "student", "broken", "after"]
    student = jobs[1]
    assert student.folder == tmp_path / "fine-tuning/student/10-pct/0"
    flags = student.arguments()
    assert flags[flags.index("--teacher") + 1] == (tmp_path / "fine-tuning/sigmoid/10-pct/0").as_posix()
    assert flags[flags.index("--batch-size") + 1] == "4"
    assert "--k-t" not in flags, "the flag belongs to mile; for other methods it is --set mile.k_t"
    assert "mile.k_t=2" in flags
    assert "--k-t" in jobs[2].arguments()
    assert [job.key.row for job in pick(jobs, ["fine-tuning/student"], None)] == ["sigmoid", "student"]
    with pytest.raises(Problem, match="--only nothing: no such block or row"):
        pick(jobs, ["nothing"], None)
    with refused("--seeds", "seed 7", "there are 0"):
        pick(jobs, [], [0, 7])


def test_a_row_without_columns_serves_every_column_and_seed(tmp_path):
    tree = {**TINY, "seeds": [0, 1], "quick": None}
    tree["blocks"] = [
        {
            "name": "pre",
            "hidden": True,
            "rows": {"simclr": {"verb": "pretrain", "seeds": [7], "settings": {"recipe": "p"}}},
        },
        {
            "name": "tune",
            "columns": {"a": {}, "b": {}},
            "rows": {"grown": {"needs": {"pre": "pre/simclr"}, "settings": {"init": "{pre}/x.ckpt"}}},
        },
    ]
    jobs = make_jobs(Table.model_validate(tree), tmp_path, {})
    assert jobs[0].command() == f"finetune-mile pretrain --recipe p --seed 7 --out {tmp_path}/pre/simclr/7"
    assert {job.needs["pre"] for job in jobs[1:]} == {RunKey("pre", "simclr", "", 7)}
    assert len(jobs) == 5
    assert f"--init {tmp_path}/pre/simclr/7/x.ckpt" in jobs[1].command()


def test_a_place_that_nothing_fills_is_told(tmp_path):
    tree = {**TINY, "quick": None, "blocks": [{"name": "x", "rows": {"a": {"settings": {"init": "{pre}/x"}}}}]}
    with refused("x / a: init", "{pre}/x", "needs"):
        make_jobs(Table.model_validate(tree), tmp_path, {})


def test_a_row_of_another_verb_is_resolved_by_its_own_recipe(tmp_path):
    def meaning(**settings):
        rows = {"p": {"verb": "pretrain", "settings": {"recipe": "grids", "method": "byol", **settings}}}
        tree = {**TINY, "quick": None, "blocks": [{"name": "x", "rows": rows}]}
        return resolve_all(make_jobs(Table.model_validate(tree), tmp_path, {}))[0]

    found = meaning()
    assert found.tree["method"] == "byol"
    assert "byol.momentum" in found.tree
    assert not [key for key in found.tree if key.startswith("simclr.")], "blocks of other methods do not count"
    assert meaning(steps=3).hash != found.hash
    with refused("x / p: --set stepz", "steps"):
        meaning(stepz=3)


def test_a_need_without_the_seed_is_refused(tmp_path):
    tree = {**TINY, "seeds": [0, 1, 2], "quick": None}
    rows = {"a": {"seeds": [0, 1]}, "b": {"needs": {"t": "a"}}}
    tree["blocks"] = [{"name": "x", "rows": rows}]
    with pytest.raises(Problem, match="x / b needs t: a has no seed 2"):
        make_jobs(Table.model_validate(tree), tmp_path, {})


def test_layers_replace_each_other():
    base = {"lr": 1, "epochs": 3, "mile": {"k_t": 2}, "rho": 0.1}
    found = layered(base, {"optimizer.lr": 2, "steps": 9, "k_t": 4, "mile.rho": 0.2})
    assert found == {"optimizer.lr": 2, "steps": 9, "mile.k_t": 4, "mile.rho": 0.2}


def test_names_become_folders_and_must_not_collide(tmp_path):
    assert [slug(n) for n in ("1 %", "mocov2+mile", "MILe (paper)")] == ["1-pct", "mocov2-plus-mile", "mile-paper"]
    assert folder_of(tmp_path, RunKey("b", "r", "", 3)) == tmp_path / "b/r/3"
    tree = {**TINY, "quick": None, "blocks": [{"name": "x", "rows": {"a b": {}, "a-b": {}}}]}
    with pytest.raises(Problem, match="'a b' and 'a-b' would share a folder"):
        make_jobs(Table.model_validate(tree), tmp_path, {})


def test_quick_keeps_what_is_named_and_what_that_needs():
    quick = quick_table(Table.model_validate(TINY))
    block = quick.blocks[0]
    assert quick.runs == "runs/tiny-quick"
    assert list(block.rows) == ["sigmoid", "student"]
    assert block.shown_rows == ["student"]
    assert list(block.columns) == ["10 %"]
    assert [bar.rows for bar in block.bars] == [("student", "sigmoid"), None]
    with pytest.raises(Problem, match="has no short form"):
        quick_table(quick)


def test_quick_that_leaves_out_a_needed_column_is_told(tmp_path):
    tree = {**TINY, "blocks": [{"name": "x", "columns": {"a": {}, "b": {}}, "rows": {
        "one": {"only": ["b"]}, "two": {"only": ["a"], "needs": {"t": "x/one/b"}},
    }}], "quick": {"blocks": {"x": {"columns": ["a"], "rows": ["two"]}}}}  # fmt: skip
    table = Table.model_validate(tree)
    assert len(make_jobs(table, tmp_path, {})) == 2
    with refused("x / two / a", "needs t", "quick:", "x/one/b"):
        make_jobs(quick_table(table), tmp_path, {})


def test_a_file_of_ones_own_wins_over_a_shipped_table_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_table("ssl").parent.name == "tables"
    assert find_table("ssl.yaml").parent.name == "tables"
    mine = write_tiny(tmp_path, name="ssl")
    assert find_table("ssl.yaml").resolve() == mine


def test_the_hash_sees_what_changes_a_number_and_nothing_else(tmp_path):
    table = Table.model_validate(TINY)

    def hashes(**over):
        return [m.hash for m in resolve_all(make_jobs(table, tmp_path, over))]

    before = hashes()
    assert hashes(workers=1) == before
    assert hashes(steps=7) != before
    changed = hashes(k_t=3)
    assert changed[0] == before[0], "sigmoid has no k_t"
    assert changed[2] != before[2]
    elsewhere = [m.hash for m in resolve_all(make_jobs(table, tmp_path / "other", {}))]
    assert elsewhere == before


def test_settings_that_a_recipe_refuses_are_told_with_their_cell(tmp_path):
    with pytest.raises(Problem) as caught:
        resolve_all(make_jobs(Table.model_validate(TINY), tmp_path, {"optimizer.momentun": 1}))
    assert "fine-tuning / sigmoid / 10 % and 3 more: --set optimizer.momentun" in str(caught.value)
    assert len(caught.value.sentences) == 1
    assert "did you mean momentum" in str(caught.value)
