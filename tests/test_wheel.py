"""The wheel, installed outside of the clone: what it ships is found there, and the commands work."""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import venv

import pytest
from shortcuts import ROOT, tinted_photos

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A fresh environment with the wheel, and with a `recipes` that another package put into site-packages."""
    root = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(root), str(ROOT)]
    built = subprocess.run(words, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"pip cannot build a wheel here: {built.stderr.strip().splitlines()[-1]}")
    (wheel,) = root.glob("*.whl")
    venv.create(root / "env", with_pip=True)
    python = root / "env/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = root.glob("env/lib/python*/site-packages")
    # The dependencies of this environment; a plain path does not bring its editable install along.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (site / "recipes").mkdir()
    (site / "weights").mkdir()
    return root


def call(place, *words):
    """Run a command of the environment in a folder that has nothing to do with the clone."""
    away = place / "away"
    away.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PATH": f"{place}/env/bin:{environment['PATH']}", "FINETUNE_MILE_CACHE": str(place / "cache")}
    environment |= {"FINETUNE_MILE_CONFIG": str(place / "config")}
    done = subprocess.run(words, cwd=away, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_the_wheel_that_is_imported(place):
    file = call(place, "python", "-c", "import finetune_mile; print(finetune_mile.__file__)").strip()
    assert file.startswith(str(place / "env"))


def test_cards_and_recipes_are_in_it(place):
    assert "simclr-demo" in call(place, "finetune-mile", "weights", "ls")
    assert "ssl " in call(place, "finetune-mile", "table", "--list")


def test_the_demo_trains_and_its_classifier_predicts(place):
    call(place, "finetune-mile", "run", "--method", "sigmoid", "--steps", "20", "--out", "demo")
    code = "import finetune_mile; print(len(finetune_mile.load_classifier('demo').classes))"
    assert call(place, "python", "-c", code) == "10\n"


def test_accelerate_launches_the_module(place):
    words = ["python", "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--mixed_precision", "no"]
    call(place, *words, "-m", "finetune_mile.run", "--method", "sigmoid", "--steps", "10", "--out", "launched")
    assert (place / "away/launched/results.json").is_file()


TRAIN = """
import finetune_mile

run = finetune_mile.train("photos", "none", arch="resnet18", size=64, steps=4, batch_size=8, out="runs/mine",
                          precision="no", workers=0, method="sigmoid", **{"head_init": "random", "keep": "last"})
print(run.results["accuracy"])
"""
COMPARE = """
import json, sys
import numpy as np
import onnxruntime, timm, torch
import finetune_mile

images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
model = finetune_mile.load_classifier("runs/mine")
found = {}
with torch.inference_mode():
    expected = model(images)
    config = json.load(open("to-timm/config.json"))
    name, file = config["architecture"], "to-timm/model.safetensors"
    found["timm"] = timm.create_model(name, num_classes=3, checkpoint_path=file).eval()(images)
    session = onnxruntime.InferenceSession("to-onnx/model.onnx")
    found["onnx"] = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    if "transformers" in sys.argv:
        from transformers import AutoModelForImageClassification

        found["hf"] = AutoModelForImageClassification.from_pretrained("to-hf").eval()(images).logits
assert expected.abs().max() > 0.01
print(json.dumps({key: float((logits - expected).abs().max()) for key, logits in found.items()}))
"""
NOTEBOOK = """
import json, sys

names = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
print(names["run"].results["accuracy"])
"""


def test_the_newcomers_path(place):
    """Wheel, demo, train from Python, predict, export and load elsewhere, an own card, the notebook: in this order."""
    away = place / "away"
    short = ["--steps", "20", "--k-t", "4", "--k-s", "4", "--set", "mile.warmup=4"]
    call(place, "finetune-mile", "run", *short, "--out", "runs/demo")
    assert "accuracy" in (away / "runs/demo/results.json").read_text()

    tinted_photos(away / "photos", noise=40)
    assert 0 <= float(call(place, "python", "-c", TRAIN).splitlines()[-1]) <= 100

    three = [f"photos/val/{name}/0.png" for name in ("blue", "green", "red")]
    lines = call(place, "finetune-mile", "predict", "runs/mine", *three, "--format", "jsonl").splitlines()
    assert [json.loads(line)["image"] for line in lines] == three
    code = f"import finetune_mile; print(finetune_mile.load_classifier('runs/mine').predict({three})[0][0][0])"
    assert json.loads(lines[0])["labels"][0]["label"] == call(place, "python", "-c", code).strip()

    for form in ("timm", "hf", "onnx"):
        call(place, "finetune-mile", "export", "runs/mine", "--to", form, "--out", f"to-{form}")
    others = [name for name in ("transformers",) if importlib.util.find_spec(name)]  # no dependency of ours
    differences = json.loads(call(place, "python", "-c", COMPARE, *others))
    assert len(differences) == 2 + len(others)
    assert max(differences.values()) <= 1e-4, differences

    call(place, "finetune-mile", "weights", "add", "runs/mine/export/model.safetensors", "--name", "mine")
    assert "mine" in call(place, "finetune-mile", "weights", "ls")
    flags = ["--init", "mine", "--data", "folder:photos", "--method", "sigmoid", "--steps", "2", "--set", "workers=0"]
    call(place, "finetune-mile", "run", *flags, "--out", "runs/again")
    assert json.loads((away / "runs/again/init.json").read_text())["counts"]["loaded"] > 100

    accuracy = float(call(place, "python", "-c", NOTEBOOK, str(ROOT / "docs/own-photos.ipynb")).splitlines()[-1])
    assert accuracy > 70
