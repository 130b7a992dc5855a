"""The pools that phases draw from: which training images keep their label, and which hide it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool
from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.splits import Chosen, choose
from finetune_mile.images.subsets import Indices, fingerprint, stratified

LEAST_CALIBRATION, MOST_CALIBRATION = 500, 0.2  # images, unless that is more than this share of them
CALIBRATION_SEED = 7919
WHY_HELD_OUT = "--rho auto and auto.held_out: always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Training images and the three pools over them; the given labels of the unlabelled rest are hidden."""

    images: ImageSet
    indices: dict[Pool, Indices]
    source: str = "stratified"  # or the list that names the labelled images
    calibration: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # labelled, and in no pool

    def to_json(self, fraction: float, seed: int) -> dict[str, object]:
        """The contents of split.json: enough to check a split, and to give it back."""
        ids = [self.images.ids[i] for i in self.indices["labelled"]]
        return {
            "fraction": fraction,
            "seed": seed,
            "source": self.source,
            "labelled": len(ids),
            "unlabelled": len(self.indices["unlabelled"]),
            "sha256": fingerprint(ids),
            "ids": ids,
            **({"calibration": [self.images.ids[i] for i in self.calibration]} if len(self.calibration) else {}),
        }


def labelled_pools(
    data: Data, *, fraction: float, seed: int, split: str | None = None, calibration: float = 0.0
) -> Pools:
    """The pools of a run: the images that a list or the fraction keeps labelled, less those that are held out.

    Args:
        data: all of it.
        fraction: the share of the labels that is used.
        seed: of the draws.
        split: a list of the labelled images; None: the published one for this data and fraction, or a draw.
        calibration: the share of the labelled images that no phase trains on.
    """
    chosen = choose(data.train.ids, len(data.classes), fraction, split)
    return hold_out(make_pools(data.train, fraction, seed, chosen), calibration, seed)


def make_pools(images: ImageSet, fraction: float, seed: int, chosen: Chosen | None = None) -> Pools:
    """Keep the labels of some of `images` and hide the rest.

    Args:
        images: the training images.
        fraction: the share of each class that keeps its label.
        seed: of the draw.
        chosen: the images that a list names, instead of a draw.
    """
    labels = one_label_each(images.given).numpy()
    labelled = stratified(labels, images.ids, fraction, seed) if chosen is None else chosen.indices
    if len(labelled) == 0:
        raise Problem("--data: no training image has a label")
    if chosen is not None:
        _check_list(labels, chosen)
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
        source="stratified" if chosen is None else chosen.source,
    )


def held_out_share(share: float, labelled: int) -> float:
    """The share of so many labelled images that is held out: at least 500 of them, or a fifth where they are few."""
    return max(share, min(LEAST_CALIBRATION / labelled, MOST_CALIBRATION)) if share else 0.0


def hold_out(pools: Pools, share: float, seed: int) -> Pools:
    """Take a share of the labelled images, of each class, out of every pool: the calibration images of `rho: auto`.

    At least 500 are taken, or a fifth where there are fewer than 2,500; a class of one image keeps it.

    Args:
        pools: over all images.
        share: in [0, 0.5]; 0 takes none.
        seed: of the draw, which is another one than that of the fraction.
    """
    if share == 0:
        return pools
    labelled, given = pools.indices["labelled"], pools.images.given
    if given.ndim == 2:
        raise Problem(f"{WHY_HELD_OUT} need one given label per image; these have sets of labels")
    share = held_out_share(share, len(labelled))
    labels = given[torch.from_numpy(labelled)].numpy()
    spare = np.flatnonzero(np.bincount(labels)[labels] > 1)
    ids = [pools.images.ids[i] for i in labelled[spare]]
    if len(spare) == 0:
        raise Problem(f"{WHY_HELD_OUT} need classes with two labelled images or more; these have one each")
    taken = labelled[spare[stratified(labels[spare], ids, share, seed + CALIBRATION_SEED)]]
    rest = {name: np.setdiff1d(members, taken, assume_unique=True) for name, members in pools.indices.items()}
    return dataclasses.replace(pools, indices=rest, calibration=taken)


def _check_list(labels: Indices, chosen: Chosen) -> None:
    """A list must name labelled images, and some of every class that has any."""
    of_list = labels[chosen.indices]
    if (of_list < 0).any():
        raise Problem(f"--split {chosen.source}: {int((of_list < 0).sum())} of the images it names have no label")
    lost = np.setdiff1d(labels[labels >= 0], of_list)
    if len(lost):
        raise Problem(
            f"--split {chosen.source}: no image is left of {len(lost)} classes (the first is class number {lost[0]}); "
            "a list must name at least one image of each"
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
