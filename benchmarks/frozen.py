"""What a step of MILe costs on frozen features: the command itself, on features that are drawn instead of computed.

python benchmarks/frozen.py              # 10,000 images, 2,048 features, 10 classes, 1,000 steps of 256
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finetune_mile.compute.passes import Outputs
from finetune_mile.compute.rows import Writer
from finetune_mile.images.bad_images import BadImages
from finetune_mile.images.order import Indices
from finetune_mile.learning.loop import Loop
from finetune_mile.run import main
from finetune_mile.training import features
from finetune_mile.training.processes import Device
from finetune_mile.training.task import images_of

WIDTH = 2048  # of a ResNet-50
SPREAD = 2.0  # of an image around the centre of its class: ten classes overlap a little


def draw_features(
    device: Device, wanted: features.FeatureSet, store: features.Store, part: tuple[features.Split, int, Indices],
    bad: BadImages, advance: Callable[[int], None],
) -> None:  # fmt: skip
    """Write rows around a centre of each class, in the place of those of a network."""
    del device, bad
    split, view, indices = part
    images = images_of(wanted.data, split)
    draw = torch.Generator().manual_seed(len(images))
    centres = torch.randn(int(images.given.max()) + 1, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.25
    rows = centres[images.given[indices]] + SPREAD * torch.randn(len(indices), WIDTH, generator=draw)
    outputs = Outputs(rows.relu(), torch.ones(len(indices), dtype=torch.bool))
    with Writer(store, split, view) as writer:
        features._write_rows(writer, indices, outputs)
        writer.keep(dict.fromkeys(indices.tolist(), features.DONE))
    advance(len(indices))


def timed(spent: dict[str, float], name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose seconds of CPU and of the clock are added up."""

    def measured(*arguments: Any, **settings: Any) -> Any:
        cpu, clock = time.process_time(), time.perf_counter()
        try:
            return work(*arguments, **settings)
        finally:
            spent[f"{name}, CPU"] = spent.get(f"{name}, CPU", 0.0) + time.process_time() - cpu
            spent[f"{name}, clock"] = spent.get(f"{name}, clock", 0.0) + time.perf_counter() - clock

    return measured


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--method", default="mile")
    parser.add_argument("--dtype", default="float16", choices=("float16", "float32"))
    options = parser.parse_args()
    spent: dict[str, float] = {}
    features._fill = draw_features
    Loop.train = timed(spent, "steps", Loop.train)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as place:
        os.environ["FINETUNE_MILE_CACHE"] = place
        flags = ["--recipe", "finetune", "--data", f"demo:{options.images}", "--init", "none", "--arch", "resnet50"]
        flags += ["--trunk", "frozen", "--keep", "last", "--set", "size=32", "--set", "evaluate.labels=false"]
        flags += ["--set", f"feature_dtype={options.dtype}", "--method", options.method]
        flags += ["--steps", str(options.steps), "--batch-size", str(options.batch_size), "--out", f"{place}/run"]
        code = timed(spent, "everything", main)(flags)
        results = json.loads(Path(place, "run/results.json").read_text())
    assert code == 0
    for name, seconds in spent.items():
        print(f"{name:18} {seconds:6.1f} s")
    per = 1000 / options.steps * spent["steps, CPU"]
    print(
        f"{per:.1f} CPU seconds per 1,000 steps of {options.batch_size} with {torch.get_num_threads()} threads; "
        f"accuracy {results['accuracy']:.1f}, of the probe {results['probe_accuracy']:.1f}"
    )
