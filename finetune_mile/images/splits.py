"""Which images train, which validate, and which training images keep their label. No torch at import.

The labelled images are a seeded, stratified draw, or a list of names: published (SimCLR's 1 % and 10 % of ImageNet) or
the user's (--split). A list is checked against its card or file. N images, C classes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pydantic import Field

from finetune_mile.core.files import load_yaml_file, shipped
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool, Section
from finetune_mile.images.groups import find_groups, group_members, say_kept
from finetune_mile.images.name_lists import fetch_list, find, read_list
from finetune_mile.images.order import Indices, hashes
from finetune_mile.images.readers import Joined, Picked
from finetune_mile.images.sets import Data, ImageSet, Names

if TYPE_CHECKING:
    from torch import Tensor

VAL_SHARE = 0.2
LEAST_CALIBRATION, MOST_CALIBRATION = 500, 0.2  # images, unless that is more than this share of them
CALIBRATION_SEED = 7919
HELD_OUT_FLAGS = "--rho auto and auto.held_out: always"
IMAGENET_CLASSES = 1000
_TRAIN_NAME = re.compile(r"(.*/)?n\d{8}_\d+(_n\d{8})?\.JPEG$")


# ------------------------------------------------------------------------------------ training and validation images


def make_data(name: str, classes: Sequence[str], sets: Iterable[ImageSet], flag: str) -> Data:
    """The data of a source that has training and validation images, or one set of both.

    Of one set, a fifth of each class is for validation: the same images for every seed. Near-duplicates are kept on one
    side. Without classes all are for training.
    """
    if len(classes) == 1:
        raise Problem(f"{flag}: only one class ({classes[0]}); two are needed")
    halves = list(sets)
    if not classes:
        halves = [dataclasses.replace(half, given=half.given.new_full((len(half),), -1).long()) for half in halves]
        halves.append(_take(halves[0], np.zeros(0, dtype=np.int64)))
        return Data(name=name, classes=(), train=halves[0], val=halves[1])
    notes: tuple[str, ...] = ()
    if len(halves) == 1:
        images = dataclasses.replace(halves[0], alike=find_groups(halves[0]))
        labels = one_label_each(images.given).numpy()
        held_out = stratified(labels, images.ids, VAL_SHARE, seed=0, alike=images.alike)
        rest = np.setdiff1d(np.arange(len(images)), held_out, assume_unique=True)
        only = ~np.isin(labels[held_out], labels[rest])  # classes that would have no training image
        rest, held_out = np.sort(np.concatenate([rest, held_out[only]])), held_out[~only]
        if len(rest) == 0 or len(held_out) == 0:
            raise Problem(f"{flag}: one image per class cannot be split; add images, or validation images of their own")
        halves = [_take(images, rest), _take(images, held_out)]
        notes = say_kept(images.alike, held_out)
    return Data(name=name, classes=tuple(classes), train=halves[0], val=halves[1], notes=notes)


def _take(images: ImageSet, rows: Indices) -> ImageSet:
    return dataclasses.replace(
        images, ids=Names.of(images.ids[i] for i in rows.tolist()), given=images.given[rows],
        truth=None if images.truth is None else images.truth[rows],
        alike=None if images.alike is None else images.alike[rows],
        content=Picked(images.content, rows),
    )  # fmt: skip


def join_unlabelled(images: ImageSet, extra: ImageSet) -> ImageSet:
    """Training images, then others whose labels are ignored, called `unlabelled/<id>`."""
    hidden = images.given.new_full((len(extra), *images.given.shape[1:]), -1)
    return join(images, dataclasses.replace(extra, given=hidden, truth=None, alike=None), "unlabelled")


def join(images: ImageSet, extra: ImageSet, folder: str) -> ImageSet:
    """Images, then others of the same classes, called `<folder>/<id>`.

    They come last, so that the order and the draws of the first images stay the same.
    """
    import torch

    while any(name.startswith(f"{folder}/") for name in images.ids):
        folder += "+"
    truth, alike = images.truth, None
    if truth is not None:
        more = truth.new_zeros(len(extra), truth.shape[1]) if extra.truth is None else extra.truth
        truth = torch.cat([truth, more])
    if images.alike is not None:  # groups of the others are groups of their own
        more_alike = np.full(len(extra), -1) if extra.alike is None else extra.alike
        alike = np.concatenate([images.alike, np.where(more_alike < 0, -1, more_alike + images.alike.max() + 1)])
    return ImageSet(
        ids=Names.of([*images.ids, *(f"{folder}/{name}" for name in extra.ids)]),
        given=torch.cat([images.given, extra.given]), truth=truth,
        content=Joined(images.content, len(images), extra.content),
        in_memory=images.in_memory and extra.in_memory, alike=alike,
    )  # fmt: skip


def stratified(
    labels: Indices, ids: Sequence[str], fraction: float, seed: int, *, alike: Indices | None = None
) -> Indices:
    """A share of each class, at least one image each, as sorted indices.

    Within a class the images are ranked by a hash of (seed, id) and the first ones are taken, so a smaller fraction
    is part of a larger one, and images added later do not reshuffle the others. A group of near-duplicates has the rank
    of its first image and is taken as a whole or not at all, unless it holds more than half of a class.

    Args:
        labels: (N,) one class per image; -1 = unlabelled, never taken.
        ids: N names.
        fraction: in (0, 1].
        seed: another seed is another draw.
        alike: (N,) images with the same number are near-duplicates; -1: alone.
    """
    if not 0 < fraction <= 1:
        raise Problem(f"--fraction {fraction}: must be above 0 and at most 1")
    if fraction == 1:
        return np.flatnonzero(labels >= 0)
    digests = (hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest() for name in ids)
    numbers = np.array([int.from_bytes(d, "little") >> 1 for d in digests], dtype=np.int64)
    ranks = hashes(seed, 0, numbers)
    groups = [] if alike is None else group_members(labels, alike)
    bound = np.arange(len(labels))  # the first image of the group that each is in
    for members in groups:
        ranks[members], bound[members] = ranks[members[0]], members[0]
    order = np.lexsort((ranks, labels))  # class by class, and by rank within
    order = order[labels[order] >= 0]
    taken = np.zeros(len(labels), dtype=np.bool_)
    for some in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        count = max(1, round(fraction * len(some)))
        ends = np.flatnonzero(np.diff(bound[some])) + 1  # where no group is cut
        taken[some[: ends[np.abs(ends - count).argmin()] if count < len(some) else count]] = True
    for members in groups:  # of several classes, or with unlabelled images: not taken, unless a class needs it
        chosen = members[taken[members]]
        if 0 < len(chosen) < len(members):
            taken[chosen] = False
            taken[chosen] = ~np.isin(labels[chosen], labels[taken])
    return np.flatnonzero(taken)


def fingerprint(ids: Sequence[str]) -> str:
    """A hash of a list of ids, in order: two runs with the same one used the same images."""
    return hashlib.sha256("".join(f"{name}\n" for name in ids).encode("utf-8", "surrogateescape")).hexdigest()


def one_label_each(given: Tensor) -> Tensor:
    """(N,) classes to stratify by: the given label, or the rarest of several, so that no class is missed; -1 = none."""
    if given.ndim == 1:
        return given
    positive = given > 0
    rarity = positive / positive.sum(0).clamp(min=1)
    return rarity.argmax(1).masked_fill(~positive.any(1), -1)


def label_names(given: Tensor, classes: Sequence[str]) -> list[list[str]]:
    """The class names of each image's given labels, (N,) or (N, C)."""
    if given.ndim == 1:
        return [[classes[label]] if label >= 0 else [] for label in given.tolist()]
    return [[classes[c] for c in row.nonzero().flatten().tolist()] for row in given > 0]


# ------------------------------------------------------------------------------------ pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Training images and the three pools that phases draw from; labels outside of the labelled pool are hidden."""

    images: ImageSet
    indices: dict[Pool, Indices]
    source: str = "stratified"  # or the list that names the labelled images
    calibration: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # labelled, and in no pool

    def to_json(self, fraction: float, seed: int) -> dict[str, object]:
        """The contents of split.json: enough to check a split, and to use it again with --split."""
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
        data: all images.
        fraction: the share of the labels that is used.
        seed: of the draws.
        split: a list of the labelled images; None: the published one for this data and fraction, or a draw.
        calibration: the share of the labelled images that no phase trains on.
    """
    if calibration and data.train.given.ndim == 2:
        raise Problem(
            "--method auto (--rho auto) needs one given label per image, and these have sets of labels; use --method "
            "sigmoid or mile"
        )
    chosen = choose(data.train.ids, len(data.classes), fraction, split)
    return hold_out(make_pools(data.train, fraction, seed, chosen), calibration, seed)


def make_pools(images: ImageSet, fraction: float, seed: int, chosen: Chosen | None = None) -> Pools:
    """Keep the labels of a share of each class, or of the images that a list has chosen; hide the others."""
    labels = one_label_each(images.given).numpy()
    if chosen is None:
        chosen = Chosen(stratified(labels, images.ids, fraction, seed), "stratified")
    else:
        _check_list(labels, chosen, fraction)
    labelled, everything = chosen.indices, np.arange(len(images))
    if len(labelled) == 0:
        raise Problem("--data: no training image has a label")
    visible = images.given.new_full(images.given.shape, -1)
    visible[labelled] = images.given[labelled]
    return Pools(
        images=dataclasses.replace(images, given=visible),
        indices={
            "labelled": labelled,
            "unlabelled": np.setdiff1d(everything, labelled, assume_unique=True),
            "all": everything,
        },
        source=chosen.source,
    )


def _check_list(labels: Indices, chosen: Chosen, fraction: float) -> None:
    listed, with_label = labels[chosen.indices], labels[labels >= 0]
    share = len(listed) / max(len(with_label), 1)
    if fraction < 1 and not 0.5 * fraction <= share <= 2 * fraction:
        images = "images" if len(with_label) == len(labels) else "labelled images"
        raise Problem(
            f"{chosen.flag} holds {share:.2%} of all {images}, --fraction is {fraction:.2%}; leave out one of them"
        )
    if (listed < 0).any():
        raise Problem(f"{chosen.flag}: {int((listed < 0).sum())} of the images it names have no label")
    lost = np.setdiff1d(with_label, listed)
    if len(lost):
        raise Problem(
            f"{chosen.flag}: no image is left of {len(lost)} classes (the first is class number {lost[0]}); "
            "a list must name at least one image of each"
        )


def add_unlabelled(pools: Pools, extra: ImageSet) -> Pools:
    """Pools with further images, whose labels are ignored; which images keep their label does not change."""
    images = join_unlabelled(pools.images, extra)
    added = np.arange(len(pools.images), len(images))
    indices = {
        name: members if name == "labelled" else np.concatenate([members, added])
        for name, members in pools.indices.items()
    }
    return dataclasses.replace(pools, images=images, indices=indices)


def with_validation(pools: Pools, val: ImageSet) -> Pools:
    """Pools to which the validation images are added with their labels: all that there are."""
    images = join(pools.images, val, "val")
    added = np.arange(len(pools.images), len(images))
    labelled = one_label_each(val.given).numpy() >= 0
    more = {"labelled": added[labelled], "unlabelled": added[~labelled], "all": added}
    indices = {name: np.concatenate([members, more[name]]) for name, members in pools.indices.items()}
    return dataclasses.replace(pools, images=images, indices=indices)


def hold_out(pools: Pools, share: float, seed: int) -> Pools:
    """Take a share of the labelled images, of each class, out of every pool.

    They calibrate `rho: auto`, or judge a trial.

    At least 500 are taken, or a fifth where there are fewer than 2,500; a class of one image keeps it.

    Args:
        pools: over all images.
        share: in [0, 0.5]; 0 takes none.
        seed: of the draw, which is another one than that of the fraction.
    """
    if share == 0:
        return pools
    labelled = pools.indices["labelled"]
    labels = one_label_each(pools.images.given)[labelled].numpy()
    spare = np.flatnonzero(np.bincount(labels)[labels] > 1)
    if len(spare) == 0:
        raise Problem(f"{HELD_OUT_FLAGS} need classes with two labelled images or more; these have one each")
    ids = [pools.images.ids[i] for i in labelled[spare]]
    alike = None if pools.images.alike is None else pools.images.alike[labelled[spare]]
    share = max(share, min(LEAST_CALIBRATION / len(labelled), MOST_CALIBRATION))
    drawn = stratified(labels[spare], ids, share, seed + CALIBRATION_SEED, alike=alike)
    taken = labelled[spare[drawn]]
    rest = {name: np.setdiff1d(members, taken, assume_unique=True) for name, members in pools.indices.items()}
    return dataclasses.replace(pools, indices=rest, calibration=taken)


def label_counts(given: Tensor, num_classes: int) -> Tensor:
    """How many images have each label, (C,)."""
    return (given > 0).sum(0) if given.ndim == 2 else given[given >= 0].bincount(minlength=num_classes)


def balanced_weights(given: Tensor, num_classes: int) -> Tensor:
    """Class weights (C,) that are inverse to the label counts, with mean 1; a class without labels gets 1."""
    counts = label_counts(given, num_classes)
    present = counts > 0
    weights = 1 / counts.float().clamp(min=1)
    return (weights / weights[present].mean()).masked_fill(~present, 1.0)


# ------------------------------------------------------------------------------------ lists of labelled images


class SplitCard(Section):
    """A published list: facts only. The file is fetched on first use."""

    name: str
    data: str = Field(description="which data it is a part of; imagenet is the only one so far")
    fraction: float = Field(gt=0, lt=1)
    count: int = Field(gt=0, description="names in the list")
    urls: tuple[str, ...] = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the list as text, uncompressed")
    source: str
    licence: str


class Chosen(NamedTuple):
    """The labelled images that a list names."""

    indices: Indices  # sorted
    source: str  # for split.json: the card's or the file's name
    flag: str = ""  # the list, for messages


def read_cards() -> list[SplitCard]:
    paths = sorted((shipped("recipes") / "splits").glob("*.yaml"))
    return [SplitCard.model_validate(load_yaml_file(path)) for path in paths]


def choose(ids: Sequence[str], num_classes: int, fraction: float, split: str | None) -> Chosen | None:
    """The images that a list names: --split if given, else the published list; None: draw a stratified split.

    Args:
        ids: of all training images.
        num_classes: C.
        fraction: the share of the labels that is used.
        split: a list of the labelled images.
    """
    if split is not None:
        flag = f"--split {split}"
        return Chosen(find(read_list(Path(split)), ids, flag), Path(split).name, flag)
    if num_classes == IMAGENET_CLASSES and len(ids) and _TRAIN_NAME.match(ids[0]):
        for card in read_cards():
            if card.data == "imagenet" and card.fraction == fraction:
                flag = f"the published list {card.name}"
                return Chosen(find(fetch_list(card), ids, flag), card.name, flag)
    return None
