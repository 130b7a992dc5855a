"""The bytes of images, by index. Readers travel to loader processes, so each is a small picklable object. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from finetune_mile.core.files import LARGEST_IMAGE, open_regular, read_regular, size_in_words
from finetune_mile.core.problems import BadImage

if TYPE_CHECKING:
    from finetune_mile.images.order import Indices

T = TypeVar("T")


class Files:
    """The bytes of files below a folder."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self.names = str(root), names

    def __call__(self, index: int) -> bytes:
        path = os.path.join(self.root, self.names[index])  # noqa: PTH118  a Path per image would cost
        try:
            return read_regular(path, LARGEST_IMAGE)
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror}") from error


class TarFiles:
    """The bytes of members of tar files, read in place."""

    def __init__(self, paths: Sequence[str], which: Indices, offsets: Indices, sizes: Indices) -> None:
        """Image i is bytes [offsets[i], offsets[i] + sizes[i]) of the file paths[which[i]]; all are (N,)."""
        self.paths, self.which, self.offsets, self.sizes = tuple(paths), which, offsets, sizes
        self._open: dict[int, int] = {}

    def __call__(self, index: int) -> bytes:
        """The member's content. `pread` has no position, so forked processes may share open files."""
        which, size = int(self.which[index]), int(self.sizes[index])
        if size > LARGEST_IMAGE:
            raise BadImage(f"larger than {size_in_words(LARGEST_IMAGE)}")
        try:
            if which not in self._open:
                self._open[which] = open_regular(self.paths[which])
            data = os.pread(self._open[which], size, int(self.offsets[index]))
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise BadImage(f"{self.paths[which]} is cut off before its end")
        return data

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_open", {}).values():
            os.close(descriptor)


class Picked(Generic[T]):
    """Some images of another reader, in the order of `rows`."""

    def __init__(self, inner: Callable[[int], T], rows: Indices) -> None:
        self.inner, self.rows = inner, rows

    def __call__(self, index: int) -> T:
        return self.inner(int(self.rows[index]))


class Joined(Generic[T]):
    """The `count` images of one reader, then those of another."""

    def __init__(self, first: Callable[[int], T], count: int, rest: Callable[[int], T]) -> None:
        self.first, self.count, self.rest = first, count, rest

    def __call__(self, index: int) -> T:
        return self.first(index) if index < self.count else self.rest(index - self.count)
