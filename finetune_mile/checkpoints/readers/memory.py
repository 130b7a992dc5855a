"""Mapped pages given back once they are copied, so that loading takes the memory of one network.

A file that is mapped counts as memory of the process as soon as it is read; the copy that becomes
the network counts again. The system may take the pages of the map back at any time, and is told so
here. Only on Linux; elsewhere nothing happens, and nothing is lost.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")


class MappedPages:
    """The file-backed, private parts of this process's memory, as they are now."""

    def __init__(self) -> None:
        self._ranges = sorted(_file_ranges())
        self._libc = ctypes.CDLL(None, use_errno=True) if self._ranges else None

    def give_back(self, tensor: Tensor) -> None:
        """Let go of a tensor's pages where they come from a file; reading it again reads the file.

        Memory that is not backed by a file is left alone: there the advice would wipe it.
        """
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        position = bisect_right(self._ranges, (start, 2**64)) - 1
        if self._libc is None or position < 0 or end > self._ranges[position][1]:
            return
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, end // page * page
        if last > first:
            size = ctypes.c_size_t(last - first)
            self._libc.madvise(ctypes.c_void_p(first), size, mmap.MADV_DONTNEED)


def _file_ranges() -> list[tuple[int, int]]:
    """(start, end) of each private, writable mapping of a file."""
    if not _MAPS.is_file() or not hasattr(mmap, "MADV_DONTNEED"):
        return []
    ranges = []
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        where, rights, _, _, inode, *name = line.split(maxsplit=5)
        # weights lie in data files: what is executable or belongs to a library is not ours
        if inode != "0" and rights == "rw-p" and name and ".so" not in name[0]:
            start, end = (int(part, 16) for part in where.split("-"))
            ranges.append((start, end))
    return ranges
