"""The user's main command: SimCLR-v2 weights on ImageNet, as typed, and without what it needs."""

import json
import os
import sys
from pathlib import Path

import pytest
from PIL import Image
from shortcuts import ROOT

from finetune_mile.run import main

sys.path.append(str(ROOT / "tests/checkpoints"))
from material import unpack

MAIN = ["--init", "simclrv2-sk1", "--fraction", "0.01"]
CLASSES = [f"n{i:08}" for i in range(1, 1001)]


@pytest.fixture
def imagenet(tmp_path, monkeypatch):
    """1,000 classes laid out as ImageNet is: ten training images each, a validation image for a few."""
    root = tmp_path / "ILSVRC2012"
    for number, name in enumerate(CLASSES):
        folder = root / "train" / name
        folder.mkdir(parents=True)
        colour = (number % 10 * 25, number // 10 % 10 * 25, number // 100 * 25)
        Image.new("RGB", (36, 32), colour).save(folder / f"{name}_0.JPEG")
        for i in range(1, 10):
            os.link(folder / f"{name}_0.JPEG", folder / f"{name}_{i}.JPEG")
        if number % 50 == 0:
            (root / "val" / name).mkdir(parents=True)
            os.link(folder / f"{name}_0.JPEG", root / "val" / name / f"ILSVRC2012_val_{number + 1:08}.JPEG")
    monkeypatch.setenv("IMAGENET_DIR", str(root))
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    return root


@pytest.fixture
def weights(shared, tmp_path):
    """SimCLR-v2's own TensorFlow checkpoint of a ResNet-50 with selective kernels; its weights are random."""
    source, folder = shared / "checkpoints/simclrv2_tf1_sk1", tmp_path / "r50_1x_sk1"
    folder.mkdir()
    unpack(source / "model.ckpt-1.data-00000-of-00001.zst", folder)
    (folder / "model.ckpt-1.index").write_bytes((source / "model.ckpt-1.index").read_bytes())
    return folder


@pytest.fixture
def flags(weights, imagenet, tmp_path):
    """The main command with these weights, a list of 10 % of these images, and as little work as there can be."""
    (tmp_path / "list.txt").write_text("".join(f"{name}_3.JPEG\n" for name in CLASSES))
    sets = ("size=32", "evaluate.images=4", "workers=0", "log_every=1", "checkpoint_every=100", "mile.warmup=0")
    little = ["--steps", "3", "--batch-size", "8", "--k-t", "2", "--k-s", "1", "--lr", "0.001"]
    return [
        "--init",
        str(weights),
        "--fraction",
        "0.1",
        "--split",
        str(tmp_path / "list.txt"),
        *little,
        *(f"--set={s}" for s in sets),
    ]


@pytest.mark.slow
def test_it_explains_trains_stops_resumes_and_evaluates(flags, imagenet, tmp_path, monkeypatch, capsys, stop_at):
    assert main([*flags, "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "simclrv2-large.yaml (no --recipe: simclrv2 weights on ImageNet)" in printed
    assert "SimCLR-v2 paper sec. 3" in printed  # the source of head_from
    assert "imagenet:" in printed  # the path itself may be wrapped
    assert "IMAGENET_DIR" in printed
    assert "1,000 of 10,000 training images keep their label" in printed

    out = tmp_path / "run"
    monkeypatch.setattr("finetune_mile.training.monitor.PROBE_IMAGES", 8)
    stop_at(1)
    assert main([*flags, "--out", str(out)]) == 143
    stop_at(None)
    assert json.loads((out / "run.json").read_text())["status"] == "stopped"
    assert f"data: imagenet:{imagenet}" in (out / "recipe.yaml").read_text()
    assert main(["--resume", str(out)]) == 0
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if s["kind"] == "train"] == [1, 2, 3]
    init = json.loads((out / "init.json").read_text())
    assert init["arch"] == "resnet50-sk"
    assert "proj.0.weight" in init["loaded"], "at 10 % the first projection layer stays"
    reset = {name for name in init["reset"] if not name.endswith("num_batches_tracked")}
    assert reset == {"fc.weight", "fc.bias"}, "its own classifier knows all labels"
    results = json.loads((out / "results.json").read_text())
    assert results["images"] == 20
    assert {"accuracy", "top5"} <= results.keys()


def test_without_imagenet_it_says_where_to_put_it(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("IMAGENET_DIR", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(MAIN) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Set IMAGENET_DIR to its folder, or put it into data/imagenet, or download the hub's" in line


def test_without_the_weights_it_says_where_to_put_them(tmp_path, monkeypatch, capsys):
    (tmp_path / "train").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IMAGENET_DIR", str(tmp_path))
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))

    def no_network(*_):
        raise OSError("no network")

    monkeypatch.setattr("finetune_mile.core.download.transfer", no_network)
    assert main(MAIN) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.ckpt-250228.index could not be fetched (no network); fetch https://" in line
    assert "model.ckpt-250228.data-00000-of-00001 elsewhere and put both into" in line
    assert line.endswith(str(tmp_path / "cache/weights/simclrv2-sk1"))
    assert not Path("runs").exists()
