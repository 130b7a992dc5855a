"""WebDataset shards on a disk, read in place: tar files of `KEY.jpg`, `KEY.cls` and, optionally, `KEY.json`.

`train*.tar` and `val*.tar` are the two halves (or folders `train/` and `val/`); other names are one set that is split.
The class is the number in `.cls`, or the name(s) in `.json` under `label` or `labels`. A class that has only a number
is named after the folder of its keys, if each class has its own folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune_mile.core.files import open_regular, size_in_words
from finetune_mile.core.problems import Problem
from finetune_mile.images.order import Indices
from finetune_mile.images.readers import TarFiles
from finetune_mile.images.scans import ENDINGS, scan_tar
from finetune_mile.images.sets import MOST_CLASSES, Data, ImageSet, labels_of, to_set
from finetune_mile.images.splits import make_data

STATE = "pack.json"  # `finetune-mile pack` writes it beside its shards
VAL_STARTS = ("val", "validation", "test")
LARGEST_NOTE = 2**20  # bytes of one .cls or .json


class Sample(NamedTuple):
    """One image in a shard, and its label."""

    key: str
    ending: str
    number: int  # in .cls; -1 = none
    note: dict[str, Any]  # in .json
    place: tuple[int, int, int]  # shard, offset, size

    def names(self, by_number: dict[int, str]) -> list[str]:
        if "labels" in self.note:
            return [str(name) for name in self.note["labels"]]
        if "label" in self.note and not isinstance(self.note["label"], int):
            return [str(self.note["label"])]
        number = self.number if self.number >= 0 else int(self.note.get("label", -1))
        return [by_number.get(number, str(number))] if number >= 0 else []


def load(where: str, flag: str) -> Data:
    root = Path(where)
    state = read_state(root / STATE) if (root / STATE).is_file() else {}
    if state and not state.get("complete"):
        raise Problem(f"{flag}: packing is incomplete; run the same `finetune-mile pack` again to continue")
    shards = _shards(root, flag)
    halves = [[sample for i, path in enumerate(paths) for sample in _samples(i, path)] for paths in shards]
    if not halves[0]:
        raise Problem(f"{flag}: no images in the shards")
    classes = state.get("classes") or _class_order([sample for half in halves for sample in half])
    sets = (_image_set(paths, half, classes, flag) for paths, half in zip(shards, halves, strict=True))
    return make_data(state.get("name", root.resolve().name), classes, sets, flag)


def read_state(path: Path) -> dict[str, Any]:
    """What `finetune-mile pack` wrote about its shards."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or not isinstance(state.get("classes"), list):
        raise Problem(f"{path}: pack.json is damaged; remove {path.parent} and pack again")
    return state


def _shards(root: Path, flag: str) -> list[list[Path]]:
    """Tar files for training and for validation; or all of them, as one set."""
    paths = sorted([*root.glob("*.tar"), *root.glob("*/*.tar")])
    if not paths:
        raise Problem(f"{flag}: there is no .tar file in it")
    first = {path: (path.name if path.parent == root else path.parent.name) for path in paths}
    train = [path for path in paths if first[path].startswith("train")]
    for start in VAL_STARTS:
        val = [path for path in paths if first[path].startswith(start)]
        if train and val:
            return [train, val]
    return [paths]


def _samples(shard: int, path: Path) -> Iterator[Sample]:
    scan = scan_tar(path)
    offsets, sizes = scan.numbers["offset"].tolist(), scan.numbers["size"].tolist()
    parts: dict[str, dict[str, tuple[int, int]]] = {}  # key to ending to place
    for name, offset, size in zip(scan.names, offsets, sizes, strict=True):
        folder, _, file = name.rpartition("/")
        stem, _, ending = file.partition(".")
        parts.setdefault(f"{folder}/{stem}" if folder else stem, {})[ending] = (offset, size)
    with os.fdopen(open_regular(path), "rb") as stream:

        def content(key: str, ending: str) -> bytes | None:
            if ending not in parts[key]:
                return None
            offset, size = parts[key][ending]
            if size > LARGEST_NOTE:
                raise Problem(f"{path}: {key}.{ending} is larger than {size_in_words(LARGEST_NOTE)}")
            stream.seek(offset)
            return stream.read(size)

        for key, places in parts.items():
            image = next((ending for ending in places if f".{ending}".lower().endswith(ENDINGS)), None)
            if image is not None:
                number, note = _number(content(key, "cls"), path, key), _note(content(key, "json"), path, key)
                yield Sample(key, image, number, note, (shard, *places[image]))


def _number(text: bytes | None, path: Path, key: str) -> int:
    if text is None:
        return -1
    text = text.strip()
    if not text.isdigit():
        raise Problem(f"{path}: {key}.cls holds {text[:20].decode(errors='replace')!r}, not a class number")
    if len(text) > 18 or int(text) >= MOST_CLASSES:
        raise Problem(f"{path}: {key}.cls holds {text[:20].decode()}: class numbers go up to {MOST_CLASSES - 1:,}")
    return int(text)


def _note(text: bytes | None, path: Path, key: str) -> dict[str, Any]:
    try:
        note = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path}: {key}.json is not JSON ({error})") from error
    return note if isinstance(note, dict) else {}


def _class_order(samples: list[Sample]) -> list[str]:
    """Class names: of the .json files, sorted; else the folders of the keys; else the numbers."""
    folders: dict[int, set[str]] = {}
    for sample in samples:
        folders.setdefault(sample.number, set()).add(sample.key.rpartition("/")[0])
    count = max(folders) + 1
    owners = {next(iter(some)) for some in folders.values() if len(some) == 1}
    own = min(folders) == 0 and len(owners) == len(folders) == count and "" not in owners
    numbered = [next(iter(folders[k])) if own else str(k) for k in range(count)]
    by_number = dict(enumerate(numbered))
    used = {name for sample in samples for name in sample.names(by_number)}
    return numbered if used <= set(numbered) else sorted(used)


def _image_set(paths: list[Path], samples: list[Sample], classes: list[str], flag: str) -> ImageSet:
    by_number = dict(enumerate(classes))
    names = [sample.names(by_number) for sample in samples]
    unknown = sorted({name for some in names for name in some} - set(classes))
    if unknown:
        raise Problem(f"{flag}: label {unknown[0]!r} in the shards is none of the {len(classes)} classes")
    several = any("labels" in sample.note for sample in samples)
    ids = []
    for sample, some in zip(samples, names, strict=True):
        file = f"{sample.key}.{sample.ending}"
        by_class = f"{some[0]}/{file.rpartition('/')[2]}" if some and not several else file
        ids.append(str(sample.note.get("id") or by_class))
    places: Indices = np.array([sample.place for sample in samples], dtype=np.int64).reshape(-1, 3)
    encoded = TarFiles([str(path) for path in paths], *places.T.copy())
    return to_set(ids, labels_of(names, classes, several), encoded)
