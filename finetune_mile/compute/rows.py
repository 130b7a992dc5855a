"""The files of a store of features, and rows that are copied from one store to another.

N images, D features. A store is a folder of
  train.npy, val.npy           (N, D), memory-mapped on reading; train.view1.npy, ...: augmented views
  train.done, val.done, ...    one byte per image: 0 missing, 1 computed, 2 could not be read (its row is NaN)
  train.sums, val.sums, ...    a CRC-32 of each row, that begins with the key: a damaged or foreign row is found
  train.marks, val.marks       a hash of the contents of each photo, by which other stores find its row
  train.parquet, val.parquet   id and label names of each row
  features.json                all that the features depend on, and a key over it
features.json is the first file, and a row is written before its sum, the sum before its byte: after a kill at any
moment the same command continues.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from finetune_mile.compute.passes import Outputs
from finetune_mile.core.files import (
    MOST_RUN_BYTES,
    cache,
    read_regular,
    unwritable,
    whole_file,
    write_json,
    write_whole,
    writing,
)
from finetune_mile.core.problems import BadImage
from finetune_mile.images.order import Indices
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.splits import label_names

Dtype = Literal["float16", "float32"]
Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
MISSING, DONE, BAD = 0, 1, 2
MARK, SUM = 32, 4  # bytes
MOST_MARKED = 200_000  # photos; more are not read twice
ROWS = 4096  # copied at once
FACTS = "features.json"
SUMS = "CRC-32 of each row"  # in FACTS; stores of an earlier version have none
OURS = re.compile(r"(train|val)(\.view\d+)?\.(npy|done|sums|marks|parquet)|features\.json|bad_images\.csv")
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
        return cast("npt.NDArray[Any]", np.lib.format.open_memmap(self.file(split, view, "npy"), mode="r"))

    def rows(self, split: Split, indices: Indices | None = None, view: int = 0) -> Outputs:
        """Features (n, D) of some images, or of all, in float32."""
        some = slice(None) if indices is None else indices
        rows = np.array(self.features(split, view)[some], dtype=np.float32)
        return Outputs(torch.from_numpy(rows), torch.from_numpy(self.state(split, view)[some] == DONE))

    def state(self, split: Split, view: int = 0) -> npt.NDArray[np.uint8]:
        """(N,) MISSING, DONE or BAD; empty where nothing was begun. Ask `examined` whether the rows are good."""
        path = self.file(split, view, "done")
        return np.fromfile(path if path.is_file() else os.devnull, dtype=np.uint8)

    def marks(self, split: Split) -> npt.NDArray[np.uint8]:
        """(N, MARK) a hash of the contents of each photo, zeros where it is not known; none in an old store."""
        path = self.file(split, 0, "marks")
        return np.fromfile(path if path.is_file() else os.devnull, dtype=np.uint8).reshape(-1, MARK)

    def sums(self, split: Split, view: int = 0) -> npt.NDArray[np.uint32]:
        """(N,) the checksum of each row; none in a store of an earlier version."""
        path = self.file(split, view, "sums")
        content = path.read_bytes() if path.is_file() else b""
        return np.frombuffer(content[: len(content) // SUM * SUM], dtype=np.uint32)

    def note(self) -> dict[str, Any]:
        """What FACTS holds; `depends_on` is empty where the file is damaged, or being written."""
        try:
            note: dict[str, Any] = json.loads(read_regular(self.path / FACTS, MOST_RUN_BYTES))
            return note if isinstance(note["depends_on"], dict) else {"depends_on": {}}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {"depends_on": {}}

    def file(self, split: Split, view: int, ending: str) -> Path:
        return self.path / (f"{split}.view{view}.{ending}" if view else f"{split}.{ending}")


def key_of(facts: Mapping[str, Any]) -> str:
    """A hash of all that features depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------- what is kept


def unfit(store: Store, facts: Mapping[str, Any]) -> str:
    """Why a folder cannot take these features: it holds others, or anything else. Empty where it can."""
    path = store.path / FACTS
    if not path.is_file():
        if os.path.lexists(store.path) and not store.path.is_dir():
            return "is a file; name a folder for the features"
        entries = [*store.path.iterdir()] if store.path.is_dir() else []
        if not all(entry.name == ".lock" or _is_part(entry) for entry in entries):
            return "is not empty and holds no features; choose another folder, or remove it if `embed` made it"
        return ""
    known = store.note()["depends_on"]
    if not known:
        return f"has a damaged {FACTS}; remove {store.path} and embed again"
    reasons = [words for name, words in DIFFERENCES.items() if known.get(name) != facts[name]]
    if known == facts:
        return ""
    return f"holds features of {' and '.join(reasons) or 'another format'}; choose another folder"


def _is_part(path: Path) -> bool:
    """Is this what a kill left of one of our files?"""
    return path.name.startswith(".") and path.suffix == ".part" and bool(OURS.fullmatch(path.name[1:-5]))


def clear(store: Store) -> None:
    """Remove the files of a store, and nothing else; the caller holds its lock."""
    for entry in store.path.iterdir():
        if OURS.fullmatch(entry.name) or _is_part(entry):
            entry.unlink()


def examined(
    store: Store, split: Split, view: int, like: npt.NDArray[Any], rows: Indices
) -> tuple[npt.NDArray[np.uint8], str]:
    """The states of some rows, a damaged one is MISSING; and what is damaged, in words.

    Args:
        store: which.
        split: of its images.
        view: of them.
        like: has the dtype and the shape (N, D) that the features must have.
        rows: the images that are needed; their checksums are compared.
    """
    nothing, why = np.zeros(len(rows), dtype=np.uint8), _misfit(store, split, view, like)
    if why is not None:
        return nothing, why
    state, note = store.state(split, view)[rows], store.note()
    if "sums" not in note:
        return state, ""
    done = rows[state == DONE]
    wrong = done[_sums_of(store.features(split, view), done, note["depends_on"]) != store.sums(split, view)[done]]
    state[np.isin(rows, wrong)] = MISSING
    return state, f"{len(wrong):,} of {len(done):,} rows are not what was written" if len(wrong) else ""


def _misfit(store: Store, split: Split, view: int, like: npt.NDArray[Any]) -> str | None:
    """Why the files of a split cannot be used, empty where they were not begun; None: they can."""
    if not store.file(split, view, "done").is_file():
        return ""
    if len(store.state(split, view)) != len(like):
        return "the record of its rows has another length"
    if "sums" in store.note() and len(store.sums(split, view)) != len(like):
        return "its checksums are missing or have another length"
    if not store.file(split, view, "npy").is_file():
        return "it is missing"
    try:
        found = store.features(split, view)
    except Exception as error:  # whatever numpy trips over: this is not what was written
        return f"it cannot be read ({error})"
    if (found.dtype, found.shape) != (like.dtype, like.shape) or not found.flags.c_contiguous:
        return f"it has {found.dtype} {found.shape}, expected {like.dtype} {like.shape}"
    return None


def _first_sum(facts: Mapping[str, Any]) -> int:
    """What the checksum of a row begins with, so that a row of another store is told."""
    return int(key_of(facts)[:8], 16)


def _sums_of(features: npt.NDArray[Any], rows: Indices, facts: Mapping[str, Any]) -> npt.NDArray[np.uint32]:
    """The checksum of each of some rows (N, D)."""
    start, sums = _first_sum(facts), np.zeros(len(rows), dtype=np.uint32)
    for at in range(0, len(rows), ROWS):
        block = np.ascontiguousarray(features[rows[at : at + ROWS]])
        content, size = block.view(np.uint8).reshape(-1).data, block.itemsize * features.shape[1]
        sums[at : at + ROWS] = [zlib.crc32(content[i : i + size], start) for i in range(0, len(content), size)]
    return sums


# ------------------------------------------------------------------------------------------------------- writing


def begin(store: Store, note: Mapping[str, Any], data: Data) -> None:
    """Write the note that makes a folder a store, then the labels; the caller holds the lock."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    facts = note["depends_on"]
    if "sums" not in store.note():  # of an earlier version, or new
        for done in store.path.glob("*.done"):
            with contextlib.suppress(OSError, ValueError):  # what cannot be read is computed again
                features = np.lib.format.open_memmap(done.with_suffix(".npy"), mode="r")
                sums = _sums_of(features, np.arange(len(features)), facts)
                write_whole(done.with_suffix(".sums"), sums.tobytes())
    write_json(store.path / FACTS, {**note, "sums": SUMS})
    for split, images in (("train", data.train), ("val", data.val)):
        schema = pa.schema([("id", pa.string()), ("labels", pa.list_(pa.string()))])
        table = pa.table([*names_and_labels(images, data.classes)], schema=schema)
        with whole_file(store.path / f"{split}.parquet") as part:
            pq.write_table(table, part)


def names_and_labels(images: ImageSet, classes: tuple[str, ...]) -> tuple[list[str], list[list[str]]]:
    """The columns of the labels: the id of each image, in UTF-8, and the names of its labels."""
    names = [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in images.ids]
    return names, label_names(images.given, classes)


def check_room(store: Store, todo: list[tuple[npt.NDArray[Any], Indices]]) -> None:
    """Refuse to begin with rows that the disk has no room for; `todo`: dtype and shape, and the rows."""
    needed = sum(len(rows) * (like.itemsize * like.shape[1] + SUM) for like, rows in todo)
    if shutil.disk_usage(store.path).free < needed:
        raise unwritable(store.path, OSError(errno.ENOSPC, ""), needed)


def preallocate(store: Store, split: Split, view: int, like: npt.NDArray[Any]) -> None:
    """Files for the rows of a split, dtype and shape as `like`; those that can be used stay."""
    if _misfit(store, split, view, like) is None:
        return
    store.file(split, view, "done").unlink(missing_ok=True)
    with whole_file(store.file(split, view, "npy")) as part:
        np.lib.format.open_memmap(part, mode="w+", dtype=like.dtype, shape=like.shape)
    write_whole(store.file(split, view, "sums"), bytes(SUM * len(like)))
    write_whole(store.file(split, view, "done"), bytes(len(like)))


class Writer:
    """Puts rows into the files of a split; they count once they are kept."""

    def __init__(self, store: Store, split: Split, view: int = 0) -> None:
        features = cast("np.memmap[Any, Any]", store.features(split, view))
        self.dtype, self._offset = features.dtype, features.offset
        self._start = _first_sum(store.note()["depends_on"])
        self.path, *others = (store.file(split, view, ending) for ending in ("npy", "sums", "done"))
        self._open = contextlib.ExitStack()
        with writing(self.path):
            self._rows, self._sums, self._record = (
                self._open.enter_context(path.open("r+b")) for path in (self.path, *others)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with writing(self.path):
            self._open.close()

    def put(self, places: Indices, rows: npt.NDArray[Any]) -> None:
        """Write rows (n, D) and their checksums."""
        with writing(self.path):
            for place, row in zip(places.tolist(), np.ascontiguousarray(rows.astype(self.dtype)), strict=True):
                content = row.tobytes()
                self._rows.seek(self._offset + place * len(content))
                self._rows.write(content)
                self._sums.seek(SUM * place)
                self._sums.write(np.uint32(zlib.crc32(content, self._start)).tobytes())

    def keep(self, states: Mapping[int, int]) -> None:
        """Write DONE or BAD for the places of rows, when the rows have reached the disk."""
        with writing(self.path):
            self._rows.flush()
            os.fsync(self._rows.fileno())
            self._sums.flush()
            for place, state in states.items():
                self._record.seek(place)
                self._record.write(bytes([state]))
            self._record.flush()


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
    write_whole(before, marks.tobytes())
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
    """Copy rows that are done and good in another store, and take them from `wanted`: mark to rows."""
    like = store.features(split)
    try:
        marks = other.marks(theirs)
        found = np.flatnonzero([mark.tobytes() in wanted for mark in marks])
        state, _ = examined(other, theirs, 0, np.broadcast_to(like[:1], (len(marks), *like.shape[1:])), found)
        source = other.features(theirs) if (state == DONE).any() else like
    except (OSError, ValueError):
        return 0  # damaged, or not begun
    pairs = [
        (place, row)
        for row in found[state == DONE].tolist()
        if np.isfinite(source[row]).all()
        for place in wanted.pop(marks[row].tobytes(), ())
    ]
    with Writer(store, split) as writer:
        for at in range(0, len(pairs), ROWS):
            places, rows = zip(*pairs[at : at + ROWS], strict=True)
            writer.put(np.array(places), source[list(rows)])
            writer.keep(dict.fromkeys(places, DONE))
    return len(pairs)
