"""The loop against a naive one, and a stop at every step against none."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from shortcuts import AUGMENTED, SHORT, SHORT_MILE, losses

from finetune_mile.checkpoints.cards import SCRATCH
from finetune_mile.checkpoints.loading import load_network
from finetune_mile.images.order import Order
from finetune_mile.images.pipeline import Augmentation, Views, normalise
from finetune_mile.images.sources.grids import load
from finetune_mile.learning.optim import rate_at
from finetune_mile.run import main


def naive_mile(letters, *, imitate_from, rho=0.1, batch=8, lr=2e-3):
    """Algorithm 1 as one would write it in a notebook: losses of the steps that `letters` spells."""
    torch.manual_seed(0)
    learner, _, _ = load_network("none", arch="resnet-demo", num_classes=10, head_bias="prior")
    teacher, student = copy.deepcopy(learner), copy.deepcopy(learner)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in learner.parameters() if p.ndim == 1], "weight_decay": 0.0},
            {"params": [p for p in learner.parameters() if p.ndim > 1], "weight_decay": 0.01},
        ],
        betas=(0.9, 0.999),
    )
    data = load("200").train
    how = SCRATCH.preprocess.model_copy(update={"size": 24})
    views = Views(data, how, Augmentation(crop="shift", scale=(0.08, 1.0), shift=1, flip=False), 0)
    order = Order(torch.arange(len(data)).numpy(), 0)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (how.mean, how.std))
    found, learner = [], learner.train()
    for step, letter in enumerate(letters):
        if step and letter != letters[step - 1]:  # hand the weights over
            if letter == "S":
                teacher.load_state_dict(learner.state_dict())
                learner.load_state_dict((student if imitate_from == "student" else teacher).state_dict())
            else:
                student.load_state_dict(learner.state_dict())
        drawn, _ = views.read(order.keys(step * batch, batch))
        images, labels = normalise(drawn.images, mean, std), drawn.labels
        targets = F.one_hot(labels, 10).float()
        if letter == "S":
            with torch.no_grad():
                targets = (teacher.eval()(images).sigmoid() > rho).float()
        loss = F.binary_cross_entropy_with_logits(learner(images), targets, reduction="sum") / batch
        for group in optimizer.param_groups:
            group["lr"] = lr * rate_at(step, total_steps=24, schedule="cosine", warmup=20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_both_variants_equal_a_naive_loop(run_demo):
    paper = run_demo("paper", *SHORT_MILE)
    assert losses(paper)[:20] == pytest.approx(naive_mile("TTTTSS" * 4, imitate_from="student")[:20], rel=1e-4)
    published = run_demo("published", *SHORT_MILE, "--variant", "published")
    assert losses(published)[:20] == pytest.approx(naive_mile("TTTS" * 6, imitate_from="teacher")[:20], rel=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        SHORT_MILE,
        [*SHORT_MILE, "--variant", "published", "--set", "optimizer.ema=0.9", "--set", "mile.optimizer_state=reset"],
        pytest.param(
            [*SHORT, "--method", "noisy-student", "--set", "noisy_student.pseudo_labels=cycle", "--semi", "all",
             "--fraction", "0.1", "--set", "accumulate=2", *AUGMENTED], marks=pytest.mark.slow,
        ),
        pytest.param(
            [*SHORT, "--method", "averaged-teacher", "--semi", "all", "--fraction", "0.1",
             "--set", "labelled_share=0.5", "--set", "optimizer.ema=0.9", "--set", "views=weak-strong",
             "--set", "accumulate=2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [*SHORT, "--method", "averaged-teacher", "--semi", "all", "--fraction", "0.1",
             "--set", "labelled_share=0.5", "--set", "averaged_teacher.renew=3", "--set", "views=weak-strong"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["paper", "published", "noisy-student", "averaged-teacher", "copied-teacher"],
)  # fmt: skip
def test_a_stop_after_any_step_changes_nothing(run_demo, tmp_path, stop_at, flags):
    whole = run_demo("whole", *flags)
    stopped = tmp_path / "stopped"
    every = [1, 4, 5, 6, 11, 17, 23, 24]
    arguments = [*flags, "--out", str(stopped)]
    for step in every:
        stop_at(step)
        assert main(arguments) == 143
        assert json.loads((stopped / "run.json").read_text())["status"] == "stopped"
        assert len(list((stopped / "checkpoints").glob("step-*"))) <= 2
        arguments = ["--resume", str(stopped)]
    stop_at(None)
    assert main(arguments) == 0
    assert json.loads((stopped / "run.json").read_text())["status"] == "finished"
    ours, theirs = (load_file(f / "export/model.safetensors") for f in (stopped, whole))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert losses(stopped) == losses(whole)
    assert (stopped / "results.json").read_text() == (whole / "results.json").read_text()
    looks = [[r for r in map(json.loads, (f / "metrics.jsonl").read_text().splitlines()) if r["kind"] == "evaluation"]
             for f in (stopped, whole)]  # fmt: skip
    assert looks[0] == looks[1]


@pytest.mark.slow
def test_a_kill_right_after_an_evaluation_does_not_record_it_twice(run_demo, tmp_path, monkeypatch):
    from finetune_mile.training.monitor import LabelMonitor
    from finetune_mile.training.processes import Stopped

    flags = [*SHORT_MILE, "--set", "evaluate.every=5"]
    whole, killed = run_demo("whole", *flags), tmp_path / "killed"
    evaluate = LabelMonitor.evaluate

    def evaluate_and_die(self, step, phase, *, ended):
        evaluate(self, step, phase, ended=ended)
        if step in (6, 10):  # the end of a phase, and inside of one
            raise Stopped(9)

    arguments = [*flags, "--out", str(killed)]
    monkeypatch.setattr(LabelMonitor, "evaluate", evaluate_and_die)
    assert main(arguments) == 137
    monkeypatch.undo()
    assert main(["--resume", str(killed)]) == 0
    records = [[r | {"images_per_second": 0} for r in map(json.loads, (f / "metrics.jsonl").read_text().splitlines())]
               for f in (killed, whole)]  # fmt: skip
    assert records[0] == records[1]


@pytest.mark.slow
def test_labels_once_per_cycle_equal_labels_per_batch_without_augmentation(run_demo):
    plain = [*SHORT_MILE, "--set", "augment.crop=none", "--rho", "0.05"]  # away from the prior 0.1: no ties
    each = run_demo("batch", *plain)
    once = run_demo("cycle", *plain, "--set", "mile.pseudo_labels=cycle")
    assert losses(once) == pytest.approx(losses(each), rel=1e-4)


def test_accumulation_is_the_same_batch_in_parts(run_demo):
    flags = [*SHORT_MILE, "--steps", "12", "--arch", "resnet-demo-gn"]  # batch norm would see smaller batches
    one = run_demo("one", *flags)
    parts = run_demo("parts", *flags, "--set", "accumulate=4")
    assert losses(parts) == pytest.approx(losses(one), rel=1e-3)


def test_a_loss_that_explodes_stops_with_a_sentence(tmp_path, capsys):
    code = main([*SHORT, "--method", "sigmoid", "--lr", "1e30", "--out", str(tmp_path / "run")])
    assert code == 1, "the command was right, the run failed"
    assert "lower --lr" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"
