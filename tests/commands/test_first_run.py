"""The default on one's own photos: a probe as the start, a trial that decides how far to go, the first weights told."""

import csv
import html
import json
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from shortcuts import tinted_photos

import finetune_mile
from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.cli import main as verbs
from finetune_mile.config.resolve import resolve
from finetune_mile.measures.intervals import wilson
from finetune_mile.measures.metrics import measure
from finetune_mile.measures.verdicts import over, units, worse_than_probe
from finetune_mile.run import main
from finetune_mile.training import plan as planning
from finetune_mile.training import start as starts
from finetune_mile.training import task as tasks
from finetune_mile.training.explain import how_far, variant_of
from finetune_mile.training.plan import make_plan, unintended
from finetune_mile.training.processes import Device
from finetune_mile.training.trial import not_rejected

LITTLE = ["--init", "simclr-demo", "--set", "size=24", "--set", "workers=0", "--set", "checkpoint_every=4"]
LITTLE += ["--steps", "12", "--batch-size", "8", "--set", "log_every=1", "--set", "precision=no"]
NO_PHASES, LITTLE = LITTLE, [*LITTLE, "--k-t", "3", "--k-s", "3"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Noise with a tint: 20 training and 10 validation images of each of three classes."""
    root = tmp_path_factory.mktemp("photos")
    tinted_photos(root, noise=500)
    return root


@pytest.fixture
def few(monkeypatch):
    """Sixty labels are enough for a trial."""
    monkeypatch.setattr(planning, "FEW_LABELS", 30)


def results(run):
    return json.loads((run / "results.json").read_text())


def test_a_default_run_is_not_below_its_probe(photos, tmp_path, few, capsys):
    out = tmp_path / "run"
    assert main([*LITTLE, "--data", f"folder:{photos}", "--out", str(out)]) == 0
    scores, decision = results(out), json.loads((out / "trial/decision.json").read_text())
    start = json.loads((out / "start.json").read_text())
    assert [scores["probe_accuracy"], scores["knn_accuracy"]] == [start["accuracy"], start["knn_accuracy"]]
    assert scores["accuracy"] >= max(scores["probe_accuracy"] - 10, 60)
    assert decision["held_out"] == 12
    assert not list((out / "trial/checkpoints").glob("step-*")), "the trial's checkpoints are gone"
    assert decision["losses"].keys() == {"1", "0.5", "0"}
    printed = capsys.readouterr().err
    assert "start   the classifier is a linear probe of the labelled images, batch norm is frozen" in printed
    assert "trial   12 steps with 12 labels held out" in printed
    assert "method  mile (paper variant, except imitate_from: teacher, rho: 0.5, union: true): 12 steps" in printed
    recipe = (out / "recipe.yaml").read_text()
    assert "name: relative" in recipe
    assert "lr: 0.006" in recipe
    assert "union: true" in recipe
    classifier = finetune_mile.load_classifier(str(out))
    files = sorted((photos / "val").rglob("*.png"))
    right = sum(classifier.predict(str(file))[0][0] == file.parent.name for file in files)
    assert 100 * right / len(files) == pytest.approx(scores["accuracy"]), "the export is what was evaluated"


@pytest.mark.parametrize(("full", "half", "kept"), [(0.0, 0.0, 1.0), (0.4, 0.1, 1.0), (0.7, 0.4, 0.5), (2.0, 0.7, 0.0)])
def test_held_out_labels_reject_only_what_is_clearly_worse(full, half, kept):
    """Sixty-one labels, as of 307: the differences of their losses have a standard error of 0.26."""
    noise = 3.4 * torch.linspace(-1, 1, 61, dtype=torch.double)
    losses = {1.0: 2 + full + noise, 0.5: 2 + half + noise, 0.0: torch.full((61,), 2, dtype=torch.double)}
    assert float(noise.std()) / 61**0.5 == pytest.approx(0.26, abs=0.003)
    assert not_rejected(losses) == kept


@pytest.mark.slow
def test_every_run_tells_the_two_lines_to_beat(photos, tmp_path, monkeypatch):
    """Those of `finetune-mile probe`: from the start, the cache, or a pass of their own; else the command is shown."""
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    passes, outputs = [], Device.outputs

    def note(self, network, views, *others):
        passes.append(views.on_bad.args[0])
        return outputs(self, network, views, *others)

    monkeypatch.setattr(Device, "outputs", note)
    flags = [*LITTLE, "--data", f"folder:{photos}", "--keep", "last", "--set", "evaluate.every=null", "--steps", "6"]

    def lines(name, *more):
        passes.clear()
        assert main([*flags, *more, "--out", str(tmp_path / name)]) == 0
        scores = results(tmp_path / name)
        return scores.get("probe_accuracy"), scores.get("knn_accuracy"), passes.count("val")

    first = lines("first")
    late = lines("late", "--head-init", "random")
    assert late[:2] == (None, None)
    assert first[2] == late[2] + 1, "both lines in one pass"
    page = html.unescape((tmp_path / "late/report.html").read_text())
    command = re.search(r"k-NN of the checkpoint: finetune-mile (probe .*?)</p>", page)[1]
    table = tmp_path / "probe.json"
    assert verbs([*shlex.split(command), "--json", str(table)]) == 0
    (row,) = json.loads(table.read_text())["probes"]
    theirs = [row["accuracy"][kind]["mean"] for kind in ("sigmoid", "k-NN")]
    assert first[:2] == pytest.approx(theirs, abs=4), "float16"
    cached = lines("cached", "--head-init", "random")
    assert cached[:2] == pytest.approx(theirs)
    assert cached[2] == late[2], "no pass of their own"
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(starts, "REPORT_SHARE", 0)
    assert lines("long", "--head-init", "random") == pytest.approx(first)
    assert "<code>knn_accuracy</code>" in (tmp_path / "long/report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 12])
def test_a_stop_in_the_trial_or_after_it_changes_nothing(photos, tmp_path, few, stop_at, step):
    flags = [*LITTLE, "--data", f"folder:{photos}"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*flags, "--out", str(whole)]) == 0
    stop_at(step)
    arguments = [*flags, "--out", str(stopped)]
    for _ in range(2):  # the trial has that step, and the run itself
        assert main(arguments) == 143
        arguments = ["--resume", str(stopped)]
    stop_at(None)
    assert main(["--resume", str(stopped)]) == 0
    ours, theirs = (load_file(run / "export/model.safetensors") for run in (stopped, whole))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert results(stopped) == results(whole)


@pytest.mark.slow
def test_few_labels_go_half_the_way_without_a_trial(photos, tmp_path):
    runs = {keep: tmp_path / keep for keep in ("best", "last")}
    for keep, out in runs.items():
        assert main([*LITTLE, "--data", f"folder:{photos}", "--keep", keep, "--out", str(out)]) == 0
        assert not (out / "trial").exists()
    half, whole = (load_file(run / "export/model.safetensors") for run in runs.values())
    init = finetune_mile.load("simclr-demo").state_dict()
    middle = (init["conv1.weight"] + whole["conv1.weight"]) / 2
    assert half["conv1.weight"].allclose(middle, atol=1e-6)
    assert not half["conv1.weight"].allclose(whole["conv1.weight"], atol=1e-5)
    for name in ("bn1.running_mean", "bn1.running_var"):
        assert whole[name].equal(init[name]), "batch norm keeps the statistics of the checkpoint"


@pytest.mark.slow
def test_overwrite_replaces_a_run_with_its_trial(photos, tmp_path, few):
    flags = [*LITTLE, "--data", f"folder:{photos}", "--out", str(tmp_path / "run")]
    assert main(flags) == 0
    assert main([*flags, "--overwrite", "--keep", "last"]) == 0
    assert not (tmp_path / "run/trial").exists()


def test_a_model_that_is_worse_than_its_probe_says_so():
    scores = {"accuracy": 40.0, "probe_accuracy": 50.0, "over_probe": -10.0, "over_probe_low": -14.0}
    assert worse_than_probe(scores | {"over_probe_high": -6.0}).startswith(
        "Fine-tuning made this model worse: accuracy 40.0 %, and the linear probe"
    )
    assert worse_than_probe(scores | {"over_probe_high": 0.0}) is None, "the interval has its ends"
    assert worse_than_probe({"accuracy": 40.0, "probe_accuracy": 50.0}) is None, "not compared image by image"
    little = {"map": 36.58, "probe_map": 36.63, "over_probe": -0.05, "over_probe_low": -0.1, "over_probe_high": -0.01}
    assert worse_than_probe(little) is None, "it said: 36.6 %, and the linear probe has 36.6 %"


def test_a_perfect_model_is_not_called_worse_than_its_perfect_probe():
    """It said: accuracy 100.0 %, and the linear probe of its checkpoint has 100.0 %."""
    logits, given = torch.tensor([[1.0, 0.0]]).expand(47, 2), torch.zeros(47, dtype=torch.long)
    measured = measure(logits, given, None, activation="softmax", prediction_set="threshold")
    difference = over(measured, units(measured), "over_probe")
    assert difference == {"over_probe": 0.0, "over_probe_low": 0.0, "over_probe_high": 0.0}
    assert worse_than_probe({"accuracy": 100.0, "probe_accuracy": 100.0, **difference}) is None
    for images in range(1, 300):
        assert wilson(1.0, images)[1] == 1.0
        assert wilson(0.0, images)[0] == 0.0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--set", "optimizer.nesterov=true"], "optimizer.nesterov: true does not go with relative"),
        (["--set", "optimizer.head_lr=0.1"], "optimizer.head_lr does not go with relative"),
        (["--keep-head", "fc"], "--keep-head and --head-init probe: give one of them"),
        (["--keep", "first"], "--keep first"),
    ],
)
def test_settings_that_do_not_go_together(photos, tmp_path, capsys, flags, sentence):
    assert main([*LITTLE, "--data", f"folder:{photos}", "--out", str(tmp_path / "run"), *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_says_what_decides_how_far_its_weights_go():
    """With 120 photos it promised a trial that there was none of."""
    recipe = resolve({"data": "folder:photos", "init": "simclr-demo"}, []).recipe
    said = {labels: how_far(recipe, labels) for labels in (120, 200, 20_000, 20_001)}
    assert said[120] == (
        ". 120 labels are too few for a trial: the result is halfway between the first and the last weights"
    )
    assert said[200] == said[20_000] == ". A trial decides how far the weights go from the first to the last ones"
    assert said[20_001] == how_far(recipe.model_copy(update={"keep": "last"}), 120) == ""


def test_the_rate_is_lower_where_nothing_can_judge_it(capsys):
    rates = {labels: planning.auto_rate(labels, frozen=False) for labels in (199, 200, 10**6)}
    assert rates == {199: 0.003, 200: 0.006, 10**6: 0.006}
    assert planning.auto_rate(10**6, frozen=True) == 0.003
    assert main(["--data", "demo:100", "--init", "simclr-demo", "--set", "optimizer.name=sgd", "--explain",
                 "--recipe", "finetune"]) == 2  # fmt: skip
    assert "optimizer.lr: auto is for the optimizer `relative`; give --lr a number for sgd" in capsys.readouterr().err


def test_a_method_line_says_where_it_departs_from_the_variant():
    mine = {"data": "folder:photos", "init": "simclr-demo"}
    assert variant_of(resolve(mine | {"rho": 0.25}, ["mile.union=false", "mile.imitate_from=student"]).recipe) == (
        " (paper variant)"
    )
    assert variant_of(resolve(mine | {"variant": "published"}, []).recipe) == " (published variant, except union: true)"
    assert variant_of(resolve(mine | {"method": "softmax"}, []).recipe) == ""


def test_no_warm_up_is_asked_for_where_the_classifier_starts_as_a_probe():
    """A probe is trained: its outputs are not at the prior, whatever rho is."""

    def warnings(*sets):
        recipe = resolve({"data": "folder:photos", "init": "simclr-demo", "rho": 0.3}, sets).recipe
        plan = make_plan(recipe, {"labelled": 600, "unlabelled": 0, "all": 600})
        return " ".join(unintended(recipe, plan, 600, num_classes=3))

    assert "near the prior" not in warnings()
    assert "near the prior" in warnings("head_init=random", "optimizer.name=sgd", "optimizer.lr=0.1", "keep=last")


@pytest.mark.parametrize("method", ["mile", pytest.param("softmax", marks=pytest.mark.slow)])
def test_the_closing_lines_say_which_weights_probe_and_threshold_there_were(photos, tmp_path, capsys, method):
    out = tmp_path / "run"
    flags = LITTLE if method == "mile" else NO_PHASES
    assert main([*flags, "--data", f"folder:{photos}", "--out", str(out), "--method", method]) == 0
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if line.startswith("warning: --init simclr-demo")]
    assert "drawings of digits" in line
    activation, threshold = ("sigmoid", 0.5) if method == "mile" else ("softmax", 0.25)
    probe = f"probe_accuracy is of a linear {activation} classifier, fitted to the features of 60 labelled training"
    weights = "The scored weights are halfway between the first ones (before fine-tuning) and those of step 12"
    page = html.unescape((out / "report.html").read_text())
    for text in (printed.out, page):
        assert probe in text
        assert weights in text
    assert (f"labels above {threshold:g}" in page) == (method == "mile"), "one label a photo has no threshold to move"
    assert f"finetune-mile predict {out} IMAGES" in printed.out
    assert f"labels above {threshold:g}" in printed.out
    assert verbs(["predict", str(out), str(photos / "val"), "--format", "jsonl", "--workers", "0"]) == 0
    assert {json.loads(line)["threshold"] for line in capsys.readouterr().out.splitlines()} == {threshold}
    labels = re.findall(r'class="label ([^"]*)"([^>]*)>[^<]* ([.\d]+)</span>', page)
    assert len(re.findall('<div class="given">given: ', page)) <= len(labels), "always the best one"
    shown = [
        float(p) for kind, data, p in labels if "data-p" in data and not {"first", "below", "missed"} & {*kind.split()}
    ]
    assert all(p > threshold - 0.005 for p in shown)


def test_the_rules_go_with_a_frozen_trunk(photos, tmp_path, few, monkeypatch):
    """The probe, trained on: the export joins the backbone and the folded classifier."""
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "run"
    assert main([*LITTLE, "--data", f"folder:{photos}", "--trunk", "frozen", "--out", str(out)]) == 0
    assert results(out)["accuracy"] >= results(out)["probe_accuracy"] - 10
    classifier = finetune_mile.load_classifier(str(out))
    files = sorted((photos / "val").rglob("*.png"))
    right = sum(classifier.predict(str(file))[0][0] == file.parent.name for file in files)
    assert 100 * right / len(files) == pytest.approx(results(out)["accuracy"], abs=4)


@pytest.mark.parametrize("trunk", [pytest.param("all", marks=pytest.mark.slow), "frozen"])
def test_test_images_are_scored_once_and_decide_nothing(photos, tmp_path, few, monkeypatch, capsys, trunk):
    """Other test images, other scores of test images: nothing else differs."""
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    shown, views = [], tasks.image_views

    def note(preprocess, bad, seed, images, split, *others):
        shown.append(split)
        return views(preprocess, bad, seed, images, split, *others)

    monkeypatch.setattr(tasks, "image_views", note)
    data, runs = tmp_path / "photos", [tmp_path / "run", tmp_path / "other"]
    shutil.copytree(photos, data)
    shutil.copytree(photos / "val", data / "test")
    (data / "test/red/9.png").unlink()
    flags = [*LITTLE, "--data", f"folder:{data}", "--trunk", trunk, "--patience", "1", "--out"]
    flags[:0] = ["--set", "evaluate.every=1"]
    assert main([*flags, str(runs[0])]) == 0
    assert shown.count("test") == 1
    said = "".join(capsys.readouterr())
    assert "30 validation images, 29 test images (scored once, at the end), 3 classes" in said
    assert "test_ are of 29 test images, which were scored once, with the final weights" in said
    scores = results(runs[0])
    assert scores["test_images"] == 29
    with (runs[0] / "test_per_class.csv").open() as stream:
        assert [row["given"] for row in csv.DictReader(stream)] == ["10", "10", "9"]
    files = sorted((data / "test").rglob("*.png"))
    guesses = finetune_mile.load_classifier(str(runs[0])).predict([str(file) for file in files])
    right = [guess[0][0] == file.parent.name for guess, file in zip(guesses, files, strict=True)]
    assert 100 * np.mean(right) == pytest.approx(scores["test_accuracy"], abs=4 if trunk == "frozen" else 1e-4)
    page = (runs[0] / "report.html").read_text()
    assert "<code>test_accuracy</code>" in page
    assert ">Classes, on the test photos</h2>" in page
    assert "Held-out labels of the trial chose how far the weights went" in page
    (data / "test/red").rename(data / "test/yellow")
    (data / "test/green").rename(data / "test/red")
    (data / "test/yellow").rename(data / "test/green")
    assert main([*flags, str(runs[1])]) == 0
    others = results(runs[1])
    assert others["test_accuracy"] < scores["test_accuracy"]
    assert all(others[key] == value for key, value in scores.items() if "test_" not in key)
    assert (runs[0] / "export/model.safetensors").read_bytes() == (runs[1] / "export/model.safetensors").read_bytes()


# ------------------------------------------------------------- complete runs of the default: any scale, classes, batch

DEFAULT = ["--recipe", "finetune", "--set", "size=24", "--set", "precision=no", "--set", "workers=0"]


def tints(root, classes):
    """Noise in 2 or 100 tints, which crops and mirrors leave alone: 600 training and 1,000 validation images."""
    draw = np.random.default_rng(0)
    axes = [np.linspace(60, 200, count) for count in (5, 5, 4)]
    colours = np.stack(np.meshgrid(*axes), -1).reshape(-1, 3) if classes == 100 else [(120, 110, 110), (110, 110, 120)]
    for part, count in (("train", 600), ("val", 1000)):
        for number in range(count):
            folder = root / part / f"{number % classes:02}"
            folder.mkdir(parents=True, exist_ok=True)
            tint = colours[number % classes] + draw.normal(0, 15, 3)
            pixels = np.clip(draw.normal(tint, 60, (24, 24, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def scores_of(out, *flags):
    """The results of a default run whose trial let the weights move."""
    assert main([*DEFAULT, *flags, "--out", str(out)]) == 0
    assert json.loads((out / "trial/decision.json").read_text())["share"] > 0
    scores = results(out)
    assert scores["images"] == 1000
    return scores


def scaled(place, by):
    """Write the demo's checkpoint with features that are `by` times as large: the last norms, which a block adds up."""
    network = finetune_mile.load("simclr-demo")
    for name in ("layer4.0.bn2", "layer4.0.downsample.1"):
        norm = network.get_submodule(name)
        norm.weight.data *= by
        norm.bias.data *= by
    config = {"arch": "resnet-demo", "padding": "torch", "num_classes": 0}
    write_export(place, network, config | network.card.preprocess.model_dump(mode="json"))
    return network


@pytest.mark.slow
def test_the_scale_of_the_features_does_not_matter(tmp_path):
    data, images = tints(tmp_path / "tints", 100), torch.rand(4, 3, 24, 24)
    features, accuracy = {}, {}
    for by in (0.05, 1.0, 20.0):
        init = tmp_path / f"x{by}"
        with torch.inference_mode():
            features[by] = scaled(init, by)(images)
        scores = scores_of(tmp_path / f"run{by}", "--init", str(init), "--data", f"folder:{data}")
        accuracy[by] = scores["accuracy"]
        assert scores["accuracy"] > scores["probe_accuracy"] + 1, scores
    for by, rows in features.items():
        torch.testing.assert_close(rows, by * features[1.0], rtol=1e-4, atol=1e-4 * by)
    assert max(accuracy.values()) - min(accuracy.values()) <= 1.0, accuracy


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "batch"), [(2, 32), (100, 32), (2, 8), (100, 8)])
def test_a_default_run_with_any_number_of_classes_and_small_batches(tmp_path, classes, batch):
    data = tints(tmp_path / "tints", classes)
    flags = ["--init", "simclr-demo", "--data", f"folder:{data}", "--batch-size", str(batch)]
    scores = scores_of(tmp_path / "run", *flags)
    assert scores["accuracy"] >= scores["probe_accuracy"] - 1, scores
    assert scores["accuracy"] > (60 if classes == 2 else 25)
