"""From what a scan found to image sets: sorted by id, classes numbered, one tree split in two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from finetune_mile.core.problems import Problem
from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.names import Names
from finetune_mile.images.reading import Bytes, Decoded, Picked
from finetune_mile.images.subsets import Indices, stratified

VAL_SHARE = 0.2
MOST_CLASSES = 10**6  # class numbers are below this: each is an output of the network


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """N images as a source lists them, in any order."""

    ids: Sequence[str]
    labels: npt.NDArray[np.int64] | npt.NDArray[np.int8]  # (N,), -1 = unlabelled; or (N, C) of 0 and 1
    encoded: Bytes


def to_set(listing: Listing) -> ImageSet:
    """The image set of a listing, sorted by id."""
    ids, labels, encoded = list(listing.ids), listing.labels, listing.encoded
    names = listing.ids
    if any(a > b for a, b in pairwise(ids)):
        rows = np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
        names, labels, encoded = [ids[i] for i in rows.tolist()], labels[rows], Picked(encoded, rows)
    return ImageSet(
        ids=names if isinstance(names, Names) else Names.of(names),
        given=torch.from_numpy(labels), truth=None, read=Decoded(encoded), encoded=encoded,
    )  # fmt: skip


def take(images: ImageSet, rows: Indices) -> ImageSet:
    """Some images of a set that reads bytes."""
    assert images.encoded is not None
    encoded = Picked(images.encoded, rows)
    where = torch.from_numpy(rows)
    return ImageSet(
        ids=Names.of(images.ids[i] for i in rows.tolist()), given=images.given[where],
        truth=None if images.truth is None else images.truth[where], read=Decoded(encoded), encoded=encoded,
    )  # fmt: skip


def split_in_two(images: ImageSet, what: str) -> tuple[ImageSet, ImageSet]:
    """Training and validation images of one tree: a fifth of each class, the same ones whatever a run's seed."""
    given = images.given
    labels = given if given.ndim == 1 else torch.where((given > 0).any(1), given.argmax(1), -1)
    held_out = stratified(labels.numpy(), images.ids, VAL_SHARE, seed=0)
    rest = np.setdiff1d(np.arange(len(images)), held_out, assume_unique=True)
    if len(rest) == 0 or len(held_out) == 0:
        raise Problem(f"{what}: one image per class cannot be split; add images, or validation images of their own")
    return take(images, rest), take(images, held_out)


def check_classes(what: str, classes: Sequence[str], labels: npt.NDArray[np.int64]) -> None:
    """Refuse what nothing can be learned from.

    Args:
        what: how the message begins, such as `--data folder:photos`.
        classes: C names.
        labels: (N,) of the training images.
    """
    if len(labels) == 0:
        raise Problem(f"{what}: no images")
    if len(classes) < 2:
        raise Problem(f"{what}: only one class ({classes[0]}); two are needed")


def number(names: Sequence[str], classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """(N,) positions in `classes` of each image's class name; all of them must be there."""
    position = {name: i for i, name in enumerate(classes)}
    return np.array([position[name] for name in names], dtype=np.int64)


def multi_hot(sets: Sequence[Sequence[str]], classes: Sequence[str]) -> npt.NDArray[np.int8]:
    """(N, C) of 0 and 1 from sets of class names; all of them must be known."""
    position = {name: i for i, name in enumerate(classes)}
    matrix = np.zeros((len(sets), len(classes)), dtype=np.int8)
    for row, names in zip(matrix, sets, strict=True):
        row[[position[name] for name in names]] = 1
    return matrix


def unique_ids(classes: Sequence[str], files: Sequence[str]) -> list[str]:
    """`<class>/<file name>` for each image; the whole path instead where two images would share that."""
    ids = [f"{label}/{file.rpartition('/')[2]}" for label, file in zip(classes, files, strict=True)]
    return ids if len(set(ids)) == len(ids) else list(files)


def make_data(name: str, classes: Sequence[str], train: ImageSet, val: ImageSet | None, what: str) -> Data:
    """Put the halves together, or make them of one."""
    if val is None:
        train, val = split_in_two(train, what)
    return Data(name=name, classes=tuple(classes), train=train, val=val)
