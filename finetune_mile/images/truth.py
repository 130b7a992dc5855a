"""True label sets from elsewhere, joined by file name: ReaL, human counts, a CSV of sets. N images, C classes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from finetune_mile.core.files import open_regular
from finetune_mile.core.problems import Problem
from finetune_mile.images.index import Data, locate
from finetune_mile.images.sources.imagenet import VAL_NAME, real_labels, synsets
from finetune_mile.images.sources.lists import read_rows, split_labels


def with_truth(data: Data, spec: str) -> Data:
    """`data` with true label sets for its validation images.

    Args:
        data: what a source gave.
        spec: `real`; `csv:FILE` (columns file,labels); or `counts:FILE.npy,INDEX.csv,0.1` (see `from_counts`).
    """
    kind, _, where = spec.partition(":")
    if kind == "real" and not where:
        return with_real(data, required=True)
    if kind == "csv":
        rows = read_rows(Path(where), ("file", "labels"), f"truth {spec}")
        return from_sets(data, [row["file"] for row in rows], [split_labels(row["labels"]) for row in rows], spec)
    if kind == "counts":
        parts = where.split(",")
        return from_counts(data, Path(parts[0]), Path(parts[1]), float(parts[2]), spec)
    raise Problem(f"truth {spec}: write real, csv:FILE, or counts:FILE.npy,INDEX.csv,0.1")


def with_real(data: Data, *, required: bool) -> Data:
    """ReaL's label sets for ImageNet's validation images.

    Labels outside of the data's classes (a subset of ImageNet) are left out; an image whose set is then empty does not
    count in set metrics, as in the ReaL paper.

    Args:
        data: its classes are synsets, or 1,000 of any name in ImageNet's order.
        required: whether other data is a problem, or stays as it is.
    """
    order = synsets()
    position = {name: i for i, name in enumerate(data.classes)}
    columns = [position.get(name, -1) for name in order]
    if max(columns) < 0 and len(order) == len(data.classes):
        columns = list(range(len(order)))
    sets = real_labels()
    keys = [VAL_NAME.search(name) for name in data.val.ids]
    if max(columns) < 0 or not keys or any(key is None or key[0] not in sets for key in keys):
        if required:
            raise Problem("truth real: is for ImageNet's validation images, named ILSVRC2012_val_00000001.JPEG")
        return data
    truth = torch.zeros(len(keys), len(data.classes), dtype=torch.bool)
    pairs = [(i, columns[c]) for i, key in enumerate(keys) if key for c in sets[key[0]] if columns[c] >= 0]
    where = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    truth[where[:, 0], where[:, 1]] = True
    return _filled(data, truth) if required or bool(truth.any()) else data


def from_sets(data: Data, files: Sequence[str], sets: Sequence[Sequence[str]], spec: str) -> Data:
    """Sets of class names, one a file; images that are not listed have no known set."""
    position = {name: i for i, name in enumerate(data.classes)}
    unknown = sorted({name for names in sets for name in names} - set(position))
    if unknown:
        raise Problem(f"truth {spec}: {len(unknown)} labels are no class of the data: {', '.join(unknown[:5])}")
    truth = torch.zeros(len(data.val), len(data.classes), dtype=torch.bool)
    for index, names in zip(_join(data, files, spec), sets, strict=True):
        if index >= 0:
            truth[index, [position[name] for name in names]] = True
    return _filled(data, truth)


def from_counts(data: Data, counts_file: Path, index_file: Path, share: float, spec: str) -> Data:
    """How many people chose each class, as in CIFAR-10H; a class is true from a share of the choices on.

    Args:
        data: its classes, sorted, are the columns.
        counts_file: an .npy of (M, C).
        index_file: a CSV with a column `file`; its line i belongs to row i.
        share: the least share of the choices that makes a class true.
        spec: for messages.
    """
    try:
        with os.fdopen(open_regular(counts_file), "rb") as stream:
            counts = np.lib.format.read_array(stream, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise Problem(f"truth {spec}: {counts_file} cannot be read as .npy ({error})") from error
    files = [row["file"] for row in read_rows(index_file, ("file",), f"truth {spec}: {index_file.name}")]
    if counts.shape != (len(files), len(data.classes)):
        raise Problem(
            f"truth {spec}: the counts are {counts.shape}, wanted are {len(files)} files in {index_file.name} x "
            f"{len(data.classes)} classes"
        )
    rows = np.array(_join(data, files, spec), dtype=np.int64)
    chosen = counts / np.maximum(counts.sum(1, keepdims=True), 1) >= share
    truth = np.zeros((len(data.val), len(data.classes)), dtype=bool)
    truth[rows[rows >= 0]] = chosen[rows >= 0]
    return _filled(data, torch.from_numpy(truth))


def _join(data: Data, files: Sequence[str], spec: str) -> list[int]:
    """Where each file is among the validation images; -1 = among the training images instead."""
    found, missing = locate(files, data.val.ids)
    if missing:
        _, nowhere = locate(missing, data.train.ids)
        if nowhere:
            raise Problem(f"truth {spec}: {len(nowhere)} files are not in the data: {', '.join(nowhere[:3])}")
    return found


def _filled(data: Data, truth: Tensor) -> Data:
    if not bool(truth.any()):
        raise Problem("truth: none of the validation images has a label set; do the file names belong to this data?")
    return dataclasses.replace(data, val=dataclasses.replace(data.val, truth=truth))
