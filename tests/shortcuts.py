"""What several test files use: short demo runs, and where things are."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# A demo run of seconds: every phase is there, the images are few.
SHORT = [
    "--data", "demo:400", "--init", "none", "--arch", "resnet-demo", "--steps", "24", "--batch-size", "8",
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


def losses(folder):
    """The loss of every logged step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"]
