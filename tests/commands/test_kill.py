"""Killed at any moment, a run goes on as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file
from shortcuts import ROOT, SHORT_MILE

FLAGS = [*SHORT_MILE, "--steps", "120", "--set", "checkpoint_every=3", "--set", "evaluate.images=200"]


def start(*flags):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "finetune_mile/run.py"), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "FINETUNE_MILE_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_steps(process, out, more):
    """Until the run has done `more` steps since now, or has ended."""
    metrics = out / "metrics.jsonl"

    def lines():
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    goal = lines() + more
    while process.poll() is None and lines() < goal:
        time.sleep(0.002)


def whole(tmp_path):
    process = start(*FLAGS, "--out", str(tmp_path / "whole"))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return load_file(tmp_path / "whole/export/model.safetensors")


def kill_often(tmp_path, signum, times, seed):
    out, draws = tmp_path / "killed", random.Random(seed)
    flags = [*FLAGS, "--out", str(out)]
    for _ in range(times):
        process = start(*flags)
        wait_for_steps(process, out, draws.randint(1, 12))
        time.sleep(draws.uniform(0, 0.15))  # in a step, in an evaluation, while saving
        process.send_signal(signum)
        process.communicate(timeout=60)
        if signum == signal.SIGTERM and process.returncode == 143:
            assert json.loads((out / "run.json").read_text())["status"] == "stopped"
        flags = ["--resume", str(out)] if (out / "recipe.yaml").exists() else flags
    process = start(*flags)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    assert not list(out.rglob("*.part"))
    return load_file(out / "export/model.safetensors")


def test_a_few_kills_change_nothing(tmp_path):
    expected = whole(tmp_path)
    found = kill_often(tmp_path, signal.SIGKILL, 2, seed=0)
    assert all(found[name].equal(expected[name]) for name in expected)


def test_sigterm_saves_and_says_so(tmp_path):
    out = tmp_path / "run"
    process = start(*FLAGS, "--out", str(out))
    wait_for_steps(process, out, 5)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in errors
    info = json.loads((out / "run.json").read_text())
    assert info["status"] == "stopped"
    assert info["signal"] == "SIGTERM"
    assert list((out / "checkpoints").glob("step-*.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_twenty_kills_change_nothing(tmp_path, signum):
    expected = whole(tmp_path)
    found = kill_often(tmp_path, signum, 20, seed=1)
    assert all(found[name].equal(expected[name]) for name in expected)
