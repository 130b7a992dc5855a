"""`finetune-mile pretrain`: runs, goes on, and its checkpoint goes on to fine-tuning."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from runs import METHODS, SHORT, exported
from shortcuts import ROOT, losses

from finetune_mile.checkpoints.loading import load_network
from finetune_mile.cli import main
from finetune_mile.run import main as finetune

HEADS = {
    "simclr": {"projection_head"},
    "mocov2": {"projection_head", "backbone_momentum", "projection_head_momentum"},
    "byol": {"projection_head", "prediction_head", "backbone_momentum", "projection_head_momentum"},
    "swav": {"projection_head", "prototypes"},
}


def pretrain(out, *flags):
    assert main(["pretrain", *flags, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("method", METHODS)
def test_the_checkpoint_goes_on_to_fine_tuning(tmp_path, method):
    run = pretrain(tmp_path / "run", *SHORT, "--method", method)
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
        assert (card.arch, card.method, card.preprocess.size) == ("resnet-demo", method, 24)
        assert card.preprocess.mean == (0.5, 0.5, 0.5)
        assert card.preprocess.crop == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_resumed_is_the_same_to_the_last_bit(tmp_path, method, monkeypatch):
    from finetune_mile.pretraining.looping import Recorder

    flags = [*SHORT, "--method", method, "--set", "swav.queue_from=4", "--set", "swav.frozen=2"]
    whole = pretrain(tmp_path / "whole", *flags)
    call = Recorder.__call__

    def dies(self, step, loss, share):
        call(self, step, loss, share)
        if step == 8:  # three steps after a checkpoint
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "__call__", dies)
        with pytest.raises(KeyboardInterrupt):
            main(["pretrain", *flags, "--out", str(tmp_path / "cut")])
    assert main(["pretrain", "--resume", str(tmp_path / "cut")]) == 0
    expected, found = exported(whole), exported(tmp_path / "cut")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert losses(whole) == losses(tmp_path / "cut")


def test_the_run_folder_starts_a_fine_tuning_run(tmp_path):
    run = pretrain(tmp_path / "run", *SHORT, "--steps", "3")
    flags = ["--data", "demo:200", "--method", "sigmoid", "--steps", "3", "--batch-size", "8"]
    flags += ["--set", "evaluate.images=20", "--set", "evaluate.labels=false"]
    assert finetune([*flags, "--init", str(run), "--out", str(tmp_path / "tuned")]) == 0
    init = json.loads((tmp_path / "tuned/init.json").read_text())
    assert init["arch"] == "resnet-demo"
    assert any(name.startswith("projection_head.") for name in init["dropped"])


def test_a_trunk_with_group_norm_goes_on_too(tmp_path):
    run = pretrain(tmp_path / "run", *SHORT, "--steps", "2", "--arch", "resnet-demo-gn")
    network, card, _ = load_network(str(run), arch=None, num_classes=10, head_bias="zero")
    assert card.arch == "resnet-demo-gn"
    assert torch.equal(network.state_dict()["conv1.weight"], exported(run)["backbone.conv1.weight"])


def test_labels_change_nothing(tmp_path, monkeypatch):
    import dataclasses

    from finetune_mile.verbs import pretrain as verb

    one = pretrain(tmp_path / "one", *SHORT)
    load = verb.load_data

    def unlabelled(name):
        data = load(name)
        hidden = dataclasses.replace(data.train, given=torch.full_like(data.train.given, -1))
        return dataclasses.replace(data, train=hidden)

    monkeypatch.setattr(verb, "load_data", unlabelled)
    other = pretrain(tmp_path / "other", *SHORT)
    first, second = exported(one), exported(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((other / "results.json").read_text())["neighbours"] is None


def test_images_that_are_not_kept_give_the_same(tmp_path):
    kept = pretrain(tmp_path / "kept", *SHORT)
    streamed = pretrain(tmp_path / "streamed", *SHORT, "--set", "keep_megabytes=0")
    first, second = exported(kept), exported(streamed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_small_views(tmp_path):
    local = "swav.local_views={count: 2, size: 12, area: [0.1, 0.4]}"
    run = pretrain(tmp_path / "run", *SHORT, "--steps", "2", "--method", "swav", "--set", local)
    assert len(losses(run)) == 2
    assert (run / "report.html").stat().st_size > 1000
    assert (run / "views.png").is_file()


def test_it_learns(tmp_path):
    """A hundred steps bring the contrastive loss well below that of guessing."""
    run = pretrain(tmp_path / "run", *SHORT, "--steps", "60", "--batch-size", "32", "--arch", "resnet-mini")
    found = losses(run)
    assert sum(found[-5:]) / 5 < 0.75 * found[0]


def test_sigterm_saves_and_says_so(tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune_mile.cli", "pretrain", *SHORT, "--steps", "5000", "--out", str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and not (out / "metrics.jsonl").is_file():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    info = json.loads((out / "run.json").read_text())
    assert (info["status"], info["signal"]) == ("stopped", "SIGTERM")
    step = int(sorted((out / "checkpoints").glob("step-*.pt"))[-1].stem.removeprefix("step-"))
    assert step == len(losses(out))
