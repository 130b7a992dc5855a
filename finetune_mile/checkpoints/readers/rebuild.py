"""The callables of honest checkpoints, each replaced by a harmless function of our own.

`REBUILDERS`, at the end, is the complete list: a pickle can reach nothing else. Each takes the pickled arguments and
the allowance, and gives plain data: tensors of torch and numpy, Python scalars, dicts and lists. `call` looks them up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from finetune_mile.checkpoints.readers.contents import Allowance, Refused, Stub, require
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.names import Name, acting

Args = tuple[Any, ...]

_ENTRY = 100  # bytes that an entry of a dict or set takes, about
_TUPLE_KEY = 2**16
_LARGEST_SIDE = 2**40


def check_shape(shape: Any) -> tuple[int, ...]:
    require(
        isinstance(shape, tuple | list) and len(shape) <= 32, "is damaged: the shape of a tensor in it is not valid"
    )
    require(
        all(type(side) is int and 0 <= side <= _LARGEST_SIDE for side in shape),
        "is damaged: a tensor in it has a negative or impossibly large side",
    )
    return tuple(shape)


# --------------------------------------------------------- torch: tensors as bounded views of storages

DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float16", "float32", "float64", "bfloat16", "bool", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
}
_TYPED = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
STORAGES: dict[str, torch.dtype | None] = {
    **{f"torch.{name}Storage": dtype for name, dtype in _TYPED.items()},
    **{f"torch.cuda.{name}Storage": dtype for name, dtype in _TYPED.items()},
    "torch.storage.UntypedStorage": None,
}
_SMALL = 4096  # a tensor may be an expanded view of fewer numbers (stride 0), if it is small


@dataclass(slots=True)
class Storage:
    """The bytes of a pickled torch storage, and as what they are to be read."""

    data: torch.UntypedStorage
    dtype: torch.dtype | None  # None: untyped, the tensor says it
    count: int  # in items of dtype, or in bytes


def _rebuild_tensor(args: Args, allowance: Allowance) -> torch.Tensor:
    """`_rebuild_tensor` and its later versions."""
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
    items = prod(sides)
    last = offset + sum((side - 1) * step for side, step in zip(sides, steps, strict=True))
    if items and (last >= count or items > max(count, _SMALL)):
        raise Refused(
            f"holds a tensor of shape {sides} over a storage of {count} numbers: it is damaged, its sizes do not agree"
        )
    if not items:
        return torch.empty(sides, dtype=dtype)
    allowance.spend(items * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage.data, offset, sides, steps)


def _tensor(value: Any) -> Any:
    require(isinstance(value, torch.Tensor), "is damaged: a parameter in it is not a tensor")
    return value


# -------------------------------------------- numpy: dtypes, arrays and scalars, as tensors and scalars

_NUMBERS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])
_SPELT_OUT = {np.dtype(letter).name: letter for letter in sorted(_NUMBERS)}  # {"float32": "f4", "bool": "b1", ...}


@dataclass(frozen=True, slots=True)
class Blob:
    """A long string or bytes of a pickle, left in the file until somebody needs it."""

    file: MappedFile
    start: int
    count: int
    form: Literal["text", "bytes", "latin-1"]  # latin-1: bytes, spelt as text

    def value(self) -> str | bytes:
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
        require(
            isinstance(state, tuple) and len(state) >= 8 and state[1] in ("<", ">", "|", "="),
            "is damaged: a numpy dtype in it has no byte order",
        )
        require(state[2:5] == (None, None, None), "holds a numpy array of records; only numbers are read")
        self.order = ">" if state[1] == ">" else "<"

    def numbers(self) -> np.dtype[Any]:
        if self.code == "bfloat16":
            return np.dtype("<u2")
        require(self.code in _NUMBERS, f"holds a numpy array of dtype {self.code[:20]!r}; only numbers are read")
        return np.dtype(self.order + self.code)


@dataclass(slots=True)
class Unbuilt:
    """An array between numpy's `_reconstruct` and its state; `memo` says where it was put down."""

    memo: list[int] = field(default_factory=list)


def _make_kind(code: Any) -> Kind:
    """A dtype from what `numpy.dtype` was called with."""
    if isinstance(code, Name):
        code = code.qualified.rpartition(".")[2]
        code = code.removesuffix("DType").lower() if code.endswith("DType") else code.rstrip("_")
        if code == "bfloat16":
            return Kind("bfloat16")
    require(isinstance(code, str) and len(code) <= 20, "is damaged: a numpy dtype in it is not valid")
    order = code[0] if code[:1] in ("<", ">", "|", "=") else ""
    code = code.removeprefix(order)
    return Kind(_SPELT_OUT.get(code, code), order or "<")


def _plain_kind(name: str, *_: Any) -> Kind:
    """`numpy.dtypes.Float32DType` and its like."""
    return Kind(_SPELT_OUT[name.lower()])


def _as_bytes(data: Any, allowance: Allowance) -> npt.NDArray[np.uint8]:
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
    require(isinstance(data, bytes), "holds a numpy array whose data are not bytes (objects are never read)")
    return np.frombuffer(data, dtype=np.uint8).copy()


def _make_array(kind: Any, shape: Any, data: Any, *, fortran: bool, allowance: Allowance) -> torch.Tensor:
    """A tensor from a pickled array's dtype, shape and bytes, whose sizes must agree."""
    require(isinstance(kind, Kind), "is damaged: a numpy array in it has no dtype")
    dtype, sides = kind.numbers(), check_shape(shape)
    raw = _as_bytes(data, allowance)
    require(
        prod(sides) * dtype.itemsize == raw.size,
        f"holds an array of shape {sides} that has {raw.size} bytes: it is damaged, its sizes do not agree",
    )
    array = raw.view(dtype).astype(dtype.newbyteorder("="), copy=False)
    array = array.reshape(sides, order="F" if fortran else "C")
    tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(sides))
    return tensor.view(torch.bfloat16) if kind.code == "bfloat16" else tensor


def restore_array(state: Any, allowance: Allowance) -> torch.Tensor | Stub:
    """A tensor from numpy's state of an array: (version, shape, dtype, fortran, data); text and objects stay inert."""
    require(isinstance(state, tuple) and len(state) in (4, 5), "is damaged: a numpy array in it has no state")
    shape, kind, fortran, data = state[-4:]
    expected: type | tuple[type, ...] = list if isinstance(kind, Kind) and kind.code[:1] == "O" else (str, bytes, Blob)
    if isinstance(kind, Kind) and kind.code[:1] in ("O", "U", "S") and isinstance(data, expected):
        return Stub(f"numpy.ndarray of {'objects' if expected is list else 'text'}", (data,))
    return _make_array(kind, shape, data, fortran=bool(fortran), allowance=allowance)


def _scalar(args: Args, allowance: Allowance) -> Any:
    kind, data = args[:2]
    require(isinstance(kind, Kind), "is damaged: a numpy scalar in it has no dtype")
    if kind.code[:1] in ("U", "S"):
        raw = _as_bytes(data, allowance).tobytes()
        return raw.decode("utf-32-le" if kind.code[0] == "U" else "latin-1").rstrip("\0")
    return _make_array(kind, (), data, fortran=False, allowance=allowance).item()


def _from_buffer(args: Args, allowance: Allowance) -> torch.Tensor:
    """Protocol-5 arrays, kept in the pickle: (buffer, dtype, shape, order)."""
    data, kind, shape, order = args
    return _make_array(kind, shape, data, fortran=order == "F", allowance=allowance)


def _complete_array(args: Args, allowance: Allowance) -> torch.Tensor | Stub:
    """The arrays of dill and jax: (numpy's _reconstruct, its arguments, the state, extras)."""
    require(args[0] == Name("numpy.core.multiarray._reconstruct"), "is damaged: an array in it is not numpy's")
    return restore_array(args[2], allowance)


# ------------------------------------------------------------------------ Python: containers and bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A named tuple's class, known by its fields only."""

    name: str
    fields: tuple[str, ...]


def check_key(key: Any, allowance: Allowance) -> Any:
    """A dict's key or a set's element: a scalar, a short flat tuple of scalars, or a stub."""
    if isinstance(key, tuple) and len(key) <= 16:
        # Deep tuples overflow C's stack when hashed, and many can be made to collide: few, flat.
        allowance.spend(_TUPLE_KEY)
        if all(_is_scalar(part) for part in key):
            return key
    elif _is_scalar(key) or isinstance(key, Stub | Name):
        return key
    raise Refused("is damaged: a dict in it has a key that is neither a name nor a number")


def _is_scalar(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= 64
    return value is None or isinstance(value, str | bytes | float)


def _encode(args: Args, allowance: Allowance) -> bytes | Blob:
    """`_codecs.encode`, as Python 2 protocols spell bytes: latin-1 and nothing else."""
    text, codec = args
    require(codec in ("latin1", "latin-1"), "is refused: it uses _codecs.encode for more than latin-1 bytes")
    if isinstance(text, Blob):
        allowance.spend(text.count)
        return replace(text, form="latin-1")
    require(isinstance(text, str), "is damaged: bytes in it are not a string")
    allowance.spend(len(text))
    return bytes(text, "latin-1")


def _bytes(args: Args, allowance: Allowance) -> Any:
    """`bytes` and `bytearray`; a number, which would be a length, is refused."""
    if not args:
        return b""
    if len(args) == 2:
        return _encode(args, allowance)
    require(len(args) == 1 and isinstance(args[0], bytes | Blob), "is damaged: a bytearray in it is not made of bytes")
    return args[0]


def _mapping(args: Args, allowance: Allowance) -> dict[Any, Any]:
    """Any dict-like class: of nothing, of a dict, or of a list of pairs."""
    if not args:
        return {}
    if len(args) == 1 and isinstance(args[0], dict):
        return args[0]
    if len(args) == 1 and isinstance(args[0], list):
        allowance.spend(_ENTRY * len(args[0]))
        return {check_key(key, allowance): value for key, value in args[0]}
    raise Refused("is damaged: the contents of a dict in it are not valid")


def _sequence(args: Args, _: Allowance) -> Any:
    """`list`, `tuple`, `torch.Size`: what they were given."""
    if not args:
        return []
    require(isinstance(args[0], list | tuple), "is damaged: the contents of a list in it are not valid")
    return args[0]


def _deque(args: Args, allowance: Allowance) -> list[Any]:
    """A list of its own: the items are often appended afterwards."""
    items = _sequence(args, allowance)
    allowance.spend(_ENTRY * len(items))
    return list(items)


def make_set(args: Args, allowance: Allowance) -> set[Any]:
    return {check_key(item, allowance) for item in _deque(args, allowance)}


def _type(args: Args, _: Allowance) -> Name:
    """`type(None)` is how None's class is pickled; anything else makes classes."""
    require(args == (None,), "is refused: it asks to run builtins.type, which no checkpoint needs")
    return Name("builtins.NoneType")


def _attribute(args: Args, _: Allowance) -> Stub:
    """`getattr(Class, "method")`, as bound and unbound methods of foreign classes are pickled: a stub of that name."""
    owner, name = args
    named = owner.qualified if isinstance(owner, Name) else owner.name if isinstance(owner, Stub) else ""
    if not named or not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise acting("builtins.getattr")
    return Stub(f"{named[:400]}.{name[:80]}")


def _device(args: Args, _: Allowance) -> str:
    return ":".join(str(part) for part in args if isinstance(part, str | int))[:40]


def _record(args: Args, allowance: Allowance) -> Record:
    """The named tuples of dill: (name, fields, module)."""
    name, fields = args[:2]
    require(isinstance(name, str) and isinstance(fields, tuple | list), "is damaged: a named tuple in it has no fields")
    require(all(isinstance(part, str) for part in fields), "is damaged: a field of a named tuple in it has no name")
    allowance.spend(_ENTRY * len(fields))
    return Record(name, tuple(fields))


def _old_object(args: Args, allowance: Allowance) -> Any:
    """`copyreg._reconstructor`, of protocols 0 and 1: (class, base, base's state)."""
    result = call(args[0], (), allowance)
    if isinstance(result, Stub) and isinstance(args[2], dict):
        result.entries = args[2]
    elif isinstance(result, Stub) and isinstance(args[2], list):
        result.elements = args[2]
    return result


def call(target: Any, args: Any, allowance: Allowance) -> Any:
    """What calling `target` comes to: plain data from our own code, or a stub that records it."""
    require(isinstance(args, tuple), "is damaged: a call in it has no arguments")
    if isinstance(target, Name):
        if not target.callable:
            raise acting(target.qualified)
        rebuild = REBUILDERS.get(target.qualified)
        return Stub(target.qualified, args) if rebuild is None else rebuild(args, allowance)
    if isinstance(target, Record):
        require(len(args) == len(target.fields), f"is damaged: {target.name[:80]} has fewer or more values than fields")
        allowance.spend(_ENTRY * len(args))
        return dict(zip(target.fields, args, strict=True))
    require(isinstance(target, Stub), "is damaged: it calls something that is not a class")
    return Stub(f"{target.name[:500]}()", args)


# ------------------------------------------------------------------------------------- the complete list


REBUILDERS: dict[str, Callable[[Args, Allowance], Any]] = {
    "builtins.dict": _mapping,
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda args, allowance: _mapping(args[1:], allowance),  # without its factory
    "flax.core.frozen_dict.FrozenDict": _mapping,
    "haiku._src.data_structures.FlatMapping": _mapping,
    "haiku._src.data_structures.FlatMap": _mapping,
    "haiku._src.data_structures.frozendict": _mapping,
    "haiku.data_structures.FlatMapping": _mapping,
    "haiku.data_structures.frozendict": _mapping,
    "collections.deque": _deque,
    "builtins.list": _sequence,
    "builtins.tuple": _sequence,
    "builtins.set": make_set,
    "builtins.frozenset": make_set,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.complex": lambda args, _: complex(*map(float, args)),
    "builtins.type": _type,
    "builtins.getattr": _attribute,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _old_object,
    "copyreg.__newobj__": lambda args, allowance: call(args[0], args[1:], allowance),
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda args, _: _tensor(args[0]),
    "torch._utils._rebuild_parameter_with_state": lambda args, _: _tensor(args[0]),
    "torch._utils._rebuild_device_tensor_from_numpy": lambda args, _: _tensor(args[0]),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda args, _: _tensor(args[0]),
    # the tensor without its subclass
    "torch._tensor._rebuild_from_type_v2": lambda args, allowance: _tensor(call(args[0], args[2], allowance)),
    "torch.Size": _sequence,
    "torch.device": _device,
    "numpy.dtype": lambda args, _: _make_kind(args[0]),
    "numpy.core.multiarray._reconstruct": lambda _args, _: Unbuilt(),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    **{
        f"numpy.dtypes.{kind}DType": partial(_plain_kind, kind)
        for kind in (
            *("Float16", "Float32", "Float64", "Bool", "Int8", "Int16", "Int32", "Int64"),
            *("UInt8", "UInt16", "UInt32", "UInt64"),
        )
    },
    "dill._dill._create_array": _complete_array,
    "dill._dill._create_namedtuple": _record,
    "dill.dill._create_array": _complete_array,
    "dill.dill._create_namedtuple": _record,
    "jax._src.array._reconstruct_array": _complete_array,
    "jax._src.device_array.reconstruct_device_array": _complete_array,
    "jax.interpreters.xla.reconstruct_device_array": _complete_array,
    "jax.interpreters.xla._reconstruct_array": _complete_array,
}
# Names that stand for themselves, as an argument of one of the above.
KNOWN = (
    REBUILDERS.keys()
    | STORAGES.keys()
    | DTYPES.keys()
    | {"numpy.ndarray", "torch.Tensor", "torch.nn.parameter.Parameter"}
)
