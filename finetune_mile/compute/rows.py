"""The files of a store of features, and rows that are copied from one store to another.

N images, D features. A store is a folder of
  train.npy, val.npy           (N, D), memory-mapped on reading; train.view1.npy, ...: augmented views
  train.done, val.done, ...    one byte per image: 0 missing, 1 computed, 2 could not be read (its row is NaN)
  train.marks, val.marks       a hash of the contents of each photo, by which other stores find its row
  train.parquet, val.parquet   id and label names of each row
  features.json                all that the features depend on, and a key over it
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from finetune_mile.compute.passes import Outputs
from finetune_mile.core.files import cache, whole_file, write_json
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images.order import Indices
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.splits import label_names

Dtype = Literal["float16", "float32"]
Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
MISSING, DONE, BAD = 0, 1, 2
MARK = 32  # bytes
MOST_MARKED = 200_000  # photos; more are not read twice
ROWS = 4096  # copied at once
FACTS = "features.json"
DIFFERENCES = {
    "network": "another network", "weights": "other weights", "preprocess": "another preprocessing",
    "dtype": "another --dtype", "precision": "another precision", "images": "other images, or images that changed",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Store:
    """Features on disk."""

    path: Path

    def features(self, split: Split, view: int = 0) -> npt.NDArray[Any]:
        """(N, D), mapped; rows of images that could not be read are NaN."""
        return cast("npt.NDArray[Any]", np.load(self.file(split, view, "npy"), mmap_mode="r"))

    def rows(self, split: Split, indices: Indices | None = None, view: int = 0) -> Outputs:
        """Features (n, D) of some images, or of all, in float32."""
        some = slice(None) if indices is None else indices
        rows = np.array(self.features(split, view)[some], dtype=np.float32)
        return Outputs(torch.from_numpy(rows), torch.from_numpy(self.state(split, view)[some] == DONE))

    def state(self, split: Split, view: int = 0) -> npt.NDArray[np.uint8]:
        """(N,) MISSING, DONE or BAD; empty where nothing was begun, or a file is damaged."""
        path, nothing = self.file(split, view, "done"), np.zeros(0, dtype=np.uint8)
        if not path.is_file():
            return nothing
        try:
            count = len(self.features(split, view))
        except (OSError, ValueError):  # cut off
            return nothing
        state = np.fromfile(path, dtype=np.uint8)
        return state if len(state) == count else nothing

    def marks(self, split: Split) -> npt.NDArray[np.uint8]:
        """(N, MARK) a hash of the contents of each photo, zeros where it is not known; none in an old store."""
        path = self.file(split, 0, "marks")
        return np.fromfile(path if path.is_file() else os.devnull, dtype=np.uint8).reshape(-1, MARK)

    def note(self) -> dict[str, Any]:
        """What FACTS holds; `depends_on` is empty where the file is damaged, or being written."""
        try:
            note: dict[str, Any] = json.loads((self.path / FACTS).read_text(encoding="utf-8"))
            return note if isinstance(note["depends_on"], dict) else {"depends_on": {}}
        except (OSError, ValueError, KeyError, TypeError):
            return {"depends_on": {}}

    def file(self, split: Split, view: int, ending: str) -> Path:
        return self.path / (f"{split}.view{view}.{ending}" if view else f"{split}.{ending}")


def check_store(store: Store, facts: Mapping[str, Any]) -> None:
    """Refuse a folder that holds other features, or anything else."""
    path = store.path / FACTS
    if not path.is_file():
        if store.path.is_dir() and any(entry.name != ".lock" for entry in store.path.iterdir()):
            raise Problem(f"{store.path}: is not empty and holds no features; choose another folder")
        if store.path.exists() and not store.path.is_dir():
            raise Problem(f"{store.path}: is a file; name a folder for the features")
        return
    known = store.note()["depends_on"]
    if not known:
        raise Problem(f"{path}: is damaged; remove {store.path} and embed again")
    if known == facts:
        return
    reasons = [words for name, words in DIFFERENCES.items() if known.get(name) != facts[name]]
    raise Problem(f"{store.path}: holds features of {' and '.join(reasons) or 'another format'}; choose another folder")


def begin(store: Store, note: Mapping[str, Any], data: Data) -> None:
    """Write the labels, and at last the note that makes a folder a store."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, images in (("train", data.train), ("val", data.val)):
        names = [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in images.ids]
        schema = pa.schema([("id", pa.string()), ("labels", pa.list_(pa.string()))])
        table = pa.table([names, label_names(images.given, data.classes)], schema=schema)
        with whole_file(store.path / f"{split}.parquet") as part:
            pq.write_table(table, part)
    write_json(store.path / FACTS, note)


def preallocate(store: Store, split: Split, view: int, width: int, data: Data, dtype: Dtype) -> None:
    path, done = store.file(split, view, "npy"), store.file(split, view, "done")
    if len(store.state(split, view)):
        return
    count = len(data.train if split == "train" else data.val)
    try:
        with whole_file(path) as part:
            np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=(count, width))
        with whole_file(done) as part:
            part.write_bytes(bytes(count))
    except OSError as error:
        raise Problem(
            f"{path}: cannot be written ({error.strerror}); free the disk or choose another folder"
        ) from error


# ------------------------------------------------------------------------------------------- rows of other stores


def reuse(
    store: Store, facts: Mapping[str, Any], split: Split, images: ImageSet, rows: Indices, tick: Callable[[], None]
) -> int:
    """Copy the features of photos that another store of the cache has; returns how many.

    Photos are compared by their contents, so that a folder may have been copied, renamed or sorted in another way. The
    caller holds the lock of the store.

    Args:
        store: where to; its files are there.
        facts: what its features depend on: all but the images must be the same.
        split: of the store.
        images: of the split.
        rows: images that are to be computed.
        tick: called for each image that is read.
    """
    rows = rows[store.state(split)[rows] == MISSING]  # those that could not be read are tried again
    if not 0 < len(rows) <= MOST_MARKED:
        return 0
    marks = np.zeros((len(images), MARK), dtype=np.uint8)
    before = store.file(split, 0, "marks")
    if before.is_file() and before.stat().st_size == marks.size:
        marks = store.marks(split)
    wanted: dict[bytes, list[int]] = defaultdict(list)
    for row in rows.tolist():
        tick()
        mark = _mark(images, row)
        marks[row] = np.frombuffer(mark, dtype=np.uint8)
        if any(mark):
            wanted[mark].append(row)
    with whole_file(before) as part:
        marks.tofile(part)
    others = [
        other
        for other in kept_stores()
        if {**other.note()["depends_on"], "images": None} == {**facts, "images": None}
        and other.path.resolve() != store.path.resolve()
    ]
    return sum(_copy(other, theirs, store, split, wanted) for other in others for theirs in SPLITS)


def _mark(images: ImageSet, index: int) -> bytes:
    """A hash of a photo's file, or of its pixels where it has none; zeros where it cannot be read."""
    try:
        content = images.content(index)
    except BadImage:
        return bytes(MARK)
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    pixels = content.numpy()
    return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).digest()


def kept_stores() -> list[Store]:
    """The stores of the cache."""
    return [Store(path.parent) for path in sorted((cache() / "features").glob(f"*/{FACTS}"))]


def _copy(other: Store, theirs: Split, store: Store, split: Split, wanted: dict[bytes, list[int]]) -> int:
    """Copy rows that are done in another store, and take them from `wanted`: mark to rows."""
    like = store.features(split)
    try:
        state, marks = other.state(theirs), other.marks(theirs)  # before the rows: a byte follows its row
        source = other.features(theirs)
    except (OSError, ValueError):
        return 0  # damaged, or not begun
    if not len(state) == len(marks) == len(source) or (source.dtype, source.shape[1:]) != (like.dtype, like.shape[1:]):
        return 0
    pairs = [
        (place, row)
        for row in np.flatnonzero(state == DONE).tolist()
        if (mark := marks[row].tobytes()) in wanted and np.isfinite(source[row]).all()
        for place in wanted.pop(mark)
    ]
    target = np.load(store.file(split, 0, "npy"), mmap_mode="r+")
    for at in range(0, len(pairs), ROWS):
        places, found = zip(*pairs[at : at + ROWS], strict=True)
        target[list(places)] = source[list(found)]
    target.flush()
    with store.file(split, 0, "done").open("r+b") as record:
        for place, _ in pairs:
            record.seek(place)
            record.write(bytes([DONE]))
    return len(pairs)
