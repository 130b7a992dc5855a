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


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------ signals of schedulers

LAUNCHERS = {
    "python": [sys.executable],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}


def launch_group(launcher, *flags):
    """Start a run in a process group of its own, as SLURM, systemd and docker do."""
    return subprocess.Popen(
        [*LAUNCHERS[launcher], str(ROOT / "finetune_mile/run.py"), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "FINETUNE_MILE_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def status_of(out):
    return json.loads((out / "run.json").read_text())["status"]


def check_f10(tmp_path, launcher, workers):
    """SIGTERM to the whole process group: loaders died first, the run ended as failed and saved nothing."""
    flags = [*FLAGS, "--steps", "60", "--set", "checkpoint_every=1000", "--set", f"workers={workers}"]
    flags += ["--k-t", "20", "--k-s", "10"]
    out = tmp_path / "run"
    process = launch_group(launcher, *flags, "--out", str(out))
    wait_for_steps(process, out, 13)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)  # accelerate's launcher dies at once, its child holds the pipe
    assert status_of(out) == "stopped", errors
    assert "Traceback" not in errors.replace('Traceback (most recent call last):\n  File "<frozen runpy>', ""), errors
    info = json.loads((out / "run.json").read_text())
    assert info["signal"] == "SIGTERM"
    saved = [int(path.stem.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*.pt")]
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert max(saved) == max(r["step"] for r in logged if r["kind"] == "train"), "the step at which it stopped is saved"
    resumed = launch_group(launcher, "--resume", str(out))
    _, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors
    complete = launch_group(launcher, *flags, "--out", str(tmp_path / "complete"))
    _, errors = complete.communicate(timeout=300)
    assert complete.returncode == 0, errors
    found, expected = (load_file(folder / "export/model.safetensors") for folder in (out, tmp_path / "complete"))
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_f10_sigterm_to_the_group_saves_though_loaders_get_it_too(tmp_path):
    check_f10(tmp_path, "python", 2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_f10_sigterm_to_the_group_with_every_launcher(tmp_path, launcher, workers):
    check_f10(tmp_path, launcher, workers)


def test_two_sigterms_are_one(tmp_path):
    """torchrun repeats to its processes what SLURM has sent to all of them."""
    out = tmp_path / "run"
    process = start(*FLAGS, "--out", str(out))
    wait_for_steps(process, out, 5)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in errors
    assert status_of(out) == "stopped"
