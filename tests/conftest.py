"""Shared by all tests: short demo runs, and the folder of real data that only our own machines have."""

import json
import os
from pathlib import Path

import pytest
import torch

# The networks here are tiny; more threads only wait for each other.
torch.set_num_threads(1)
os.environ["FINETUNE_MILE_THREADS"] = "1"

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# A demo run of seconds: every phase is there, the images are few.
SHORT = [
    "--data", "demo:400", "--init", "none", "--arch", "resnet-demo", "--steps", "24", "--batch-size", "8",
    "--set", "size=24", "--set", "evaluate.images=40", "--set", "evaluate.labels=false", "--set", "log_every=1",
    "--set", "checkpoint_every=5",
]  # fmt: skip
SHORT_MILE = [*SHORT, "--k-t", "4", "--k-s", "2", "--set", "mile.warmup=0"]


@pytest.fixture(scope="session")
def shared():
    """The folder of real data and checkpoints, or a skip."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared, the real data and checkpoints that only our own machines have")
    return SHARED


@pytest.fixture
def run_demo(tmp_path):
    """Run the command in this process: run_demo("name", *flags) gives the run folder."""
    from finetune_mile.run import main

    def run(name, *flags):
        out = tmp_path / name
        assert main([*flags, "--out", str(out)]) == 0
        return out

    return run


def losses(folder):
    """The loss of every logged step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"]
