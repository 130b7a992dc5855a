"""WebVision 1.0 as published: file lists in `info/`, images in `google/`, `flickr/` and `val_images*/`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finetune_mile.core.files import open_text
from finetune_mile.core.problems import Problem
from finetune_mile.images.assembly import Listing, check_classes, make_data, to_set
from finetune_mile.images.imageset import Data
from finetune_mile.images.reading import Files
from finetune_mile.images.sources.options import read_options

PARTS = ("google", "flickr")


def load(where: str) -> Data:
    """Read the lists.

    Args:
        where: the directory; `DIR?classes=50&parts=google` is the usual mini-WebVision.
    """
    place, options = read_options("webvision", where, ("classes", "parts"))
    root, what = Path(place), f"--data webvision:{where}"
    parts = options.get("parts", ",".join(PARTS)).split(",")
    wrong = sorted(set(parts) - set(PARTS))
    if wrong:
        raise Problem(f"{what}: parts={wrong[0]} is neither google nor flickr")
    info = root / "info" if (root / "info").is_dir() else root
    synsets = [line.split(maxsplit=1)[0] for line in _lines(info / "synsets.txt", what)]
    limit = options.get("classes", str(len(synsets)))
    if not limit.isdecimal() or len(limit) > 9 or not 2 <= int(limit) <= len(synsets):
        raise Problem(f"{what}: classes={limit} must be from 2 to {len(synsets)}")
    classes = synsets[: int(limit)]
    train = [pair for part in parts for pair in _pairs(info / f"train_filelist_{part}.txt", classes, what)]
    val = _pairs(info / "val_filelist.txt", classes, what)
    folder = next((d for d in ("val_images", "val_images_256", "val") if (root / d).is_dir()), None)
    if folder is None:
        raise Problem(f"{what}: there is no val_images/ (nor val_images_256/)")
    train_set = to_set(_listing(root, train))
    check_classes(what, classes, train_set.given.numpy())
    return make_data(root.resolve().name, classes, train_set, to_set(_listing(root / folder, val)), what)


def _lines(path: Path, what: str) -> list[str]:
    try:
        with open_text(path) as stream:
            return [line for line in stream.read().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{what}: {path} cannot be read ({error}); is this WebVision 1.0 with its info/?") from error


def _pairs(path: Path, classes: list[str], what: str) -> list[tuple[str, int]]:
    found = []
    for number, line in enumerate(_lines(path, what), start=1):
        file, _, label = line.rpartition(" ")
        if not file or not label.isdigit():
            raise Problem(f"{what}: {path.name} line {number} is not `file number`")
        if int(label) < len(classes):
            found.append((file, int(label)))
    return found


def _listing(root: Path, pairs: list[tuple[str, int]]) -> Listing:
    files = [file for file, _ in pairs]
    return Listing(ids=files, labels=np.array([k for _, k in pairs], dtype=np.int64), encoded=Files(root, files))
