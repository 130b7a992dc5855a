"""From an image set to batches on a device: uint8 all the way, normalised where it is used.

B batch, H and W height and width.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Batch, Preprocess
from finetune_mile.images.decoding import BadImage
from finetune_mile.images.imageset import ImageSet
from finetune_mile.images.order import Key
from finetune_mile.images.randomness import uniforms
from finetune_mile.images.subsets import Indices

CROP_TRIES = 10
DRAWS = 4 * CROP_TRIES + 1  # the last one is for the flip
STAND_INS = 100  # bad images in a row that end a run
NOTHING = -1  # in `bad`: no image was found to stand in


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
    side = max(1, round(min(height, width) * how.crop))
    top, left = (height - side) // 2, (width - side) // 2
    if side == how.size:
        return image[:, top : top + side, left : left + side]
    return resized(image, (top, left, side, side), how)


def resized(image: Tensor, box: tuple[int, int, int, int], how: Preprocess) -> Tensor:
    """The part (top, left, height, width) of a uint8 image (3, H, W), resized to (3, size, size).

    The same pixels as torchvision's `resized_crop`; with the channels last in memory torch resizes a third faster.
    """
    top, left, height, width = box
    part = image[:, top : top + height, left : left + width]
    if how.interpolation == "nearest":
        return interpolate(part.unsqueeze(0), (how.size, how.size), mode="nearest").squeeze(0)
    part = part.unsqueeze(0).contiguous(memory_format=torch.channels_last)
    return interpolate(part, (how.size, how.size), mode=how.interpolation, antialias=how.antialias).squeeze(0)


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
            image = resized(image, box, how)
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
    """An image set seen through a transform; a key is (epoch, sample), a whole batch is read at once.

    A training image that cannot be read is replaced by the next one of its pool, with the draws of its own key: what
    comes instead depends neither on workers nor on processes. On the plain view it is black, and whoever evaluates
    leaves the samples in `bad` out; they are there once the batch has come out of `batches`.
    """

    def __init__(
        self,
        images: ImageSet,
        how: Preprocess,
        augmentation: Augmentation | None,
        seed: int,
        *,
        pool: Indices | None = None,
        on_bad: Callable[[Mapping[int, str]], None] | None = None,
    ) -> None:
        """Look at images.

        Args:
            images: which.
            how: what the network wants to see.
            augmentation: for training; None: the plain view.
            seed: of the augmentation.
            pool: sorted samples that a bad one is replaced from; None: all.
            on_bad: told, in the process that takes the batches, of samples that could not be read.
        """
        self.images, self.how, self.augmentation, self.seed = images, how, augmentation, seed
        self.pool, self.on_bad = pool, on_bad
        self.bad: dict[int, str] = {}

    def __getitems__(self, keys: list[Key]) -> Batch:
        """Read and transform the samples of `keys`."""
        batch, bad = self.look(keys)
        self.bad.update(bad)
        return batch

    def look(self, keys: list[Key]) -> tuple[Batch, dict[int, str]]:
        """The batch of `keys`, and the samples that could not be read, with the reason."""
        wanted = np.array([sample for _, sample in keys])
        bad: dict[int, str] = {}
        read = [self._read(int(sample), bad) for sample in wanted]
        views, index = [image for image, _ in read], np.array([sample for _, sample in read])
        if self.augmentation is None:
            views = [centre_view(image, self.how) for image in views]
        else:
            epochs = np.array([epoch for epoch, _ in keys])
            draws = uniforms(self.seed, epochs, wanted, DRAWS).tolist()
            views = [
                random_view(image, self.how, self.augmentation, draw) for image, draw in zip(views, draws, strict=True)
            ]
        where = torch.from_numpy(index)
        return Batch(torch.stack(views), self.images.given[where], where), bad

    def _read(self, sample: int, bad: dict[int, str]) -> tuple[Tensor, int]:
        """The image (3, H, W) of a sample, or of the one that stands in for it; and which one it is."""
        black = torch.zeros(3, self.how.size, self.how.size, dtype=torch.uint8)
        for _ in range(STAND_INS):
            try:
                return self.images.read(sample), sample
            except BadImage as error:
                bad[sample] = str(error)
            if self.augmentation is None:
                return black, sample
            sample = self._next(sample)
        bad[NOTHING] = bad[sample]
        return black, sample

    def _next(self, sample: int) -> int:
        if self.pool is None:
            return (sample + 1) % len(self.images)
        return int(self.pool[np.searchsorted(self.pool, sample, side="right") % len(self.pool)])


def _as_it_is(batch: Any) -> Any:
    return batch  # the data set reads whole batches; there is nothing to collate


def batches(views: Views, keys: Iterable[list[Key]], *, workers: int, pin: bool) -> Iterator[Batch]:
    """Batches for lists of keys, in their order, read ahead by `workers` processes."""
    loader = DataLoader(
        _Looks(views), batch_sampler=keys, num_workers=workers, collate_fn=_as_it_is, pin_memory=pin,
        worker_init_fn=_outlive_sigterm,
    )  # fmt: skip
    return _listing_bad(views, iter(loader))


def _outlive_sigterm(worker: int) -> None:
    """SLURM, systemd and torchrun send SIGTERM to every process: a loader must outlive it, so that the run can save.

    It ends when the run asks it to, or when the run is gone.
    """
    del worker
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _Looks(Dataset[tuple[Batch, dict[int, str]]]):
    """Batches together with what was bad, which a loader process cannot tell in any other way."""

    def __init__(self, views: Views) -> None:
        self.views = views

    def __getitems__(self, keys: list[Key]) -> tuple[Batch, dict[int, str]]:
        return self.views.look(keys)


def _listing_bad(views: Views, loaded: Iterator[tuple[Batch, dict[int, str]]]) -> Iterator[Batch]:
    for batch, bad in loaded:
        if bad:
            views.bad.update(bad)
            first = next(iter(bad))
            if NOTHING in bad:
                raise Problem(
                    f"--data: none of {STAND_INS} images in a row can be read; the first, {views.images.ids[first]}, "
                    f"says: {bad[first]}"
                )
            if views.on_bad is not None:
                views.on_bad(bad)
        yield batch


def default_workers(world: int) -> int:
    """Loader processes for one of `world` training processes: the cores it can have, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // world))


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) to floats in the network's convention; mean and std (3, 1, 1) on the device."""
    floats = images.to(torch.float32, copy=True)  # then in place: new memory a step would cost more than the sums
    return floats.div_(255.0).sub_(mean).div_(std)
