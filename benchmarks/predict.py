"""Images per second of `predict`, from JPEG files to labels, and of the forward pass alone: benchmarks/predict.py.

Both take turns with the same network, memory layout, batch size and threads. The forward pass has its images in memory,
normalised.
Told are the ratio by the clock, and that of processor time over all processes, which hardly depends on who else uses
the machine. Bar: 0.9 by the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from input import SIZE, synthesise

from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.loading import open_with_head
from finetune_mile.core.types import Preprocess
from finetune_mile.images.pipeline import default_workers
from finetune_mile.images.readers import Files
from finetune_mile.images.sets import ImageSet
from finetune_mile.measures.labels import labelled
from finetune_mile.networks.heads import build, new_head
from finetune_mile.training.processes import use_threads


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of processor time with that of the loader processes."""
    clock, before = time.perf_counter(), os.times()
    run()
    after = os.times()
    return time.perf_counter() - clock, sum(after[:4]) - sum(before[:4])


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    threads = use_threads()
    with tempfile.TemporaryDirectory() as place:
        names = [str(Path(place, f"{i:04d}.jpg")) for i in range(options.images)]
        for i, name in enumerate(names):
            synthesise(i % 32).save(name, quality=92)
        network = build(options.arch)
        new_head(network, 10, "zero")
        config = {"arch": options.arch, "padding": "torch", "num_classes": 10, "activation": "sigmoid"}
        write_export(Path(place, "export"), network, Preprocess().model_dump(mode="json") | config)
        opened = open_with_head(str(Path(place, "export")), "RUN")
        images = ImageSet(ids=names, given=torch.full((len(names),), -1), truth=None, content=Files(Path(), names))
        batch = torch.randn(options.batch_size, 3, 224, 224, device=options.device)
        batch = batch.contiguous(memory_format=torch.channels_last)

        @torch.inference_mode()
        def forward() -> None:
            for at in range(0, options.images, options.batch_size):
                opened.network(batch[: options.images - at]).cpu()

        limits = torch.full((opened.report.classifier,), 0.25)

        def predict() -> None:
            count = sum(
                labels is not None
                for _, labels in labelled(
                    opened,
                    images,
                    limits,
                    device=options.device,
                    batch_size=options.batch_size,
                    workers=options.workers,
                )
            )
            assert count == options.images

        predict()  # moves the network, warms the caches
        forward()
        rounds = [(timed(forward), timed(predict)) for _ in range(options.rounds)]
    workers = default_workers(1) if options.workers is None else options.workers
    print(
        f"{options.arch}, {options.images} JPEGs of {SIZE[0]} x {SIZE[1]}, batches of {options.batch_size}, "
        f"{options.device}, {threads} threads, {workers} loader processes, {options.rounds} rounds"
    )
    for column, name in enumerate(("forward pass alone", "predict")):
        pace = statistics.median(options.images / row[column][0] for row in rounds)
        print(f"{name:<20} {pace:7.1f} images/s")
    for kind, title in enumerate(("by the clock", "by processor time")):
        ratios = [row[0][kind] / row[1][kind] for row in rounds]
        print(f"ratio {title:<18} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
