"""Two processes are one run, for every method: the losses look at the features of both."""

import json
import os
import subprocess
import sys

import pytest
from short_runs import METHODS, SHORT, exported
from shortcuts import ROOT

# Batch norm sees one process's part alone, and Adam divides by a gradient's own size: neither is wanted here.
FLAGS = [*SHORT, "--arch", "resnet-mini-gn", "--steps", "5", "--lr", "0.005", "--set", "optimizer.name=sgd"]
FLAGS += [word for method in METHODS for word in ("--set", f"{method}.batch_norm=false")]
FLAGS += ["--set", "swav.queue_from=2", "--set", "swav.frozen=2"]


def launch(out, processes, method):
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE")}
    env |= {"OMP_NUM_THREADS": "1", "FINETUNE_MILE_THREADS": "1", "ACCELERATE_USE_CPU": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += ["-m", "finetune_mile.cli", "pretrain", *FLAGS, "--method", method, "--out", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return exported(out)


def same(tmp_path, method):
    one, two = (launch(tmp_path / str(processes), processes, method) for processes in (1, 2))
    assert json.loads((tmp_path / "2/run.json").read_text())["world_size"] == 2
    moved = [
        float((one[name] - two[name]).abs().max()) for name in one if one[name].is_floating_point()
    ]  # fmt: skip
    assert max(moved) <= 1e-5
    results = [json.loads((tmp_path / str(p) / "results.json").read_text()) for p in (1, 2)]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], abs=1e-4)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    same(tmp_path, "simclr")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mocov2", "byol", "swav"])
def test_two_processes_equal_one_for_the_others(tmp_path, method):
    same(tmp_path, method)
