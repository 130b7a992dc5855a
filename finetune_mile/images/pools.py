"""The pools that phases draw from: which training images keep their label, and which hide it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finetune_mile.images.imageset import ImageSet
from finetune_mile.images.subsets import Indices, fingerprint, stratified
from finetune_mile.learning.phases import Pool
from finetune_mile.problems import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Training images and the three pools over them; the given labels of the unlabelled rest are hidden."""

    images: ImageSet
    indices: dict[Pool, Indices]

    def to_json(self, fraction: float, seed: int) -> dict[str, object]:
        """The contents of split.json: enough to check a split, and to give it back."""
        ids = [self.images.ids[i] for i in self.indices["labelled"]]
        return {
            "fraction": fraction,
            "seed": seed,
            "labelled": len(ids),
            "unlabelled": len(self.indices["unlabelled"]),
            "sha256": fingerprint(ids),
            "ids": ids,
        }


def make_pools(images: ImageSet, fraction: float, seed: int) -> Pools:
    """Keep the labels of a stratified share of `images` and hide the rest."""
    labels = one_label_each(images.given).numpy()
    labelled = stratified(labels, images.ids, fraction, seed)
    if len(labelled) == 0:
        raise Problem("--data: no training image has a label")
    everything = np.arange(len(images))
    hidden = torch.full_like(images.given, -1)
    hidden[torch.from_numpy(labelled)] = images.given[torch.from_numpy(labelled)]
    return Pools(
        images=dataclasses.replace(images, given=hidden),
        indices={
            "labelled": labelled,
            "unlabelled": np.setdiff1d(everything, labelled, assume_unique=True),
            "all": everything,
        },
    )


def one_label_each(given: Tensor) -> Tensor:
    """(N,) classes to stratify by: the given label, or the first of several; -1 = none."""
    if given.ndim == 1:
        return given
    return torch.where((given > 0).any(1), given.argmax(1), -1)


def balanced_weights(given: Tensor, num_classes: int) -> Tensor:
    """Class weights (C,) that are inverse to the label counts, with mean 1; a class without labels gets 1."""
    counts = torch.bincount(given[given >= 0], minlength=num_classes).float()
    if given.ndim == 2:
        counts = (given > 0).sum(0).float()
    weights = torch.where(counts > 0, 1 / counts.clamp(min=1), 0.0)
    present = counts > 0
    weights = weights / weights[present].mean()
    return torch.where(present, weights, 1.0)
