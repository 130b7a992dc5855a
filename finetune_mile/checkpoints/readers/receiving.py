"""The parent's side: starts the child that reads a file's pickles, and makes tensors of what it describes.

What the child sends is not trusted more than the file: the only names it may use are those in `Received._made`, and
every tensor is checked against its storage, every storage against the file.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import torch

import finetune_mile
from finetune_mile.checkpoints.readers.contents import Container, Refused, Stub, check_shape, require
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.sending import REFUSED, Header
from finetune_mile.checkpoints.readers.unpickling import DTYPES, NUMBERS

_ROOT = Path(finetune_mile.__file__).resolve().parent.parent
_CODE = "import sys; sys.path.append(sys.argv[1]); from {0} import main; main(*sys.argv[2:])"
_COMMAND = ["-I", "-S", "-c", _CODE.format("finetune_mile.checkpoints.readers.sending"), str(_ROOT)]
_PATIENCE, _SLOWEST = 60, 2**20  # seconds, and one more for so many bytes of the pickle
_OUT_OF_TIME = -24  # ended by SIGXCPU, on Linux and macOS
_SMALL = 4096  # a tensor may be an expanded view of fewer numbers (stride 0), if it is small
# What our own code and torch raise on arguments of the wrong kind or number.
_NONSENSE = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError)


def itemsize(dtype: str | None) -> int:
    """Bytes of an item of a storage; an untyped storage counts bytes."""
    return 1 if dtype is None else _dtype(dtype).itemsize


def _dtype(name: str) -> torch.dtype:
    require(name in DTYPES, "holds a tensor of a dtype that is not known")
    return getattr(torch, name)


@contextmanager
def received(file: MappedFile, container: Container, start: int, count: int) -> Iterator["Received"]:
    """What a child process finds in the pickle, or the run of pickles, in a range of a file."""
    command = [sys.executable, *_COMMAND, container, str(start), str(count)]
    with file.path.open("rb") as stream:
        try:
            child = subprocess.Popen(command, stdin=stream, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            why = f"cannot be read: sys.executable is {sys.executable!r}, which does not start ({error.strerror})"
            raise Refused(f"{why}; set it to a Python, or convert the file to safetensors") from error
    clock = Timer(_PATIENCE + count / _SLOWEST, child.kill)
    clock.start()
    try:
        yield Received(child.stdout, file)
    except (EOFError, pickle.UnpicklingError) as error:
        raise Refused(_why(child, clock.finished.is_set())) from error
    except _NONSENSE as error:
        raise Refused(f"is damaged: its pickle is not valid ({type(error).__name__}); fetch it again") from error
    finally:
        clock.cancel()
        child.kill()
        child.communicate()


def _why(child: subprocess.Popen[bytes], out_of_time: bool) -> str:
    """Why a child ended too early: it said so, or the system ended it."""
    said = child.communicate()[1].decode("utf-8", "replace")
    if child.returncode == REFUSED:
        return said
    if out_of_time or child.returncode == _OUT_OF_TIME:
        return "takes far longer to read than its size explains; save its state_dict alone and use that"
    return f"is refused: the process that read it ended early (exit code {child.returncode}); fetch the file again"


class Received(pickle.Unpickler):
    """What a child sends, with tensors in the place of their descriptions.

    Attributes:
        header: What comes before the tree.
        places: Key of each storage: where its bytes begin in the file. Fill it before you call `load`.
    """

    def __init__(self, stream: Any, file: MappedFile) -> None:
        super().__init__(stream)
        self._file, self._left = file, 64 * 2**20 + 8 * file.size
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._made: dict[str, Callable[..., Any]] = {
            "Object": Stub, "Mapping": dict, "complex": complex, "Global": _name, "Scalar": self._scalar,
            "Array": self._array, "Tensor": self._tensor,
        }  # fmt: skip
        self.places: dict[str, int] = {}
        self.header = Header(*self.load())

    def find_class(self, _module: str, name: str) -> Callable[..., Any]:
        return self._made[name]

    def _tensor(self, key: str, name: str, offset: Any, size: Any, stride: Any) -> torch.Tensor:
        """A view of a storage; its dtype is that of the storage, if that has one."""
        dtype, (kind, count) = _dtype(name), self.header.storages[key]
        if key not in self._storages:
            align = 8 if kind is None else dtype.itemsize
            self._storages[key] = self._file.storage(self.places[key], count * itemsize(kind), align)
        count = count * itemsize(kind) // dtype.itemsize
        sides, steps = check_shape(size), check_shape(stride)
        items = prod(sides)
        require(type(offset) is int and offset >= 0, "is damaged: a tensor in it has no storage")
        last = offset + sum((side - 1) * step for side, step in zip(sides, steps, strict=True))
        require(
            not items or (last < count and items <= max(count, _SMALL)),
            f"holds a tensor of shape {sides} over a storage of {count} numbers: it is damaged, its sizes do not agree",
        )
        if not items:
            return torch.empty(sides, dtype=dtype)
        self._spend(items * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(self._storages[key], offset, sides, steps)

    def _array(self, code: str, order: str, shape: Any, fortran: bool, data: Any) -> torch.Tensor | Stub:
        """A tensor from an array's bytes, whose sizes must agree; text and objects stay inert."""
        if code[:1] in ("O", "U", "S") and isinstance(data, list if code[0] == "O" else str | bytes):
            return Stub(f"numpy.ndarray of {'objects' if code[0] == 'O' else 'text'}", (data,))
        require(code in NUMBERS or code == "bfloat16", f"holds a numpy array of dtype {code!r}; only numbers are read")
        dtype, sides = np.dtype("<u2" if code == "bfloat16" else order + code), check_shape(shape)
        raw = np.frombuffer(self._bytes(data), dtype=np.uint8).copy()
        require(
            prod(sides) * dtype.itemsize == raw.size,
            f"holds an array of shape {sides} that has {raw.size} bytes: it is damaged, its sizes do not agree",
        )
        array = raw.view(dtype).astype(dtype.newbyteorder("="), copy=False)
        array = array.reshape(sides, order="F" if fortran else "C")
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(sides))
        return tensor.view(torch.bfloat16) if code == "bfloat16" else tensor

    def _scalar(self, code: str, order: str, data: Any) -> Any:
        if code[:1] in ("U", "S"):
            return self._bytes(data).decode("utf-32-le" if code[0] == "U" else "latin-1").rstrip("\0")
        array = self._array(code, order, (), False, data)
        return array.item() if isinstance(array, torch.Tensor) else array

    def _bytes(self, data: Any) -> bytes:
        """The data of an array; a string is what Python 2 called bytes."""
        data = data.encode("latin-1") if isinstance(data, str) else data
        why = "holds a numpy array whose data are not bytes (objects are never read)"
        require(isinstance(data, bytes | bytearray), why)
        self._spend(len(data))
        return bytes(data)

    def _spend(self, count: int) -> None:
        """Take bytes before they are made, or refuse: a small file cannot ask for many times its size in memory."""
        require(0 <= count <= self._left, "is refused: its contents would unfold to many times the size of the file")
        self._left -= count


def _name(qualified: str) -> str | Stub:
    """A class or function that a file names: dtypes are plain data."""
    return qualified if qualified.removeprefix("torch.") in DTYPES else Stub(qualified)
