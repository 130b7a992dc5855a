"""docs/python.md: its snippets run as they stand; the loops that it links to compute what the built-in loop does."""

import copy
import importlib.util
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from shortcuts import ROOT, losses

from finetune_mile.config.flags import parse
from finetune_mile.images import pipeline
from finetune_mile.learning.optim import parameter_groups
from finetune_mile.methods import mile
from finetune_mile.run import prepare
from finetune_mile.training import task as tasks
from finetune_mile.training.processes import Signals
from finetune_mile.training.task import feed, set_up
from finetune_mile.training.train import open_folder, train

EXAMPLES = ROOT / "docs/examples"
STEPS, PHASES = 14, {"k_t": 3, "k_s": 2, "warmup": 4}
FLAGS = [
    "--data", "demo:80", "--init", "none", "--arch", "resnet-demo", "--method", "mile", "--variant", "paper",
    "--steps", str(STEPS), "--batch-size", "8", "--size", "24", "--lr", "0.02",
    *(word for key, value in PHASES.items() for word in ("--set", f"mile.{key}={value}")),
    "--set", "mile.rho=0.15", "--set", "mile.empty=negative", "--set", "optimizer.schedule=constant",
    "--set", "optimizer.name=sgd", "--set", "optimizer.momentum=0.9", "--set", "optimizer.nesterov=true",
    "--set", "optimizer.weight_decay=0.001", "--set", "optimizer.warmup=0", "--set", "optimizer.head_lr=null",
    "--set", "head_init=random", "--set", "log_every=1", "--set", "evaluate.images=0", "--set", "evaluate.labels=false",
]  # fmt: skip


@pytest.mark.slow
def test_the_snippets_run_one_after_another(tmp_path, monkeypatch, capsys):
    """The reader's photos, very small ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    for module in (tasks, pipeline):  # loader processes take longer to start than these images to read
        monkeypatch.setattr(module, "default_workers", lambda world: 0)
    draw = np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(0, 120, (32, 36, 3), dtype=np.uint8)
            pixels[..., label] += 100
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    Image.fromarray(pixels).save("photo.jpg")
    names = {}
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    assert len(snippets) == 9
    for snippet in snippets:
        exec(compile(snippet, "docs/python.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "found" in printed
    assert "('dog', " in printed
    assert "--out runs/photos holds a run" in printed
    assert names["model"].network.backbone is not names["backbone"]
    for run in ("photos", "sigmoid", "lists", "backbone"):
        assert (tmp_path / "runs" / run / "results.json").is_file()


@pytest.fixture
def built_in(tmp_path):
    """A run of the built-in loop: its first network, its batches, its optimiser for another network, its losses."""
    options = parse([*FLAGS, "--out", str(tmp_path / "run")])
    _, resolved, path, init, teacher = prepare(options)
    with Signals() as signals:
        task, model, device = set_up(resolved.recipe, init, teacher, path, signals)
        network, recipe = copy.deepcopy(model.network), task.recipe
        drawn = zip(feed(task, device, "labelled", 0), range(STEPS), strict=False)
        batches = [(device.prepare(batch.images, task.preprocess), batch.labels) for batch, _ in drawn]
        folder = open_folder(task, model, device, path, resume=False, overwrite=False)
        assert train(task, model, device, folder)[0] == 0
    groups = parameter_groups(network, lr=0.02, head_lr=None, weight_decay=recipe.optimizer.weight_decay)
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    expected = losses(path)
    assert len(expected) == STEPS
    assert {phase.name for phase in task.plan.phases} == {"interaction", "imitation"}
    return network, batches, optimizer, expected


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_own_loop_has_the_losses_of_the_built_in_one(built_in):
    network, batches, optimizer, expected = built_in
    found = example("own_loop").train(
        network, optimizer, iter(batches), num_classes=10, steps=STEPS, rho=0.15, **PHASES
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) <= 40


def test_the_own_trainer_has_the_losses_of_the_built_in_loop(built_in, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed; it is no dependency")
    network, batches, optimizer, expected = built_in
    found, trainer = [], example("own_trainer").MileTrainer

    class Recorded(trainer):
        def compute_loss(self, *args, **more):
            loss = super().compute_loss(*args, **more)
            found.append(loss.item())
            return loss

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            for images, labels in batches:
                for image, label in zip(images, labels, strict=True):
                    yield {"pixel_values": image, "labels": int(label)}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"), max_steps=STEPS, per_device_train_batch_size=8, max_grad_norm=0,
        use_cpu=True, report_to="none", save_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    block = mile.Block(**mile.VARIANTS["paper"] | {"rho": 0.15, "empty": "negative"} | PHASES)
    Recorded(
        model=network, args=arguments, train_dataset=Rows(), optimizers=(optimizer, constant), block=block,
        num_classes=10,
    ).train()  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_the_notebook_runs_from_start_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {}
    for cell in json.loads((ROOT / "docs/own-photos.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    results = names["run"].results
    assert results["accuracy"] >= results["probe_accuracy"]
    assert results["accuracy"] > 80
    assert int(names["matrix"].sum()) == results["images"]
    assert len(names["plt"].get_fignums()) == 2 + bool(names["worst"]) + bool(names["doubtful"])
    assert (names["Path"](names["audit"]["folder"]) / "audit.html").is_file()
    names["plt"].close("all")
    assert names["again"].predict(names["some"][0])[0][0] == names["model"].predict(names["some"][0])[0][0]
