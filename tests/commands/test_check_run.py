"""`finetune-mile check` of a run, with a card, its file with a classifier, and a tree laid out as ImageNet is."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from shortcuts import COLOURS, ROOT, tinted_photos

import finetune_mile
from finetune_mile.cli import main
from finetune_mile.core.download import digest
from finetune_mile.core.files import shipped

DEMO = shipped("weights") / "simclr-demo.safetensors"
PREPROCESS = {"mean": [0.3, 0.3, 0.3], "std": [0.37, 0.37, 0.37], "size": 24, "crop": 1.0}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """The tree, the file, and its accuracy: computed image by image, from Python."""
    root = tmp_path_factory.mktemp("preflight")
    tinted_photos(root / "tree", noise=160)
    network = finetune_mile.load("simclr-demo")
    rows = {}
    for part in ("train", "val"):
        files = sorted((root / "tree" / part).glob("*/*.png"))
        images = torch.stack([network.preprocess(Image.open(file)) for file in files])
        with torch.inference_mode():
            rows[part] = network(images), torch.tensor([sorted(COLOURS).index(f.parent.name) for f in files])
    features, labels = rows["train"]
    means = torch.stack([features[labels == c].mean(0) for c in range(3)])
    means[:, 3:] = 0  # the nearest mean of a few features: a linear classifier that makes mistakes
    head = {"fc.weight": 2 * means, "fc.bias": -means.square().sum(1)}
    save_file({**load_file(DEMO), **head}, root / "standin.safetensors")
    features, labels = rows["val"]
    right = (features @ head["fc.weight"].T + head["fc.bias"]).argmax(1) == labels
    return root, 100 * float(right.double().mean())


@pytest.fixture
def card(material, tmp_path, monkeypatch):
    """card(...) writes the stand-in's card with these facts; returns the words of the command."""
    root, top1 = material
    monkeypatch.setenv("FINETUNE_MILE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("finetune_mile.paper.published.CLASSES", 3)
    file = root / "standin.safetensors"

    def write(**facts):
        facts = {
            "name": "standin", "method": "simclr", "arch": "resnet-demo", "format": "torchvision", "path": str(file),
            "sha256": digest(file, "sha256"), "preprocess": PREPROCESS, "linear_head": True, "linear_top1": top1,
            **facts,
        }  # fmt: skip
        (tmp_path / "config/weights").mkdir(parents=True, exist_ok=True)
        (tmp_path / "config/weights/standin.yaml").write_text(yaml.safe_dump(facts))
        flags = ["--init", "standin", "--data", f"imagenet:{root / 'tree'}", "--fraction", "1", "--method", "sigmoid"]
        little = ["--batch-size", "4", "--steps", "10", "--lr", "0.01", "--set", "size=24", "--set", "workers=1"]
        little += ["--set", "precision=no"]  # auto is bf16 on some processors
        return ["check", *flags, *little]

    return write


def states(printed):
    """Name to state and text of its last line, and the last line of all."""
    *lines, last = printed.splitlines()
    return {line[:9].strip(): (line[9:15].strip(), line[15:]) for line in lines}, last


def test_a_good_checkpoint_is_ready_and_recorded(card, material, tmp_path, capsys):
    assert main(card()) == 0
    said, last = states(capsys.readouterr().out)
    assert last in ("ready", "ready, but reading images will limit the speed")
    assert said["file"][1] == "standin: resnet-demo, 72 tensors loaded, hash as on the card, no features known"
    assert said["head"][1].startswith(f"the classifier in the file: top-1 {material[1]:.1f} (")
    assert said["head"][1].endswith(f"on 30 validation images; published {material[1]:g}")
    assert {name: state for name, (state, _) in said.items() if state == "off"} == {}
    assert "1 process, 4 images in 1 part: " in said["step"][1]
    assert said["load"][1].startswith("72 tensors loaded, 2 new (fc.weight, fc.bias), 2 ignored; format torchvision")
    assert {"data", "memory", "disk", "loading", "steps", "GPUs", "time"} <= said.keys()
    assert not (tmp_path / "runs").exists()
    record = json.loads((tmp_path / "config/weights/verified/standin.json").read_text())
    assert record["accuracies"]["head"]["top1"] == pytest.approx(material[1], abs=0.01)
    assert record["files"]["standin.safetensors"]["sha256"] == digest(material[0] / "standin.safetensors", "sha256")

    # What was recorded goes onto the card; a file that computes something else is then found.
    features = record["features"]
    assert main(card(features=features)) == 0
    assert "hash as on the card, features as on the card" in capsys.readouterr().out
    assert main(card(features=[value + 1 for value in features])) == 1
    said, last = states(capsys.readouterr().out)
    assert said["file"][0] == "off"
    assert last == 'not ready: file (docs/imagenet.md, "A number is off")'


@pytest.mark.parametrize(("published", "state", "advice"), [
    (5.0, "off", "are training images among the validation images"), (99.9, "off", "the load report above"),
    (None, "ok", "")])  # fmt: skip
def test_a_published_accuracy_outside_the_interval_is_off(published, state, advice, card, capsys):
    assert main(card(linear_top1=published)) == (state == "off")
    printed = capsys.readouterr().out
    assert states(printed)[0]["head"][0] == state
    assert advice in printed


def test_a_classifier_that_guesses_is_off_without_any_published_number(card, material, tmp_path, capsys):
    tensors = load_file(material[0] / "standin.safetensors")
    tensors["fc.weight"], tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"]), torch.tensor([0.0, 0.0, 1.0])
    save_file(tensors, tmp_path / "zero.safetensors")
    words = card(path=str(tmp_path / "zero.safetensors"), linear_top1=None,
                 sha256=digest(tmp_path / "zero.safetensors", "sha256"))  # fmt: skip
    assert main(words) == 1
    assert "head is off. Check next: no better than guessing. Either the validation labels" in capsys.readouterr().out


def test_knn_is_compared_with_all_training_images_only(card, tmp_path, monkeypatch, capsys):
    assert main([*card(knn_top1=1.0), "--bank", "30"]) == 0
    said, _ = states(capsys.readouterr().out)
    assert "with 30 of 60 training images (with all, published: 1; --bank all compares): top-1 " in said["k-NN"][1]
    monkeypatch.setattr("finetune_mile.paper.published.MANY", 80)
    assert main([*card(knn_top1=1.0), "--bank", "all"]) == 1
    assert len(list((tmp_path / "cache/features").glob("*/train.npy"))) == 1, "features of many images are kept"
    said, last = states(capsys.readouterr().out)
    assert said["k-NN"][0] == "off"
    assert said["k-NN"][1].startswith("k-NN (k 20) with 60 of 60 training images: top-1 ")
    assert last.startswith("not ready: k-NN ")


def test_other_data_and_random_weights_are_not_compared(card, capsys, monkeypatch):
    monkeypatch.setattr("finetune_mile.paper.published.CLASSES", 1000)
    assert main(card(linear_top1=1.0)) == 0
    said, _ = states(capsys.readouterr().out)
    assert said["head"][1].endswith("on 30 validation images")
    words = card()
    words[words.index("standin")] = "none"
    assert main([*words, "--arch", "resnet-demo", "--recipe", "demo"]) == 0
    said, _ = states(capsys.readouterr().out)
    state, text = said["accuracy"]
    assert (state, text[:54]) == ("-", "not measured: published ones are ImageNet's; with a ch")


def test_a_small_disk_and_a_small_shared_memory_are_told(card, monkeypatch, capsys):
    place = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: place._replace(free=1000))
    assert main(card()) == 1
    printed = capsys.readouterr().out
    assert "disk is off. Check next: more space, or another place for --out" in printed
    assert "shm is off. Check next: start the container with --shm-size 1g, or use --set workers=N" in printed


def test_what_cannot_work_is_refused_before_torch_is_imported(card, capsys):
    words = card()
    for more, sentence in (
        (["--images", "none"], "--images none: must be from 1 to 10,000,000, or all"),
        (["--explain"], "--explain: not available here. Give the flags of a new run."),
        (["--classes", "3"], "--classes needs --images N beside it, and at least two classes"),
        (["--quick"], "--quick and --runs belong to --table NAME"),
        (["--initt", "x"], "--initt: unknown flag; did you mean --init?"),
    ):
        assert main([*words, *more]) == 2
        assert capsys.readouterr().err == f"error: {sentence}\n"
    wrong = [*words, "--images", "0"]
    code = f"import sys\nfrom finetune_mile.cli import main\nmain({wrong!r})\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow  # two more interpreters
def test_two_processes_take_their_steps_together(card, tmp_path):
    env = os.environ | {"ACCELERATE_USE_CPU": "1", "FINETUNE_MILE_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "finetune_mile.cli", *card(), "--bank", "all"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1
    assert "error: sync_batch_norm: true needs GPUs; for several processes on CPUs use --set" in done.stderr
    command += ["--set", "sync_batch_norm=false"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    said, last = states(done.stdout)
    assert last.startswith("ready")
    assert said["step"][1].startswith("2 processes, 4 images in 2 parts: ")
    assert (said["head"][0], said["k-NN"][0]) == ("ok", "ok")
