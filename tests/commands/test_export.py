"""`finetune-mile export`: every form computes our logits, its card says how, and nothing leaks or is left half done."""

import ast
import importlib.util
import json
import os
import zipfile

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from images.photos import photo
from PIL import Image
from shortcuts import ROOT
from snippets import blocks, run_python, run_shell

import finetune_mile
from finetune_mile import cli
from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.loading import Preprocessor, load_network
from finetune_mile.core.types import Preprocess
from finetune_mile.pages.card import model_card, public_name
from finetune_mile.run import main
from finetune_mile.verbs import export

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in export.NEEDS["onnx"]),
    reason="needs onnx, onnxscript and onnxruntime: pip install -e '.[export]'",
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)
CONFIG = {
    "arch": "resnet18", "padding": "torch", "num_classes": 3, "classes": ["cat", "dog", "Zürich, city"], "size": 64,
    "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "crop": 0.8, "interpolation": "bicubic", "activation": "sigmoid",
}  # fmt: skip


def exported(folder, **change):
    """A run folder of nothing but an export with random weights; its head is large, so that logits differ."""
    torch.manual_seed(0)
    config = CONFIG | change
    network, _, _ = load_network("none", arch=config["arch"], num_classes=config["num_classes"], head_bias="prior")
    with torch.no_grad():
        for head in network.modules():
            if isinstance(head, torch.nn.Linear) and head.out_features == config["num_classes"]:
                head.weight.mul_(100)
    write_export(folder / "export", network, config)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps from a local file on a local folder: what it publishes must not name either place."""
    place = tmp_path_factory.mktemp("secret-place")
    for part, count in (("train", 4), ("val", 2)):
        for number, name in enumerate(("cat", "dog")):
            (place / "photos" / part / name).mkdir(parents=True)
            for i in range(count):
                (place / "photos" / part / name / f"{i}.jpg").write_bytes(photo(100 * number + i))
    exported(place / "start", arch="resnet-demo", size=24, licence="MIT")
    flags = ["--data", f"folder:{place / 'photos'}", "--init", str(place / "start/export/model.safetensors")]
    flags += ["--method", "sigmoid", "--steps", "2", "--batch-size", "4", "--head-init", "random", "--keep", "last"]
    flags += ["--set", "precision=no"]  # Accelerate keeps the precision of its first run in a process
    assert main([*flags, "--out", str(place / "runs/photos-1")]) == 0
    return place / "runs/photos-1"


def texts(folder):
    """Every file of a folder as bytes; the parts of a .pt2 too."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.name, path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield from ((name, archive.read(name)) for name in archive.namelist())


def check_card(folder, run, monkeypatch, *, tolerance=1e-4):
    """Execute the card's lines on a photo that is no square and lies on its side; the logits are ours."""
    rng = np.random.default_rng(3)
    picture = Image.fromarray(rng.integers(0, 255, (9, 13, 3), dtype=np.uint8)).resize(
        (131, 90), Image.Resampling.BICUBIC
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / "photo.jpg", quality=95, exif=exif)
    monkeypatch.chdir(folder)
    model = finetune_mile.load_classifier(run)
    with Image.open("photo.jpg") as opened, torch.inference_mode():
        expected = model(model.preprocess(opened)[None])
    names = run_python(folder / "README.md")[-1]
    logits = torch.as_tensor(names["logits"])
    assert expected.abs().max() > 0.1, "all zeros would prove nothing"
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)
    assert list(names["classes"]) == list(model.classes or range(3))
    return names


def test_a_run_publishes_names_and_no_places(run):
    card = (run / "export/README.md").read_text()
    assert "`model.safetensors`" in card
    assert "on photos" in card
    assert "Licence of the initial weights (`model.safetensors`): MIT" in card
    config = json.loads((run / "export/config.json").read_text())
    assert (config["init"], config["data"], config["threshold"]) == ("model.safetensors", "photos", 0.25)
    for name, text in texts(run / "export"):
        assert b"secret-place" not in text, name


@pytest.mark.parametrize("form", ["torch", pytest.param("onnx", marks=needs_onnx)])
def test_a_program_computes_our_logits_for_any_batch(run, form, tmp_path, monkeypatch, capsys):
    before = os.umask(0o027)
    try:
        words = [
            "export",
            str(run),
            "--to",
            form,
            "--out",
            str(tmp_path / "out"),
            *(["--preprocess"] * (form == "onnx")),
        ]
        assert cli.main(words) == 0
    finally:
        os.umask(before)
    assert f"for {form}" in capsys.readouterr().out
    names = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert names == dict.fromkeys(("README.md", "config.json", f"model.{'pt2' if form == 'torch' else 'onnx'}"), 0o640)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    for name, text in texts(tmp_path / "out"):
        assert b"secret-place" not in text, name
        assert str(ROOT).encode() not in text, name
        assert str(tmp_path).encode() not in text, name
    # PIL's resize is another one than torch's: by one level of 255 at most
    left = check_card(tmp_path / "out", run, monkeypatch, tolerance=1e-4 if form == "torch" else 0.05)
    if form == "onnx":
        assert left["pixels"].dtype == np.uint8
        model = finetune_mile.load_classifier(run)
        ours = dict(model.predict("photo.jpg"))
        assert dict(zip(left["classes"], left["probabilities"][0], strict=True)) == pytest.approx(ours, abs=0.02)
        pixels = np.random.default_rng(0).integers(0, 255, (5, 3, 24, 24), dtype=np.uint8)
        whole = Preprocessor(model.preprocess.convention.model_copy(update={"crop": 1.0}))
        seen = torch.stack([whole(torch.from_numpy(each)) for each in pixels])
        with torch.inference_mode():
            expected = model(seen).numpy()
        np.testing.assert_allclose(left["session"].run(None, {"images": pixels})[0], expected, atol=1e-4)
        notes = left["session"].get_modelmeta().custom_metadata_map
        assert json.loads(notes["classes"]) == ["cat", "dog"]
        assert json.loads(notes["threshold"]) == 0.25


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", pytest.param("onnx", marks=needs_onnx)])
@pytest.mark.parametrize(
    "change",
    [
        {"arch": "resnet18", "activation": "softmax"}, {"arch": "resnet50-sk", "size": 32},
        {"arch": "resnet18-d", "padding": "tf"}, {"arch": "resnet50w2", "size": 32}, {"arch": "grid-cell", "size": 42},
        {"arch": "grid-cnn", "size": 30}, {"arch": "mlp", "size": 28}, {"arch": "timm:convnext_atto"},
        {"arch": "timm:vit_tiny_patch16_224", "size": 224}, {"arch": "resnet-demo-gn", "classes": []},
    ],
    ids=lambda change: change["arch"],
)  # fmt: skip
def test_every_network_becomes_a_program(change, form, tmp_path, monkeypatch):
    run = exported(tmp_path / "run", **change)
    assert cli.main(["export", str(run), "--to", form, "--out", str(tmp_path / "out")]) == 0
    left = check_card(tmp_path / "out", run, monkeypatch, tolerance=1e-4 if form == "torch" else 0.05)
    if form == "onnx" and change.get("activation") == "softmax":
        assert left["probabilities"].sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "change",
    [{}, {"arch": "timm:vit_tiny_patch16_224:heads=6", "size": 224, "activation": "softmax"}],
    ids=["resnet", "vit"],
)
def test_timm_loads_it_as_the_card_says(change, tmp_path, monkeypatch, capsys):
    run = exported(tmp_path / "run", **change)
    assert cli.main(["export", str(run), "--to", "timm", "--out", str(tmp_path / "out")]) == 0
    assert "checkpoint_path=" in (tmp_path / "out/README.md").read_text()
    names = check_card(tmp_path / "out", run, monkeypatch)
    best = finetune_mile.load_classifier(run).predict("photo.jpg")[0]
    assert ast.literal_eval(capsys.readouterr().out.splitlines()[-1]) == (pytest.approx(best[1], abs=1e-4), best[0])
    assert names["preprocess"]("photo.jpg").shape[-1] == (change or CONFIG)["size"]
    # and it is a folder that we read, with the same labels
    assert finetune_mile.load_classifier("../out").predict("photo.jpg")[0][0] == best[0]


@pytest.mark.parametrize(
    "change", [{}, {"interpolation": "nearest"}, {"antialias": False, "interpolation": "bilinear"}, {"size": 72}]
)
def test_the_pixels_of_the_card_are_those_of_training(change, tmp_path):
    config = CONFIG | change
    names = {}
    exec(blocks(model_card(config, {}, "timm", call=""), "python")[0].split("\nmodel =")[0], names)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 131, 3), dtype=np.uint8))
    picture.save(tmp_path / "x.png")
    convention = Preprocess(**{key: config[key] for key in Preprocess.model_fields if key in config})
    torch.testing.assert_close(
        names["preprocess"](tmp_path / "x.png")[0], Preprocessor(convention)(picture), atol=1e-6, rtol=0
    )


@needs_transformers
def test_transformers_loads_it_as_the_card_says(tmp_path, monkeypatch):
    from transformers import AutoModelForImageClassification

    run = exported(tmp_path / "run")
    assert cli.main(["export", str(run), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    check_card(tmp_path / "out", run, monkeypatch)
    classify = run_python(tmp_path / "out/README.md")[0]["classify"]
    theirs = classify("photo.jpg")
    ours = dict(finetune_mile.load_classifier(run).predict("photo.jpg"))
    assert {each["label"] for each in theirs} == set(CONFIG["classes"])
    for each in theirs:  # sigmoid, as it was trained; the pixels are timm's
        assert each["score"] == pytest.approx(ours[each["label"]], abs=0.1)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = finetune_mile.load_classifier(run)(images)
        torch.testing.assert_close(model(images).logits, expected, atol=1e-4, rtol=1e-4)


def test_the_files_for_transformers(tmp_path):
    run = exported(tmp_path / "run")
    assert cli.main(["export", str(run), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["TimmWrapperForImageClassification"]
    assert (config["architecture"], config["num_classes"]) == ("resnet18", 3)
    assert config["problem_type"] == "multi_label_classification"
    assert config["label_names"] == CONFIG["classes"]


def test_the_card_is_one_that_the_hub_understands(run):
    card = ModelCard((run / "export/README.md").read_text())
    result = card.data.eval_results[0]
    assert (result.dataset_name, result.metric_type, result.task_type) == ("photos", "accuracy", "image-classification")
    assert result.metric_value == pytest.approx(json.loads((run / "results.json").read_text())["accuracy"], abs=0.01)
    config = CONFIG | {"init": "/data/me/moco.pth::backbone", "licence": "CC-BY-NC-4.0"}
    text = model_card(config, {}, "onnx")
    assert "Licence of the initial weights (`moco.pth::backbone`): CC-BY-NC-4.0" in text
    assert "model-index" not in yaml.safe_load(text.split("---")[1])
    assert "is not known here" in model_card(CONFIG | {"init": "x.pth"}, {}, "torch")


@pytest.mark.parametrize(
    ("init", "name"),
    [("simclrv2-sk1", "simclrv2-sk1"), ("timm:resnet50.a1_in1k", "timm:resnet50.a1_in1k"), ("hf:me/net", "hf:me/net"),
     ("/data/me/moco.pth", "moco.pth"), ("../runs/a-1", "a-1"), (r"C:\me\moco.pth", "moco.pth"),
     ("~/x.pth::m", "x.pth::m")],
)  # fmt: skip
def test_only_the_name_of_a_file_is_published(init, name):
    assert public_name(init) == name


@pytest.mark.parametrize(
    ("change", "words", "sentence"),
    [
        ({}, ["run", "--to", "timm", "--preprocess"], "--preprocess is for --to onnx and --to torch"),
        ({}, ["none", "--to", "timm"], "RUN none: there is no such run folder or file"),
        ({}, ["run", "--to", "tim"], "did you mean timm?"),
        ({}, ["run", "--to", "timm", "--out", "run"], "--out run: it already exists"),
        ({"arch": "resnet-demo"}, ["run", "--to", "timm"], "timm has no resnet-demo"),
        ({"arch": "resnet50-sk"}, ["run", "--to", "hf"], "timm has no resnet50-sk"),
        ({"padding": "tf"}, ["run", "--to", "timm"], "it needs 'tf' padding"),
    ],
)
def test_what_is_not_possible_is_one_sentence_and_leaves_nothing(
    change, words, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    exported(tmp_path / "run", **change)
    assert cli.main(["export", *words, *([] if "--out" in words else ["--out", "out"])]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch, capsys):
    run = exported(tmp_path / "run", arch="resnet-demo")
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else object())
    assert cli.main(["export", str(run), "--to", "onnx", "--out", str(tmp_path / "out")]) == 2
    assert "--to onnx needs packages that are not installed: pip install onnxscript" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("versions", "old"),
    [
        (("2.6.0+cu124", "0.7.2"), "torch 2.6.0+cu124"), (("2.15.0", "0.5.7"), "onnxscript 0.5.7"),
        (("2.6.0", "0.5.7"), "torch 2.6.0, onnxscript 0.5.7"), (("2.15.0", "0.7"), ""), (("3.0.0a0", "1.0"), ""),
    ],
)  # fmt: skip
def test_an_old_package_is_named_with_its_command(versions, old, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export, "find_spec", lambda name: object())
    monkeypatch.setattr(export, "version", dict(zip(("torch", "onnxscript"), versions, strict=True)).get)
    assert cli.main(["export", str(tmp_path / "none"), "--to", "onnx", "--out", str(tmp_path / "out")]) == 2
    sentences = capsys.readouterr().err.splitlines()
    assert "there is no such run folder or file" in sentences.pop(), "all problems at once"
    assert sentences == ([f"error: --to onnx needs torch 2.7 and onnxscript 0.7 or newer (installed: {old}): "
                          "pip install -U torch torchvision onnxscript"] if old else [])  # fmt: skip


@pytest.mark.parametrize("wrong", [0.01, float("nan")])
def test_other_logits_are_not_left_in_place(wrong, tmp_path, monkeypatch, capsys):
    from finetune_mile.checkpoints import exporting

    run, write = exported(tmp_path / "run", arch="mlp", size=28), exporting.write_torch

    def spoilt(*values):
        program = write(*values)
        return lambda images: program(images) + wrong

    monkeypatch.setattr(exporting, "write_torch", spoilt)
    assert cli.main(["export", str(run), "--to", "torch", "--out", str(tmp_path / "out")]) == 1
    assert "the logits differ" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@needs_onnx
def test_the_document(tmp_path, monkeypatch, capsys):
    exported(tmp_path / "runs/demo-1", arch="resnet-demo", size=24)
    exported(tmp_path / "runs/photos-1")
    monkeypatch.chdir(tmp_path)
    done = run_shell(ROOT / "docs/export.md", monkeypatch)
    assert len(done) == 4
    assert {code for code, _ in done.values()} == {0}
