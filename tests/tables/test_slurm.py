"""The SLURM script of a table, submitted to a small fake of SLURM (tests/tables/sbatch.py)."""

import json
import os
import subprocess
import sys

import pytest
from shortcuts import ROOT
from tiny import write_tiny

from finetune_mile.cli import main

# In the place of a launcher and its run: writes down its words, fails for mile, waits for TERM if it is told to.
FAKE_RUN = """#!/bin/bash
echo "$SLURM_RESTART_COUNT $*" >> "$FAKE_SLURM/runs.txt"
case "$*" in *"--method mile"*) exit 1 ;; esac
if [ "$SLURM_RESTART_COUNT ${FAKE_SIGNAL#* }" = "0 ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" ]; then
  trap 'echo saved >> "$FAKE_SLURM/runs.txt"; exit 143' TERM
  touch "$FAKE_SLURM/started"
  while true; do sleep 0.1; done
fi
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch, capsys):
    """slurm(*flags, **variables) submits the script of the tiny table; returns the fake's log and what was printed."""
    place = tmp_path / "slurm"
    place.mkdir()
    monkeypatch.setenv("FAKE_SLURM", str(place))
    import sbatch

    monkeypatch.setattr(sbatch, "PLACE", place)
    sbatch.install(tmp_path / "bin")
    path = write_tiny(tmp_path)

    def submit(*flags, **variables):
        words = ["table", str(path), "--runs", str(tmp_path / "runs"), "--commands", "slurm", *flags]
        assert main(words) == 0
        script = capsys.readouterr().out
        env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)} | variables
        done = subprocess.run(["bash", "-c", script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return sbatch.read(), done.stderr

    return submit


@pytest.fixture
def fake_run(tmp_path):
    file = tmp_path / "fake-run"
    file.write_text(FAKE_RUN)
    file.chmod(0o755)
    return str(file)


def test_each_task_waits_for_the_tasks_that_it_needs_alone(slurm, fake_run, tmp_path):
    """One failed teacher kept all students from starting."""
    log, _ = slurm("--launch", fake_run)
    codes = {line["task"]: line["code"] for line in log}
    assert codes == {"1_0": 0, "1_1": 1, "2_0": 0, "3_0": None}, (
        "the student of the good teacher ran, the other did not"
    )
    needs = {line["task"]: line["options"]["dependency"] for line in log}
    assert needs == {"1_0": None, "1_1": None, "2_0": "afterok:1_0", "3_0": "afterok:1_1"}
    calls = (tmp_path / "slurm/runs.txt").read_text().splitlines()
    assert all(call.endswith("--resume auto") for call in calls)
    assert all(line["options"]["gres"] == "gpu:8" for line in log)


def test_eight_gpus_and_a_free_port_by_default(slurm, tmp_path, capsys):
    words = ["table", str(tmp_path / "tiny.yaml"), "--runs", str(tmp_path / "runs"), "--commands", "slurm"]
    assert main(words) == 0
    script = capsys.readouterr().out
    assert "accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --main_process_port 0 " in script
    assert main([*words, "--gpus", "1"]) == 0
    script = capsys.readouterr().out
    assert "accelerate launch --num_machines 1 --num_processes 1 --main_process_port 0 finetune_mile/run.py " in script
    assert "--gres=gpu:1 " in script
    assert main([*words, "--gpus", "0"]) == 2


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_task_at_its_time_limit_and_a_preempted_one_save_and_are_queued_again(slurm, fake_run, tmp_path, signal):
    log, _ = slurm("--launch", fake_run, "--only", "fine-tuning/sigmoid", FAKE_SIGNAL=f"{signal} 1_0")
    assert [(line["task"], line["code"], line["restarts"]) for line in log] == [("1_0", 143, 0), ("1_0", 0, 1)]
    calls = (tmp_path / "slurm/runs.txt").read_text().splitlines()
    assert calls[1] == "saved"
    assert calls[0].removeprefix("0 ") == calls[2].removeprefix("1 "), "the same command"


@pytest.mark.slow
def test_a_real_run_goes_on_where_it_was_stopped(slurm, tmp_path):
    watch = tmp_path / "watched"  # says when the run has begun
    out = tmp_path / "runs/fine-tuning/sigmoid/10-pct/0"
    watch.write_text(
        f'#!/bin/bash\n(while [ ! -s "{out}/metrics.jsonl" ]; do sleep 0.1; done; touch "$FAKE_SLURM/started") &\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    watch.chmod(0o755)
    flags = ["--set", "steps=3000", "--set", "log_every=1", "--only", "fine-tuning/sigmoid"]
    log, errors = slurm("--launch", str(watch), *flags, FAKE_SIGNAL="USR1 1_0")
    assert [line["code"] for line in log] == [143, 0], errors
    info = json.loads((out / "run.json").read_text())
    assert (info["status"], info["signal"]) == ("finished", "SIGTERM")
