"""`run --minutes N`: a model for the time that there is, of frozen features or of the largest step that fits."""

import json
import shlex
import signal

import pytest
from shortcuts import tinted_photos

from finetune_mile.cli import main
from finetune_mile.config.resolve import resolve
from finetune_mile.core.problems import Failed
from finetune_mile.training import minutes, pricing, task
from finetune_mile.training import plan as planning
from finetune_mile.training.minutes import InTime
from finetune_mile.training.processes import Signals

LITTLE = ["--init", "simclr-demo", "--method", "softmax", "--set", "workers=0"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """One of them cannot be read."""
    root = tmp_path_factory.mktemp("photos")
    tinted_photos(root, noise=60)
    (root / "train/red/7.png").write_bytes(b"")
    return root


@pytest.fixture
def out(monkeypatch, tmp_path):
    """The run folder; few steps, a cache of its own."""
    monkeypatch.setattr(planning, "LEAST_STEPS", 10)
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "out"


@pytest.fixture
def enough_time(monkeypatch):
    """All layers are said to fit."""
    monkeypatch.setattr(InTime, "_largest_that_fits", lambda work, _size: ("all layers", work.make(["trunk=all"])))


def run(photos, out, *words):
    return main(["run", "--minutes", "1", "--data", str(photos), "--out", str(out), *LITTLE, *words])


def facts_of(out):
    return json.loads((out / "minutes.json").read_text())


def is_frozen(folder):
    return "trunk: frozen" in (folder / "recipe.yaml").read_text()


def predicts(folder, photos):
    return main(["predict", str(folder), str(photos / "val/red")]) == 0


def test_without_time_there_is_a_model_of_frozen_features(photos, out, capsys, monkeypatch):
    monkeypatch.setattr(minutes.Clock, "left", property(lambda self: -1.0))
    assert run(photos, out) == 0
    facts, printed = facts_of(out), capsys.readouterr()
    assert facts["kept"] == "frozen features at 24 px"
    assert [step["name"] for step in facts["left_out"]] == ["all layers"]  # the others are not even timed
    (step,) = facts["steps"]
    assert step["low"] <= step["score"] <= step["high"]
    assert step["score"] == json.loads((out / "results.json").read_text())["accuracy"]
    assert "no time for fine-tuning: all layers (about" in printed.out
    assert is_frozen(out)
    assert predicts(out, photos)


@pytest.mark.usefixtures("enough_time")
@pytest.mark.parametrize("better", [True, False])
def test_the_larger_step_takes_the_folder_only_if_held_out_labels_like_it_better(
    photos, out, capsys, monkeypatch, better
):
    judge = minutes._is_better
    monkeypatch.setattr(minutes, "_is_better", lambda *them: (judge(*them), better)[1])
    assert run(photos, out) == 0
    facts, printed = facts_of(out), capsys.readouterr()
    assert [step["name"] for step in facts["steps"]] == ["frozen features at 24 px", "all layers at 24 px"]
    assert facts["kept"] == facts["steps"][better]["name"]
    assert facts["difference"]["low"] <= facts["difference"]["mean"] <= facts["difference"]["high"]
    gain = facts["steps"][1]["score"] - facts["steps"][0]["score"]
    assert facts["difference"]["mean"] == pytest.approx(gain)
    assert is_frozen(out) is not better
    assert is_frozen(out / "not-kept") is better
    assert not list((out / "not-kept/checkpoints").glob("*.pt"))
    assert sorted(path.name for path in out.parent.iterdir()) == ["cache", "out"]
    assert not (out / "larger").exists()
    assert f"finetune-mile predict {out} IMAGES" in printed.out
    assert f"see {out / 'bad_images.csv'}" in printed.out
    assert str(out / "larger") not in printed.out + printed.err, "it is gone"
    assert "a little too good" in printed.out
    assert "<title>out" in (out / "report.html").read_text()
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    assert predicts(out, photos)


def test_a_tie_keeps_the_simpler_model():
    import torch

    facts = {}
    assert not minutes._is_better(facts, torch.tensor([100.0, 0.0]), torch.tensor([0.0, 100.0]))
    assert facts["difference"]["mean"] == 0
    assert not minutes._is_better({}, torch.tensor([torch.nan]), torch.tensor([torch.nan]))  # no labels
    assert minutes._is_better({}, torch.tensor([100.0, 0.0]), torch.tensor([0.0, 0.0]))


@pytest.mark.usefixtures("enough_time")
@pytest.mark.parametrize("end", ["signal", "failure"])
def test_what_ends_the_larger_step_leaves_the_first_model(photos, out, capsys, monkeypatch, end):
    one_run = InTime._run

    def second(work, resolved, path, *, brief):
        if path != out:
            assert is_frozen(out)
            if end == "failure":
                raise Failed("the memory is full")
            work.signals.stop(signal.SIGINT)
        return one_run(work, resolved, path, brief=brief)

    monkeypatch.setattr(InTime, "_run", second)
    code, printed = run(photos, out), capsys.readouterr()
    assert code == (130 if end == "signal" else 0)
    assert ("is complete" in printed.err) is (end == "signal")
    assert ("the memory is full" in printed.out) is (end == "failure")
    assert facts_of(out)["kept"] == "frozen features at 24 px"
    assert predicts(out, photos)


def test_all_that_does_not_go_with_minutes_is_told_at_once(photos, out, monkeypatch, capsys):
    words = ["--minutes", "-1", "--steps", "3", "--set", "trunk=all", "--size", "32", "--seeds", "2", "--overwrite"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["run", "--data", str(photos), "--out", str(out), *words]) == 2
    told = capsys.readouterr().err
    for word in ("--minutes -1", "one process", "--steps, --trunk, --size", "--seeds, --overwrite"):
        assert word in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["--resume", "runs/x"], "leave out --resume"), (["--init", "none", "--arch", "resnet18"], "add --init")],
)
def test_minutes_needs_a_checkpoint_and_a_new_run(photos, out, capsys, words, sentence):
    data = [] if "--resume" in words else ["--data", str(photos), "--out", str(out)]
    assert main(["run", "--minutes", "1", *data, *words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_all_layers_come_before_the_last_block_and_small_sizes_are_not_tried():
    assert list(minutes.ladder(224)) == [
        "all layers", "all layers at 160 px", "all layers at 128 px", "the last block"
    ]  # fmt: skip
    assert list(minutes.ladder(24)) == ["all layers", "the last block"]


def test_the_largest_step_that_fits_is_chosen(monkeypatch):
    prices = {("all", None): 500.0, ("last:1", None): 200.0, ("all", 160): 90.0, ("all", 128): 40.0}

    class Price:
        def __init__(self, recipe, _signals):
            self.seconds = [0, 0, prices[recipe.trunk, recipe.size]]

    monkeypatch.setattr(pricing, "estimate", Price)

    def make(sets):
        return resolve({"init": "simclr-demo", "data": "folder:photos"}, sets)

    left_out = []
    work = InTime(clock=minutes.Clock(2), make=make, init=None, path=None, signals=None, facts={"left_out": left_out})
    chosen = work._largest_that_fits(224)
    assert chosen is not None
    assert chosen[0] == "all layers at 160 px"
    assert chosen[1].recipe.size == 160
    assert [step["name"] for step in left_out] == ["all layers"]


def test_the_price_of_the_last_block_is_of_a_network_that_learns_no_more(photos, monkeypatch):
    asked = []
    monkeypatch.setattr(task, "choose_trainable", lambda network, trunk: asked.append(trunk))
    settings = {"init": "simclr-demo", "data": str(photos)}
    with Signals() as signals:
        price = pricing.estimate(resolve(settings, ["trunk=last:1", "workers=0"]).recipe, signals)
    assert asked == ["last:1"]
    assert 0 < price.seconds[0] <= price.seconds[1] <= price.seconds[2]


@pytest.mark.usefixtures("enough_time")
def test_a_refit_that_does_not_fit_is_named_with_its_command(photos, out, capsys, monkeypatch):
    monkeypatch.setattr(minutes, "REFIT_SHARE", 1e9)
    monkeypatch.setattr(minutes, "_is_better", lambda *_: True)
    out = out.with_name("my out")
    assert run(photos, out, "--refit") == 0
    words = shlex.split(facts_of(out)["refit_later"])
    assert facts_of(out)["refit_later"] in capsys.readouterr().out
    assert main(words[1:]) == 0
    assert json.loads((out / "export/config.json").read_text())["refit_labels"] == 90
