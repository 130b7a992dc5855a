"""Switches for speed and memory: each gives the numbers that the plain run gives."""

import copy
import os

import pytest
import torch
from golden import ROOT  # noqa: F401  puts tests/ on the path
from shortcuts import SHORT, SHORT_MILE, losses

from finetune_mile.config.resolve import resolve
from finetune_mile.learning.optim import make_optimizer, parameter_groups, set_rate
from finetune_mile.networks.heads import build, new_head
from finetune_mile.networks.parts import blocks_of, recompute_blocks
from finetune_mile.run import main
from finetune_mile.training import processes

IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def network():
    torch.manual_seed(0)
    made = build("resnet-demo")
    new_head(made, 3, "zero")
    return made.train()


def learned(made, optimizer, steps=3):
    """Weights and statistics after some steps at a rate that changes."""
    for step in range(steps):
        set_rate(optimizer, 1 - step / 4)
        torch.nn.functional.cross_entropy(made(IMAGES), LABELS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}


def saved_bytes(made):
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made(IMAGES)
    return sum(kept.values())


def test_blocks_that_are_computed_twice_learn_the_same_in_less_memory():
    plain, twice = network(), network()
    recompute_blocks(twice)
    assert saved_bytes(twice) < 0.75 * saved_bytes(plain)
    results = []
    for made in (network(), twice := network()):
        if made is twice:
            recompute_blocks(made)
        groups = parameter_groups(made, lr=0.1, head_lr=None, weight_decay=0.0)
        results.append(learned(made, make_optimizer("sgd", groups, momentum=0.9, nesterov=False)))
    assert results[0].keys() == results[1].keys()
    assert all(results[0][name].equal(results[1][name]) for name in results[0]), "batch-norm statistics included"
    assert results[1]["bn1.num_batches_tracked"] == results[1]["layer1.0.bn1.num_batches_tracked"] == 3


def test_a_copy_has_blocks_of_its_own():
    """The teacher is a copy: it must not compute with the learner's weights."""
    made = network()
    recompute_blocks(made)
    made.compile(backend="eager")
    teacher = copy.deepcopy(made)
    before = teacher(IMAGES).detach()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert teacher(IMAGES).detach().equal(before)
    assert not made(IMAGES).any()
    assert all(ours is not theirs for ours, theirs in zip(blocks_of(made), blocks_of(teacher), strict=True))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_optimisers_learn_the_same(name):
    results = []
    for fused in (False, True):
        made = network()
        groups = parameter_groups(made, lr=0.01, head_lr=0.1, weight_decay=0.01)
        optimizer = make_optimizer(name, groups, momentum=0.9, nesterov=name == "sgd", fused=fused)
        assert bool(optimizer.param_groups[0]["fused"]) == fused
        results.append(learned(made, optimizer))
    for tensor in results[0]:
        torch.testing.assert_close(results[0][tensor], results[1][tensor], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_lars_of_all_tensors_together_is_lars_of_each(fused):
    """timm computes the tensors of a group together; this is the formula for one of them."""
    made, by_hand = network(), network()
    groups = parameter_groups(made, lr=0.5, head_lr=None, weight_decay=1e-3)
    ours = learned(made, make_optimizer("lars", groups, momentum=0.9, nesterov=False, fused=fused))
    adapted = {name for name, p in by_hand.named_parameters() if p.ndim > 1}
    moved = {}
    for step in range(3):
        torch.nn.functional.cross_entropy(by_hand(IMAGES), LABELS).backward()
        with torch.no_grad():
            for name, p in by_hand.named_parameters():
                change = p.grad
                if name in adapted:
                    size, slope = p.norm(), p.grad.norm()
                    trust = 0.001 * size / (slope + 1e-3 * size + 1e-8) if size > 0 and slope > 0 else 1.0
                    change = trust * (p.grad + 1e-3 * p)
                moved[name] = 0.9 * moved[name] + change if name in moved else change.clone()
                p -= 0.5 * (1 - step / 4) * moved[name]
                p.grad = None
    for name, tensor in by_hand.state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.fixture
def recipe():
    return resolve({"init": "none", "data": "demo:120"}, []).recipe


def test_defaults_follow_the_device(recipe, monkeypatch):
    names = ("channels_last", "cudnn_benchmark", "fused_optimizer")
    on_cpu = processes.on_device(recipe)
    assert [getattr(on_cpu, name) for name in names] == [False] * 3, "every recorded loss stays as it is"
    assert on_cpu.precision == "no"
    monkeypatch.setattr(processes, "uses_gpu", lambda: True)
    on_gpu = processes.on_device(recipe)
    assert [getattr(on_gpu, name) for name in names] == [True] * 3
    exact = processes.on_device(recipe.model_copy(update={"deterministic": True, "channels_last": False}))
    assert [getattr(exact, name) for name in names] == [False, False, True]
    for has_bf16, chosen in ((True, "bf16"), (False, "tf32")):
        monkeypatch.setattr(processes, "computes_in_bf16", lambda has=has_bf16: has)
        assert processes.on_device(recipe.model_copy(update={"precision": "auto"})).precision == chosen
    monkeypatch.setattr(processes, "uses_gpu", lambda: False)
    assert processes.on_device(recipe.model_copy(update={"precision": "auto"})).precision == "no"


@pytest.mark.parametrize(("flag", "used"), [(None, True), ("False", True), ("True", False), ("1", False)])
def test_the_device_is_the_one_that_accelerate_takes(flag, used, monkeypatch):
    """`accelerate launch` sets the variable to "False" where it uses a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if flag is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", flag)
    assert processes.uses_gpu() == used


def test_torch_has_its_own_switches_back_after_a_run(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "before")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(processes, "uses_gpu", lambda: True)
    cudnn = torch.backends.cudnn

    def state():
        exact = torch.are_deterministic_algorithms_enabled()
        return cudnn.benchmark, cudnn.deterministic, exact, torch.get_float32_matmul_precision()

    before = state()
    with processes.computing(precision="tf32", benchmark=True):
        assert state() == (True, False, False, "high")
    with processes.computing(precision="bf16", benchmark=False, deterministic=True):
        assert state() == (False, True, True, "highest")
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert state() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["deterministic=true", "cudnn_benchmark=true"], "which chooses algorithms by their time"),
        (["compile=true", "gradient_checkpointing=true"], "set one of them to false"),
    ],
)
def test_switches_that_exclude_each_other(words, said, capsys):
    sets = [word for pair in words for word in ("--set", pair)]
    assert main([*SHORT, *sets, "--explain"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "close"),
    [(["deterministic=true"], 0), (["gradient_checkpointing=true"], 0),
     (["channels_last=true", "fused_optimizer=true"], 1e-3)],
    ids=["deterministic", "checkpointing", "layout"],
)  # fmt: skip
def test_a_run_with_a_switch_learns_the_same(run_demo, sets, close, capsys):
    flags = [*SHORT_MILE, "--set", "optimizer.name=sgd", "--lr", "0.01", "--arch", "resnet-demo-gn"]
    plain = run_demo("plain", *flags)
    switched = run_demo("switched", *flags, *(word for each in sets for word in ("--set", each)))
    assert losses(switched) == pytest.approx(losses(plain), rel=close, abs=0)
    assert f"speed   on: {', '.join(each.partition('=')[0] for each in sets)}; off:" in capsys.readouterr().err


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(run_demo):
    """Few steps, because compiling takes a minute; the teacher is compiled on its own."""
    flags = [*SHORT_MILE, "--steps", "4", "--k-t", "2", "--k-s", "2", "--arch", "resnet-demo-gn"]
    plain, compiled = run_demo("plain", *flags), run_demo("compiled", *flags, "--set", "compile=true")
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-3)
