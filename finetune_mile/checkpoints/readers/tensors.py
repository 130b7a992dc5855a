"""Tensors of torch.save, as bounded views of storages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from finetune_mile.checkpoints.readers.allowance import Allowance
from finetune_mile.checkpoints.readers.arrays import check_shape, count_items
from finetune_mile.checkpoints.readers.contents import Refused
from finetune_mile.checkpoints.readers.names import Name

_DTYPE_NAMES = (
    *("float16", "float32", "float64", "bfloat16", "bool", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2"),
)
DTYPES = {f"torch.{name}": getattr(torch, name) for name in _DTYPE_NAMES}
_TYPED = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
STORAGES: dict[str, torch.dtype | None] = {
    **{f"torch.{name}Storage": dtype for name, dtype in _TYPED.items()},
    **{f"torch.cuda.{name}Storage": dtype for name, dtype in _TYPED.items()},
    "torch.storage.UntypedStorage": None,
}

# A tensor may be an expanded view of fewer numbers (stride 0), if it is small.
_SMALL = 4096


@dataclass(slots=True)
class Storage:
    """The bytes of a pickled torch storage, and as what they are to be read."""

    data: torch.UntypedStorage
    dtype: torch.dtype | None  # None: untyped, the tensor says it
    count: int  # in items of dtype, or in bytes


def rebuild_tensor(args: tuple[Any, ...], allowance: Allowance) -> torch.Tensor:
    """`_rebuild_tensor` and its later versions: a bounded view of a storage."""
    storage, offset, size, stride = args[:4]
    if not isinstance(storage, Storage) or type(offset) is not int or offset < 0:
        raise Refused("is damaged: a tensor in it has no storage")
    dtype, count = storage.dtype, storage.count
    if dtype is None:
        named = args[6] if len(args) > 6 else None
        dtype = DTYPES.get(named.qualified) if isinstance(named, Name) else None
        if dtype is None:
            raise Refused("holds a tensor of a dtype that is not known")
        count //= dtype.itemsize
    sides, steps = check_shape(size), check_shape(stride)
    items = count_items(sides)
    last = offset + sum((side - 1) * step for side, step in zip(sides, steps, strict=True))
    if items and (last >= count or items > max(count, _SMALL)):
        raise Refused(
            f"holds a tensor of shape {sides} over a storage of {count} numbers: it is damaged "
            "or it lies about its sizes"
        )
    if not items:
        return torch.empty(sides, dtype=dtype)
    allowance.spend(items * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage.data, offset, sides, steps)
