"""Folders of images, a folder a class: `train/` and `val/`, or one tree that is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.subsets import stratified
from finetune_mile.problems import Problem

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".gif"}
VAL_SHARE = 0.2


def load(where: str) -> Data:
    """Read the tree at `where`; its class folders in sorted order are the classes."""
    root = Path(where)
    train_dir = root / "train"
    if train_dir.is_dir():
        val_dir = next((root / n for n in ("val", "validation", "test") if (root / n).is_dir()), None)
        if val_dir is None:
            raise Problem(f"--data folder:{root}: there is a train/ but no val/ beside it")
        classes, train = scan(train_dir)
        val_classes, val = scan(val_dir)
        unknown = sorted(set(val_classes) - set(classes))
        if unknown:
            raise Problem(f"--data folder:{root}: val/ has classes that train/ lacks: {', '.join(unknown[:5])}")
        val = [(path, classes.index(val_classes[label])) for path, label in val]
        return Data(
            name=root.name, classes=tuple(classes),
            train=as_set(train_dir, train), val=as_set(val_dir, val),
        )  # fmt: skip
    classes, found = scan(root)
    labels = np.array([label for _, label in found])
    ids = [path.relative_to(root).as_posix() for path, _ in found]
    held_out = set(stratified(labels, ids, VAL_SHARE, seed=0).tolist())
    if len(held_out) == len(found):
        raise Problem(f"--data folder:{root}: one image per class cannot be split; add images or a val/ folder")
    return Data(
        name=root.name, classes=tuple(classes),
        train=as_set(root, [f for i, f in enumerate(found) if i not in held_out]),
        val=as_set(root, [f for i, f in enumerate(found) if i in held_out]),
    )  # fmt: skip


def scan(root: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """The classes below `root` and every image with its class's number, sorted."""
    classes = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in ENDINGS
    ]
    if not found:
        raise Problem(f"--data folder:{root}: no images in class folders below it (a folder a class is wanted)")
    empty = sorted(set(range(len(classes))) - {label for _, label in found})
    if empty:
        raise Problem(f"--data folder:{root}: no image in class {classes[empty[0]]}; remove the folder or fill it")
    if len(classes) < 2:
        raise Problem(f"--data folder:{root}: only one class ({classes[0]}); two are needed")
    return classes, found


def as_set(root: Path, found: list[tuple[Path, int]]) -> ImageSet:
    """An image set that decodes its files when they are read."""
    paths = [path for path, _ in found]

    def read(index: int) -> torch.Tensor:
        with Image.open(paths[index]) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        return torch.from_numpy(np.asarray(upright).transpose(2, 0, 1).copy())

    return ImageSet(
        ids=[path.relative_to(root).as_posix() for path in paths],
        given=torch.tensor([label for _, label in found]), truth=None, read=read,
    )  # fmt: skip
