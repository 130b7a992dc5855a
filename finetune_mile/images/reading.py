"""Ways to get at the bytes of image number i. They travel to loader processes, so each is a small picklable object."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from finetune_mile.core.files import LARGEST_IMAGE, open_regular, read_regular, size_in_words
from finetune_mile.images.decoding import BadImage, decode

Indices = npt.NDArray[np.int64]
Bytes = Callable[[int], bytes]


class Files:
    """Files below a folder."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self.names = str(root), names

    def __call__(self, index: int) -> bytes:
        """The file's content."""
        path = os.path.join(self.root, self.names[index])  # noqa: PTH118  a Path per image would cost
        try:
            return read_regular(path, LARGEST_IMAGE)
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror}") from error


class TarFiles:
    """Members of tar files, read in place by their offsets."""

    def __init__(self, paths: Sequence[str], which: Indices, offsets: Indices, sizes: Indices) -> None:
        """Remember where things lie.

        Args:
            paths: the tar files.
            which: (N,) which of them holds image i.
            offsets: (N,) where its bytes begin.
            sizes: (N,) how many there are.
        """
        self.paths, self.which, self.offsets, self.sizes = tuple(paths), which, offsets, sizes
        self._open: dict[int, int] = {}

    def __call__(self, index: int) -> bytes:
        """The member's content. `pread` has no position, so forked processes may share what is open."""
        which = int(self.which[index])
        try:
            if which not in self._open:
                self._open[which] = open_regular(self.paths[which])
            size = int(self.sizes[index])
            if size > LARGEST_IMAGE:
                raise BadImage(f"larger than {size_in_words(LARGEST_IMAGE)}")
            data = os.pread(self._open[which], size, int(self.offsets[index]))
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise BadImage(f"{self.paths[which]} ends before it")
        return data

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_open", {}).values():
            os.close(descriptor)


class Picked:
    """Some of another reader's images, in another order."""

    def __init__(self, inner: Bytes, rows: Indices) -> None:
        self.inner, self.rows = inner, rows

    def __call__(self, index: int) -> bytes:
        """The content of image `rows[index]`."""
        return self.inner(int(self.rows[index]))


class Decoded:
    """An image set's `read`: bytes to tensors (3, H, W)."""

    def __init__(self, encoded: Bytes) -> None:
        self.encoded = encoded

    def __call__(self, index: int) -> Tensor:
        """The decoded image."""
        return decode(self.encoded(index))
