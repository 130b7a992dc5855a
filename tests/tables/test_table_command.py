"""`finetune-mile table` as a user types it, on runs of a second each."""

import json
import shutil

import pytest
from PIL import Image
from tiny import write_tiny

from finetune_mile.cli import main
from finetune_mile.paper.tables.description import read_table
from finetune_mile.paper.tables.runs import read_records
from finetune_mile.paper.tables.writing import plotted_hash, read_ledger


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A table that was run once: two runs went well, one failed, one was left out for that."""
    folder = tmp_path_factory.mktemp("table")
    path = write_tiny(folder)
    runs, out = folder / "runs", folder / "ledger"
    code = main(["table", str(path), "--runs", str(runs), "--out", str(out), "--jobs", "1", "--no-prices"])
    return folder, path, code


def run(folder, path, *flags):
    return main(["table", str(path), "--runs", str(folder / "runs"), "--out", str(folder / "ledger"), *flags])


def test_a_failed_run_is_reported_and_the_rest_goes_on(done):
    folder, _, code = done
    assert code == 1
    records = {r.row: r for r in read_records(folder / "ledger/runs.jsonl")}
    assert {row: r.status for row, r in records.items()} == {"sigmoid": "done", "student": "done", "broken": "failed"}
    assert "error: the loss is nan at step 2" in (folder / "runs/logs/fine-tuning/broken/100-pct/0.txt").read_text()
    results = json.loads((folder / "runs/fine-tuning/student/10-pct/0/results.json").read_text())
    assert records["student"].results == results
    assert (records["student"].device, records["student"].threads) == ("cpu", 1)


def test_the_ledger_has_all_its_files_and_the_picture_knows_its_numbers(done):
    folder, path, _ = done
    names = {p.name for p in (folder / "ledger").iterdir()}
    assert names == {"runs.jsonl", "prices.json", "ledger.md", "plot.png"}
    ledger, _ = read_ledger(folder / "ledger", read_table(path))
    with Image.open(folder / "ledger/plot.png") as picture:
        assert picture.info["Description"] == plotted_hash(ledger)
    assert "| after | 100 % | top-1 | 60 |" in (folder / "ledger/ledger.md").read_text()


def test_other_formats_are_written_on_demand_from_the_runs_that_are_recorded(done, tmp_path, capsys):
    folder, path, _ = done
    out = tmp_path / "ledger"
    shutil.copytree(folder / "ledger", out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    command = ["table", str(path), "--runs", str(tmp_path / "none"), "--out", str(out)]
    assert main([*command, "--format", "html", "--format", "csv", "--format", "latex"]) == 0
    assert capsys.readouterr().out.split() == [str(out / f"ledger.{end}") for end in ("html", "csv", "tex")]
    assert {name: (out / name).read_bytes() for name in before} == before, (
        "no run folder was read, nothing else written"
    )
    assert "data:image/png;base64," in (out / "ledger.html").read_text()
    assert "fine-tuning,student,10 %,top-1," in (out / "ledger.csv").read_text()
    assert r"\begin{tabular}" in (out / "ledger.tex").read_text()
    (out / "ledger.csv").write_text("outdated")
    (out / "ledger.tex").unlink()
    assert run(folder, path, "--out", str(out), "--ledger-only", "--no-prices") == 0
    assert "fine-tuning,student," in (out / "ledger.csv").read_text()
    assert not (out / "ledger.tex").exists()
    capsys.readouterr()
    assert main(["table", str(path), "--out", str(tmp_path / "nothing"), "--format", "csv"]) == 2
    assert "runs.jsonl: not found" in capsys.readouterr().err


def test_what_is_done_is_not_run_again_and_what_is_missing_is_listed(done, capsys):
    folder, path, _ = done
    assert run(folder, path, "--commands", "shell") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("accelerate launch finetune_mile/run.py --resume ")
    assert lines[0].endswith("/broken/100-pct/0")
    assert lines[1].startswith("accelerate launch finetune_mile/run.py --data demo:200 ")
    assert "--method distill" in lines[1]
    assert len(lines) == 2
    assert run(folder, path, "--commands", "slurm") == 0
    script = capsys.readouterr().out
    assert script.count("sbatch") == 2, "the second level waits for the first"
    assert run(folder, path, "--commands", "shell", "--only", "fine-tuning/student") == 0
    assert capsys.readouterr().out == ""


def test_dry_run_says_states_commands_and_who_said_what(done, capsys):
    folder, path, _ = done
    before = sorted(folder.rglob("*"))
    assert run(folder, path, "--dry-run") == 0
    text = capsys.readouterr().out
    assert "1. fine-tuning / sigmoid / 10 %: done (seed 0)" in text
    assert "3. fine-tuning / broken / 100 %: failed (seed 0) [the loss is nan at step 2" in text
    assert "4. fine-tuning / after / 100 %: not run (seed 0)" in text
    assert "batch_size = 8   --batch-size" in text
    assert "needs teacher: fine-tuning / sigmoid / 10 %" in text
    assert text.endswith("4 cells, 4 runs, 2 of them done\n")
    assert sorted(folder.rglob("*")) == before


def test_other_settings_make_a_run_stale_and_again_replaces_it(done, capsys, tmp_path):
    folder, _, _ = done

    def change(tree):
        del tree["blocks"][0]["rows"]["broken"], tree["blocks"][0]["rows"]["after"]
        del tree["blocks"][0]["paper"]["after"], tree["blocks"][0]["bars"][2]
        tree["blocks"][0]["rows"]["sigmoid"]["settings"]["steps"] = 5

    path = write_tiny(tmp_path, change)
    out = tmp_path / "ledger"
    assert run(folder, path, "--out", str(out), "--ledger-only", "--no-prices") == 0
    said = capsys.readouterr().err
    assert "steps was 6, is 5" in said
    assert "its teacher (fine-tuning / sigmoid / 10 %) is to be run again" in said
    assert "--again replaces it" in said
    assert {r.status for r in read_records(out / "runs.jsonl")} == {"stale"}
    assert run(folder, path, "--commands", "shell") == 0
    assert capsys.readouterr().out == ""
    assert run(folder, path, "--commands", "shell", "--again") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("--overwrite") for line in lines)


def test_a_run_is_stale_when_what_it_needs_was_run_again(done, capsys):
    folder, path, _ = done
    place = folder / "runs/fine-tuning/sigmoid/10-pct/0/run.json"
    before = place.read_text()
    place.write_text(json.dumps(json.loads(before) | {"began": "2999-01-01T00:00:00.000+00:00"}))
    try:
        assert run(folder, path, "--dry-run", "--only", "fine-tuning/student") == 0
        said = capsys.readouterr().out
        assert "stale (seed 0) [its teacher (fine-tuning / sigmoid / 10 %) was run again after it]" in said
        student = place.parents[3] / "student/10-pct/0/run.json"
        assert json.loads(student.read_text())["began"] > json.loads(before)["began"]
    finally:
        place.write_text(before)


def test_a_stopped_run_is_gone_on_with(done, capsys):
    folder, path, _ = done
    place = folder / "runs/fine-tuning/sigmoid/10-pct/0/run.json"
    before = place.read_text()
    place.write_text(before.replace('"finished"', '"stopped"'))
    try:
        assert run(folder, path, "--commands", "shell", "--only", "fine-tuning/sigmoid") == 0
        assert capsys.readouterr().out.split() == [
            "accelerate", "launch", "finetune_mile/run.py", "--resume", place.parent.as_posix(),
        ]  # fmt: skip
    finally:
        place.write_text(before)


def test_results_that_are_missing_are_not_a_done_run(done, capsys):
    folder, path, _ = done
    place = folder / "runs/fine-tuning/student/10-pct/0/results.json"
    before = place.read_text()
    place.unlink()
    try:
        assert run(folder, path, "--dry-run", "--only", "fine-tuning/student") == 0
        assert "student / 10 %: stopped (seed 0)" in capsys.readouterr().out
    finally:
        place.write_text(before)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--seeds", "one"], "--seeds one: write whole numbers"),
        (["--set", "data"], "--set data: write KEY=VALUE"),
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--only", "pre"], "--only pre: no such block or row"),
    ],
)
def test_bad_flags(flags, sentence, tmp_path, capsys):
    assert run(tmp_path, write_tiny(tmp_path), *flags) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "ledger").exists()
