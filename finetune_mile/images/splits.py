"""Which images train, which validate, and which training images keep their label. No torch at import.

The labelled images are a seeded, stratified draw, or a list of names: published (SimCLR's 1 % and 10 % of ImageNet) or
the user's (--split). A list is checked against its card or file. N images, C classes.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import lzma
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import Field

from finetune_mile.core.download import RemoteFile, fetch
from finetune_mile.core.files import cache, load_yaml_file, open_regular, shipped, size_in_words
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool, Section
from finetune_mile.images.index import Data, ImageSet, Joined, Names, Picked, locate
from finetune_mile.images.order import Indices, hashes

if TYPE_CHECKING:
    from torch import Tensor

VAL_SHARE = 0.2
LEAST_CALIBRATION, MOST_CALIBRATION = 500, 0.2  # images, unless that is more than this share of them
CALIBRATION_SEED = 7919
HELD_OUT_FLAGS = "--rho auto and auto.held_out: always"
IMAGENET_CLASSES = 1000
LARGEST_LIST = 2**28  # bytes, unpacked; the names of all of ImageNet take about 40 MB
PACKED: Mapping[str, Callable[[Any], Any]] = {".xz": lzma.LZMAFile, ".gz": lambda file: gzip.GzipFile(fileobj=file)}
_TRAIN_NAME = re.compile(r"(.*/)?n\d{8}_\d+(_n\d{8})?\.JPEG$")


# ------------------------------------------------------------------------------------ training and validation images


def make_data(name: str, classes: Sequence[str], sets: Iterable[ImageSet], flag: str) -> Data:
    """The data of a source that has training and validation images, or one set of both.

    Of one set, a fifth of each class is for validation: the same images for every seed. Without classes all are for
    training.
    """
    if len(classes) == 1:
        raise Problem(f"{flag}: only one class ({classes[0]}); two are needed")
    halves = list(sets)
    if not classes:
        halves = [dataclasses.replace(half, given=half.given.new_full((len(half),), -1).long()) for half in halves]
        halves.append(_take(halves[0], np.zeros(0, dtype=np.int64)))
        return Data(name=name, classes=(), train=halves[0], val=halves[1])
    if len(halves) == 1:
        images = halves[0]
        held_out = stratified(one_label_each(images.given).numpy(), images.ids, VAL_SHARE, seed=0)
        rest = np.setdiff1d(np.arange(len(images)), held_out, assume_unique=True)
        if len(rest) == 0 or len(held_out) == 0:
            raise Problem(f"{flag}: one image per class cannot be split; add images, or validation images of their own")
        halves = [_take(images, rest), _take(images, held_out)]
    return Data(name=name, classes=tuple(classes), train=halves[0], val=halves[1])


def _take(images: ImageSet, rows: Indices) -> ImageSet:
    return dataclasses.replace(
        images, ids=Names.of(images.ids[i] for i in rows.tolist()), given=images.given[rows],
        truth=None if images.truth is None else images.truth[rows],
        read=Picked(images.read, rows), encoded=None if images.encoded is None else Picked(images.encoded, rows),
    )  # fmt: skip


def join_unlabelled(images: ImageSet, extra: ImageSet) -> ImageSet:
    """Training images, then others whose labels are ignored, called `unlabelled/<id>`.

    They come last, so that the order and the draws of the training images stay the same.
    """
    import torch

    folder = "unlabelled"
    while any(name.startswith(f"{folder}/") for name in images.ids):
        folder += "+"
    count, given, truth, encoded = len(images), images.given, images.truth, None
    if images.encoded is not None and extra.encoded is not None:
        encoded = Joined(images.encoded, count, extra.encoded)
    return ImageSet(
        ids=Names.of([*images.ids, *(f"{folder}/{name}" for name in extra.ids)]),
        given=torch.cat([given, given.new_full((len(extra), *given.shape[1:]), -1)]),
        truth=None if truth is None else torch.cat([truth, truth.new_zeros(len(extra), truth.shape[1])]),
        read=Joined(images.read, count, extra.read), in_memory=images.in_memory and extra.in_memory, encoded=encoded,
    )  # fmt: skip


def stratified(labels: Indices, ids: Sequence[str], fraction: float, seed: int) -> Indices:
    """A share of each class, at least one image each, as sorted indices.

    Within a class the images are ranked by a hash of (seed, id) and the first ones are taken, so a smaller fraction
    is part of a larger one, and images added later do not reshuffle the others.

    Args:
        labels: (N,) one class per image; -1 = unlabelled, never taken.
        ids: N names.
        fraction: in (0, 1].
        seed: another seed is another draw.
    """
    if not 0 < fraction <= 1:
        raise Problem(f"--fraction {fraction}: must be above 0 and at most 1")
    if fraction == 1:
        return np.flatnonzero(labels >= 0)
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in ids)
    numbers = np.array([int.from_bytes(d, "little") >> 1 for d in digests], dtype=np.int64)
    order = np.lexsort((hashes(seed, 0, numbers), labels))  # class by class, and by rank within
    order = order[labels[order] >= 0]
    members = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return np.sort(np.concatenate([some[: max(1, round(fraction * len(some)))] for some in members]))


def fingerprint(ids: Sequence[str]) -> str:
    """A hash of a list of ids, in order: two runs with the same one used the same images."""
    return hashlib.sha256("".join(f"{name}\n" for name in ids).encode()).hexdigest()


def one_label_each(given: Tensor) -> Tensor:
    """(N,) classes to stratify by: the given label, or the first of several; -1 = none."""
    return given if given.ndim == 1 else given.argmax(1).masked_fill(~(given > 0).any(1), -1)


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
    with_label = int((one_label_each(data.train.given) >= 0).sum())
    chosen = choose(data.train.ids, len(data.classes), fraction, split, with_label)
    return hold_out(make_pools(data.train, fraction, seed, chosen), calibration, seed)


def make_pools(images: ImageSet, fraction: float, seed: int, chosen: Chosen | None = None) -> Pools:
    """Keep the labels of a share of each class, or of the images that a list has chosen; hide the others."""
    labels = one_label_each(images.given).numpy()
    if chosen is None:
        chosen = Chosen(stratified(labels, images.ids, fraction, seed), "stratified")
    else:
        _check_list(labels, chosen)
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


def _check_list(labels: Indices, chosen: Chosen) -> None:
    listed = labels[chosen.indices]
    if (listed < 0).any():
        raise Problem(f"--split {chosen.source}: {int((listed < 0).sum())} of the images it names have no label")
    lost = np.setdiff1d(labels[labels >= 0], listed)
    if len(lost):
        raise Problem(
            f"--split {chosen.source}: no image is left of {len(lost)} classes (the first is class number {lost[0]}); "
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
    labelled = pools.indices["labelled"]
    if pools.images.given.ndim == 2:
        raise Problem(f"{HELD_OUT_FLAGS} need one given label per image; these have sets of labels")
    labels = pools.images.given[labelled].numpy()
    spare = np.flatnonzero(np.bincount(labels)[labels] > 1)
    if len(spare) == 0:
        raise Problem(f"{HELD_OUT_FLAGS} need classes with two labelled images or more; these have one each")
    ids = [pools.images.ids[i] for i in labelled[spare]]
    drawn = stratified(labels[spare], ids, held_out_share(share, len(labelled)), seed + CALIBRATION_SEED)
    taken = labelled[spare[drawn]]
    rest = {name: np.setdiff1d(members, taken, assume_unique=True) for name, members in pools.indices.items()}
    return dataclasses.replace(pools, indices=rest, calibration=taken)


def balanced_weights(given: Tensor, num_classes: int) -> Tensor:
    """Class weights (C,) that are inverse to the label counts, with mean 1; a class without labels gets 1."""
    counts = (given > 0).sum(0) if given.ndim == 2 else given[given >= 0].bincount(minlength=num_classes)
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


def read_cards() -> list[SplitCard]:
    paths = sorted((shipped("recipes") / "splits").glob("*.yaml"))
    return [SplitCard.model_validate(load_yaml_file(path)) for path in paths]


def published(ids: Sequence[str], num_classes: int, fraction: float) -> SplitCard | None:
    """The card of a published list for this fraction of this data, if there is one."""
    if num_classes != IMAGENET_CLASSES or not len(ids) or not _TRAIN_NAME.match(ids[0]):
        return None
    return next((card for card in read_cards() if card.data == "imagenet" and card.fraction == fraction), None)


def choose(
    ids: Sequence[str], num_classes: int, fraction: float, split: str | None, with_label: int | None = None
) -> Chosen | None:
    """The images that a list names: --split if given, else the published list; None: draw a stratified split.

    Args:
        ids: of all training images.
        num_classes: C.
        fraction: the share of the labels that is used.
        split: a list of the labelled images.
        with_label: how many of the images have a label; None: all.
    """
    if split is not None:
        found = find(read_list(Path(split)), ids, f"--split {split}", fraction, with_label)
        return Chosen(found, Path(split).name)
    card = published(ids, num_classes, fraction)
    if card is None:
        return None
    return Chosen(find(fetch_list(card), ids, f"the published list {card.name}", fraction, with_label), card.name)


def read_list(path: Path) -> list[str]:
    """Names from a text file, one a line (also .xz and .gz), or from a run's split.json."""
    flag = f"--split {path}"
    try:
        with os.fdopen(open_regular(path), "rb") as stream, PACKED.get(path.suffix, lambda f: f)(stream) as unpacked:
            data: bytes = unpacked.read(LARGEST_LIST + 1)
        if len(data) > LARGEST_LIST:
            raise OSError(f"larger than {size_in_words(LARGEST_LIST)}")
        text = data.decode("utf-8")
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise Problem(f"{flag}: cannot be read as a list of names ({error})") from error
    if path.name.removesuffix(".xz").removesuffix(".gz").endswith(".json"):
        try:
            names = [str(name) for name in json.loads(text)["ids"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Problem(f"{flag}: not the split.json of a run (it has no list `ids`)") from error
    else:
        names = [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        raise Problem(f"{flag}: the list is empty")
    if len(set(names)) < len(names):
        raise Problem(f"{flag}: {len(names) - len(set(names))} names are listed twice")
    return names


def fetch_list(card: SplitCard) -> list[str]:
    """The names of a published list: from the cache, or fetched into it; never drawn anew."""
    place = cache() / "splits" / f"{card.name}.txt"
    if not place.is_file():
        try:
            fetch((RemoteFile(name=place.name, urls=card.urls, sha256=card.sha256),), place.parent)
        except Problem as error:
            reason = str(error).partition("; fetch ")[0]  # the download's own advice does not know --split
            raise Problem(
                f"--fraction {card.fraction:g} of ImageNet means SimCLR's published list, which could not be fetched "
                f"({reason}); fetch {card.urls[0]} elsewhere and put it at {place}, or give it with --split FILE"
            ) from error
    text = place.read_bytes()
    names = text.decode("utf-8").split()
    if hashlib.sha256(text).hexdigest() != card.sha256 or len(names) != card.count:
        raise Problem(
            f"{place} is not the published list {card.name} (its sha256 differs); delete it, and it is fetched again"
        )
    return names


def find(
    names: Sequence[str], ids: Sequence[str], flag: str, fraction: float, with_label: int | None = None
) -> Indices:
    """The positions in `ids` of the names of a list, sorted; a name that is not there is an error."""
    positions, missing = locate(names, ids)
    if missing:
        raise Problem(
            f"{flag} names {len(missing):,} of {len(names):,} images that the data lacks: "
            f"{', '.join(name[:80] for name in missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}"
        )
    indices = np.unique(np.array(positions, dtype=np.int64))
    if len(indices) < len(names):
        raise Problem(f"{flag}: {len(names) - len(indices)} names point to an image that is already listed")
    of = len(ids) if with_label is None else with_label
    share = len(indices) / of
    if fraction < 1 and not 0.5 * fraction <= share <= 2 * fraction:
        images = "images" if of == len(ids) else "labelled images"
        raise Problem(f"{flag} holds {share:.2%} of all {images}, --fraction is {fraction:.2%}; leave out one of them")
    return indices
