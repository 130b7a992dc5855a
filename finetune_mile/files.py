"""Reading files that a user or a dataset names: regular files only, up to a given size. No torch here."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TextIO

# Bytes of one image file. The largest image that is decoded (decoding.MOST_PIXELS) takes as much without compression.
LARGEST_IMAGE = 2**29


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Opening a pipe can block for ever, and reading a device may never end. The file is opened without blocking and
    checked afterwards, so that it cannot be replaced in between.

    Raises:
        OSError: the file cannot be opened, or it is a pipe, a device, a socket or a folder.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file (a pipe, a device or a socket)", str(path))


def read_regular(path: str | Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises:
        OSError: as `open_regular`, or the file is larger.
    """
    descriptor = open_regular(path)
    try:
        left = os.fstat(descriptor).st_size
        if left > most:
            raise OSError(errno.EFBIG, f"larger than {size_in_words(most)}", str(path))
        parts = []
        while left and (part := os.read(descriptor, left)):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def open_text(path: str | Path, encoding: str = "utf-8") -> TextIO:
    """Open a regular text file; line ends are left alone."""
    return os.fdopen(open_regular(path), encoding=encoding, newline="")


def size_in_words(size: int) -> str:
    """A size limit for messages, such as 512 MB."""
    return f"{size // 2**20} MB" if size >= 2**20 else f"{size:,} bytes"
