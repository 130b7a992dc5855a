"""CelebA as published: `list_attr_celeba.txt`, `list_eval_partition.txt` and `img_align_celeba/`; 40 labels at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finetune_mile.core.files import open_text
from finetune_mile.core.problems import Problem
from finetune_mile.images.assembly import Listing, make_data, to_set
from finetune_mile.images.imageset import Data
from finetune_mile.images.reading import Files
from finetune_mile.images.sources.options import read_options

PARTITION = {"train": "0", "val": "1", "test": "2"}


def load(where: str) -> Data:
    """Read the attribute list.

    Args:
        where: the directory; `DIR?val=test` evaluates on the test partition instead of the validation one.
    """
    place, options = read_options("celeba", where, ("val",))
    root, what = Path(place), f"--data celeba:{where}"
    val = options.get("val", "val")
    if val not in ("val", "test"):
        raise Problem(f"{what}: val={val} is neither val nor test")
    attributes = _lines(_find(root, "list_attr_celeba.txt", ("", "Anno"), what), what)
    classes = attributes[1].split() if len(attributes) > 2 else []
    table = {}
    for number, line in enumerate(attributes[2:], start=3):
        file, *values = line.split()
        if len(values) != len(classes) or not set(values) <= {"1", "-1"}:
            raise Problem(f"{what}: list_attr_celeba.txt line {number} has not {len(classes)} values of 1 and -1")
        table[file] = np.array(values, dtype=np.int8) > 0
    if len(classes) < 2 or not table:
        raise Problem(f"{what}: list_attr_celeba.txt holds no attributes")
    parts = dict(line.split() for line in _lines(_find(root, "list_eval_partition.txt", ("", "Eval"), what), what))
    unknown = sorted(set(parts) - set(table))
    if unknown:
        raise Problem(f"{what}: list_eval_partition.txt names {len(unknown)} files without attributes ({unknown[0]})")
    folder = _find(root, "img_align_celeba", ("", "Img"), what)
    halves = []
    for part in ("train", val):
        files = sorted(file for file, number in parts.items() if number == PARTITION[part])
        if not files:
            raise Problem(f"{what}: list_eval_partition.txt has no image of the part {part}")
        labels = np.stack([table[file] for file in files]).astype(np.int8)
        halves.append(to_set(Listing(ids=files, labels=labels, encoded=Files(folder, files))))
    return make_data("celeba", classes, halves[0], halves[1], what)


def _find(root: Path, name: str, folders: tuple[str, ...], what: str) -> Path:
    found = next((root / f / name for f in folders if (root / f / name).exists()), None)
    if found is None:
        raise Problem(f"{what}: {name} is missing (looked in {' and '.join(f or '.' for f in folders)})")
    return found


def _lines(path: Path, what: str) -> list[str]:
    try:
        with open_text(path) as stream:
            return [line for line in stream.read().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{what}: {path} cannot be read ({error})") from error
