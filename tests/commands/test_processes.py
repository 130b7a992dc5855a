"""Two processes are one run: the same samples, the same weights."""

import json
import os
import subprocess
import sys

import pytest
from idx_files import write_mnist
from safetensors.torch import load_file
from shortcuts import ROOT, SHORT_MILE

# Adam divides by a gradient's own size, and a threshold turns a last bit into a label: both blow up the order of a sum.
# SGD on the teacher's soft labels shows whether the processes see the same samples and weights, and nothing else.
FLAGS = [*SHORT_MILE, "--arch", "resnet-demo-gn", "--steps", "50", "--lr", "0.004"]
FLAGS += ["--set", "optimizer.name=sgd", "--set", "mile.targets=soft"]


def launch(out, *, processes, use_cpu, flags=FLAGS):
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE")}
    env |= {"OMP_NUM_THREADS": "1"} | ({"ACCELERATE_USE_CPU": "1"} if use_cpu else {})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    script = [str(ROOT / "finetune_mile/run.py"), *flags, "--out", str(out)]
    return subprocess.run([*command, *script], env=env, capture_output=True, text=True, timeout=120)


def test_two_processes_equal_one(tmp_path):
    for processes in (1, 2):
        done = launch(tmp_path / str(processes), processes=processes, use_cpu=True)
        assert done.returncode == 0, done.stderr[-2000:]
    info = json.loads((tmp_path / "2/run.json").read_text())
    assert info["world_size"] == 2
    one, two = (load_file(tmp_path / str(p) / "export/model.safetensors") for p in (1, 2))
    for name in one:
        assert float((one[name] - two[name]).abs().max()) <= 1e-5, name
    results = [json.loads((tmp_path / str(p) / "results.json").read_text()) for p in (1, 2)]
    assert results[0]["images"] == results[1]["images"] == 100
    assert results[0]["accuracy"] == pytest.approx(results[1]["accuracy"], abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["irm", "rex"])
def test_a_penalty_over_two_processes_is_that_of_the_whole_batch(tmp_path, method):
    data = write_mnist(tmp_path / "mnist", 300, 60)
    flags = ["--recipe", "ood/colored-mnist", "--data", f"colored-mnist:{data}?side=14", "--method", method]
    flags += ["--steps", "30", "--batch-size", "16", "--lr", "0.01", "--set", "optimizer.name=sgd"]
    flags += ["--set", f"{method}.weight=5", "--set", f"{method}.anneal=0"]
    for processes in (1, 2):
        done = launch(tmp_path / str(processes), processes=processes, use_cpu=True, flags=flags)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (load_file(tmp_path / str(p) / "export/model.safetensors") for p in (1, 2))
    for name in one:
        assert float((one[name] - two[name]).abs().max()) <= 1e-5, name


def test_processes_that_do_not_see_each_other_are_stopped(tmp_path):
    done = launch(tmp_path / "run", processes=2, use_cpu=False)
    assert done.returncode != 0
    assert "ACCELERATE_USE_CPU=1 torchrun --nproc_per_node 2" in done.stderr
    assert not (tmp_path / "run").exists()
