"""What lies in a folder tree or a tar file, looked up once and remembered in the cache. No torch here.

A scan of a million files takes a while on a network disk. It is kept with a stamp (the modification times of all
folders, or size and time of a tar) that is compared at the next start: a file added, removed or renamed changes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune_mile.core.files import cache
from finetune_mile.core.problems import Problem
from finetune_mile.images.names import Names

ENDINGS = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
UNREAD = (".heic", ".heif", ".avif", ".jxl", ".dng", ".nef", ".cr2", ".cr3", ".arw", ".orf", ".rw2", ".raf", ".pef")
FORMAT = 2  # of the files in the cache; another number is another file
WORTH_KEEPING = 5000  # files; fewer are found faster than a cache is read
SETTLED = 2.0  # seconds; what changed just now may change again within the clock's resolution
DEEPEST = 32  # folders inside each other; more is a link that goes round in circles


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Names of files, sorted, and where needed numbers for each (offsets in a tar)."""

    names: Names
    numbers: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # each (N,)
    empty: Names = field(default_factory=lambda: Names.of(()))  # folders without image or subfolder
    unread: Names = field(default_factory=lambda: Names.of(()))  # photos in formats that we do not read

    def __len__(self) -> int:
        return len(self.names)


def scan_tree(root: Path, what: str) -> Scan:
    """Every image below `root`, as sorted relative paths with `/`; from the cache if nothing has changed."""
    return _remembered(root, "tree", lambda stamp: _walk(root, what, stamp), _same_folders)


def scan_file(path: Path, kind: str, look: Callable[[], Scan]) -> Scan:
    """What `look` finds in a file, from the cache as long as the file's size and time stay."""

    def fresh(stamp: dict[str, int]) -> Scan:
        status = path.stat()
        stamp |= {"size": status.st_size, "time": status.st_mtime_ns}
        return look()

    def same(stamp: Mapping[str, int]) -> bool:
        status = path.stat()
        return dict(stamp) == {"size": status.st_size, "time": status.st_mtime_ns}

    return _remembered(path, kind, fresh, same, worth_keeping=0)


# ------------------------------------------------------------------------------------ the walk


def _walk(root: Path, what: str, stamp: dict[str, int]) -> Scan:
    found: list[str] = []
    empty: list[str] = []
    unread: list[str] = []
    todo = [""]
    while todo:
        here = todo.pop()
        folder = os.path.join(root, here)  # noqa: PTH118  strings: a million Paths would cost
        if here.count("/") > DEEPEST:
            raise Problem(f"{what}: folders inside each other without end at {here[:80]}; remove the link")
        try:
            stamp[here] = os.stat(folder).st_mtime_ns  # noqa: PTH116
            before = len(found) + len(todo)
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.name.lower().endswith(ENDINGS):
                        found.append(here + entry.name)
                    elif entry.is_dir():
                        todo.append(f"{here}{entry.name}/")
                    elif entry.name.lower().endswith(UNREAD):
                        unread.append(here + entry.name)
        except OSError as error:
            raise Problem(f"{what}: the folder {folder} cannot be read ({error.strerror})") from error
        if len(found) + len(todo) == before:
            empty.append(here)
    found.sort()
    return Scan(names=Names.of(found), empty=Names.of(sorted(empty)), unread=Names.of(sorted(unread)))


def _same_folders(root: Path, stamp: Mapping[str, int]) -> bool:
    try:
        return all(os.stat(os.path.join(root, k)).st_mtime_ns == v for k, v in stamp.items())  # noqa: PTH116, PTH118
    except OSError:
        return False  # a folder is gone: look again


# ------------------------------------------------------------------------------------ the cache


def _remembered(
    where: Path,
    kind: str,
    look: Callable[[dict[str, int]], Scan],
    same: Callable[..., bool],
    worth_keeping: int | None = None,
) -> Scan:
    place = str(where.resolve())
    key = hashlib.sha256(f"{FORMAT}\n{kind}\n{place}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
    kept = cache() / "scans" / f"{key}.npz"
    known = _load(kept)
    if known is not None and (same(where, known[1]) if kind == "tree" else same(known[1])):
        return known[0]
    stamp: dict[str, int] = {}
    scan = look(stamp)
    newest = stamp["time"] if "time" in stamp and kind != "tree" else max(stamp.values(), default=0)
    enough = WORTH_KEEPING if worth_keeping is None else worth_keeping
    if len(scan) >= enough and time.time() - newest / 1e9 > SETTLED:
        _save(kept, scan, stamp)
    return scan


def _load(path: Path) -> tuple[Scan, dict[str, int]] | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            content = {key: stored[key] for key in stored.files}
        names, empty, unread, stamped = (Names(content.pop(k), int(content.pop(f"{k}_count"))) for k in _BLOCKS)
        times = content.pop("stamp_times").tolist()
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):  # a full disk's half file: look again
        return None
    return Scan(names=names, empty=empty, unread=unread, numbers=content), dict(zip(stamped, times, strict=True))


_BLOCKS = ("names", "empty", "unread", "stamp")


def _save(path: Path, scan: Scan, stamp: Mapping[str, int]) -> None:
    """Write a scan; a cache that cannot be written (read-only, full) only costs the next start."""
    content: dict[str, Any] = dict(scan.numbers)
    for key, names in zip(_BLOCKS, (scan.names, scan.empty, scan.unread, Names.of(stamp)), strict=True):
        content |= {key: names.blob, f"{key}_count": np.int64(len(names))}
    content["stamp_times"] = np.array(list(stamp.values()), dtype=np.int64)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            np.savez(stream, **content)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
