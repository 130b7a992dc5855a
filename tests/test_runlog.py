"""Run folders: who may write into one, what may be removed from one, and what a kill may leave behind."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from shortcuts import ROOT, SHORT_MILE

from finetune_mile.core import files
from finetune_mile.core.problems import Problem
from finetune_mile.run import main
from finetune_mile.training.folder import RunFolder, alone, check_free

TINY = [*SHORT_MILE, "--steps", "6", "--data", "demo:60", "--set", "evaluate.images=10"]
FACTS = ("card", "versions", "world_size", "began", "device", "recipe_sha256")


def test_a_run_folder_has_one_writer_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.0)
    folder = RunFolder.create(tmp_path / "run", "a: 1", overwrite=False)
    folder.update(status="running")
    with alone(folder.path):
        with pytest.raises(Problem, match="another process is at work on this run"), alone(folder.path):
            pass
        with pytest.raises(Problem, match="another process is at work on this run"):
            RunFolder.create(folder.path, "a: 2", overwrite=True)
    assert (folder.path / "recipe.yaml").read_text() == "a: 1"
    assert not list(tmp_path.glob(".run.*")), "no leftovers"
    replaced = RunFolder.create(folder.path, "a: 2", overwrite=True)
    assert replaced.info["began"] > folder.info["began"]
    with alone(folder.path):
        assert (folder.path / "recipe.yaml").read_text() == "a: 2"


# ------------------------------------------------------------------------------------ F1: --overwrite


def test_f1_overwrite_refuses_a_folder_that_no_run_made(tmp_path, capsys):
    """A project folder with a recipe.yaml of its own: a thesis and its .git were gone."""
    project = tmp_path / "project"
    (project / "thesis").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / "thesis/ch1.tex").write_text("x")
    (project / "recipe.yaml").write_text((ROOT / "recipes/demo.yaml").read_text())
    for flags in ([], ["--overwrite"]):
        assert main([*TINY, "--out", str(project), *flags]) == 2
        said = capsys.readouterr().err
        assert "was not made by a run" in said
        assert "--overwrite" not in said, "it would not help"
    assert (project / "thesis/ch1.tex").read_text() == "x"
    assert (project / ".git").is_dir()


def test_f1_overwrite_keeps_and_names_what_a_run_did_not_write(tmp_path, capsys):
    out = tmp_path / "run"
    scratch = tmp_path / "scratch"
    (scratch / "data").mkdir(parents=True)
    (scratch / "data/photo.jpg").write_text("mine")
    assert main([*TINY, "--out", str(out)]) == 0
    (out / "notes").mkdir()
    (out / "notes/idea.txt").write_text("mine")
    (out / "export/thesis.tex").write_text("mine")
    (out / "pseudo_labels").symlink_to(scratch)
    before = (out / "run.json").read_text()
    assert main([*TINY, "--seed", "1", "--out", str(out), "--overwrite"]) == 0
    said = capsys.readouterr().err
    assert "kept" in said
    for name in ("notes", "export/thesis.tex", "pseudo_labels"):
        assert name in said, name
    assert (out / "notes/idea.txt").read_text() == (out / "export/thesis.tex").read_text() == "mine"
    assert (scratch / "data/photo.jpg").read_text() == "mine"
    assert (out / "run.json").read_text() != before
    assert "seed: 1\n" in (out / "recipe.yaml").read_text()


@pytest.mark.slow
def test_f1_pseudo_labels_on_a_scratch_disk_leave_the_disk_alone(tmp_path):
    """`pseudo_labels` was a link to a scratch disk, and everything else on that disk was removed."""
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    (scratch / "generation-old").mkdir(parents=True)
    (scratch / "generation-old/thesis.tex").write_text("mine")
    (scratch / "photos").mkdir()
    (scratch / "photos/a.jpg").write_text("mine")
    (scratch / ".DS_Store").write_text("mine")
    flags = [*TINY, "--set", "mile.pseudo_labels=cycle", "--steps", "12", "--out", str(out)]
    process = subprocess.run(
        [sys.executable, "-c", STOP_WHEN_MADE, str(scratch), *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert (scratch / "generation-old/thesis.tex").read_text() == "mine"
    assert (scratch / "photos/a.jpg").read_text() == (scratch / ".DS_Store").read_text() == "mine"
    made = sorted(path.name for path in scratch.glob("generation-*") if path.name != "generation-old")
    assert len(made) == 1, "labels of earlier generations are removed"


# Links pseudo_labels to a scratch folder as soon as the run folder is there, as a user would by hand.
STOP_WHEN_MADE = """
import sys
from pathlib import Path
from finetune_mile.training import train as training
from finetune_mile.run import main
train = training.train
def linked(*given):
    (given[-1].path / "pseudo_labels").symlink_to(sys.argv[1])
    return train(*given)
training.train = linked
sys.exit(main(sys.argv[2:]))
"""


# ------------------------------------------------------------------------------------ F2: damaged checkpoints


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped, with two checkpoints, and the weights of the same run without a stop."""
    from safetensors.torch import load_file

    base = tmp_path_factory.mktemp("stopped")
    assert main([*TINY, "--steps", "12", "--out", str(base / "complete")]) == 0
    append = RunFolder.append

    def append_and_stop(self, record):
        append(self, record)
        if record["step"] == 10 and record["kind"] == "train":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append", append_and_stop)
        assert main([*TINY, "--steps", "12", "--out", str(base / "run")]) == 143
    assert len(list((base / "run/checkpoints").glob("step-*.pt"))) == 2
    return base / "run", load_file(base / "complete/export/model.safetensors")


def copied(run, to):
    import shutil

    shutil.copytree(run, to)
    return to, sorted((to / "checkpoints").glob("step-*.pt"))


def flip(path, at, bit):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def contents_equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(contents_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(contents_equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.slow
def test_f2_a_flipped_bit_is_never_trained_on(stopped, tmp_path):
    """13 of 20 flips gave other weights without a word: now a flip is either told or changes nothing that is read."""
    from finetune_mile.training.resume import load_latest

    run, (older, newest) = copied(stopped[0], tmp_path / "run")
    folder = RunFolder.reopen(run)
    before, latest = (load_latest(folder, said.append) for said in ([], []))  # read twice: the same
    assert contents_equal(before, latest)
    assert latest["step"] == 10
    good, draws, told = newest.read_bytes(), random.Random(0), 0
    for _ in range(80):
        flip(newest, draws.randrange(len(good)), draws.randrange(8))
        said = []
        content = load_latest(folder, said.append)
        if said:
            told += 1
            assert newest.name in said[0]
            assert content["step"] < 10, "the one before is used"
        else:
            assert contents_equal(content, latest)
        newest.write_bytes(good)
    assert told > 40, "most of a checkpoint is data"
    del older


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "random": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
    "pickle": lambda path: path.write_bytes(__import__("pickle").dumps({"step": 3, "roles": {}})),
    "another dict": lambda path: torch.save({"step": 3}, path),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_f2_a_damaged_checkpoint_is_said_and_the_one_before_is_used(stopped, tmp_path, kind):
    from finetune_mile.training.resume import load_latest

    run, (older, newest) = copied(stopped[0], tmp_path / "run")
    DAMAGE[kind](newest)
    said = []
    content = load_latest(RunFolder.reopen(run), said.append)
    assert content["step"] == int(older.stem.removeprefix("step-"))
    assert len(said) == 1
    assert newest.name in said[0]
    assert older.name in said[0]


def test_f2_a_checkpoint_of_another_run_is_not_taken(stopped, tmp_path):
    from finetune_mile.training.resume import load_latest

    run, (older, newest) = copied(stopped[0], tmp_path / "run")
    content = torch.load(newest, weights_only=True)
    torch.save(content | {"run": "another"}, newest)
    said = []
    assert load_latest(RunFolder.reopen(run), said.append)["step"] < content["step"]
    assert "another run" in said[0]
    del older


def test_f2_resume_goes_on_from_the_checkpoint_before_and_ends_with_the_same_weights(stopped, tmp_path, capsys):
    from safetensors.torch import load_file

    run, (_, newest) = copied(stopped[0], tmp_path / "run")
    flip(newest, newest.stat().st_size // 3, 6)
    assert main(["--resume", str(run)]) == 0
    assert f"{newest.name} is damaged" in capsys.readouterr().err
    found = load_file(run / "export/model.safetensors")
    assert all(found[name].equal(expected) for name, expected in stopped[1].items())


def test_f2_without_a_good_checkpoint_nothing_is_removed(stopped, tmp_path, capsys):
    run, checkpoints = copied(stopped[0], tmp_path / "run")
    for path in checkpoints:
        path.write_bytes(b"")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "run.json"}
    assert main(["--resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "no usable checkpoint" in said
    assert {path: path.read_bytes() for path in before} == before


def test_f2_an_edited_recipe_is_refused_with_the_keys_that_differ(stopped, tmp_path, capsys):
    run, _ = copied(stopped[0], tmp_path / "run")
    recipe = run / "recipe.yaml"
    text = recipe.read_text()
    recipe.write_text("# a comment changes nothing\n" + text)
    assert main(["--resume", str(run), "--explain"]) == 0
    capsys.readouterr()
    recipe.write_text(text.replace("batch_size: 8\n", "batch_size: 16\n").replace("  lr: ", "  lr: 1"))
    assert main(["--resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert "batch_size was 8, is 16" in said
    assert "optimizer.lr was" in said
    assert "seed" not in said


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "\udcff"])
def test_f14_a_damaged_run_json_is_one_sentence(stopped, tmp_path, capsys, content):
    run, _ = copied(stopped[0], tmp_path / "run")
    (run / "run.json").write_text(content, errors="surrogateescape")
    assert main(["--resume", str(run)]) == 2
    assert "run.json is damaged" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ F11: killed while it is made


# Ends the process, as a kill would, just before the n-th rename, unlink or mkdir below a folder.
KILL_AT_EVENT = """
import os, sys
from pathlib import Path
at, below, seen = int(sys.argv[1]), sys.argv[2], 0
def watched(event, args):
    global seen
    if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "open") and str(args[0]).startswith(below):
        if event == "open" and not isinstance(args[1], str | None) or (event == "open" and "w" not in (args[1] or "")):
            return
        seen += 1
        if seen == at:
            os._exit(9)
sys.addaudithook(watched)
from finetune_mile.training.folder import RunFolder
RunFolder.create(
    Path(below) / "run", "a: 2", overwrite=True, notes={"init.json": {"a": 1}, "split.json": {"b": 1}},
    facts={"card": {}, "versions": {}, "world_size": 1, "device": "cpu"},
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("over", ["nothing", "a run"])
def test_f11_a_run_folder_is_complete_or_made_anew_by_the_same_command(tmp_path, over):
    """Killed between the rename and run.json, a run never got init.json, split.json and most of run.json."""

    def create(path, text):
        notes = {"init.json": {"a": 1}, "split.json": {"b": 1}}
        facts = {"card": {}, "versions": {}, "world_size": 1, "device": "cpu"}
        return RunFolder.create(path, text, overwrite=True, notes=notes, facts=facts)

    at = 0
    while True:
        at += 1
        base = tmp_path / str(at)
        base.mkdir()
        run = base / "run"
        if over == "a run":
            create(run, "a: 1")
            (run / "metrics.jsonl").write_text("{}\n")
            (run / "mine.txt").write_text("mine")
        done = subprocess.run([sys.executable, "-c", KILL_AT_EVENT, str(at), str(base)], cwd=ROOT, check=False)
        assert done.returncode in (0, 9)
        if (run / "recipe.yaml").is_file():  # a run that can be resumed is a complete one
            info = json.loads((run / "run.json").read_text())
            assert all(key in info for key in FACTS)
            assert (run / "init.json").is_file()
            assert (run / "split.json").is_file()
            assert info["recipe"] == ({"a": 2} if "a: 2" in (run / "recipe.yaml").read_text() else {"a": 1})
        check_free(run, overwrite=True)
        create(run, "a: 3")
        assert (run / "recipe.yaml").read_text() == "a: 3"
        assert sorted(path.name for path in base.iterdir()) == ["run"], "leftovers of the kill are removed"
        assert not list(run.rglob("*.part"))
        if over == "a run":
            assert (run / "mine.txt").read_text() == "mine"
            assert not (run / "metrics.jsonl").exists()
        if done.returncode == 0:
            break
    assert at > 5, "the kills reached into the work"


def test_f11_resume_writes_what_an_earlier_version_left_out(stopped, tmp_path):
    run, _ = copied(stopped[0], tmp_path / "run")
    complete = {name: (run / name).read_text() for name in ("init.json", "split.json")}
    for name in complete:
        (run / name).unlink()
    (run / ".init.json.part").write_text("{")
    assert main(["--resume", str(run)]) == 0
    assert {name: (run / name).read_text() for name in complete} == complete
    assert all(key in json.loads((run / "run.json").read_text()) for key in FACTS)
    assert not list(run.rglob("*.part"))


def test_f1_a_foreign_run_json_is_no_mark(tmp_path):
    """Other tools have a run.json as well."""
    for number, content in enumerate(('{"versions": 5}', '{"versions": {"other": "1"}}', "[]", "not JSON")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "run.json").write_text(content)
        with pytest.raises(Problem, match="was not made by a run"):
            check_free(folder, overwrite=True)


def test_f2_a_date_in_an_edited_recipe_is_one_sentence(stopped, tmp_path, capsys):
    run, _ = copied(stopped[0], tmp_path / "run")
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("seed: 0\n", "seed: 2024-01-01\n"))
    assert main(["--resume", str(run)]) == 2
    assert "seed was 0, is 2024-01-01" in capsys.readouterr().err
