"""Memory that a step takes, estimated without computing it; and what a run does with the estimate."""

import json

import pytest
import torch
import yaml
from shortcuts import SHORT, SHORT_MILE, losses

from finetune_mile.config.resolve import resolve
from finetune_mile.learning.loop import LabelObjective
from finetune_mile.networks.heads import build
from finetune_mile.networks.parts import recompute_blocks
from finetune_mile.run import main
from finetune_mile.training import memory
from finetune_mile.training.memory import CONTEXT, Need, gpu_words, kept_per_image


def really_kept(network, images, half):
    kept = {}

    def keep(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half):
        network(torch.rand(images, 3, 24, 24))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("half", [False, True])
def test_the_estimate_is_what_autograd_keeps(half):
    network = build("resnet-demo").train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    estimated = kept_per_image(network, 24, half=half)
    assert all(tensor.equal(before[name]) for name, tensor in network.state_dict().items())
    found = (really_kept(network, 6, half) - really_kept(network, 2, half)) / 4
    assert estimated == pytest.approx(found, rel=0.02)
    whole = kept_per_image(network, 24, half=False)
    assert estimated <= whole
    recompute_blocks(network)
    assert kept_per_image(network, 24, half=False) < 0.7 * whole


@pytest.fixture
def recipe():
    return resolve({"init": "none", "data": "demo:120", "batch_size": 96}, []).recipe


def test_parts_of_a_batch_are_as_few_as_fit(recipe):
    need = Need(fixed=500_000_000, per_image=100_000_000)
    assert [need.parts(96, size * 1e9, recipe) for size in (16, 24, 40, 80)] == [1, 1, 1, 1]
    assert [need.parts(480, size * 1e9, recipe) for size in (16, 24, 40, 80)] == [4, 3, 2, 1]
    assert need.parts(480, CONTEXT, recipe) is None
    pairs = recipe.model_copy(update={"augment": recipe.augment.model_copy(update={"mixup": 0.4})})
    assert need.parts(6, need.of(3), recipe) == 2
    assert need.parts(6, need.of(3), pairs) == 3, "parts of an even number of images"
    whole = recipe.model_copy(update={"method": "large-loss"})
    assert need.parts(480, 16e9, whole) is None
    words = gpu_words(recipe, need)
    assert words.endswith("for 12 images each in precision no; with 16, 24, 40, 80 GB, accumulate = 1, 1, 1, 1 on 1; "
                          "1, 1, 1, 1 on 8")  # fmt: skip


def test_accumulate_auto_takes_what_fits_and_keeps_the_batch(run_demo, monkeypatch, capsys):
    flags = [*SHORT, "--method", "softmax", "--steps", "2", "--set", "accumulate=auto", "--arch", "resnet-demo-gn"]
    whole = run_demo("whole", *flags)
    monkeypatch.setattr(memory, "device_memory", lambda _: 16 * 10**9)
    monkeypatch.setattr(memory, "need_of", lambda *_: Need(fixed=0, per_image=4 * 10**9))
    parts = run_demo("parts", *flags)
    found = [yaml.safe_load((run / "recipe.yaml").read_text()) for run in (whole, parts)]
    assert [(each["batch_size"], each["accumulate"]) for each in found] == [(8, 1), (8, 4)]
    assert "batch   8 images = 1 process x 4 parts x 2 images" in capsys.readouterr().err
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-3)


def test_a_run_without_enough_memory_ends_with_advice(tmp_path, monkeypatch, capsys):
    def too_much(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(LabelObjective, "backward", too_much)
    trial = ["--head-init", "probe", "--keep", "best"]  # the first steps are those of a trial
    assert main([*SHORT_MILE, *trial, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert "error: out of memory on cpu: a step with 8 images per process takes about" in said
    assert "--set accumulate=2 (the batch of 8 stays, in parts of 4), --set gradient_checkpointing=true, or" in said
    assert "Traceback" not in said
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["status"] == "failed"
    assert "accumulate=2" in run["error"]
