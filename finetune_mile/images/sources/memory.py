"""Images that a Python caller has in memory, or lists: `finetune_mile.train(data=...)`. N images, C classes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Subset

from finetune_mile.core.in_memory import SCHEME, get_object
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images.pipeline import to_pixels
from finetune_mile.images.readers import Files
from finetune_mile.images.sets import Data, ImageSet, labels_of, to_set, unique_ids
from finetune_mile.images.sources.hf import classes_of, from_splits, values
from finetune_mile.images.splits import make_data

SPLITS = ("train", "val", "test")
TAKEN = "a datasets.Dataset, a torch Dataset of (PIL image, int), a dict of them (train, val, test), or (paths, labels)"
COLUMNS = "call select_columns, rename_column and cast_column first, to leave one image column and one called label"


def load(where: str, flag: str) -> Data:
    """The data of an object that was given from Python.

    Args:
        where: its name behind `python:`.
        flag: with its text, for messages.
    """
    given = get_object(f"{SCHEME}:{where}", flag, "")
    splits = given if isinstance(given, Mapping) else {"train": given}
    if splits and all(isinstance(each, datasets.Dataset) for each in splits.values()):
        plain = {split: each.with_format(None) for split, each in splits.items()}
        return from_splits(where, plain, {}, flag, COLUMNS)
    if isinstance(given, list | tuple):
        return _listed(where, given, flag)
    if "train" not in splits or not all(hasattr(each, "__getitem__") for each in splits.values()):
        raise Problem(f"{flag}: expected {TAKEN}")
    if not set(splits) <= set(SPLITS):
        raise Problem(f"{flag}: the splits are {', '.join(map(str, splits))}; expected {', '.join(SPLITS)}")
    return _items(where, {split: splits[split] for split in SPLITS if split in splits}, flag)


# ------------------------------------------------------------------------------------ paths and labels


def _listed(name: str, given: Sequence[Any], flag: str) -> Data:
    """Two lists: N paths; N labels, each a name, a number, or a list of them; None, "" and -1 are no label."""
    if len(given) != 2 or not all(isinstance(part, Sequence) and not isinstance(part, str) for part in given):
        raise Problem(f"{flag}: expected {TAKEN}")
    paths, labels = given
    if len(paths) != len(labels) or not len(paths):
        raise Problem(f"{flag}: there are {len(paths):,} paths and {len(labels):,} labels; expected one label per path")
    files = [os.path.abspath(Path(path).expanduser()) for path in paths]  # noqa: PTH100  a user's links stay
    several = any(isinstance(label, list | tuple | set) for label in labels)
    cells = [values(label) for label in labels]
    classes = classes_of(chain.from_iterable(cells), flag)
    sets = [[str(value) for value in cell] for cell in cells]
    shared = os.path.commonpath([os.path.dirname(file) for file in files])  # noqa: PTH120  not part of an id
    ids = [os.path.relpath(file, shared) for file in files] if several else unique_ids(sets, files)
    if len(set(ids)) < len(ids):
        twice = next(each for i, each in enumerate(ids) if each in ids[:i])
        raise Problem(f"{flag}: {twice} is listed twice")
    return make_data(name, classes, [to_set(ids, labels_of(sets, classes, several), Files(Path("/"), files))], flag)


# ------------------------------------------------------------------------------------ (image, label) items


class Items:
    """The images of a torch Dataset of (image, label)."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __call__(self, index: int) -> Tensor:
        try:
            return to_pixels(self.items[index][0])
        except OSError as error:  # PIL's too
            raise BadImage(str(error)) from error


def _items(name: str, splits: Mapping[str, Any], flag: str) -> Data:
    labels = {split: _labels(split, items, flag) for split, items in splits.items()}
    train = splits["train"]
    named = getattr(train.dataset if isinstance(train, Subset) else train, "classes", None)
    classes = classes_of({*np.concatenate([*labels.values()]).tolist()} - {-1}, flag)
    if isinstance(named, list | tuple) and len(named) >= len(classes):
        classes = [str(each) for each in named]
    sets = {
        split: ImageSet(
            ids=[f"row-{i:09d}" for i in range(len(items))], given=torch.from_numpy(labels[split]), truth=None,
            content=Items(items),
        )
        for split, items in splits.items()
    }  # fmt: skip
    data = make_data(name, classes, [sets[split] for split in ("train", "val") if split in sets], flag)
    return dataclasses.replace(data, test=sets.get("test"))


def _labels(split: str, items: Any, flag: str) -> npt.NDArray[np.int64]:
    """(N,) labels; from `targets`, which torchvision's data sets have, else from reading every item once."""
    inner: Any = items.dataset if isinstance(items, Subset) else items
    rows = items.indices if isinstance(items, Subset) else range(len(items))
    targets: Any = getattr(inner, "targets", None)
    listed = targets is not None and len(targets) == len(inner) and getattr(inner, "target_transform", None) is None
    try:
        to_pixels(items[0][0])
        labels = (targets[i] for i in rows) if listed else (items[i][1] for i in range(len(items)))
        return np.array([int(label) for label in labels], dtype=np.int64)
    except (BadImage, OSError, TypeError, ValueError, IndexError, KeyError) as error:
        raise Problem(
            f"{flag}: {split} has an item that is not (PIL image, int), without transforms: {error}"
        ) from error
