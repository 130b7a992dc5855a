"""Images per second and core: our input pipeline against torchvision's, interleaved: python benchmarks/input.py.

The default is ImageFolder with RandomResizedCrop(224), flip, ToTensor and Normalize on PIL images. Ours hands uint8 to
the device, which normalises; the ratio with that done on the same core is told too. Bar: at least 1.9 times as fast,
in processor time. Then a small ResNet is trained and the share of a step that waits for data is told.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision import datasets, transforms

from finetune_mile.core.types import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from finetune_mile.images.order import Order, micro_batches
from finetune_mile.images.pipeline import Augmentation, Views, batches, default_workers, normalise
from finetune_mile.images.sets import ImageSet
from finetune_mile.images.sources import load_data
from finetune_mile.networks.heads import build, new_head

SIZE = (500, 375)  # about that of ImageNet's photos
AUGMENTATION = Augmentation(crop="random-resized", scale=(0.08, 1.0), shift=0, flip=True)
BATCH = 32


def synthesise(seed: int) -> Image.Image:
    """A picture that compresses about as a photo does: smooth shapes, some texture."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(SIZE, Image.Resampling.BICUBIC)
    fine = rng.normal(0, 12, (SIZE[1] // 2, SIZE[0] // 2, 1)).repeat(2, 0).repeat(2, 1)
    texture = np.pad(fine, ((0, SIZE[1] % 2), (0, SIZE[0] % 2), (0, 0)), mode="edge")
    return Image.fromarray((np.asarray(coarse) + texture).clip(0, 255).astype(np.uint8))


def make_folder(root: Path, photos: Path | None, images: int) -> None:
    """`images` JPEGs of ImageNet's usual size in two classes, the same ones for both pipelines."""
    paths = [] if photos is None else sorted(p for p in photos.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    if photos is not None and not paths:
        raise SystemExit(f"--photos {photos}: no .jpg below it")
    for i in range(images):
        image = Image.open(paths[i % len(paths)]).convert("RGB").resize(SIZE) if paths else synthesise(i)
        for part in ("train", "val"):
            path = root / part / f"class{i % 2}" / f"{i:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if part == "train" or i < 2:
                image.save(path, quality=92)


def default_pass(folder: datasets.ImageFolder) -> Callable[[], int]:
    """One pass of torchvision's default over all images, in batches."""

    def run() -> int:
        for at in range(0, len(folder), BATCH):
            default_collate([folder[i] for i in range(at, min(at + BATCH, len(folder)))])
        return len(folder)

    return run


def our_pass(images: ImageSet, *, floats: bool) -> Callable[[], int]:
    """One pass of ours over all images, in batches; each pass draws other crops. With floats it normalises as well."""
    views = Views(images, Preprocess(), AUGMENTATION, 0)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    epochs = count()

    def run() -> int:
        epoch = next(epochs)
        for at in range(0, len(images), BATCH):
            batch, _ = views.read([(epoch, i) for i in range(at, min(at + BATCH, len(images)))])
            if floats:
                normalise(batch.images, mean, std)
        return len(images)

    return run


def speed(run: Callable[[], int]) -> float:
    """Images per second of processor time: what one core does, whoever else uses the machine."""
    began = time.process_time()
    return run() / (time.process_time() - began)


def waiting_share(images: ImageSet, arch: str, steps: int, batch_size: int) -> tuple[float, float]:
    """Share of the training steps that waits for data, and images per second, after two steps to warm up."""
    network = build(arch)
    new_head(network, 2, "zero")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    order = Order(np.arange(len(images)), 0)
    keys = micro_batches(order, first_step=0, batch_size=batch_size, accumulate=1, rank=0, world=1)
    feed = batches(
        Views(images, Preprocess(), AUGMENTATION, 0), islice(keys, steps + 2), workers=default_workers(1), pin=False
    )
    waited, began = 0.0, time.perf_counter()
    for step in range(steps + 2):
        if step == 2:
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch = next(feed)
        waited += time.perf_counter() - asked
        loss = torch.nn.functional.cross_entropy(network(normalise(batch.images, mean, std)), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    return waited / seconds, steps * batch_size / seconds


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, help="a folder of JPEGs to resize and use; default: synthesised ones")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        make_folder(root, options.photos, options.images)
        data = load_data(f"folder:{root}")
        weight = statistics.mean(p.stat().st_size for p in root.rglob("*.jpg")) / 1024
        print(f"{options.images} JPEGs of {SIZE[0]} x {SIZE[1]}, {weight:.0f} kB each, one thread")
        v1 = transforms.Compose([
            transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ])  # fmt: skip
        passes = {
            "torchvision's default": default_pass(datasets.ImageFolder(root / "train", v1)),
            "ours, uint8 out": our_pass(data.train, floats=False),
            "ours, normalised as well": our_pass(data.train, floats=True),
        }
        for run in passes.values():
            speed(run)
        speeds = [[speed(run) for run in passes.values()] for _ in range(options.rounds)]
        for column, name in enumerate(passes):
            ratios = [row[column] / row[0] for row in speeds]
            median = statistics.median(row[column] for row in speeds)
            ratio = f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if column else ""
            print(f"{name:<25} {median:7.1f} images/s per core  {ratio}")
        share, pace = waiting_share(data.train, options.arch, options.steps, options.batch_size)
        print(
            f"training {options.arch} at {pace:.1f} images/s, {default_workers(1)} loader processes: "
            f"{share:.1%} of a step waits for data"
        )


if __name__ == "__main__":
    main()
