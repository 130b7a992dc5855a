"""What several test files use: short demo runs, and where things are."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# A demo run of seconds: every phase is there, the images are few.
SHORT = [
    "--data", "demo:200", "--init", "none", "--arch", "resnet-demo", "--steps", "24", "--batch-size", "8",
    "--set", "size=24", "--set", "evaluate.images=40", "--set", "evaluate.labels=false", "--set", "log_every=1",
    "--set", "checkpoint_every=5",
]  # fmt: skip
SHORT_MILE = [*SHORT, "--k-t", "4", "--k-s", "2", "--set", "mile.warmup=0"]
# Every augmentation at once.
AUGMENTED = [
    "--flip", "true", "--set", "augment.jitter=[0.4, 0.4, 0.4, 0.1]", "--set", "augment.policy=trivial",
    "--set", "augment.erase=0.5", "--set", "augment.mixup=0.4", "--set", "augment.cutmix=1.0",
    "--set", "label_smoothing=0.1",
]  # fmt: skip


COLOURS = {"red": (160, 90, 90), "green": (90, 160, 90), "blue": (90, 90, 160)}


def tinted(draw, tint, noise):
    """A photo of nothing: noise around a colour."""
    return Image.fromarray(np.clip(draw.normal(tint, noise, (32, 32, 3)), 0, 255).astype(np.uint8))


def tinted_photos(root, noise, train=20, val=10):
    """train/ and val/ with so many photos of each of COLOURS; returns what draws more of them."""
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for name, tint in COLOURS.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                tinted(draw, tint, noise).save(root / part / name / f"{number}.png")
    return draw


def losses(folder):
    """The loss of every logged step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"]


@contextmanager
def refused(*facts):
    """A Problem that names these things (flags, files, numbers, what to type), in whatever words."""
    import pytest

    from finetune_mile.core.problems import Problem

    with pytest.raises(Problem) as caught:
        yield caught
    text = str(caught.value)
    assert not [fact for fact in facts if fact not in text], text
