"""Many names in little memory, and finding images by names that others gave them. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
MOST_FOLDERS = 64  # at the end of a name that are compared; without a bound a name of slashes takes gigabytes
_ERRORS = "surrogateescape"  # a file name need not be UTF-8


class Names(Sequence[str]):
    """A list of names in one block of bytes: a million of them are loaded at once, and forked without being copied."""

    def __init__(self, blob: npt.NDArray[np.uint8], count: int) -> None:
        """Take over a block.

        Args:
            blob: the names, each ended by a zero byte.
            count: how many there are.
        """
        self.blob = blob
        self.ends: Indices = np.flatnonzero(blob == 0)
        if len(self.ends) != count:
            raise ValueError(f"{len(self.ends)} names in the block, {count} were promised")

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Pack some names."""
        listed = list(names)
        data = "".join(f"{name}\0" for name in listed).encode("utf-8", _ERRORS)
        return cls(np.frombuffer(data, dtype=np.uint8), len(listed))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # negative ones too, and IndexError
        start = int(self.ends[position - 1]) + 1 if position else 0
        return bytes(self.blob[start : int(self.ends[position])]).decode("utf-8", _ERRORS)

    def __iter__(self) -> Iterator[str]:
        return iter(self.blob.tobytes().decode("utf-8", _ERRORS).split("\0")[:-1])


def locate(names: Iterable[str], ids: Sequence[str]) -> tuple[list[int], list[str]]:
    """Where each of `names` is among `ids`, and the names that are not there (-1 in the first list).

    A name fits an id that equals it or its end (`test/cat/1.jpg` is `cat/1.jpg`); else it is compared by the bare file
    name, provided that only one id has it. What the hub appends to ImageNet's file names is overlooked.
    """
    wanted = list(names)
    tails = {tail for name in wanted for tail in _tails(name)}
    bare = {plain(name) for name in wanted}
    whole: dict[str, int] = {}
    by_file: dict[str, int] = {}
    for index, name in enumerate(ids):
        if name in tails:
            whole[name] = index
        file = plain(name)
        if file in bare:
            by_file[file] = -1 if file in by_file else index  # -1: ambiguous
    found = []
    for name in wanted:
        tail = next((tail for tail in _tails(name) if tail in whole), None)
        found.append(by_file.get(plain(name), -1) if tail is None else whole[tail])
    return found, [name for name, index in zip(wanted, found, strict=True) if index < 0]


def plain(name: str) -> str:
    """The bare file name; ImageNet's files without the `_n01440764` that the hub's copy appends."""
    file = name.rpartition("/")[2]
    stem, dot, ending = file.rpartition(".")
    if stem[-10:-8] == "_n" and stem[-8:].isdigit() and len(stem) > 10:
        return stem[:-10] + dot + ending
    return file


def _tails(name: str) -> Iterator[str]:
    if name:
        yield name
    tail = "/".join(name.rsplit("/", MOST_FOLDERS)[1:])
    while tail:
        yield tail
        tail = tail.partition("/")[2]
