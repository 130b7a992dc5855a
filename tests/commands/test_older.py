"""What commit 3b44214 wrote is still opened: a stopped run, a finished run with its export, features and a card."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import finetune_mile
from finetune_mile.checkpoints.cards import read_card
from finetune_mile.cli import main
from finetune_mile.images.sources import load_data
from finetune_mile.training import features

OLDER = Path(__file__).parent / "older"


@pytest.fixture
def older(tmp_path, monkeypatch):
    """A copy, with its features as the cache."""
    shutil.copytree(OLDER, tmp_path / "older")
    (tmp_path / "cache").mkdir()
    (tmp_path / "older/features").rename(tmp_path / "cache/features")
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "older"


def results(run):
    return json.loads((run / "results.json").read_text())


def test_a_stopped_run_is_resumed_to_the_same_end(older):
    assert main(["run", "--resume", str(older / "stopped")]) == 0
    before, now = results(older / "finished"), results(older / "stopped")
    assert before.keys() <= now.keys()
    assert {key: now[key] for key in before} == pytest.approx(before, rel=1e-4)
    ours, theirs = (
        finetune_mile.load_classifier(str(older / run)).network.state_dict() for run in ("stopped", "finished")
    )
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_finished_run_says_so_and_its_recipe_runs_again(older, tmp_path, capsys):
    assert main(["run", "--resume", str(older / "finished")]) == 0
    assert "finished" in "".join(capsys.readouterr())
    recipe, out = str(older / "finished/recipe.yaml"), tmp_path / "again"
    assert main(["run", "--recipe", recipe, "--out", str(out), "--steps", "6"]) == 0


def test_a_finished_run_is_evaluated_predicted_with_and_exported(older, tmp_path, capsys):
    run = str(older / "finished")
    assert main(["eval", "--model", f"run:{run}", "--draws", "0", "--out", str(tmp_path / "eval")]) == 0
    assert results(tmp_path / "eval")["accuracy"] == results(older / "finished")["accuracy"]
    image = load_data("demo:60").val.read(0)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "one.png")
    capsys.readouterr()
    assert main(["predict", run, str(tmp_path / "one.png"), "--format", "csv"]) == 0
    assert "one.png" in capsys.readouterr().out
    assert main(["export", run, "--to", "torch", "--out", str(tmp_path / "torch")]) == 0
    assert any((tmp_path / "torch").iterdir())


def test_kept_features_are_found_and_not_computed_again(older, monkeypatch):
    monkeypatch.setattr(features, "_fill", None)
    found = finetune_mile.embed(str(older / "finished"), "demo:60")
    assert found["train"]["features"].shape == (60, 128)
    assert bool(np.isfinite(found["val"]["features"]).all())


def test_a_card_is_read(older):
    assert read_card(older / "swav.yaml").name == "swav"
