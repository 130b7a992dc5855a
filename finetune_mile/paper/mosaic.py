"""Mosaics: grids of photos from class folders, one given label each. Natural photos with a known label ambiguity."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images.decoding import BadImage
from finetune_mile.images.grids import make_grids, read_wanted
from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.pipeline import centre_view
from finetune_mile.images.sources import folder


@functools.lru_cache(maxsize=2)
def load(where: str) -> Data:
    """Mosaics of the photos in class folders; those for training are made of training photos alone.

    Args:
        where: what `folder:` takes, and options: `DIR?rows=2&share=0.6&single=0.2&cell=32&train=20000&val=5000&draw=1`,
            also the folder's own `depth` and `val_from` (its `val`).
    """
    wanted = read_wanted("mosaic", where, cell=32, train=20_000, val=5_000, others=("depth", "val_from"))
    names = {"depth": "depth", "val_from": "val"}
    options = "&".join(f"{names[key]}={value}" for key, value in wanted.others.items())
    photos = folder.load(f"{wanted.place}?{options}" if options else wanted.place)
    sets = []
    for number, name, images, count in ((1, "train", photos.train, wanted.train), (2, "val", photos.val, wanted.val)):
        sets.append(
            make_grids(
                small_photos(images, wanted.cell), images.given.numpy(), np.arange(len(images)), count,
                num_classes=len(photos.classes), layout=wanted.layout, seed=2 * wanted.draw + number, name=name,
            )
        )  # fmt: skip
    return Data(name=f"mosaic-{photos.name}", classes=photos.classes, train=sets[0], val=sets[1])


def small_photos(images: ImageSet, side: int) -> Tensor:
    """Every photo's central square (N, 3, side, side), in memory."""
    how = Preprocess(size=side, crop=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return torch.stack([centre_view(_read(images, i), how) for i in range(len(images))])


def _read(images: ImageSet, index: int) -> Tensor:
    try:
        return images.read(index)
    except BadImage as error:
        raise Problem(f"--data mosaic: {images.ids[index]} cannot be used ({error}); remove it") from error
