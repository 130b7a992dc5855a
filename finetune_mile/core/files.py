"""Files: only regular ones are read, ours are written in one step, and a lock keeps a second writer out."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from finetune_mile.core.problems import Problem

# Bytes of one image file. The largest image that is decoded (decoding.MOST_PIXELS) takes as much without compression.
LARGEST_IMAGE = 2**29
LOCK_SECONDS = 10.0  # loader processes outlive a kill by some seconds


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


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path`, flushed to disk, if the block ends well."""
    part = path.with_name(f".{path.name}.part")
    yield part
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    part.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write JSON at once."""
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def locked(path: Path, sentence: str, seconds: float | None = None) -> Iterator[None]:
    """Hold a lock file while the block runs. A process that died holds nothing.

    Args:
        path: the lock file; it stays.
        sentence: of the `Problem` if another process holds it.
        seconds: to wait for it; None: LOCK_SECONDS.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        with contextlib.suppress(NotImplementedError):  # a file system without locks
            lock.acquire(timeout=LOCK_SECONDS if seconds is None else seconds)
    except Timeout as error:
        raise Problem(sentence) from error
    try:
        yield
    finally:
        lock.release()
