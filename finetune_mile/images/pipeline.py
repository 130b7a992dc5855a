"""From an image set to batches on a device: uint8 all the way, normalised where it is used.

B batch, H and W height and width.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from finetune_mile.checkpoints.cards import Preprocess
from finetune_mile.images.imageset import ImageSet
from finetune_mile.images.order import Key
from finetune_mile.images.randomness import uniforms

CROP_TRIES = 10
DRAWS = 4 * CROP_TRIES + 1  # the last one is for the flip


class Batch(NamedTuple):
    """Images as they come out of a loader."""

    images: Tensor  # (B, 3, H, W) uint8
    labels: Tensor  # (B,) or (B, C), the given labels
    samples: Tensor  # (B,) which ones of the image set


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """What training images go through."""

    crop: Literal["random-resized", "shift", "none"]
    scale: tuple[float, float]
    shift: int
    flip: bool


def centre_view(image: Tensor, how: Preprocess) -> Tensor:
    """The evaluation view (3, size, size): a central crop of a share of the short side, resized."""
    height, width = image.shape[-2:]
    side = round(min(height, width) * how.crop)
    top, left = (height - side) // 2, (width - side) // 2
    if side == how.size:
        return image[:, top : top + side, left : left + side]
    mode = InterpolationMode(how.interpolation)
    view: Tensor = tv.resized_crop(image, top, left, side, side, [how.size] * 2, mode, antialias=how.antialias)
    return view


def crop_box(height: int, width: int, scale: tuple[float, float], draws: Sequence[float]) -> tuple[int, int, int, int]:
    """A random-resized-crop's (top, left, height, width): area in `scale`, aspect 3/4 to 4/3."""
    for try_ in range(CROP_TRIES):
        area_draw, ratio_draw, top_draw, left_draw = draws[4 * try_ : 4 * try_ + 4]
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        ratio = exp(log(3 / 4) + (log(4 / 3) - log(3 / 4)) * ratio_draw)
        w, h = round(sqrt(area * ratio)), round(sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(top_draw * (height - h + 1)), int(left_draw * (width - w + 1)), h, w
    side = min(height, width)  # a very long image: its middle
    return (height - side) // 2, (width - side) // 2, side, side


def random_view(image: Tensor, how: Preprocess, augmentation: Augmentation, draws: Sequence[float]) -> Tensor:
    """A training view (3, size, size) of an image (3, H, W), decided by `draws` alone."""
    match augmentation.crop:
        case "random-resized":
            box = crop_box(image.shape[-2], image.shape[-1], augmentation.scale, draws)
            mode = InterpolationMode(how.interpolation)
            image = tv.resized_crop(image, *box, [how.size] * 2, mode, antialias=how.antialias)
        case "shift":
            image = centre_view(image, how)
            reach = augmentation.shift
            top, left = (int(d * (2 * reach + 1)) for d in draws[:2])
            image = torch.nn.functional.pad(image, (reach,) * 4)
            image = image[:, top : top + how.size, left : left + how.size]
        case "none":
            image = centre_view(image, how)
    return image.flip(-1) if augmentation.flip and draws[-1] < 0.5 else image


class Views(Dataset[Batch]):
    """An image set seen through a transform; a key is (epoch, sample), a whole batch is read at once."""

    def __init__(self, images: ImageSet, how: Preprocess, augmentation: Augmentation | None, seed: int) -> None:
        self.images, self.how, self.augmentation, self.seed = images, how, augmentation, seed

    def __getitems__(self, keys: list[Key]) -> Batch:
        """Read and transform the samples of `keys`."""
        index = np.array([sample for _, sample in keys])
        views = [self.images.read(int(i)) for i in index]
        if self.augmentation is None:
            views = [centre_view(image, self.how) for image in views]
        else:
            epochs = np.array([epoch for epoch, _ in keys])
            draws = uniforms(self.seed, epochs, index, DRAWS).tolist()
            views = [
                random_view(image, self.how, self.augmentation, draw) for image, draw in zip(views, draws, strict=True)
            ]
        where = torch.from_numpy(index)
        return Batch(torch.stack(views), self.images.given[where], where)


def _as_it_is(batch: Any) -> Any:
    return batch  # the data set reads whole batches; there is nothing to collate


def batches(views: Views, keys: Iterable[list[Key]], *, workers: int, pin: bool) -> Iterator[Batch]:
    """Batches for lists of keys, in their order, read ahead by `workers` processes."""
    loader = DataLoader(
        views, batch_sampler=keys, num_workers=workers, collate_fn=_as_it_is, pin_memory=pin
    )  # fmt: skip
    return iter(loader)


def default_workers(world: int) -> int:
    """Loader processes for one of `world` training processes: the cores it can have, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // world))


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) to floats in the network's convention; mean and std (3, 1, 1) on the device."""
    return (images.float() / 255.0 - mean) / std
