"""The same command again: `--resume auto` starts a run, continues it, or has nothing left to do."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import load_file
from shortcuts import ROOT, SHORT_MILE

import finetune_mile
from finetune_mile.cli import main as command
from finetune_mile.run import main

FLAGS = [*SHORT_MILE, "--steps", "12", "--data", "demo:60", "--set", "evaluate.images=10"]
PAIRS = list(zip(FLAGS[::2], FLAGS[1::2], strict=True))


def auto(out, *flags):
    return main([*FLAGS, *flags, "--resume", "auto", "--out", str(out)])


def test_the_same_command_starts_continues_and_is_done(tmp_path, stop_at, capsys):
    out = tmp_path / "run"
    stop_at(7)
    assert auto(out) == 143
    assert json.loads((out / "run.json").read_text())["status"] == "stopped"
    stop_at(None)
    assert auto(out) == 0
    assert main([*FLAGS, "--out", str(tmp_path / "complete")]) == 0
    found, expected = (load_file(each / "export/model.safetensors") for each in (out, tmp_path / "complete"))
    assert all(found[name].equal(expected[name]) for name in expected)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    capsys.readouterr()
    assert auto(out) == 0
    assert "is finished" in capsys.readouterr().out
    given = [pair[1].split("=") if pair[0] == "--set" else (pair[0][2:], pair[1]) for pair in PAIRS]
    settings = {key.replace("-", "_"): yaml.safe_load(value) for key, value in given}
    trained = finetune_mile.train(settings.pop("data"), settings.pop("init"), out=out, resume="auto", **settings)
    assert trained.results == json.loads((out / "results.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_other_settings_are_refused_by_name(tmp_path, stop_at, capsys):
    out = tmp_path / "run"
    stop_at(5)
    assert auto(out) == 143
    stop_at(None)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert auto(out, "--lr", "0.5", "--set", "mile.rho=0.3") == 2
    said = capsys.readouterr().err
    assert "optimizer.lr was " in said
    assert ", is 0.5" in said
    assert "mile.rho was " in said
    assert "steps was" not in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_settings_are_compared_as_they_were_asked_for(tmp_path, stop_at):
    """A run spells out steps for epochs, and the precision of its machine: asking for the same again is no change."""
    out = tmp_path / "run"
    flags = [word for pair in PAIRS if pair[0] != "--steps" for word in pair] + [
        "--epochs",
        "2",
        "--set",
        "precision=auto",
    ]
    stop_at(5)
    assert main([*flags, "--resume", "auto", "--out", str(out)]) == 143
    stop_at(None)
    info = json.loads((out / "run.json").read_text())
    asked, used = info["requested"], info["recipe"]
    assert (asked["steps"], asked["epochs"], asked["precision"]) == (None, 2, "auto")
    assert all(used[key] != value for key, value in asked.items()), "only what the run has put another value for"
    assert main([*flags, "--resume", "auto", "--out", str(out)]) == 0


def test_resume_auto_needs_out_and_out_alone_refuses_as_before(tmp_path, capsys):
    assert main([*FLAGS, "--resume", "auto"]) == 2
    assert "add --out DIR" in capsys.readouterr().err
    assert auto(tmp_path / "run", "--overwrite") == 2
    assert "leave out --overwrite" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    assert auto(tmp_path / "mine") == 2
    assert "was not made by a run" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ several processes

# gloo's barrier at the start of a group hides what NCCL, which has none, lets happen: a slow process finds the folder
# that the first one has just made. So the second one must not look at all.
#
# The first function that is registered is the last one to run: the process must have no thread of gloo by then. If such
# a thread lets go of a tensor while Python ends, the process aborts, rarely and after all its work is done.
SECOND_IS_BLIND = """
import atexit, os, sys
from pathlib import Path
def no_thread_is_left():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    if any("gloo" in name for name in names):
        sys.stderr.write(f"threads are left: {names}\\n")
        os._exit(9)
atexit.register(no_thread_is_left)
import finetune_mile.training.folder as folder
def refuse(*_):
    raise AssertionError("only the first process may look at the folder")
if os.environ["RANK"] == "1":
    folder._choose_folder = folder.check_free = folder.next_folder = refuse
from finetune_mile.cli import main as command
from finetune_mile.run import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_only_the_first_process_chooses_and_checks_the_folder(tmp_path):
    script = tmp_path / "blind.py"
    script.write_text(SECOND_IS_BLIND)
    env = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]

    def run(*flags):
        return subprocess.run(
            [*command, *FLAGS, *flags], env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path
        )

    done = run()  # both must have the folder that the first one chose
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo-1"]
    again = run("--out", "runs/demo-1")
    assert again.returncode != 0
    assert "holds a run" in again.stderr
    assert "only the first process" not in again.stderr
    third = run("--resume", "auto", "--out", "runs/demo-1")
    assert third.returncode == 0, third.stderr[-3000:]
    assert third.stdout.count("is finished") == 1


def test_seeds_are_for_one_process(tmp_path, monkeypatch, capsys):
    """The first run has closed the connections of the processes when the second one starts."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*FLAGS, "--seeds", "2", "--out", str(tmp_path / "seeds")]) == 2
    assert "start one run per seed" in capsys.readouterr().err


def test_finished_is_one_answer_for_every_command(tmp_path, capsys):
    """A run was killed after results.json, before export/: --seeds counted it as done, and printed its mean."""
    out = tmp_path / "seeds"
    words = [*FLAGS, "--seeds", "1", "--out", str(out)]
    assert main(words) == 0
    run, weights = out / "seed-0", out / "seed-0/export/model.safetensors"
    before, info = weights.read_bytes(), json.loads((run / "run.json").read_text())
    info = {key: value for key, value in info.items() if key not in ("share", "images_per_second")}
    (run / "run.json").write_text(json.dumps(info | {"status": "running"}))  # as a kill after results.json leaves it
    for verb in ("predict", "eval", "export"):
        more = {"predict": ["photo.png"], "eval": [], "export": ["--to", "torch", "--out", str(tmp_path / "torch")]}
        source = ["--model", f"run:{run}"] if verb == "eval" else [str(run)]
        (tmp_path / "photo.png").touch()
        assert command([verb, *source, *(str(tmp_path / word) if "." in word else word for word in more[verb])]) == 2
        assert f"this run is not finished; continue it with --resume {run}" in capsys.readouterr().err
    assert main(["--init", str(run), "--data", "demo:60", "--explain"]) == 2
    weights.unlink()
    assert main(words) == 0
    assert weights.read_bytes() == before
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
