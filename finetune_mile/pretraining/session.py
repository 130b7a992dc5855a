"""The parts of a pre-training run that belong together: images, device, and the views that the loop is fed with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import tee

import numpy as np
import torch
from accelerate import Accelerator
from lightly.utils.benchmarking import knn_predict
from torch import Tensor, nn
from torch.nn.functional import normalize as unit

from finetune_mile.core.types import Preprocess, in_steps
from finetune_mile.images.index import BadImages, Data, ImageSet
from finetune_mile.images.order import Key, Order, micro_batches
from finetune_mile.images.pipeline import Augmentation, Views, batches, default_workers, normalise
from finetune_mile.images.splits import one_label_each
from finetune_mile.measures.predictions import pick_probe, predict
from finetune_mile.pretraining.recipe import Pretrain
from finetune_mile.pretraining.views import SEEDS, ViewKind, draw, make_view

WHOLE = Augmentation(crop="none", scale=(1.0, 1.0), shift=0, flip=False)  # nothing is lost before views are made
BLOCK = 1024  # images read at once


def with_size(recipe: Pretrain, images: ImageSet) -> Pretrain:
    """The recipe with the side of its views spelled out."""
    size = recipe.size or min(images.read(0).shape[-2:])
    return recipe.model_copy(update={"size": size, "source_size": recipe.source_size or size})


@dataclass(slots=True, kw_only=True)
class Session:
    """One run's images and device. S is `source_size`, s is `size`."""

    recipe: Pretrain  # its sizes are known
    accelerator: Accelerator
    data: Data
    bad: BadImages
    tick: Callable[[], None]  # looked at between batches outside of training; it may raise to stop
    _kept: Tensor | None = field(default=None, init=False)  # (N, 3, S, S) uint8

    @property
    def images(self) -> ImageSet:
        """What is trained on; its labels are not looked at."""
        return self.data.train

    @property
    def workers(self) -> int:
        """Loader processes for this one."""
        if self.recipe.workers is not None:
            return self.recipe.workers
        return 0 if self.images.in_memory else default_workers(self.accelerator.num_processes)

    def steps(self, amount: int | str) -> int:
        """An amount of the recipe in steps; 0 stays 0."""
        per_epoch = len(self.images) / self.recipe.batch_size
        return 0 if amount == 0 else in_steps(amount, total_steps=self.recipe.steps, steps_per_epoch=per_epoch)

    def seen(self, side: int | None) -> Preprocess:
        """The central square of an image, brought to a side."""
        return Preprocess(mean=self.recipe.mean, std=self.recipe.std, size=side or 1, crop=1.0)

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, s, s) to the network's input, on the device."""
        mean, std = self._convention()
        return normalise(images.to(self.accelerator.device, non_blocking=True), mean, std)

    def _convention(self) -> list[Tensor]:
        device = self.accelerator.device
        return [torch.tensor(v, device=device).view(3, 1, 1) for v in (self.recipe.mean, self.recipe.std)]

    # ------------------------------------------------------------------------------- images and views

    def plain(self) -> Views:
        """Whole training images, as views are cut out of them."""
        return Views(
            self.images, self.seen(self.recipe.source_size), WHOLE, self.recipe.seed,
            on_bad=partial(self.bad.add, "train", self.images.ids),
        )  # fmt: skip

    def keep(self) -> None:
        """Read all images once, where they fit into memory."""
        side, count = self.recipe.source_size or 1, len(self.images)
        if count * 3 * side * side > self.recipe.keep_megabytes * 2**20:
            return
        keys = ([(0, i) for i in range(at, min(at + BLOCK, count))] for at in range(0, count, BLOCK))
        kept = torch.empty(count, 3, side, side, dtype=torch.uint8)
        at = 0
        for batch in batches(self.plain(), keys, workers=self.workers, pin=False):
            kept[at : at + len(batch.images)] = batch.images
            at += len(batch.images)
            self.tick()
        self._kept = kept

    def feed(self, first_step: int) -> Iterator[list[Tensor]]:
        """The normalised views of this process's part of each batch, from a step on, without end."""
        order = Order(np.arange(len(self.images)), SEEDS * self.recipe.seed)
        mine, theirs = tee(
            micro_batches(
                order, first_step=first_step, batch_size=self.recipe.batch_size, accumulate=1,
                rank=self.accelerator.process_index, world=self.accelerator.num_processes,
            )
        )  # fmt: skip
        if self._kept is not None:
            kept = self._kept
            stored = (kept[torch.tensor([sample for _, sample in keys])] for keys in theirs)
        else:
            pin = self.accelerator.device.type == "cuda"
            stored = (batch.images for batch in batches(self.plain(), theirs, workers=self.workers, pin=pin))
        mean, std = self._convention()
        for images, keys in zip(stored, mine, strict=False):
            views = (view.sub_(mean).div_(std) for view in self.views(images, keys))
            yield [view.contiguous(memory_format=torch.channels_last) for view in views]

    def views(self, images: Tensor, keys: list[Key]) -> list[Tensor]:
        """All views, floats in [0, 1], of images (B, 3, S, S) uint8: two large ones, then the small ones."""
        device = self.accelerator.device
        images = images.to(device, non_blocking=True)
        draws = (draw(self.recipe.seed, keys, view).to(device) for view in range(len(self.kinds())))
        return [make_view(images, d, kind) for d, kind in zip(draws, self.kinds(), strict=True)]

    def kinds(self) -> list[ViewKind]:
        """The kind of each view of an image."""
        how, local = self.recipe.views, self.recipe.local_views
        found = [ViewKind(how=how, area=how.area, size=self.recipe.size or 1)] * 2
        return found + ([ViewKind(how=how, area=local.area, size=local.size)] * local.count if local else [])

    # ------------------------------------------------------------------------------------- neighbours

    def neighbours(self, backbone: nn.Module) -> float | None:
        """Accuracy in per cent of k nearest neighbours on the trunk's features; None where there are no labels."""
        settings = self.recipe.neighbours
        bank, bank_labels = self._features(backbone, self.data.train, settings.bank)
        asked, labels = self._features(backbone, self.data.val, settings.queries)
        if not len(bank) or not len(asked):
            return None
        k = min(settings.k, len(bank))
        found = knn_predict(
            asked, bank.T, bank_labels, num_classes=len(self.data.classes), knn_k=k, knn_t=settings.temperature
        )
        return round(100 * float((found[:, 0] == labels).float().mean()), 3)

    def _features(self, backbone: nn.Module, images: ImageSet, limit: int) -> tuple[Tensor, Tensor]:
        """Unit features (n, D) and labels (n,) of up to `limit` labelled images."""
        labels = one_label_each(images.given)
        with_label = (labels >= 0).nonzero().flatten()
        picked = with_label[pick_probe(len(with_label), limit)] if len(with_label) else with_label
        if not len(picked):
            return torch.zeros(0, 1), picked
        views = Views(images, self.seen(self.recipe.size), None, self.recipe.seed)
        features = predict(
            self.accelerator, backbone, views, picked.numpy(), self.prepare,
            batch_size=256, workers=self.workers, tick=self.tick,
        )  # fmt: skip
        return unit(features, dim=1), labels[picked]
