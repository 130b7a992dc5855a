"""numpy's pickled dtypes, arrays and scalars, rebuilt by hand as tensors and Python scalars."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from finetune_mile.checkpoints.readers.allowance import Allowance
from finetune_mile.checkpoints.readers.contents import Refused
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.names import Name

_NUMBERS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])
_LARGEST_SIDE = 2**40


@dataclass(frozen=True, slots=True)
class Blob:
    """A long string or bytes of a pickle, left in the file until somebody wants it."""

    file: MappedFile
    start: int
    count: int
    form: Literal["text", "bytes", "latin-1"]  # latin-1: bytes, spelt as text

    def value(self) -> str | bytes:
        """The string or the bytes."""
        raw = self.file.fresh(self.start, self.count)
        if self.form == "bytes":
            return raw.tobytes()
        text = str(raw.data, "utf-8", "surrogatepass")
        return text if self.form == "text" else text.encode("latin-1")


@dataclass(slots=True)
class Kind:
    """A numpy dtype: its letter and width, its byte order."""

    code: str
    order: str = "<"

    def restore(self, state: Any) -> None:
        """Take the byte order from a pickled dtype's state; records and objects are refused."""
        if not isinstance(state, tuple) or len(state) < 8 or state[1] not in ("<", ">", "|", "="):
            raise Refused("is damaged: a numpy dtype in it has no byte order")
        if any(part is not None for part in state[2:5]):
            raise Refused("holds a numpy array of records, which no weights are")
        self.order = ">" if state[1] == ">" else "<"

    def numbers(self) -> np.dtype[Any]:
        """The dtype, if it is one of plain numbers."""
        if self.code == "bfloat16":
            return np.dtype("<u2")
        if self.code not in _NUMBERS:
            raise Refused(f"holds a numpy array of dtype {self.code[:20]!r}; only numbers are read")
        return np.dtype(self.order + self.code)


@dataclass(slots=True)
class Unbuilt:
    """An array between numpy's `_reconstruct` and its state; `memo` says where it was put down."""

    memo: list[int] = field(default_factory=list)


def make_kind(code: Any) -> Kind:
    """A dtype from what `numpy.dtype` was called with."""
    if isinstance(code, Name):
        code = code.qualified.rpartition(".")[2]
        code = code.removesuffix("DType").lower() if code.endswith("DType") else code.rstrip("_")
        if code == "bfloat16":
            return Kind("bfloat16")
    if not isinstance(code, str) or len(code) > 20:
        raise Refused("is damaged: a numpy dtype in it is not one")
    order = code[0] if code[:1] in ("<", ">", "|", "=") else ""
    return Kind(_SPELT_OUT.get(code.removeprefix(order), code.removeprefix(order)), order or "<")


_SPELT_OUT = {np.dtype(letter).name: letter for letter in sorted(_NUMBERS)}  # {"float32": "f4", "bool": "b1", ...}


def check_shape(shape: Any) -> tuple[int, ...]:
    """A shape of sane length and sides."""
    if not isinstance(shape, tuple | list) or len(shape) > 32:
        raise Refused("is damaged: the shape of a tensor in it is not one")
    if any(type(side) is not int or not 0 <= side <= _LARGEST_SIDE for side in shape):
        raise Refused("is damaged: a tensor in it has a side below zero or beyond reason")
    return tuple(shape)


def count_items(shape: tuple[int, ...]) -> int:
    """The product of the sides, in integers that cannot overflow."""
    total = 1
    for side in shape:
        total *= side
    return total


def as_bytes(data: Any, allowance: Allowance) -> npt.NDArray[np.uint8]:
    """A private, writable copy of pickled bytes; a string is what Python 2 called bytes."""
    if isinstance(data, Blob):
        allowance.spend(data.count)
        if data.form == "bytes":
            return data.file.fresh(data.start, data.count)
        data = data.value()
    elif isinstance(data, str | bytes):
        allowance.spend(len(data))
    if isinstance(data, str):
        data = data.encode("latin-1")
    if not isinstance(data, bytes):
        raise Refused("holds a numpy array whose data are not bytes (objects are never read)")
    return np.frombuffer(data, dtype=np.uint8).copy()


def make_array(kind: Any, shape: Any, data: Any, *, fortran: bool, allowance: Allowance) -> Any:
    """A tensor from a pickled array's dtype, shape and bytes, whose sizes must agree."""
    if not isinstance(kind, Kind):
        raise Refused("is damaged: a numpy array in it has no dtype")
    dtype, sides = kind.numbers(), check_shape(shape)
    raw = as_bytes(data, allowance)
    if count_items(sides) * dtype.itemsize != raw.size:
        raise Refused(f"holds an array of shape {sides} that has {raw.size} bytes: it is damaged or it lies")
    array = raw.view(dtype).astype(dtype.newbyteorder("="), copy=False)
    array = array.reshape(sides, order="F" if fortran else "C")
    tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(sides))
    return tensor.view(torch.bfloat16) if kind.code == "bfloat16" else tensor


def restore_array(state: Any, allowance: Allowance) -> Any:
    """A tensor from numpy's state of an array: (version, shape, dtype, fortran, data)."""
    if not isinstance(state, tuple) or len(state) not in (4, 5):
        raise Refused("is damaged: a numpy array in it has no state")
    shape, kind, fortran, data = state[-4:]
    return make_array(kind, shape, data, fortran=bool(fortran), allowance=allowance)


def make_scalar(kind: Any, data: Any, allowance: Allowance) -> Any:
    """A Python scalar from a numpy one."""
    if not isinstance(kind, Kind):
        raise Refused("is damaged: a numpy scalar in it has no dtype")
    if kind.code[:1] in ("U", "S"):
        raw = as_bytes(data, allowance).tobytes()
        return raw.decode("utf-32-le" if kind.code[0] == "U" else "latin-1").rstrip("\0")
    return make_array(kind, (), data, fortran=False, allowance=allowance).item()
