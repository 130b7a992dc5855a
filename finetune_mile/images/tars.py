"""The members of tar files and where they lie, so that they can be read in place. No torch here."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from finetune_mile.core.files import open_regular
from finetune_mile.core.problems import Problem
from finetune_mile.images.index import Names, Scan, scan_file

_BLOCK = 512


class Member(NamedTuple):
    """A file inside a tar."""

    name: str
    offset: int
    size: int


class Window(io.RawIOBase):
    """A part of an open file that looks like a file of its own."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        super().__init__()
        self.descriptor, self.start, self.size, self.at = descriptor, start, size, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; needs no system call."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        self.at = base + offset
        return self.at

    def tell(self) -> int:
        """Where we are."""
        return self.at

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        left = max(self.size - self.at, 0)
        data = os.pread(self.descriptor, left if size < 0 else min(size, left), self.start + self.at)
        self.at += len(data)
        return data


def members(window: Window, path: Path) -> Iterator[Member]:
    """Every plain file of a tar, with absolute offsets; one that is cut off is refused."""
    end = 0
    try:
        with tarfile.open(fileobj=window, mode="r:") as archive:
            for info in archive:
                end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                if info.isfile():
                    yield Member(info.name.removeprefix("./"), window.start + info.offset_data, info.size)
    except tarfile.TarError as error:
        raise Problem(f"{path}: the tar file is cut off or damaged ({error}); fetch it again") from error
    window.seek(end)
    if window.read(_BLOCK) != bytes(_BLOCK):
        raise Problem(f"{path}: the tar file is cut off (its end mark is missing); fetch it again")


def scan_tar(path: Path, *, nested: bool = False) -> Scan:
    """The files of a tar, sorted by name, with `offset` and `size`; remembered in the cache.

    Args:
        path: the tar file, not compressed.
        nested: its members are tars themselves: `n01440764.tar` becomes the folder `n01440764/`.
    """

    def look() -> Scan:
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise Problem(f"{path}: cannot be read ({error.strerror})") from error
        try:
            outer = Window(descriptor, 0, os.fstat(descriptor).st_size)
            found = list(_inner(outer, path) if nested else members(outer, path))
        finally:
            os.close(descriptor)
        found.sort()
        return Scan(
            names=Names.of(m.name for m in found),
            numbers={
                "offset": np.array([m.offset for m in found], dtype=np.int64),
                "size": np.array([m.size for m in found], dtype=np.int64),
            },
        )

    return scan_file(path, "tar-of-tars" if nested else "tar", look)


def _inner(outer: Window, path: Path) -> Iterator[Member]:
    for member in members(outer, path):
        folder, dot, ending = member.name.rpartition(".")
        if not dot or ending != "tar":
            raise Problem(f"{path}: {member.name} in it is not a tar of one class; is it the file as distributed?")
        window = Window(outer.descriptor, member.offset, member.size)
        for name, offset, size in members(window, path):
            yield Member(f"{folder}/{name}", offset, size)
