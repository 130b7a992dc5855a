"""`finetune-mile eval`: equal to a plain loop, again without the model, one or two processes, and clear when wrong."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from shortcuts import ROOT, SHORT_MILE
from timm.data import ImageNetInfo, create_transform, resolve_data_config
from torchvision.datasets import ImageFolder

from finetune_mile import cli
from finetune_mile.checkpoints import loading
from finetune_mile.measures.predictions import read_predictions
from finetune_mile.training import folder as folders

CLASSES = ("cat", "dog", "owl")


def evaluate(*flags, expect=0):
    assert cli.main(["eval", *map(str, flags)]) == expect


def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of three classes, 8 coloured noise photos each, of several sizes; no train/."""
    root, rng = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for i in range(8):
            noise = rng.integers(0, 160, (40 + 7 * i, 70 - 3 * i, 3))
            noise[..., label] += 90 - 12 * i
            Image.fromarray(noise.astype(np.uint8)).save(root / name / f"{i}.jpg", quality=90)
    return root


@pytest.fixture(scope="module")
def network(tmp_path_factory, photos):
    """A tiny timm network whose random weights tell images apart, and its file."""
    torch.manual_seed(3)
    model = timm.create_model("test_resnet", pretrained=False, num_classes=3).eval()
    model.fc.weight.data.normal_(std=3.0)
    model.fc.bias.data -= plain_loop(model, photos)[0].mean(0)
    path = tmp_path_factory.mktemp("weights") / "net.pth"
    torch.save(model.state_dict(), path)
    return model, path


def plain_loop(model, root):
    """Ten lines that everybody would write."""
    images = ImageFolder(root, create_transform(**resolve_data_config(model.pretrained_cfg, model=model)))
    rows, right = [], 0
    with torch.no_grad():
        for image, label in images:
            rows.append(model(image.unsqueeze(0))[0])
            right += int(rows[-1].argmax()) == label
    return torch.stack(rows), 100 * right / len(images)


def test_a_timm_model_scores_as_in_a_plain_loop(photos, network, tmp_path):
    model, path = network
    logits, accuracy = plain_loop(model, photos)
    assert 0 < accuracy < 100
    assert len(logits.argmax(1).unique()) > 1, "weights that always say the same would prove nothing"
    out = tmp_path / "out"
    evaluate("--model", "timm:test_resnet", "--weights", path, "--data", photos, "--out", out, "--batch-size", 5)
    found = results(out)
    assert found["accuracy"] == accuracy
    assert found["images"] == 24
    assert found["accuracy_low"] <= accuracy <= found["accuracy_high"]
    saved = read_predictions(out / "logits.parquet")
    assert torch.allclose(saved.logits, logits, rtol=1e-4, atol=1e-4)
    assert list(saved.ids)[:2] == ["cat/0.jpg", "cat/1.jpg"]
    facts = json.loads((out / "eval.json").read_text())
    assert (facts["images"], facts["part"], facts["activation"]) == (24, "all", "softmax")


def test_without_the_model_the_numbers_are_the_same(photos, network, tmp_path):
    model = ["--model", "timm:test_resnet", "--weights", network[1], "--data", photos, "--workers", 0]
    sets = tmp_path / "sets.csv"
    lines = [f"{name}/{i}.jpg,{name};owl" for name in CLASSES for i in range(7)]
    sets.write_text("\n".join(["file,labels", *lines]) + "\n")
    evaluate(*model, "--truth", f"csv:{sets}", "--out", tmp_path / "a")
    found = results(tmp_path / "a")
    assert found["images_with_set"] == 21
    for key in ("accuracy", "top5", "real_acc", "f1@0.25", "f1@0.5", "f1@best", "lrap", "trivial_f1", "recovery_map",
                "coverage@0.25", "f1_argmax_or_threshold@0.25", "f1_threshold@best", "recovery_map_low"):  # fmt: skip
        assert key in found
    evaluate("--logits", tmp_path / "a/logits.parquet", "--out", tmp_path / "b")
    assert results(tmp_path / "b") == found
    assert not (tmp_path / "b/logits.parquet").exists()
    evaluate(*model, "--out", tmp_path / "plain")
    assert "lrap" not in results(tmp_path / "plain")
    evaluate("--logits", tmp_path / "plain/logits.parquet", "--truth", f"csv:{sets}", "--out", tmp_path / "c")
    assert results(tmp_path / "c") == found
    with (tmp_path / "a/per_class.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["class"] for row in rows] == list(CLASSES)
    assert [row["given"] for row in rows] == ["8"] * 3
    assert [row["true"] for row in rows] == ["7", "7", "21"]
    assert sum(float(row["accuracy"]) for row in rows) / 3 == pytest.approx(found["accuracy"], abs=1e-3)


def test_a_run_scores_as_it_did_and_is_compared_image_by_image(run_demo, tmp_path, capsys):
    runs = [run_demo(name, *SHORT_MILE, "--seed", str(seed)) for seed, name in enumerate(("one", "two"))]
    out = tmp_path / "out"
    evaluate("--model", f"run:{runs[0]}", "--compare", runs[1], "--out", out)
    found, before = results(out), results(runs[0])
    files = {"bad_images", "unreadable_files"}  # of the run: its training images as well
    assert {key: found[key] for key in before if key not in files} == pytest.approx(
        {key: value for key, value in before.items() if key not in files}
    )
    comparison = json.loads((out / "comparison.json").read_text())
    for key in ("accuracy", "lrap", "recovery_map"):
        measure = comparison["measures"][key]
        assert measure["a"] == pytest.approx(before[key])
        assert measure["b"] == pytest.approx(results(runs[1])[key])
        assert measure["difference"] == pytest.approx(measure["a"] - measure["b"])
        assert measure["low"] <= measure["difference"] <= measure["high"]
    shown = capsys.readouterr().out
    assert "recovery_map" in shown
    assert "paired" in shown
    evaluate("--logits", out / "logits.parquet", "--compare", out / "logits.parquet", "--out", tmp_path / "again")
    assert results(tmp_path / "again") == found, "the set rule and rho of the run travel with its logits"
    weights = runs[0] / "export/model.safetensors"
    evaluate("--model", weights, "--data", "demo:200", "--out", tmp_path / "file", "--draws", 0)
    assert results(tmp_path / "file")["accuracy"] == before["accuracy"]
    assert "accuracy_low" not in results(tmp_path / "file")
    evaluate("--model", weights, "--data", "demo:200", "--out", out, expect=2)
    assert "use --overwrite" in capsys.readouterr().err
    evaluate("--model", weights, "--data", "demo:200", "--out", out, "--overwrite", "--draws", 0)
    assert not (out / "comparison.json").exists(), "nothing of the old evaluation stays"
    evaluate("--model", weights, "--data", "demo:200", "--out", runs[0], "--overwrite", expect=2)
    assert "not an evaluation" in capsys.readouterr().err
    evaluate("--logits", out / "logits.parquet", "--compare", runs[1], "--data", "demo:40", expect=2)
    assert "must have seen the same images" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_see_every_image_once(photos, network, tmp_path):
    part = ["--data", str(photos), "--workers", "0", "--batch-size", "4"]
    flags = ["--model", "timm:test_resnet", "--weights", str(network[1]), *part]
    odd = tmp_path / "odd"
    for name in CLASSES:
        (odd / name).mkdir(parents=True)
        for i in range(3):
            (odd / name / f"{i}.jpg").write_bytes((photos / name / f"{i}.jpg").read_bytes())
    flags[flags.index(str(photos))] = str(odd)  # 9 images: the shares differ
    evaluate(*flags, "--out", tmp_path / "one")
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    done = subprocess.run(
        [*command, "finetune_mile.cli", "eval", *flags, "--out", str(tmp_path / "two")], cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (read_predictions(tmp_path / name / "logits.parquet") for name in ("one", "two"))
    assert len(one.ids) == 9
    assert list(one.ids) == list(two.ids)
    assert torch.allclose(one.logits, two.logits, atol=1e-4)
    assert results(tmp_path / "one")["accuracy"] == results(tmp_path / "two")["accuracy"]
    assert json.loads((tmp_path / "two/eval.json").read_text())["world_size"] == 2


def test_classes_are_matched_by_name(photos, tmp_path, capsys):
    """A model saved for the hub names its classes; one of ImageNet is read at the synsets that the data has."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", pretrained=False, num_classes=3).eval()
    names = {"label_names": ["owl", "cat", "dog"]}
    timm.models.save_for_hf(model, tmp_path / "hub", model_config=names, safe_serialization=True)
    evaluate("--model", f"hf:{tmp_path / 'hub'}", "--data", photos, "--out", tmp_path / "out", "--workers", 0)
    saved = read_predictions(tmp_path / "out/logits.parquet")
    assert torch.allclose(saved.logits, plain_loop(model, photos)[0][:, [1, 2, 0]], atol=1e-4)

    wide = timm.create_model("test_resnet", pretrained=False).eval()
    torch.save(wide.state_dict(), tmp_path / "wide.pth")
    synsets = ImageNetInfo().label_names()
    for name, label in zip(CLASSES, (7, 3, 500), strict=True):
        (tmp_path / "few" / synsets[label]).mkdir(parents=True)
        for i in range(2):
            (tmp_path / "few" / synsets[label] / f"{i}.jpg").write_bytes((photos / name / f"{i}.jpg").read_bytes())
    flags = ["--model", "timm:test_resnet", "--weights", tmp_path / "wide.pth", "--workers", 0]
    evaluate(*flags, "--data", tmp_path / "few", "--out", tmp_path / "few-out")
    saved = read_predictions(tmp_path / "few-out/logits.parquet")
    assert saved.classes == tuple(synsets[i] for i in (3, 7, 500))
    assert torch.allclose(saved.logits, plain_loop(wide, tmp_path / "few")[0][:, [3, 7, 500]], atol=1e-4)
    evaluate(*flags, "--data", photos, "--out", tmp_path / "no", expect=2)
    assert "it knows 1000 classes, the data has 3" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(loading, "open_trunk"), reason="needs the loader of published checkpoints")
def test_a_file_with_a_head_is_evaluated_with_it(photos, tmp_path, capsys):
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=3).eval()
    torch.save(model.state_dict(), tmp_path / "net.pth")
    evaluate("--model", tmp_path / "net.pth", "--data", photos, "--out", tmp_path / "out", "--workers", 0)
    saved = read_predictions(tmp_path / "out/logits.parquet")
    assert saved.logits.std() > 0
    assert results(tmp_path / "out")["images"] == 24
    torch.save({k: v for k, v in model.state_dict().items() if "fc" not in k}, tmp_path / "trunk.pth")
    evaluate("--model", tmp_path / "trunk.pth", "--data", photos, "--out", tmp_path / "no", expect=2)
    assert "it has no classifier" in capsys.readouterr().err


def test_a_model_that_says_nan_fails(photos, network, tmp_path, capsys):
    state = torch.load(network[1])
    state["fc.bias"] = torch.full((3,), torch.nan)
    torch.save(state, tmp_path / "nan.pth")
    flags = ["--model", "timm:test_resnet", "--weights", tmp_path / "nan.pth", "--data", photos, "--workers", 0]
    evaluate(*flags, "--out", tmp_path / "out", expect=1)
    assert "NaN or infinity for 24 images" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bad_images_do_not_count_and_are_listed(photos, network, tmp_path, capsys):
    shutil.copytree(photos, tmp_path / "photos")
    whole = (tmp_path / "photos/dog/3.jpg").read_bytes()
    (tmp_path / "photos/dog/3.jpg").write_bytes(whole[: len(whole) // 2])
    flags = ["--model", "timm:test_resnet", "--weights", network[1], "--workers", 0, "--data"]
    evaluate(*flags, tmp_path / "photos", "--out", tmp_path / "bad")
    evaluate(*flags, photos, "--out", tmp_path / "good")
    bad, good = (read_predictions(tmp_path / name / "logits.parquet") for name in ("bad", "good"))
    kept = [i for i, name in enumerate(good.ids) if name != "dog/3.jpg"]
    assert list(bad.ids) == [good.ids[i] for i in kept]
    assert torch.allclose(bad.logits, good.logits[kept], atol=1e-4)
    found = results(tmp_path / "bad")
    assert (found["images"], found["bad_images"]) == (23, 1)
    assert "dog/3.jpg" in (tmp_path / "bad/bad_images.csv").read_text()
    assert "1 images could not be read" in capsys.readouterr().out
    for path in (tmp_path / "photos").rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:300])
    evaluate(*flags, tmp_path / "photos", "--out", tmp_path / "none", expect=2)
    assert "24 of 24 images cannot be read" in capsys.readouterr().err


def test_wrong_models_are_told_by_name(photos, network, tmp_path, capsys):
    evaluate("--model", "timm:resnt18", "--data", photos, "--weights", "none", "--out", tmp_path / "x", expect=2)
    assert "timm has no such model" in capsys.readouterr().err
    evaluate("--model", "timm:test_vit", "--data", photos, "--weights", network[1], "--out", tmp_path / "x", expect=2)
    assert "no classifier in it" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


CASES = {
    "nothing": ([], "give either --model"),
    "both": (["--model", "timm:resnet18", "--logits", "x.parquet"], "give either --model"),
    "unknown flag": (["--modl", "x"], "did you mean --model?"),
    "a word": (["x"], "unexpected argument 'x'"),
    "no data": (["--model", "timm:resnet18"], "--data is required"),
    "no file": (["--model", "nothing.pth", "--data", "demo"], "--model nothing.pth: no such file"),
    "no run": (["--model", "run:nowhere"], "no directory 'nowhere'"),
    "not a run": (["--model", "run:.", "--data", "demo"], "no export in it"),
    "no name": (["--model", "timm:", "--data", "demo"], "name is missing"),
    "no folder": (["--model", "timm:resnet18", "--data", "folder:nowhere"], "no directory 'nowhere'"),
    "no logits": (["--logits", "l.parquet"], "--logits l.parquet: no such file"),
    "no weights": (["--model", "timm:resnet18", "--data", "demo", "--weights", "w.pth"], "--weights w.pth: no such"),
    "batch": (["--model", "timm:resnet18", "--data", "demo", "--batch_size", "0"], "--batch-size 0: must be from 1"),
    "truth": (["--model", "timm:resnet18", "--data", "demo", "--truth", "csv:no.csv"], "there is no file no.csv"),
    "compare": (["--model", "timm:resnet18", "--data", "demo", "--compare", "no"], "--compare no: no such file"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags, sentence = CASES[case]
    evaluate(*flags, expect=2)
    said = capsys.readouterr().err
    assert sentence in said
    assert all(line.startswith("error: ") for line in said.splitlines())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--help"], CASES["not a run"][0], CASES["truth"][0]])
def test_help_and_errors_do_not_import_torch(flags):
    code = (
        f"import sys\nfrom finetune_mile import cli\ntry: cli.main(['eval', *{flags!r}])\n"
        "except SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_is_not_scored_on_its_training_images_without_a_word(tmp_path, monkeypatch, capsys):
    """The same folder by another path: 91 % on all images, where the run had said 57 % on those it had not seen."""
    from PIL import Image

    from finetune_mile.run import main as run

    for number in range(24):
        name = tmp_path / f"photos/class-{number % 3}/{number}.png"
        name.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 30), (number, 9 * number, 80)).save(name)
    monkeypatch.chdir(tmp_path)
    flags = ["--init", "none", "--arch", "resnet-demo", "--set", "size=24", "--method", "sigmoid", "--steps", "2"]
    assert run(["--data", "folder:photos", *flags, "--batch-size", "8", "--out", "run"]) == 0
    capsys.readouterr()
    results = json.loads((tmp_path / "run/results.json").read_text())
    for number, data in enumerate(("folder:photos", f"folder:{tmp_path}/photos", str(tmp_path / "photos"))):
        out = tmp_path / f"eval-{number}"
        assert cli.main(["eval", "--model", "run:run", "--data", data, "--out", str(out)]) == 0
        found = json.loads((out / "eval.json").read_text())
        assert found["part"] == "val", data
        assert "warning" not in capsys.readouterr().err
    assert results["images"] < 24
    (tmp_path / "elsewhere").mkdir()
    with monkeypatch.context() as patch:  # the run knows where its relative paths begin
        patch.chdir(tmp_path / "elsewhere")
        assert cli.main(["eval", "--model", "run:../run", "--out", "scores"]) == 0
        assert json.loads(Path("scores/eval.json").read_text())["part"] == "val"
    (tmp_path / "photos").rename(tmp_path / "moved")
    command = ["eval", "--model", "run:run", "--data", "folder:moved", "--out", str(tmp_path / "all")]
    assert cli.main(command) == 0
    said = capsys.readouterr().err
    assert (
        "of these 24 images have the names of images that run:run was trained on. If they are the same photos" in said
    )


def test_all_images_of_a_list_without_splits_are_scored(tmp_path, monkeypatch, capsys):
    """Unless the run was made of that list: then its validation images."""
    monkeypatch.chdir(tmp_path)
    for colour, value in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        for number in range(10):
            Image.new("RGB", (24, 24), value).save(tmp_path / f"{colour}{number}.png")
    rows = [(f"{colour}{number}.png", colour) for colour in ("red", "blue") for number in range(10)]
    for name in ("own", "other"):
        (tmp_path / f"{name}.csv").write_text("file,label\n" + "".join(f"{file},{label}\n" for file, label in rows))
    flags = ["--init", "none", "--arch", "resnet-demo", "--set", "size=24", "--set", "workers=0", "--steps", "2"]
    assert cli.main(["run", "--data", "csv:own.csv", *flags, "--method", "sigmoid", "--out", "run"]) == 0
    for name, images in (("own", 4), ("other", 20)):
        command = ["eval", "--model", "run:run", "--data", f"csv:{name}.csv", "--draws", "0", "--workers", "0"]
        assert cli.main(command) == 0
        folder = tmp_path / "runs" / f"eval-{1 if name == 'own' else 2}"
        assert json.loads((folder / "results.json").read_text())["images"] == images


def test_two_commands_at_once_get_folders_of_their_own(tmp_path, monkeypatch):
    first = folders.claim_folder(tmp_path / "runs", "eval")
    asked = iter((first, tmp_path / "runs/eval-2"))  # the first one was taken meanwhile
    monkeypatch.setattr(folders, "next_folder", lambda *_: next(asked))
    assert (first.name, folders.claim_folder(tmp_path / "runs", "eval").name) == ("eval-1", "eval-2")
