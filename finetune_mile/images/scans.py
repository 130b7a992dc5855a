"""Which files there are: names of images below a folder, or of the members of a file.

A scan of a million files is slow on a network disk. It is kept in the cache with a stamp: the modification times of all
folders, or size and time of a tar. Any file added, removed or renamed changes the stamp.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from finetune_mile.core.files import cache, open_regular
from finetune_mile.core.problems import Problem
from finetune_mile.images.sets import Names

ENDINGS = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
UNREAD = (".heic", ".heif", ".avif", ".jxl", ".dng", ".nef", ".cr2", ".cr3", ".arw", ".orf", ".rw2", ".raf", ".pef")
FORMAT = 2  # of the files in the cache; another number is another file
WORTH_KEEPING = 5000  # files; fewer are found faster than a cache is read
SETTLED = 2.0  # seconds; a folder that changed just now may change again within the clock's resolution
DEEPEST = 32  # folders inside each other; more is a link to a folder above
_TAR_BLOCK = 512  # bytes
_BLOCKS = ("names", "empty", "unread", "stamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Names of files, sorted, and where needed numbers for each (offsets in a tar)."""

    names: Names
    numbers: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # offset and size, each (N,)
    empty: Names = field(default_factory=lambda: Names.of(()))  # folders without image or subfolder
    unread: Names = field(default_factory=lambda: Names.of(()))  # photos in formats that we do not read


def scan_tree(root: Path, flag: str) -> Scan:
    """Every image below `root`, as sorted relative paths with `/`; from the cache if nothing has changed."""
    place = _cache_file(root, "tree")
    kept, stamp = _load(place)
    if kept is not None and _same_folders(root, stamp):
        return kept
    scan, stamp = _walk(root, flag)
    if len(scan.names) >= WORTH_KEEPING:
        _save(place, scan, stamp)
    return scan


def count_endings(names: Iterable[str]) -> dict[str, int]:
    """The number of files with each ending, in lower case, the most frequent first."""
    return dict(Counter(name[name.rindex(".") :].lower() for name in names).most_common())


def _walk(root: Path, flag: str) -> tuple[Scan, dict[str, int]]:
    """The scan of a tree, and the modification time that each folder had before it was listed."""
    images: list[str] = []
    empty: list[str] = []
    unread: list[str] = []
    stamp: dict[str, int] = {}
    todo = [""]
    while todo:
        here = todo.pop()
        folder = os.path.join(root, here)  # noqa: PTH118  strings: a million Paths would cost
        if here.count("/") > DEEPEST:
            raise Problem(f"{flag}: folders contain each other in a circle at {here[:80]}; remove the link")
        before = len(images) + len(todo)
        try:
            stamp[here] = os.stat(folder).st_mtime_ns  # noqa: PTH116
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name.lower()
                    if name.startswith("."):
                        continue
                    if name.endswith(ENDINGS):
                        images.append(here + entry.name)
                    elif entry.is_dir():
                        todo.append(f"{here}{entry.name}/")
                    elif name.endswith(UNREAD):
                        unread.append(here + entry.name)
        except OSError as error:
            raise Problem(f"{flag}: the folder {folder} cannot be read ({error.strerror})") from error
        if len(images) + len(todo) == before:
            empty.append(here)
    images.sort()
    return Scan(names=Names.of(images), empty=Names.of(sorted(empty)), unread=Names.of(sorted(unread))), stamp


def _same_folders(root: Path, stamp: Mapping[str, int]) -> bool:
    try:
        return all(os.stat(os.path.join(root, k)).st_mtime_ns == v for k, v in stamp.items())  # noqa: PTH116, PTH118
    except OSError:
        return False  # a folder is gone: scan again


def _cache_file(path: Path, kind: str) -> Path:
    text = f"{FORMAT}\n{kind}\n{path.resolve()}"
    return cache() / "scans" / f"{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}.npz"


def _load(path: Path) -> tuple[Scan | None, dict[str, int]]:
    """A scan and its stamp from the cache; None if it is not there."""
    kept = kept_arrays(path)
    if not kept:
        return None, {}
    names, empty, unread, stamped = (Names(kept[key]) for key in _BLOCKS)
    numbers = {key: kept[key] for key in kept.keys() & {"offset", "size"}}
    stamp = dict(zip(stamped, kept["stamp_times"].tolist(), strict=True))
    return Scan(names=names, empty=empty, unread=unread, numbers=numbers), stamp


def _save(path: Path, scan: Scan, stamp: Mapping[str, int]) -> None:
    """Write a scan, unless its folders changed just now. A cache that cannot be written only costs the next start."""
    if time.time() - max(stamp.values()) / 1e9 <= SETTLED:
        return
    blocks = zip(_BLOCKS, (scan.names, scan.empty, scan.unread, Names.of(stamp)), strict=True)
    times = np.array(list(stamp.values()), dtype=np.int64)
    keep_arrays(path, {**scan.numbers, **{key: names.blob for key, names in blocks}, "stamp_times": times})


# ------------------------------------------------------------------------------------ tar files


def scan_tar(path: Path, *, nested: bool = False) -> Scan:
    """The files of a tar, sorted by name, with `offset` and `size`; from the cache if size and time are the same.

    Args:
        path: the tar file, not compressed.
        nested: its members are tars themselves: `n01440764.tar` becomes the folder `n01440764/`.
    """
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise Problem(f"{path}: cannot be read ({error.strerror})") from error
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        status = os.fstat(descriptor)
        stamp = {"size": status.st_size, "time": status.st_mtime_ns}
        place = _cache_file(path, "tar-of-tars" if nested else "tar")
        kept, known = _load(place)
        if kept is not None and known == stamp:
            return kept
        members = sorted(_members(stream, path, status.st_size, nested))
    names, offsets, sizes = zip(*members, strict=True) if members else ((), (), ())
    numbers = {"offset": np.array(offsets, dtype=np.int64), "size": np.array(sizes, dtype=np.int64)}
    scan = Scan(names=Names.of(names), numbers=numbers)
    _save(place, scan, stamp)
    return scan


def _members(stream: IO[bytes], path: Path, limit: int, nested: bool) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of every plain file of the tar from the stream's position to `limit`.

    Raises:
        Problem: the tar is cut off or damaged.
    """
    end = stream.tell()
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for info in archive:
                end = info.offset_data + -(-info.size // _TAR_BLOCK) * _TAR_BLOCK
                name = info.name.removeprefix("./")
                if info.isfile() and nested:
                    folder, dot, ending = name.rpartition(".")
                    if not dot or ending != "tar":
                        raise Problem(f"{path}: {name} in it is not a tar of one class; use the file as distributed")
                    stream.seek(info.offset_data)
                    for file, offset, size in _members(stream, path, end, nested=False):
                        yield f"{folder}/{file}", offset, size
                elif info.isfile():
                    yield name, info.offset_data, info.size
    except tarfile.TarError as error:
        raise Problem(f"{path}: the tar file is cut off or damaged ({error}); fetch it again") from error
    stream.seek(end)
    if end + _TAR_BLOCK > limit or stream.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
        raise Problem(f"{path}: the tar file is cut off (its end mark is missing); fetch it again")


# ------------------------------------------------------------------------------------ arrays in the cache


def keep_arrays(path: Path, content: Mapping[str, Any]) -> None:
    """Write arrays into the cache; one that cannot be written only costs the next start."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            np.savez(stream, **content)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def kept_arrays(path: Path) -> dict[str, Any]:
    """The arrays that `keep_arrays` wrote; none if there is no such file, or it is damaged, such as by a full disk."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return {}
