"""True label sets from elsewhere, joined by file name: ReaL, human counts, a CSV of sets. N images, C classes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from finetune_mile.core.files import open_regular
from finetune_mile.core.problems import Problem
from finetune_mile.images.name_lists import locate
from finetune_mile.images.sets import Data, multi_hot
from finetune_mile.images.sources import check_truth
from finetune_mile.images.sources.imagenet import VAL_NAME, real_labels, synsets
from finetune_mile.images.sources.lists import read_rows, split_labels

Sets = npt.NDArray[np.bool_]


def with_truth(data: Data, spec: str) -> Data:
    """`data` with true label sets for its validation images.

    Args:
        data: from a source.
        spec: `real`; `csv:FILE` (columns file,labels); or `counts:FILE.npy,INDEX.csv,0.1` (see `_from_counts`).
    """
    check_truth(spec)
    kind, _, where = spec.partition(":")
    if kind == "real":
        return with_real(data, required=True)
    return _from_counts(data, spec, *where.split(",")) if kind == "counts" else _from_csv(data, spec, Path(where))


def with_real(data: Data, *, required: bool) -> Data:
    """ReaL's label sets for ImageNet's validation images.

    Labels outside of the data's classes (a subset of ImageNet) are left out; an image whose set is then empty does not
    count in set metrics, as in the ReaL paper.

    Args:
        data: its classes are synsets, or 1,000 of any name in ImageNet's order.
        required: raise if this is other data; else return it unchanged.
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
            raise Problem("truth real: expected ImageNet's validation images, named ILSVRC2012_val_00000001.JPEG")
        return data
    truth = np.zeros((len(keys), len(data.classes)), dtype=bool)
    pairs = [(i, columns[c]) for i, key in enumerate(keys) if key for c in sets[key[0]] if columns[c] >= 0]
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    truth[rows[:, 0], rows[:, 1]] = True
    return _filled(data, truth) if required or truth.any() else data


def _from_csv(data: Data, spec: str, path: Path) -> Data:
    """Sets of class names, one a file; images that are not listed have no known set."""
    rows = read_rows(path, ("file", "labels"), f"truth {spec}")
    sets = [split_labels(row["labels"]) for row in rows]
    unknown = sorted({name for names in sets for name in names} - set(data.classes))
    if unknown:
        raise Problem(f"truth {spec}: {len(unknown)} labels are not classes of the data: {', '.join(unknown[:5])}")
    return _joined(data, spec, [row["file"] for row in rows], multi_hot(sets, data.classes) > 0)


def _from_counts(data: Data, spec: str, counts_file: str, index_file: str, share: str) -> Data:
    """How many people chose each class, as in CIFAR-10H; a class is true from a share of the choices on.

    Args:
        data: its classes, sorted, are the columns.
        spec: for messages.
        counts_file: an .npy of (M, C).
        index_file: a CSV with a column `file`; its line i belongs to row i.
        share: the least share of the choices that makes a class true.
    """
    try:
        with os.fdopen(open_regular(counts_file), "rb") as stream:
            counts = np.lib.format.read_array(stream, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise Problem(f"truth {spec}: {counts_file} cannot be read as .npy ({error})") from error
    files = [row["file"] for row in read_rows(Path(index_file), ("file",), f"truth {spec}: {Path(index_file).name}")]
    if counts.shape != (len(files), len(data.classes)):
        raise Problem(
            f"truth {spec}: the counts are {counts.shape}, expected {len(files)} files in {Path(index_file).name} x "
            f"{len(data.classes)} classes"
        )
    return _joined(data, spec, files, counts / np.maximum(counts.sum(1, keepdims=True), 1) >= float(share))


def _joined(data: Data, spec: str, files: Sequence[str], sets: Sets) -> Data:
    """Give each validation image the label set (M, C) of its file. A file may also be a training image."""
    positions, missing = locate(files, data.val.ids)
    _, nowhere = locate(missing, data.train.ids)
    if nowhere:
        raise Problem(f"truth {spec}: {len(nowhere)} files are not in the data: {', '.join(nowhere[:3])}")
    rows = np.array(positions, dtype=np.int64)
    truth = np.zeros((len(data.val), len(data.classes)), dtype=bool)
    np.logical_or.at(truth, rows[rows >= 0], sets[rows >= 0])
    return _filled(data, truth)


def _filled(data: Data, truth: Sets) -> Data:
    if not truth.any():
        raise Problem("truth: none of the validation images has a label set; its file names must be those of the data")
    return dataclasses.replace(data, val=dataclasses.replace(data.val, truth=torch.from_numpy(truth)))
