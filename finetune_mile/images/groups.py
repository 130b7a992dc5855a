"""Photos that a split of ours keeps together: copies, near-duplicates and photos that were taken one after the other.

The files are read once, reduced; the result is kept in the cache with the path, size and modification time of each.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from finetune_mile.core.console import progress
from finetune_mile.core.cores import usable_cores
from finetune_mile.core.files import LARGEST_IMAGE, cache, open_regular, read_regular
from finetune_mile.core.problems import BadImage
from finetune_mile.images.alike import NEAR, NEXT, SIDE, WIDTH, Prints, compare, print_of, similarity
from finetune_mile.images.order import Indices
from finetune_mile.images.readers import Files, Picked
from finetune_mile.images.scans import keep_arrays, kept_arrays

if TYPE_CHECKING:
    from finetune_mile.images.sets import ImageSet

MOST_PHOTOS = 20_000  # above it only exact copies are found
MOST_FILES = 200_000  # above it nothing is
FORMAT = 1  # of the files in the cache, and of what is in them
WORTH_KEEPING = 50  # photos
WORTH_SAYING = 2000
_BLOCK = 256
_TAIL = 4096  # bytes at the end of a file that are compared first

Stamps = npt.NDArray[np.uint8]  # (N, 16)


def find_groups(images: ImageSet) -> Indices | None:
    """(N,) images with the same number belong together; -1: alone. None: they are no files, or too many."""
    paths = file_paths(images.content)
    if paths is None or not 1 < len(paths) <= MOST_FILES:
        return None
    sizes, stamps = _stamp(paths, images.ids)
    root = f"{FORMAT}\n{os.path.commonpath(paths)}".encode("utf-8", "surrogateescape")
    place = cache() / "alike" / f"{hashlib.sha256(root).hexdigest()[:24]}.npz"
    known = kept_arrays(place)
    if known and np.array_equal(known["stamps"], stamps):
        return np.asarray(known["groups"], dtype=np.int64)
    groups = np.arange(len(paths))
    for rows in _exact(paths, sizes):
        _merge(groups, rows)
    prints = np.zeros((0, WIDTH), dtype=np.float16)
    if len(paths) <= MOST_PHOTOS:
        prints = _read(paths, stamps, known)
        for row, alike in compare(prints):
            _merge(groups, [row, *np.flatnonzero(alike >= NEAR).tolist()])
        folders = [name.rpartition("/")[0] for name in images.ids]
        for row in _one_after_the_other(prints):
            if folders[row] == folders[row + 1]:
                _merge(groups, [row, row + 1])
    groups[np.bincount(groups, minlength=len(groups))[groups] == 1] = -1
    if len(paths) >= WORTH_KEEPING:
        keep_arrays(place, {"stamps": stamps, "groups": groups, "prints": prints})
    return groups


def group_members(labels: Indices, alike: Indices) -> list[Indices]:
    """The members of each group of two or more, but of those that hold more than half of a class."""
    order = np.argsort(alike, kind="stable")
    order = order[alike[order] >= 0]
    sizes = np.bincount(labels[labels >= 0])
    parts = np.split(order, np.flatnonzero(np.diff(alike[order])) + 1) if len(order) else []
    return [
        part
        for part in parts
        if len(part) > 1
        and all(2 * (labels[part] == label).sum() <= sizes[label] for label in set(labels[part]) - {-1})
    ]


def say_kept(alike: Indices | None, held_out: Indices) -> tuple[str, ...]:
    """How many groups of near-duplicates a split has kept together."""
    if alike is None:
        return ()
    taken = np.bincount(alike[held_out][alike[held_out] >= 0], minlength=len(alike))
    size = np.bincount(alike[alike >= 0], minlength=len(alike))
    kept = size[(size > 0) & ((taken == 0) | (taken == size))]
    if not len(kept):
        return ()
    groups = f"{len(kept):,} groups" if len(kept) > 1 else "1 group"
    sentence = f"near-duplicates stay on one side of our split into training and validation images: {groups}"
    return (f"{sentence}, {kept.sum():,} photos",)


def file_paths(reader: Any) -> list[str] | None:
    """The absolute paths of the files behind images; None where they are in no file of their own."""
    if isinstance(reader, Picked):
        inner = file_paths(reader.inner)
        return None if inner is None else [inner[row] for row in reader.rows.tolist()]
    if isinstance(reader, Files):
        root = Path(reader.root).resolve()
        return [f"{root}/{name}" for name in reader.names]
    return None


def _merge(groups: Indices, rows: Sequence[int]) -> None:
    numbers = np.unique(groups[rows])
    if len(numbers) > 1:
        groups[np.isin(groups, numbers)] = numbers[0]


# ------------------------------------------------------------------------------------ exact copies


def _exact(paths: Sequence[str], sizes: Sequence[int]) -> list[list[int]]:
    """Groups of equal files: of equal size, then with the same end, then with the same content."""

    def tail(row: int) -> bytes:
        with os.fdopen(open_regular(paths[row]), "rb") as stream:
            stream.seek(max(sizes[row] - _TAIL, 0))
            return stream.read(_TAIL)

    def content(row: int) -> bytes:
        return hashlib.blake2b(read_regular(paths[row], LARGEST_IMAGE), digest_size=16).digest()

    equal = _parted(range(len(paths)), lambda row: sizes[row])
    equal = [part for rows in equal for part in _parted(rows, tail)]
    return [part for rows in equal for part in _parted(rows, content)]


def _parted(rows: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Rows with the same key, where there are several; a file that cannot be read, or is empty, is left out."""
    parts: dict[Hashable, list[int]] = {}
    for row in rows:
        with contextlib.suppress(OSError):
            parts.setdefault(key(row), []).append(row)
    return [part for value, part in parts.items() if len(part) > 1 and value]


# ------------------------------------------------------------------------------------ near-duplicates


def _read(paths: Sequence[str], stamps: Stamps, known: dict[str, Any]) -> Prints:
    """The prints of photos, (N, WIDTH), from the cache where they are there; zeros for one that cannot be read."""
    prints = np.zeros((len(paths), WIDTH), dtype=np.float16)
    pairs = zip(known.get("stamps", ()), known.get("prints", ()), strict=False)  # too many photos have no prints
    old = {stamp.tobytes(): values for stamp, values in pairs}
    new = []
    for row, stamp in enumerate(stamps):
        if stamp.tobytes() in old:
            prints[row] = old[stamp.tobytes()]
        else:
            new.append(row)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if len(new) >= WORTH_SAYING and first:
        sys.stderr.write(f"reading {len(new):,} photos once, to keep near-duplicates on one side of the split\n")
    with (
        warnings.catch_warnings(),
        progress("finding near-duplicates", len(new), quiet=not first or len(new) < WORTH_KEEPING) as advance,
        ThreadPoolExecutor(usable_cores()) as pool,
    ):
        warnings.simplefilter("ignore")  # about EXIF and palettes that are read all the same
        for start in range(0, len(new), _BLOCK):  # in blocks: what is queued cannot be interrupted
            rows = new[start : start + _BLOCK]
            prints[rows] = list(pool.map(_read_print, [paths[row] for row in rows]))
            advance(len(rows))
    return prints


def _read_print(path: str) -> Prints:
    from PIL import Image

    from finetune_mile.images.pipeline import PIL_ERRORS, from_pil

    try:
        with Image.open(io.BytesIO(read_regular(path, LARGEST_IMAGE))) as photo:
            photo.draft("RGB", (2 * SIDE, 2 * SIDE))
            if photo.mode.startswith("I"):
                return print_of(Image.fromarray(from_pil(photo).permute(1, 2, 0).numpy()))
            return print_of(photo)
    except (*PIL_ERRORS, BadImage):
        return np.zeros(WIDTH, dtype=np.float16)


def _one_after_the_other(prints: Prints) -> list[int]:
    """Photos whose next one is so similar that both were likely taken in one go."""
    blocks = [
        similarity(prints[start : start + _BLOCK], prints[start + 1 : start + 1 + _BLOCK]).diagonal()
        for start in range(0, len(prints) - 1, _BLOCK)
    ]
    return [row for row, alike in enumerate(np.concatenate(blocks).tolist()) if alike >= NEXT]


# ------------------------------------------------------------------------------------ the cache


def _stamp(paths: Sequence[str], ids: Sequence[str]) -> tuple[list[int], Stamps]:
    """The size of each file, 0 if it is not there, and a hash of its name, path, size and modification time."""
    sizes, stamps = [], []
    for path, name in zip(paths, ids, strict=True):
        size = time = 0
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116  a Path per image would cost
            size, time = status.st_size, status.st_mtime_ns
        sizes.append(size)
        text = f"{name}\0{path}\0{size}\0{time}".encode("utf-8", "surrogateescape")
        stamps.append(hashlib.blake2b(text, digest_size=16).digest())
    return sizes, np.frombuffer(b"".join(stamps), dtype=np.uint8).reshape(-1, 16)
