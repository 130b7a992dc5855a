"""`finetune-mile pretrain`: runs, goes on, and its checkpoint goes on to fine-tuning."""

import dataclasses
import json
import math
import os
import signal

import pytest
import torch
from short_runs import METHODS, SHORT, exported
from shortcuts import losses

from finetune_mile.checkpoints.loading import load_network
from finetune_mile.cli import main
from finetune_mile.run import main as finetune
from finetune_mile.training.monitor import Monitor

HEADS = {
    "simclr": {"projection_head"},
    "mocov2": {"projection_head", "backbone_momentum", "projection_head_momentum"},
    "byol": {"projection_head", "prediction_head", "backbone_momentum", "projection_head_momentum"},
    "swav": {"projection_head", "prototypes"},
}


def pretrain(out, *flags):
    assert main(["pretrain", *flags, "--out", str(out)]) == 0
    return out


def flags_of(method):
    return [*SHORT, "--method", method, "--set", "swav.queue_from=4", "--set", "swav.frozen=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(method) is the folder of an undisturbed run."""
    base, done = tmp_path_factory.mktemp("whole"), {}

    def run(method):
        if method not in done:
            done[method] = pretrain(base / method, *flags_of(method))
        return done[method]

    return run


def after_step(monkeypatch, number, action):
    """Do something when a run has done so many steps."""
    on_step = Monitor.on_step

    def patched(self, record):
        if record.step == number:
            action()
        on_step(self, record)

    monkeypatch.setattr(Monitor, "on_step", patched)


def equal(one, other):
    first, second = exported(one), exported(other)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", METHODS)
def test_the_checkpoint_goes_on_to_fine_tuning(whole, method):
    run = whole(method)
    state = exported(run)
    results = json.loads((run / "results.json").read_text())
    assert results["neighbours_before"] is not None
    assert results["neighbours"] is not None
    assert results["loss"] == losses(run)[-1]
    for init in (run, run / "export/checkpoint.ckpt"):
        network, card, report = load_network(str(init), arch=None, num_classes=10, head_bias="zero")
        trunk = {name: t for name, t in network.state_dict().items() if not name.startswith("fc.")}
        assert all(torch.equal(t, state[f"backbone.{name}"]) for name, t in trunk.items())
        assert len(trunk) == sum(name.startswith("backbone.") for name in state)
        assert report.format.startswith("lightly")
        assert {name.split(".")[0] for name in report.dropped} == HEADS[method]
        assert set(report.dropped) == {name for name in state if not name.startswith("backbone.")}
        assert (card.arch, card.method, card.preprocess.size) == ("resnet-mini", method, 24)
        assert card.preprocess.mean == (0.5, 0.5, 0.5)
        assert card.preprocess.crop == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_resumed_is_the_same_to_the_last_bit(tmp_path, whole, method, monkeypatch):
    def die():
        raise KeyboardInterrupt

    out = tmp_path / "cut"
    with monkeypatch.context() as patch:
        after_step(patch, 5, die)  # the checkpoint is two steps old
        assert main(["pretrain", *flags_of(method), "--out", str(out)]) == 130
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    assert main(["pretrain", "--resume", str(out)]) == 0
    assert equal(whole(method), out)
    assert losses(whole(method)) == losses(out)


def test_the_run_folder_starts_a_fine_tuning_run(tmp_path, whole):
    run = whole("simclr")
    flags = ["--data", "demo:100", "--method", "sigmoid", "--steps", "3", "--batch-size", "8"]
    flags += ["--set", "evaluate.images=20", "--set", "evaluate.labels=false"]
    assert finetune([*flags, "--init", str(run), "--out", str(tmp_path / "tuned")]) == 0
    init = json.loads((tmp_path / "tuned/init.json").read_text())
    assert init["arch"] == "resnet-mini"
    assert any(name.startswith("projection_head.") for name in init["dropped"])


def test_a_trunk_with_group_norm_goes_on_too(tmp_path):
    run = pretrain(tmp_path / "run", *SHORT, "--steps", "2", "--arch", "resnet-mini-gn")
    network, card, _ = load_network(str(run), arch=None, num_classes=10, head_bias="zero")
    assert card.arch == "resnet-mini-gn"
    assert torch.equal(network.state_dict()["conv1.weight"], exported(run)["backbone.conv1.weight"])


def test_labels_change_nothing(tmp_path, whole, monkeypatch):
    from finetune_mile.paper.pretraining import run as pretraining

    load = pretraining.load_data

    def unlabelled(name, **options):
        data = load(name, **options)
        hidden = dataclasses.replace(data.train, given=torch.full_like(data.train.given, -1))
        return dataclasses.replace(data, train=hidden)

    monkeypatch.setattr(pretraining, "load_data", unlabelled)
    other = pretrain(tmp_path / "other", *flags_of("simclr"))
    assert equal(whole("simclr"), other)
    assert json.loads((other / "results.json").read_text())["neighbours"] is None


def test_images_that_are_not_kept_give_the_same(tmp_path, whole):
    streamed = pretrain(tmp_path / "streamed", *flags_of("simclr"), "--set", "keep_megabytes=0")
    assert equal(whole("simclr"), streamed)


def test_small_views(tmp_path, rendered):
    local = "swav.local_views={count: 2, size: 12, area: [0.1, 0.4]}"
    run = pretrain(tmp_path / "run", *SHORT, "--steps", "2", "--method", "swav", "--set", local)
    assert len(losses(run)) == 2
    assert (run / "report.html").stat().st_size > 1000
    assert (run / "views.png").is_file()


def test_it_learns(tmp_path):
    """On views that differ a little the loss soon falls well below that of guessing."""
    flags = ["--data", "demo:400", "--steps", "40", "--batch-size", "32", "--set", "views.noise=0"]
    for setting in ("area=[0.9, 1.1]", "turn=5", "shift=0.04", "brightness=0.2"):
        flags += ["--set", f"views.{setting}"]
    found = losses(pretrain(tmp_path / "run", *SHORT, *flags))
    assert sum(found[-5:]) / 5 < 0.8 * math.log(2 * 32 - 1)


def test_sigterm_saves_and_goes_on(tmp_path, whole, monkeypatch, capsys):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        after_step(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert main(["pretrain", *flags_of("simclr"), "--out", str(out)]) == 143
    assert f"--resume {out}" in capsys.readouterr().out
    info = json.loads((out / "run.json").read_text())
    assert (info["status"], info["signal"]) == ("stopped", "SIGTERM")
    assert (out / "checkpoints/step-00000005.pt").is_file()
    assert main(["pretrain", "--resume", str(out)]) == 0
    assert equal(whole("simclr"), out)


@pytest.mark.parametrize("method", ["simclr", "byol"])
def test_a_checkpoint_is_continued(tmp_path, method):
    short = ["--data", "demo:100", "--steps", "2", "--batch-size", "8", "--set", "neighbours.bank=40"]
    still = pretrain(tmp_path / "still", "--init", "simclr-demo", *short, "--method", method, "--lr", "1e-12")
    before, card, report = load_network("simclr-demo", arch=None, num_classes=2, head_bias="zero")
    after, own, _ = load_network(str(still), arch=None, num_classes=2, head_bias="zero")
    assert own.arch == report.arch
    assert own.preprocess == card.preprocess.model_copy(update={"crop": 1.0})
    weights = dict(after.named_parameters())
    kept = [name for name, _ in before.named_parameters() if not name.startswith("fc.")]
    assert len(kept) == len(weights) - 2
    for name in kept:
        assert weights[name].allclose(before.get_parameter(name), atol=1e-6), name
    assert str(tmp_path) not in json.dumps(torch.load(still / "export/checkpoint.ckpt")["hyper_parameters"])
    moved = pretrain(tmp_path / "moved", "--init", "simclr-demo", *short, "--method", method)
    assert any(not exported(moved)[f"backbone.{name}"].equal(exported(still)[f"backbone.{name}"]) for name in kept)
