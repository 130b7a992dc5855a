"""A CSV file that lists images: `file,label`, or `file,labels` with several separated by `;`.

Optional columns: `split` (train, val; without it a fifth of each class is held out) and `truth` (the true label set,
separated by `;`). Paths are relative to the CSV file, or to a folder beside it that is named like the split.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from finetune_mile.core.files import open_text
from finetune_mile.core.problems import Problem
from finetune_mile.images.assembly import Listing, check_classes, make_data, multi_hot, number, to_set, unique_ids
from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.reading import Files
from finetune_mile.images.sources.options import read_options

TRAIN, VAL = ("train", "training"), ("val", "valid", "validation", "test")
Row = dict[str, str]


def load(where: str) -> Data:
    """Read the list.

    Args:
        where: the file; `FILE?separator=|` where several labels are separated by something else than `;`.
    """
    place, options = read_options("csv", where, ("separator",))
    path, what = Path(place), f"--data csv:{place}"
    separator = options.get("separator", ";")
    rows = read_rows(path, ("file",), what)
    several = "labels" in rows[0]
    if not several and "label" not in rows[0]:
        raise Problem(f"{what}: the column label (or labels) is missing; there are {', '.join(rows[0])}")
    sets = [split_labels(row["labels"], separator) if several else [row["label"].strip()] for row in rows]
    truths = [split_labels(row["truth"], separator) for row in rows] if "truth" in rows[0] else None
    for line, names in enumerate(sets, start=2):
        if not several and not names[0]:
            raise Problem(f"{what} line {line}: the label is empty")
    classes = sorted({name for names in [*sets, *(truths or ())] for name in names})
    groups = _groups(rows, what)
    halves = [_half(path, rows, sets, truths, group, classes, several) for group in groups]
    check_classes(what, classes, np.arange(len(rows)))
    return make_data(path.stem, classes, halves[0], halves[1] if len(halves) > 1 else None, what)


def read_rows(path: Path, wanted: Sequence[str], what: str) -> list[Row]:
    """The rows of a CSV file with a header; missing file, column or cell is a sentence."""
    try:
        with open_text(path, "utf-8-sig") as stream:
            table = csv.DictReader(stream, strict=True)
            header = [name.strip() for name in table.fieldnames or ()]
            table.fieldnames = header
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Problem(f"{what}: cannot be read as CSV ({error})") from error
    for column in wanted:
        if column not in header:
            raise Problem(f"{what}: the column {column} is missing; the header is {','.join(header) or 'empty'}")
    if not rows:
        raise Problem(f"{what}: no line below the header")
    for line, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise Problem(f"{what} line {line}: has not {len(header)} cells as the header has")
    return rows


def split_labels(text: str, separator: str = ";") -> list[str]:
    """`a;b` to its parts, without blanks and empty ones."""
    return [part.strip() for part in text.split(separator) if part.strip()]


def _groups(rows: list[Row], what: str) -> list[list[int]]:
    """Row numbers of train and val, or of everything."""
    if "split" not in rows[0]:
        return [list(range(len(rows)))]
    train = [i for i, row in enumerate(rows) if row["split"].strip() in TRAIN]
    names = {row["split"].strip() for row in rows}
    chosen = next((name for name in VAL if name in names), None)
    val = [i for i, row in enumerate(rows) if row["split"].strip() == chosen]
    unknown = sorted(names - set(TRAIN) - set(VAL))
    if unknown:
        raise Problem(f"{what}: split {unknown[0]!r} is neither train nor val")
    if not train or not val:
        raise Problem(f"{what}: the column split names no {'val' if train else 'train'} image; add some, or drop it")
    return [train, val]


def _half(
    path: Path,
    rows: list[Row],
    sets: list[list[str]],
    truths: list[list[str]] | None,
    group: list[int],
    classes: list[str],
    several: bool,
) -> ImageSet:
    files = [rows[i]["file"].strip() for i in group]
    root = path.parent
    split = rows[group[0]].get("split", "").strip()
    if split and not (root / files[0]).exists() and (root / split / files[0]).exists():
        root = root / split
    chosen = [sets[i] for i in group]
    ids = files if several else unique_ids([names[0] for names in chosen], files)
    if len(set(ids)) < len(ids):
        twice = next(name for i, name in enumerate(ids) if name in ids[:i])
        raise Problem(f"--data csv:{path}: {twice} is listed twice in the same split")
    labels = multi_hot(chosen, classes) if several else number([names[0] for names in chosen], classes)
    images = to_set(Listing(ids=ids, labels=labels, encoded=Files(root, files)))
    if truths is None:
        return images
    by_id = {name: truths[i] for name, i in zip(ids, group, strict=True)}
    matrix = multi_hot([by_id[name] for name in images.ids], classes)
    return dataclasses.replace(images, truth=torch.from_numpy(matrix).bool())
