"""Training, evaluation and labelling on a GPU that is not there: nothing mixes devices, nothing waits in a step.

`fake_cuda.py` says how. One process for each case, because torch may crash when fake tensors are taken down.
"""

import json
import os
import subprocess
import sys
from itertools import product

import pytest
from idx_files import write_mnist
from shortcuts import ROOT, SHORT

from finetune_mile.methods import METHODS

STEPS = ["--data", "demo:120", "--init", "none", "--arch", "resnet-demo", "--steps", "12", "--batch-size", "8"]
STEPS += ["--set", "size=24", "--set", "mile.k_t=3", "--set", "mile.k_s=3", "--set", "mile.warmup=0"]
# What a method cannot do without: the count of candidates decides how many are left out; estimates are kept on the CPU.
KNOWN = {
    "large-loss": {"a number is read in large_loss.py:loss"},
    "role": {"a tensor is read back in role.py:after_step"},
}  # fmt: skip
MORE = {
    "mile": ["--set", "mile.pseudo_labels=cycle", "--semi", "all", "--fraction", "0.5"],
    "auto": ["--set", "auto.gate=off"],
    "averaged-teacher": [
        *("--fraction", "0.5", "--semi", "all", "--set", "labelled_share=0.5", "--set", "optimizer.ema=0.9"),
        *("--set", "views=weak-strong"),
    ],
    "noisy-student": ["--set", "views=weak-strong", "--set", "optimizer.ema=0.9"],
    "self-distill": ["--set", "augment.mixup=0.4", "--set", "augment.cutmix=1", "--set", "accumulate=2"],
    "sigmoid": ["--set", "class_weights=balanced", "--set", "optimizer.clip=1"],
    "softmax": ["--set", "gradient_checkpointing=true"],
    "wan": ["--set", "deterministic=true"],
}
OPTIMIZERS, PRECISIONS = ("sgd", "adamw", "lars", "relative"), ("no", "tf32", "fp16", "bf16")


def simulate(folder, *flags, mistakes=()):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/learning/fake_cuda.py"), str(folder), json.dumps(mistakes), *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found, method="mile", precision="bf16"):
    """No mixing; what waits for the device does so once a phase, or once a pass, not in each step or batch."""
    assert found["precision"] == precision
    hashed = "a tensor is read back in roles.py:weights_hash"  # of each new teacher, before it labels a pool
    often = {what for what, count in found["training"].items() if count > found["phases"] or "mixed" in what} - {hashed}
    if precision == "fp16":  # the loss scale is looked at where the optimiser has no kernel that does it
        often = {what for what in often if "GradScaler" not in what}
    assert often <= KNOWN.get(method, set())
    assert found["evaluation of 8"] == found["evaluation of 24"], "not for each batch"
    for part in ("probe", "training", "evaluation of 8", "labelling", "export"):
        assert not any("mixed" in what or "float64" in what for what in found.get(part, {})), found[part]


@pytest.mark.slow
def test_a_step_an_evaluation_and_a_labelling_do_not_wait(tmp_path):
    found = simulate(tmp_path, *STEPS, "--set", "precision=bf16")
    check(found)
    assert found["phases"] == 4
    assert found["on"] == ["channels_last", "cudnn_benchmark", "fused_optimizer"]
    assert found["together"] > 0
    assert "labelling" in found


@pytest.mark.slow
def test_mistakes_are_found(tmp_path):
    found = simulate(tmp_path, *STEPS, "--set", "precision=bf16", mistakes=["read", "mixed", "blocking", "double"])
    assert [count for what, count in found["training"].items() if "a number is read" in what] == [12]
    assert any("devices are mixed by aten.mul" in what for what in found["training"])
    assert any("float64" in what for what in found["training"])
    assert any("blocks" in what for what, count in found["training"].items() if count >= 12)
    with pytest.raises(AssertionError):
        check(found)


@pytest.mark.parametrize("head_init", [pytest.param("probe", marks=pytest.mark.slow), "random"])
def test_a_checkpoints_probe_and_export_run_on_a_gpu(tmp_path, head_init):
    """The probe of other recipes mixed devices; a default run's export needed doubles (Apple's GPUs have none)."""
    flags = ["--init", "simclr-demo", "--set", f"head_init={head_init}", "--set", "optimizer.name=relative"]
    found = simulate(tmp_path, *STEPS, *flags, "--steps", "24", "--batch-size", "64", "--set", "precision=bf16")
    check(found)
    assert "a tensor is read back" in " ".join(found["probe"])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    from finetune_mile.run import main

    out = tmp_path_factory.mktemp("teacher") / "run"
    assert main([*SHORT, "--data", "demo:120", "--method", "sigmoid", "--steps", "2", "--out", str(out)]) == 0
    return out


CASES = [(method, *pair) for method, pair in zip([*METHODS] * 2, product(OPTIMIZERS, PRECISIONS), strict=False)]


def test_every_method_optimiser_and_precision_has_a_case():
    assert {case[0] for case in CASES} == set(METHODS)
    assert {case[1:] for case in CASES} == set(product(OPTIMIZERS, PRECISIONS))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "optimizer", "precision"), CASES, ids=["-".join(case) for case in CASES])
def test_no_method_optimiser_or_precision_waits(tmp_path, request, method, optimizer, precision):
    flags = [*STEPS, "--method", method, *MORE.get(method, [])]
    if method in ("irm", "rex"):
        data = write_mnist(tmp_path / "mnist", 300, 60)
        flags = ["--recipe", "ood/colored-mnist", "--data", f"colored-mnist:{data}?side=14", "--method", method]
        flags += ["--steps", "12", "--batch-size", "16", "--set", f"{method}.anneal=6"]
    if method == "distill":
        flags += ["--teacher", str(request.getfixturevalue("teacher"))]
    flags += ["--set", f"optimizer.name={optimizer}", "--set", f"precision={precision}"]
    flags += ["--set", "optimizer.nesterov=false", "--set", "optimizer.head_lr=null"]
    found = simulate(tmp_path / "run", *flags)
    check(found, method, precision)
    assert found["together"] > 0, "optimisers compute many tensors in one kernel"
