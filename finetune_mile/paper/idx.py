"""MNIST's idx files: find, download on request, read. No torch before they are read."""

from __future__ import annotations

import gzip
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
BELOW = ("", "raw", "MNIST/raw")  # the last one is torchvision's layout


def find_mnist(scheme: str, place: str, flag: str, download: bool = False) -> dict[str, Path]:
    """The four files in `place`; without a place in MNIST_DIR, else in data/mnist.

    Args:
        scheme: of --data, for messages.
        place: a directory, or nothing.
        flag: with its text, for messages.
        download: let torchvision fetch the files into the place if they are not there.
    """
    folder = Path(place or os.environ.get("MNIST_DIR") or "data/mnist")
    for below in BELOW:
        files = {
            key: path
            for key, name in NAMES.items()
            for end in (".gz", "")  # the last one that exists counts
            if (path := folder / below / f"{name}{end}").is_file()
        }
        if len(files) == len(NAMES):
            return files
    if download:
        from torchvision.datasets import MNIST

        try:
            MNIST(str(folder), download=True)
        except (RuntimeError, OSError) as error:
            raise Problem(f"{flag}: MNIST could not be downloaded ({error})") from error
        return find_mnist(scheme, place, flag)
    raise Problem(
        f"{flag}: MNIST's four idx files are not in {folder}. Use {scheme}:DIR, or set MNIST_DIR, "
        f"or let torchvision download them with {scheme}:{folder}?download=yes."
    )


def read_mnist(files: dict[str, Path]) -> dict[str, Tensor]:
    """The files by their names above: images (N, 28, 28) uint8, labels (N,) int64."""
    digits = {key: read_idx(path) for key, path in files.items()}
    for part, name in (("train", "train"), ("test", "t10k")):
        images, labels = digits[f"{part}_images"], digits[f"{part}_labels"]
        if len(images) != len(labels) or images.ndim != 3:
            raise Problem(f"{files['train_images'].parent}: {name} has {len(images)} images and {len(labels)} labels")
        digits[f"{part}_labels"] = labels.long()
    return digits


def read_idx(path: Path) -> Tensor:
    """Read one idx file of bytes, gzipped or not."""
    import torch

    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as stream:
            head = stream.read(4)
            if len(head) < 4 or head[:3] != b"\x00\x00\x08" or not 1 <= head[3] <= 4:
                raise Problem(f"{path}: not an idx file of bytes")
            shape = [int.from_bytes(stream.read(4), "big") for _ in range(head[3])]
            size = math.prod(shape)
            content = bytearray(stream.read(size + 1))
    except (OSError, EOFError) as error:
        raise Problem(f"{path}: cannot be read ({error})") from error
    if len(content) != size or not size:
        has = "more" if len(content) > size else f"{len(content):,}"
        raise Problem(f"{path}: expected {size:,} bytes (shape {shape}), found {has}")
    return torch.frombuffer(content, dtype=torch.uint8).reshape(shape)
