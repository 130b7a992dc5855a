"""Fixtures for all tests."""

import os

import pytest
import torch
from shortcuts import SHARED

# The networks here are tiny; more threads only wait for each other.
torch.set_num_threads(1)
os.environ["FINETUNE_MILE_THREADS"] = "1"


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
