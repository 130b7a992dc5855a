"""A file as memory: mapped where the bytes can be used in place, read where they cannot; and given back after use."""

import ctypes
import mmap
import re
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune_mile.checkpoints.readers import Refused, require

_MAPS = Path("/proc/self/maps")  # address, rights, offset, device, inode and name of each mapping; Linux only
# Private and writable, of a file (inode 0: of none) that is no library.
_OF_A_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ (?!0 )\d+ +(?!.*\.so)\S.*$", re.MULTILINE)


class MappedFile:
    """A regular file, mapped copy-on-write: tensors over it may be written to, the file is not."""

    def __init__(self, path: Path) -> None:
        status = path.stat()
        require(stat.S_ISREG(status.st_mode), "is not a regular file")
        require(status.st_size, "is empty (0 bytes); the download or the copy failed, fetch it again")
        self.path = path
        with path.open("rb") as file:
            self._bytes: npt.NDArray[np.uint8] = np.memmap(file, dtype=np.uint8, mode="c")
        self.size = int(self._bytes.size)
        self.view = self._bytes.data
        self._storage = torch.from_numpy(self._bytes).untyped_storage()

    def check(self, start: int, count: int) -> None:
        """Refuse a range that is not inside the file."""
        if start < 0 or count < 0 or start + count > self.size:
            raise Refused(
                f"needs {count} bytes at {start}, but the file has {self.size}: it is incomplete or damaged, "
                "fetch it again"
            )

    def storage(self, start: int, count: int, itemsize: int) -> torch.UntypedStorage:
        """A range as a storage of its own: in place if aligned to `itemsize`, else copied."""
        self.check(start, count)
        if count and start % itemsize == 0:
            part: torch.UntypedStorage = self._storage[start : start + count]
            return part
        copy = np.fromfile(self.path, dtype=np.uint8, count=count, offset=start)  # not through the map
        require(copy.size == count, "became shorter while it was read")
        return torch.from_numpy(copy).untyped_storage()


class MappedPages:
    """The file-backed, private parts of this process's memory, given back once they are copied.

    A file that is mapped counts as memory of the process as soon as it is read; the copy that becomes the network
    counts again. The system is told here that it may take the pages of the map back, so that loading takes the memory
    of one network. Only on Linux; elsewhere nothing happens.
    """

    def __init__(self) -> None:
        text = _MAPS.read_text(encoding="utf-8", errors="replace") if _MAPS.is_file() else ""
        self._ranges = [(int(start, 16), int(end, 16)) for start, end in _OF_A_FILE.findall(text)]

    def give_back(self, tensor: Tensor) -> None:
        """Let go of a tensor's pages where they come from a file; reading it again reads the file.

        Memory that is not backed by a file is left alone: there the advice would wipe it.
        """
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and any(low <= start and end <= high for low, high in self._ranges):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
