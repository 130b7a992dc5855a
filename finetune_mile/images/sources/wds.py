"""WebDataset shards on a disk, read in place: tar files of `KEY.jpg`, `KEY.cls` and, optionally, `KEY.json`.

`train*.tar` and `val*.tar` are the two halves (or folders `train/` and `val/`); other names are one set that is split.
The class is the number in `.cls`, or the name(s) in `.json` under `label` or `labels`. A class that has only a number
is called by the folder of its keys, where each class has one of its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune_mile.core.files import open_regular, size_in_words
from finetune_mile.core.problems import Problem
from finetune_mile.images.index import ENDINGS, MOST_CLASSES, Data, ImageSet, TarFiles, labels_of, to_set
from finetune_mile.images.splits import make_data
from finetune_mile.images.tars import scan_tar

STATE = "pack.json"  # `finetune-mile pack` writes it beside its shards
VAL_STARTS = ("val", "validation", "test")
LARGEST_NOTE = 2**20  # bytes of one .cls or .json


def load(where: str) -> Data:
    """Index the shards at `where`."""
    root, flag = Path(where), f"--data wds:{where}"
    state = read_state(root / STATE) if (root / STATE).is_file() else {}
    if state and not state.get("complete"):
        raise Problem(f"{flag}: packing is incomplete; run the same `finetune-mile pack` again to continue")
    train_paths, val_paths = shards(root, flag)
    train = Half(train_paths, flag)
    if not train.keys:
        raise Problem(f"{flag}: no images in the shards")
    val = Half(val_paths, flag) if val_paths else None
    classes = state.get("classes") or class_order([train, val] if val else [train])
    name = state.get("name", root.resolve().name)
    return make_data(name, classes, train.to_set(classes), val.to_set(classes) if val else None, flag)


def read_state(path: Path) -> dict[str, Any]:
    """The content of pack.json."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or not isinstance(state.get("classes"), list):
        raise Problem(f"{path}: pack.json is damaged; remove {path.parent} and pack again")
    return state


def shards(root: Path, flag: str) -> tuple[list[Path], list[Path]]:
    """Tar files for training, and for validation (none: one set)."""
    found = sorted([*root.glob("*.tar"), *root.glob("*/*.tar")])
    if not found:
        raise Problem(f"{flag}: there is no .tar file in it")
    first = {path: (path.name if path.parent == root else path.parent.name) for path in found}
    for start in VAL_STARTS:
        val = [path for path in found if first[path].startswith(start)]
        train = [path for path in found if first[path].startswith("train")]
        if train and val:
            return train, val
    return found, []


class Half:
    """The samples of some shards: where each image is, and its label."""

    def __init__(self, paths: list[Path], flag: str) -> None:
        """Index every shard.

        Args:
            paths: tar files.
            flag: how a message begins.
        """
        self.flag = flag
        self.keys: list[str] = []
        self.endings: list[str] = []
        self.notes: list[dict[str, Any]] = []  # of .json
        self.numbers: list[int] = []  # of .cls; -1 = none
        places: list[tuple[int, int, int]] = []
        for which, path in enumerate(paths):
            for key, parts in _samples(path).items():
                ending = next((e for e in parts if f".{e}".lower().endswith(ENDINGS)), None)
                if ending is None:
                    continue
                self.keys.append(key)
                self.endings.append(ending)
                self.numbers.append(_number(parts.get("cls"), path, key))
                self.notes.append(_note(parts.get("json"), path, key))
                offset, size = parts[ending][0], parts[ending][1]
                places.append((which, offset, size))
        table: npt.NDArray[np.int64] = np.array(places, dtype=np.int64).reshape(-1, 3)
        self.encoded = TarFiles([str(p) for p in paths], *table.T.copy())

    def names(self, index: int, by_number: dict[int, str]) -> list[str]:
        """The class names of a sample."""
        note = self.notes[index]
        if "labels" in note:
            return [str(name) for name in note["labels"]]
        if "label" in note and not isinstance(note["label"], int):
            return [str(note["label"])]
        known = self.numbers[index] if self.numbers[index] >= 0 else int(note.get("label", -1))
        return [by_number.get(known, str(known))] if known >= 0 else []

    @property
    def several(self) -> bool:
        """Do images have sets of labels?"""
        return any("labels" in note for note in self.notes)

    def to_set(self, classes: list[str]) -> ImageSet:
        """The image set of these samples."""
        by_number = dict(enumerate(classes))
        names = [self.names(i, by_number) for i in range(len(self.keys))]
        unknown = sorted({name for some in names for name in some} - set(classes))
        if unknown:
            raise Problem(f"{self.flag}: label {unknown[0]!r} in the shards is none of the {len(classes)} classes")
        ids = []
        for key, ending, note, some in zip(self.keys, self.endings, self.notes, names, strict=True):
            file = f"{key.rpartition('/')[2]}.{ending}"
            ids.append(str(note.get("id") or (f"{some[0]}/{file}" if some and not self.several else f"{key}.{ending}")))
        return to_set(ids, labels_of(names, classes, self.several), self.encoded)


def class_order(halves: list[Half]) -> list[str]:
    """Class names: of the .json files, sorted; else the folders of the keys; else the numbers."""
    folders: dict[int, set[str]] = {}
    for half in halves:
        for key, known in zip(half.keys, half.numbers, strict=True):
            folders.setdefault(known, set()).add(key.rpartition("/")[0])
    top = max(folders)
    owners = [next(iter(found)) for found in folders.values() if len(found) == 1]
    own = min(folders) == 0 and len(owners) == top + 1 == len(set(owners)) and "" not in owners
    by_number = {k: next(iter(folders[k])) if own else str(k) for k in range(top + 1)}
    used = {name for half in halves for i in range(len(half.keys)) for name in half.names(i, by_number)}
    numbered = [by_number[k] for k in range(top + 1)]
    return numbered if used <= set(numbered) else sorted(used)


def _samples(path: Path) -> dict[str, dict[str, tuple[int, int, bytes]]]:
    """Key to ending to (offset, size, content of .cls and .json)."""
    scan = scan_tar(path)
    found: dict[str, dict[str, tuple[int, int, bytes]]] = {}
    with os.fdopen(open_regular(path), "rb") as stream:
        for name, offset, size in zip(
            scan.names, scan.numbers["offset"].tolist(), scan.numbers["size"].tolist(), strict=True
        ):
            folder, _, file = name.rpartition("/")
            stem, _, ending = file.partition(".")
            content = b""
            if ending in ("cls", "json"):
                if size > LARGEST_NOTE:
                    raise Problem(f"{path}: {name} is larger than {size_in_words(LARGEST_NOTE)}")
                stream.seek(offset)
                content = stream.read(size)
            found.setdefault(f"{folder}/{stem}" if folder else stem, {})[ending] = (offset, size, content)
    return found


def _number(part: tuple[int, int, bytes] | None, path: Path, key: str) -> int:
    if part is None:
        return -1
    text = part[2].strip()
    if not text.isdigit():
        raise Problem(f"{path}: {key}.cls holds {text[:20].decode(errors='replace')!r}, not a class number")
    if len(text) > 18 or int(text) >= MOST_CLASSES:
        raise Problem(f"{path}: {key}.cls holds {text[:20].decode()}: class numbers go up to {MOST_CLASSES - 1:,}")
    return int(text)


def _note(part: tuple[int, int, bytes] | None, path: Path, key: str) -> dict[str, Any]:
    if part is None:
        return {}
    try:
        note = json.loads(part[2])
    except ValueError as error:
        raise Problem(f"{path}: {key}.json is not JSON ({error})") from error
    return note if isinstance(note, dict) else {}
