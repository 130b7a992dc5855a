"""Sources whose images are listed in text files: any CSV file, CelebA and WebVision 1.0 as published."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from finetune_mile.core.files import open_text
from finetune_mile.core.problems import Problem
from finetune_mile.images.readers import Files
from finetune_mile.images.sets import Data, ImageSet, labels_of, multi_hot, to_set, unique_ids
from finetune_mile.images.sources import read_options
from finetune_mile.images.splits import make_data

# ------------------------------------------------------------------------------------ csv:FILE

TRAIN, VAL = ("train", "training"), ("val", "valid", "validation", "test")


def load_csv(where: str, flag: str) -> Data:
    """Read a CSV file with the columns `file,label`, or `file,labels` with several labels separated by `;`.

    An image with an empty label is unlabelled. Optional columns: `split` (train, val, test; without it a fifth of
    each class is held out) and `truth` (the true label set, separated by `;`). Paths are relative to the CSV file, or
    to a folder beside it that is named like the split.

    Args:
        where: the file; `FILE?separator=|` where several labels are separated by something else than `;`.
        flag: with its text, for messages.
    """
    place, options = read_options(where, ("separator",), flag)
    path, flag = Path(place), flag.partition("?")[0]
    separator = options.get("separator", ";")
    rows = read_rows(path, ("file",), flag)
    several = "labels" in rows[0]
    if not several and "label" not in rows[0]:
        raise Problem(f"{flag}: the column label (or labels) is missing; there are {', '.join(rows[0])}")
    sets = [
        split_labels(row["labels"], separator) if several else [name for name in [row["label"].strip()] if name]
        for row in rows
    ]
    others = [mark for mark in "|," if sum(mark in row.get("labels", "") for row in rows) > len(rows) / 3]
    if others and "separator" not in options and not any(len(names) > 1 for names in sets):
        raise Problem(
            f"{flag}: no cell of `labels` has the separator ';', and many have {others[0]!r}. Write "
            f"{f'csv:{place}?separator={others[0]}'!r}, or {f'csv:{place}?separator=;'!r} if each is one label"
        )
    truths = [split_labels(row["truth"], separator) for row in rows] if "truth" in rows[0] else None
    classes = sorted({name for names in [*sets, *(truths or ())] for name in names})

    def half(group: list[int]) -> ImageSet:
        files = [rows[i]["file"].strip() for i in group]
        root = path.parent
        split = rows[group[0]].get("split", "").strip()
        if split and not (root / files[0]).exists() and (root / split / files[0]).exists():
            root = root / split
        chosen = [sets[i] for i in group]
        ids = files if several else unique_ids(chosen, files)
        if len(set(ids)) < len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise Problem(f"{flag}: {twice} is listed twice in the same split")
        images = to_set(ids, labels_of(chosen, classes, several), Files(root, files))
        if truths is None:
            return images
        truth = {name: truths[i] for name, i in zip(ids, group, strict=True)}
        matrix = multi_hot([truth[name] for name in images.ids], classes)
        return dataclasses.replace(images, truth=torch.from_numpy(matrix).bool())

    *sets_of_images, test = [half(group) if group else None for group in _groups(rows, flag)]
    data = make_data(path.stem, classes, [images for images in sets_of_images if images is not None], flag)
    return data if test is None else dataclasses.replace(data, test=test)


def read_rows(path: Path, columns: Sequence[str], flag: str) -> list[dict[str, str]]:
    """The rows of a CSV file with a header; a missing file, column or cell raises."""
    try:
        with open_text(path, "utf-8-sig") as stream:
            table = csv.DictReader(stream, strict=True)
            header = [name.strip() for name in table.fieldnames or ()]
            table.fieldnames = header
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Problem(f"{flag}: cannot be read as CSV ({error})") from error
    for column in columns:
        if column not in header:
            raise Problem(f"{flag}: the column {column} is missing; the header is {','.join(header) or 'empty'}")
    if not rows:
        raise Problem(f"{flag}: no line below the header")
    for line, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise Problem(f"{flag} line {line}: expected {len(header)} columns as in the header")
    return rows


def split_labels(text: str, separator: str = ";") -> list[str]:
    """`a;b` to its parts, without blanks and empty ones."""
    return [part.strip() for part in text.split(separator) if part.strip()]


def _groups(rows: list[dict[str, str]], flag: str) -> list[list[int]]:
    """Row numbers of train, val and test, or of everything and no test; test rows are for validation without val."""
    if "split" not in rows[0]:
        return [list(range(len(rows))), []]
    splits = [row["split"].strip() for row in rows]
    unknown = sorted(set(splits) - set(TRAIN) - set(VAL))
    if unknown:
        raise Problem(f"{flag}: split {unknown[0]!r} is not train, val or test")
    chosen = next((name for name in VAL if name in splits), None)
    train = [i for i, split in enumerate(splits) if split in TRAIN]
    val = [i for i, split in enumerate(splits) if split == chosen]
    if not train or not val:
        raise Problem(f"{flag}: the column split names no {'val' if train else 'train'} image; add some, or drop it")
    return [train, val, [] if chosen == "test" else [i for i, split in enumerate(splits) if split == "test"]]


# ------------------------------------------------------------------------------------ celeba:DIR

PARTITION = {"train": "0", "val": "1", "test": "2"}


def load_celeba(where: str, flag: str) -> Data:
    """Read `list_attr_celeba.txt`, `list_eval_partition.txt` and `img_align_celeba/`; each image has 40 labels.

    Args:
        where: the directory; `DIR?val=test` evaluates on the test partition instead of the validation one.
        flag: with its text, for messages.
    """
    place, options = read_options(where, ("val",), flag)
    root = Path(place)
    val = options.get("val", "val")
    if val not in ("val", "test"):
        raise Problem(f"{flag}: val={val} is neither val nor test")

    def find(name: str, folder: str) -> Path:
        places = (root / name, root / folder / name)
        if not any(path.exists() for path in places):
            raise Problem(f"{flag}: {name} is missing (searched . and {folder})")
        return next(path for path in places if path.exists())

    attributes = read_lines(find("list_attr_celeba.txt", "Anno"), flag)
    classes = attributes[1].split() if len(attributes) > 2 else []
    if len(classes) < 2:
        raise Problem(f"{flag}: list_attr_celeba.txt holds no attributes")
    table = {}
    for line_number, line in enumerate(attributes[2:], start=3):
        file, *values = line.split()
        if len(values) != len(classes) or not set(values) <= {"1", "-1"}:
            raise Problem(
                f"{flag}: list_attr_celeba.txt line {line_number}: expected {len(classes)} values of 1 and -1"
            )
        table[file] = np.array(values, dtype=np.int8) > 0
    pairs = [line.split() for line in read_lines(find("list_eval_partition.txt", "Eval"), flag)]
    if any(len(pair) != 2 for pair in pairs):
        raise Problem(f"{flag}: list_eval_partition.txt has a line that is not a file and a number; fetch it again")
    parts = dict(pairs)
    unknown = sorted(set(parts) - set(table))
    if unknown:
        raise Problem(f"{flag}: list_eval_partition.txt names {len(unknown)} files without attributes ({unknown[0]})")
    folder = find("img_align_celeba", "Img")
    halves = []
    for part in ("train", val):
        files = sorted(file for file, partition in parts.items() if partition == PARTITION[part])
        if not files:
            raise Problem(f"{flag}: list_eval_partition.txt has no image of the part {part}")
        labels = np.stack([table[file] for file in files]).astype(np.int8)
        halves.append(to_set(files, labels, Files(folder, files)))
    return make_data("celeba", classes, halves, flag)


def read_lines(path: Path, flag: str, advice: str = "") -> list[str]:
    try:
        with open_text(path) as stream:
            return [line for line in stream.read().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{flag}: {path} cannot be read ({error}){advice}") from error


# ------------------------------------------------------------------------------------ webvision:DIR

PARTS = ("google", "flickr")


def load_webvision(where: str, flag: str) -> Data:
    """Read the file lists in `info/`; the images are in `google/`, `flickr/` and `val_images*/`.

    Args:
        where: the directory; `DIR?classes=50&parts=google` is the usual mini-WebVision.
        flag: with its text, for messages.
    """
    place, options = read_options(where, ("classes", "parts"), flag)
    root = Path(place)
    parts = options.get("parts", ",".join(PARTS)).split(",")
    wrong = sorted(set(parts) - set(PARTS))
    if wrong:
        raise Problem(f"{flag}: parts={wrong[0]} is neither google nor flickr")
    info = root / "info" if (root / "info").is_dir() else root
    advice = "; expected WebVision 1.0 with its folder info/"
    synsets = [line.split(maxsplit=1)[0] for line in read_lines(info / "synsets.txt", flag, advice)]
    limit = options.get("classes", str(len(synsets)))
    if not limit.isdecimal() or len(limit) > 9 or not 2 <= int(limit) <= len(synsets):
        raise Problem(f"{flag}: classes={limit} must be from 2 to {len(synsets)}")

    def listed(name: str) -> list[tuple[str, int]]:
        """The (file, class) pairs of a list, of the classes that are used."""
        pairs = []
        for line_number, line in enumerate(read_lines(info / name, flag, advice), start=1):
            file, _, label = line.rpartition(" ")
            if not file or not label.isdigit():
                raise Problem(f"{flag}: {name} line {line_number} is not `file number`")
            if int(label) < int(limit):
                pairs.append((file, int(label)))
        return pairs

    def image_set(folder: Path, pairs: list[tuple[str, int]]) -> ImageSet:
        files = [file for file, _ in pairs]
        return to_set(files, np.array([label for _, label in pairs], dtype=np.int64), Files(folder, files))

    train = [pair for part in parts for pair in listed(f"train_filelist_{part}.txt")]
    val = listed("val_filelist.txt")
    val_folder = next((d for d in ("val_images", "val_images_256", "val") if (root / d).is_dir()), None)
    if val_folder is None:
        raise Problem(f"{flag}: there is no val_images/ (nor val_images_256/)")
    if not train:
        raise Problem(f"{flag}: no images")
    sets = (image_set(root, train), image_set(root / val_folder, val))
    return make_data(root.resolve().name, synsets[: int(limit)], sets, flag)
