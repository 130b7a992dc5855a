"""The wheel, installed outside of the clone: what it ships is found there, and the commands work."""

import os
import subprocess
import sys
import sysconfig
import venv

import pytest
from shortcuts import ROOT

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
