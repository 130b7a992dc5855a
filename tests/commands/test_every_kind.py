"""Every kind of labels through every method and every verb: one, several, and with images that have none."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from shortcuts import COLOURS, ROOT, tinted

import finetune_mile
from finetune_mile.cli import main as command
from finetune_mile.images.sources import load_data
from finetune_mile.measures.verdicts import below_own_size
from finetune_mile.methods import METHODS
from finetune_mile.run import main as run
from finetune_mile.training import plan as planning
from finetune_mile.training import quickstart

TINY = [
    "--init", "simclr-demo", "--size", "24", "--steps", "8", "--batch-size", "8", "--set", "workers=0",
    "--set", "evaluate.images=10", "--set", "mile.k_t=3", "--set", "mile.k_s=1",
]  # fmt: skip
KINDS = ("one", "several", "one-partly", "several-partly")
MOST = ("one", "several", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[2:]))
OFTEN = ("auto", "irm", "mile", "sigmoid", "softmax")  # the others are slow tests
METHOD_FLAGS = {
    "auto": ["--set", "mile.k_t=50 %", "--set", "mile.k_s=50 %"],
    "averaged-teacher": [
        *("--fraction", "0.5", "--semi", "all", "--set", "labelled_share=0.5", "--set", "optimizer.ema=0.9"),
        *("--set", "views=weak-strong"),
    ],
}


def write(folder, kind, count=60):
    """A CSV file of photos in tints, `several` of them side by side; the last fifth of them is for validation."""
    folder.mkdir(parents=True)
    draw, several = np.random.default_rng(0), kind.startswith("several")
    rows = []
    for number in range(count):
        names = [list(COLOURS)[number % 3], *(["green"] if several and number % 2 else [])]
        picture = Image.new("RGB", (32, 32))
        for place, name in enumerate(dict.fromkeys(names)):
            picture.paste(tinted(draw, COLOURS[name], 10).crop((0, 0, 32 - 16 * place, 32)), (16 * place, 0))
        picture.save(folder / f"{number}.png")
        hidden = kind.endswith("partly") and number % 5 == 1
        labels = "" if hidden else ";".join(dict.fromkeys(names))
        rows.append((f"{number}.png", labels, "val" if number >= 0.8 * count else "train"))
    with (folder / "photos.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "labels" if several else "label", "split"), *rows])
    return f"csv:{folder / 'photos.csv'}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return {kind: write(tmp_path_factory.mktemp("kinds") / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """A finished default run of each kind of data."""
    folders = {kind: tmp_path_factory.mktemp("runs") / kind for kind in KINDS}
    for kind, folder in folders.items():
        assert run([*TINY, "--data", data[kind], "--out", str(folder)]) == 0
    return folders


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_run_leaves_everything_behind(runs, kind):
    folder = runs[kind]
    results = json.loads((folder / "results.json").read_text())
    score = "map" if kind.startswith("several") else "accuracy"
    assert {score, f"probe_{score}", f"knn_{score}", f"chance_{score}"} <= results.keys()
    table = (folder / "report.html").read_text()
    for key in (score, f"probe_{score}", f"knn_{score}"):
        low, high = results[f"{key}_low"], results[f"{key}_high"]
        assert low <= results[key] <= high
        assert low < high, "also where all is right"
        assert f"{low:.1f} to {high:.1f}" in table
    card = (folder / "export/README.md").read_text()
    assert f"| {score} | {round(results[score], 2)} | {results[f'{score}_low']:.1f} to " in card
    assert results["over_probe_low"] <= results["over_probe"] <= results["over_probe_high"]
    assert results["over_probe"] == pytest.approx(results[score] - results[f"probe_{score}"], abs=1e-6)
    for name in ("report.html", "labels.parquet", "per_class.csv", "export/model.safetensors", "export/README.md"):
        assert (folder / name).is_file(), name


@pytest.mark.parametrize("kind", ["several", pytest.param("several-partly", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in sorted(METHODS)]
)
def test_every_method_takes_several_labels_or_refuses_before_any_work(data, tmp_path, capsys, kind, method):
    flags = [
        *TINY,
        "--data",
        data[kind],
        "--out",
        str(tmp_path / "run"),
        "--method",
        method,
        *METHOD_FLAGS.get(method, []),
    ]
    if method == "distill":
        flags += ["--teacher", str(trained_teacher(data[kind], tmp_path))]
    code = run(flags)
    if method in ("auto", "irm", "rex"):
        assert code == 2
        assert capsys.readouterr().err.count("error:") == 1
        assert not (tmp_path / "run").exists()
    else:
        assert code == 0
        assert "map" in json.loads((tmp_path / "run/results.json").read_text())


def trained_teacher(data, folder):
    assert run([*TINY, "--data", data, "--out", str(folder / "teacher"), "--method", "sigmoid"]) == 0
    return folder / "teacher"


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({*METHODS} - {"irm", "rex"}))
def test_every_method_takes_partly_unlabelled_data(data, tmp_path, method):
    flags = [*TINY, "--data", data["one-partly"], "--out", str(tmp_path / "run"), "--method", method]
    if method == "distill":
        flags += ["--teacher", str(trained_teacher(data["one-partly"], tmp_path))]
    assert run([*flags, *METHOD_FLAGS.get(method, [])]) == 0


@pytest.mark.parametrize("kind", MOST)
def test_every_verb_takes_every_kind(data, runs, tmp_path, capsys, kind):
    where, folder = data[kind], str(runs[kind])
    photos = where.removeprefix("csv:").removesuffix("/photos.csv")
    assert command(["predict", folder, photos, "--format", "jsonl"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 60
    assert all(line["labels"] for line in lines)
    assert all(("threshold" in line) != ("threshold" in line["labels"][0]) for line in lines)
    if kind.startswith("several"):
        config = json.loads((runs[kind] / "export/config.json").read_text())
        assert len(config["thresholds"]) == 3, "one for each class"
        assert any(len(line["labels"]) > 1 for line in lines), "all labels above their thresholds"
    assert command(["eval", "--model", f"run:{folder}", "--draws", "50", "--out", str(tmp_path / "eval")]) == 0
    scored, before = (json.loads((each / "results.json").read_text()) for each in (tmp_path / "eval", runs[kind]))
    for key in (key for key in ("accuracy", "accuracy_low", "map", "map_low", "map_high") if key in before):
        assert scored[key] == pytest.approx(before[key], abs=0.1), f"{key}: run and eval say the same"
    assert command(["export", folder, "--to", "timm", "--out", str(tmp_path / "timm")]) == 2, "it has no such network"
    assert command(["export", folder, "--to", "torch", "--out", str(tmp_path / "torch")]) == 0
    same = ["--init", "simclr-demo", "--data", where]
    assert command(["embed", *same, str(tmp_path / "features")]) == 0
    assert command(["probe", *same, "--json", str(tmp_path / "probe.json")]) == 0
    assert command(["check", *TINY, "--data", where]) == 0
    assert command(["check", "--data", where]) == 0
    assert run(["--resume", folder]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_quickstart_and_minutes_end_with_a_model_for_every_kind(data, tmp_path, monkeypatch, capsys, kind):
    """Nothing is left out but the time: a file that is bad is told once."""
    monkeypatch.setattr(quickstart, "SEEDS", 1)
    monkeypatch.setattr(planning, "LEAST_STEPS", 20)
    measure = "map" if kind.startswith("several") else "accuracy"
    photos = Path(data[kind].removeprefix("csv:")).parent
    where = tmp_path / "some photos"
    shutil.copytree(photos, where)
    (where / "0.png").write_bytes(b"")
    words = ["--init", "simclr-demo", "--minutes", "1"]
    assert command(["quickstart", f"csv:{where / 'photos.csv'}", *words, "--out", str(tmp_path / "quick")]) == 0
    said = "".join(capsys.readouterr())
    assert said.count("warning: train image") == 1
    facts = json.loads((tmp_path / "quick/quickstart.json").read_text())
    assert facts["measure"] == facts["model"]["measure"] == measure
    assert facts["model"]["refit_labels"] == (48 if kind.endswith("partly") else 60)
    run_flags = ["run", *words, "--data", data[kind], "--out", str(tmp_path / "run"), "--refit"]
    assert command([*run_flags, "--set", "workers=0"]) == 0
    made = json.loads((tmp_path / "run/minutes.json").read_text())
    assert made["measure"] == measure
    assert all(step["low"] <= step["score"] <= step["high"] for step in made["steps"])
    for folder in (tmp_path / "run", tmp_path / "quick/model"):
        capsys.readouterr()
        assert command(["predict", str(folder), str(photos), "--format", "jsonl"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 60


@pytest.mark.parametrize("kind", MOST)
def test_packed_data_has_the_same_labels_and_preflight_takes_it(data, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("FINETUNE_MILE_CONFIG", str(tmp_path / "config"))
    packed = f"wds:{tmp_path / 'packed'}"
    assert command(["pack", data[kind], str(tmp_path / "packed"), "--size", "32"]) == 0
    before, after = load_data(data[kind]), load_data(packed)
    for one, other in ((before.train, after.train), (before.val, after.val)):
        assert list(one.ids) == list(other.ids)
        assert one.given.equal(other.given)
    assert command(["preflight", *TINY, "--data", packed, "--bank", "30"]) == 0


def test_a_run_of_several_labels_with_a_trial_and_patience(tmp_path):
    where = write(tmp_path / "photos", "several", count=300)
    flags = [*TINY, "--data", where, "--out", str(tmp_path / "run"), "--method", "sigmoid"]
    assert run([*flags, "--patience", "2", "--set", "evaluate.every=1"]) == 0
    decision = json.loads((tmp_path / "run/trial/decision.json").read_text())
    assert decision["share"] in (0, 0.5, 1), "held-out sets of labels decide"
    assert "chosen_step" in json.loads((tmp_path / "run/results.json").read_text())


def test_lists_of_names_from_python(data, tmp_path):
    images = load_data(data["several"])
    folder = data["several"].removeprefix("csv:").removesuffix("photos.csv")
    names = [
        [images.classes[c] for c in row.nonzero().flatten().tolist()]
        for row in (images.train.given > 0)
    ]  # fmt: skip
    paths = [folder + name for name in images.train.ids]
    trained = finetune_mile.train(
        (paths, names), "simclr-demo", out=tmp_path / "run", method="sigmoid", size=24, steps=8, batch_size=8, workers=0
    )
    assert "map" in trained.results
    model = trained.classifier()
    assert model.thresholds.keys() == set(images.classes)
    assert all(0 < value < 1 for value in model.thresholds.values())
    assert [name for name, p in model.predict(paths[0]) if p > model.thresholds[name]]
    split = json.loads((tmp_path / "run/split.json").read_text())
    assert not any(name.startswith("/") for name in split["ids"]), "the same split in another place"


def test_semi_supervised_with_several_labels(data, tmp_path):
    flags = [*TINY, "--data", data["several-partly"], "--out", str(tmp_path / "run"), "--semi", "all"]
    assert run(flags) == 0
    assert run([*flags[:-4], "--out", str(tmp_path / "frozen"), "--trunk", "frozen"]) == 0


@pytest.mark.parametrize("trunk", [pytest.param("all", marks=pytest.mark.slow), "frozen"])
def test_refit_trains_on_all_labels_and_keeps_the_scores(data, tmp_path, capsys, trunk):
    flags = [*TINY, "--data", data["several-partly"], "--trunk", trunk]
    assert run([*flags, "--out", str(tmp_path / "plain")]) == 0
    assert run([*flags, "--out", str(tmp_path / "run"), "--refit"]) == 0
    plain, refitted = tmp_path / "plain", tmp_path / "run"
    before, after = (json.loads((each / "results.json").read_text()) for each in (plain, refitted))
    assert before == after, "the scores are those of the run before"
    split = json.loads((refitted / "refit/split.json").read_text())
    labelled = json.loads((plain / "split.json").read_text())["labelled"]
    assert split["labelled"] == 48, "a fifth of 60 images has no label"
    config = json.loads((refitted / "export/config.json").read_text())
    assert (config["refit_labels"], config["steps"]) == (48, round(8 * 48 / labelled))
    assert "all 48 labels" in (refitted / "export/README.md").read_text()
    weights = [load_file(each / "export/model.safetensors")["fc.weight"] for each in (plain, refitted)]
    assert not weights[0].equal(weights[1])
    capsys.readouterr()
    assert command(["eval", "--model", f"run:{refitted}", "--draws", "0", "--out", str(tmp_path / "eval")]) == 0
    assert "--refit" in capsys.readouterr().err, "it has seen these images"
    assert run(["--resume", str(plain), "--refit"]) == 0, "also after a run was looked at"
    late = load_file(plain / "export/model.safetensors")["fc.weight"]
    assert late.equal(weights[1])
    assert run(["--resume", str(plain), "--refit"]) == 0
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "trunk"), [("one", "all"), ("one", "frozen"), ("several", "all")])
def test_a_run_below_the_checkpoints_own_size_is_compared_with_a_probe_at_that_size(
    data, tmp_path, capsys, kind, trunk
):
    """64-pixel fine-tuning looked like a success beside its own probe, and was worse than a probe at 224 pixels."""
    flags = ["--init", "simclr-demo", "--data", data[kind], "--steps", "60", "--batch-size", "8", "--trunk", trunk]
    flags += ["--set", "workers=0", "--method", "sigmoid", "--size", "12"]
    if trunk == "frozen":  # dear beside such a run, unless the features are kept
        assert command(["embed", "--init", "simclr-demo", "--data", data[kind]]) == 0
    assert run([*flags, "--out", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run/results.json").read_text())
    start = json.loads((tmp_path / "run/start.json").read_text())
    assert start["own_size"]["size"] == results["own_size"] == 24
    score = "accuracy" if kind == "one" else "map"
    probe = f"own_size_probe_{score}"
    assert results[f"{probe}_low"] <= results[probe] <= results[f"{probe}_high"]
    assert results["over_own_size_probe"] == pytest.approx(results[score] - results[probe])
    said = capsys.readouterr()
    assert "own 24 pixels" in said.err, "before the first step"
    assert probe in said.out
    assert probe in (tmp_path / "run/report.html").read_text()


def test_a_run_that_a_probe_at_the_own_size_beats_says_what_to_do():
    scores = {"accuracy": 46.9, "own_size": 224, "own_size_probe_accuracy": 57.1, "over_own_size_probe": -10.2}
    worse = scores | {"over_own_size_probe_low": -15.0, "over_own_size_probe_high": -5.6}
    assert "--trunk frozen" in below_own_size(worse, 64)
    assert below_own_size(worse | {"over_own_size_probe_high": 0.0}, 64) is None
    assert below_own_size({"accuracy": 46.9}, 64) is None


# ------------------------------------------------------------------------------------ what an attack found


@pytest.mark.slow
def test_refit_in_two_processes(data, tmp_path):
    """The second process read results that the first one was still writing."""
    words = [*TINY, "--data", data["one"], "--out", str(tmp_path / "run"), "--refit"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    subprocess.run([*launch, "finetune_mile.run", *words], check=True, env=environment, timeout=300)
    assert json.loads((tmp_path / "run/export/config.json").read_text())["refit_labels"] == 60


def test_a_seed_whose_refit_was_interrupted_is_refitted(data, tmp_path):
    words = [*TINY, "--data", data["one"], "--out", str(tmp_path / "runs"), "--seeds", "1"]
    assert run(words) == 0
    assert not (tmp_path / "runs/seed-0/refit").exists()
    assert run([*words, "--refit"]) == 0
    assert "refit_labels" in json.loads((tmp_path / "runs/seed-0/export/config.json").read_text())


@pytest.mark.parametrize("ending", ["done", "npy"])
def test_kept_features_that_were_cut_off_are_computed_again(data, tmp_path, monkeypatch, ending):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    words = [*TINY, "--data", data["one"], "--trunk", "frozen", "--method", "softmax"]
    assert run([*words, "--out", str(tmp_path / "first")]) == 0
    for path in (tmp_path / "cache/features").rglob(f"train.{ending}"):
        path.write_bytes(path.read_bytes()[:5])
    assert run([*words, "--out", str(tmp_path / "second")]) == 0
    first, second = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("first", "second"))
    assert first == second


def test_a_probe_at_the_own_size_does_not_need_a_cache(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "file"))
    words = ["--init", "simclr-demo", "--data", data["one"], "--steps", "60", "--batch-size", "8", "--size", "12"]
    assert run([*words, "--set", "workers=0", "--method", "softmax", "--out", str(tmp_path / "run")]) == 0
    assert "FINETUNE_MILE_CACHE" in capsys.readouterr().err
    assert run([*TINY, "--data", data["one"], "--trunk", "frozen", "--out", str(tmp_path / "frozen")]) == 1


def test_map_and_its_interval_are_of_the_same_labels(tmp_path):
    where = write(tmp_path / "photos", "several-partly")
    path = tmp_path / "photos/photos.csv"
    rows = list(csv.reader(path.read_text().splitlines()))
    truth = ["truth", *(row[1] or "red;blue" for row in rows[1:])]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([*row, true] for row, true in zip(rows, truth, strict=True))
    assert run([*TINY, "--data", where, "--out", str(tmp_path / "run"), "--method", "sigmoid"]) == 0
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["map_low"] <= results["map"] <= results["map_high"]


def test_another_separator_is_noticed_and_a_way_out_is_named(tmp_path):
    path = tmp_path / "photos.csv"
    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    path.write_text("file,labels\n0.png,cat|dog\n1.png,cat|dog\n2.png,cat\n3.png,cat\n")
    with pytest.raises(finetune_mile.Problem, match=r"separator=\|"):
        load_data(f"csv:{path}")
    assert load_data(f"csv:{path}?separator=|").classes == ("cat", "dog")
    assert load_data(f"csv:{path}?separator=;").classes == ("cat", "cat|dog")


def test_the_only_photo_of_a_class_is_for_training(tmp_path):
    for name, count in {"cat": 5, "dog": 5, "rare": 1}.items():
        (tmp_path / name).mkdir()
        for number in range(count):
            draw = np.random.default_rng(10 * count + number)
            Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(tmp_path / name / f"{number}.png")
    found = load_data(str(tmp_path))
    assert "rare/0.png" in list(found.train.ids)
    assert len(found.val) == 2
