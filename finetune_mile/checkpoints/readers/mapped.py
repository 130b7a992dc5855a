"""A file as memory: mapped where the bytes can be used in place, read where they cannot."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from finetune_mile.checkpoints.readers.contents import Refused


class MappedFile:
    """A regular file, mapped copy-on-write: tensors over it may be written to, the file is not."""

    def __init__(self, path: Path) -> None:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Refused("is not a regular file")
        if status.st_size == 0:
            raise Refused("is empty (0 bytes); the download or the copy failed, fetch it again")
        self.path = path
        with path.open("rb") as file:
            self._bytes: npt.NDArray[np.uint8] = np.memmap(file, dtype=np.uint8, mode="c")
        self.size = int(self._bytes.size)
        self.view = self._bytes.data
        self._storage = torch.from_numpy(self._bytes).untyped_storage()

    def check(self, start: int, count: int) -> None:
        """Refuse a range that does not lie in the file."""
        if start < 0 or count < 0 or start + count > self.size:
            raise Refused(
                f"speaks of {count} bytes at {start}, but the file has {self.size}: it is cut "
                "short or damaged, fetch it again"
            )

    def fresh(self, start: int, count: int) -> npt.NDArray[np.uint8]:
        """A copy of a range, read from the disk and not through the map."""
        self.check(start, count)
        out = np.fromfile(self.path, dtype=np.uint8, count=count, offset=start)
        if out.size != count:
            raise Refused("became shorter while it was read")
        return out

    def storage(self, start: int, count: int, itemsize: int) -> torch.UntypedStorage:
        """A range as a storage of its own: in place if aligned to `itemsize`, else copied."""
        self.check(start, count)
        if count == 0:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        if start % itemsize:
            return torch.from_numpy(self.fresh(start, count)).untyped_storage()
        part: torch.UntypedStorage = self._storage[start : start + count]
        return part

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape` that begins at byte `start`."""
        count = int(np.prod(shape, dtype=object)) * dtype.itemsize
        flat = torch.empty(0, dtype=dtype).set_(self.storage(start, count, dtype.itemsize))
        return flat.reshape(shape)
