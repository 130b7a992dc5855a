"""The members of tar files and their offsets, so that they can be read in place. No torch here."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from finetune_mile.core.files import open_regular
from finetune_mile.core.problems import Problem
from finetune_mile.images.scans import Scan, scan_file
from finetune_mile.images.sets import Names

STATE = "pack.json"  # `finetune-mile pack` writes it beside its shards
_BLOCK = 512


def scan_tar(path: Path, *, nested: bool = False) -> Scan:
    """The files of a tar, sorted by name, with `offset` and `size`; remembered in the cache.

    Args:
        path: the tar file, not compressed.
        nested: its members are tars themselves: `n01440764.tar` becomes the folder `n01440764/`.
    """

    def scan() -> Scan:
        import numpy as np

        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise Problem(f"{path}: cannot be read ({error.strerror})") from error
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            members = sorted(_members(stream, path, os.fstat(descriptor).st_size, nested))
        names, offsets, sizes = zip(*members, strict=True) if members else ((), (), ())
        numbers = {"offset": np.array(offsets, dtype=np.int64), "size": np.array(sizes, dtype=np.int64)}
        return Scan(names=Names.of(names), numbers=numbers)

    return scan_file(path, "tar-of-tars" if nested else "tar", scan)


def _members(stream: IO[bytes], path: Path, limit: int, nested: bool) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of every plain file of the tar from the stream's position to `limit`.

    Raises:
        Problem: the tar is cut off or damaged.
    """
    end = stream.tell()
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for info in archive:
                end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
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
    if end + _BLOCK > limit or stream.read(_BLOCK) != bytes(_BLOCK):
        raise Problem(f"{path}: the tar file is cut off (its end mark is missing); fetch it again")


def read_state(path: Path) -> dict[str, Any]:
    """What `finetune-mile pack` wrote about its shards."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or not isinstance(state.get("classes"), list):
        raise Problem(f"{path}: pack.json is damaged; remove {path.parent} and pack again")
    return state
