"""The callables of honest checkpoints, each replaced by a harmless function of our own.

`REBUILDERS` is the whole list: a pickle can reach nothing else. Each takes the pickled arguments
and the allowance, and gives plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from finetune_mile.checkpoints.readers.allowance import Allowance
from finetune_mile.checkpoints.readers.arrays import (
    Blob,
    Kind,
    Unbuilt,
    make_array,
    make_kind,
    make_scalar,
    restore_array,
)
from finetune_mile.checkpoints.readers.contents import Refused, Stub
from finetune_mile.checkpoints.readers.names import Name
from finetune_mile.checkpoints.readers.tensors import DTYPES, STORAGES, rebuild_tensor

Args = tuple[Any, ...]

_ENTRY = 100  # bytes that an entry of a dict or set takes, about
_TUPLE_KEY = 2**16
_NUMPY_KINDS = (
    *("Float16", "Float32", "Float64", "Bool", "Int8", "Int16", "Int32", "Int64"),
    *("UInt8", "UInt16", "UInt32", "UInt64"),
)


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


def call(target: Any, args: Any, allowance: Allowance) -> Any:
    """What calling `target` comes to: plain data from our own code, or a stub that records it."""
    if not isinstance(args, tuple):
        raise Refused("is damaged: a call in it has no arguments")
    if isinstance(target, Name):
        rebuild = REBUILDERS.get(target.qualified)
        return Stub(target.qualified, args) if rebuild is None else rebuild(args, allowance)
    if isinstance(target, Record):
        if len(args) != len(target.fields):
            raise Refused(f"is damaged: {target.name[:80]} has fewer or more values than fields")
        allowance.spend(_ENTRY * len(args))
        return dict(zip(target.fields, args, strict=True))
    if isinstance(target, Stub):
        return Stub(f"{target.name[:500]}()", args)
    raise Refused("is damaged: it calls something that is not a class")


def _typed_tensor(args: Args, allowance: Allowance) -> Any:
    """`_rebuild_from_type_v2`: the tensor without its subclass."""
    return _want_tensor(call(args[0], args[2], allowance))


def _want_tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise Refused("is damaged: a parameter in it is not a tensor")
    return value


def _encode(args: Args, allowance: Allowance) -> bytes | Blob:
    """`_codecs.encode`, as Python 2 protocols spell bytes: latin-1 and nothing else."""
    text, codec = args
    if codec not in ("latin1", "latin-1"):
        raise Refused("is refused, for it uses _codecs.encode for more than latin-1 bytes")
    if isinstance(text, Blob):
        allowance.spend(text.count)
        return replace(text, form="latin-1")
    if not isinstance(text, str):
        raise Refused("is damaged: bytes in it are not a string")
    allowance.spend(len(text))
    return text.encode("latin-1")


def _bytes(args: Args, allowance: Allowance) -> bytes | Blob:
    """`bytes` and `bytearray`; a number, which would be a length, is refused."""
    if not args:
        return b""
    if len(args) == 2:
        return _encode(args, allowance)
    if len(args) == 1 and isinstance(args[0], bytes | Blob):
        return args[0]
    raise Refused("is damaged: a bytearray in it is not made of bytes")


def _mapping(args: Args, allowance: Allowance) -> dict[Any, Any]:
    """Any dict-like class: of nothing, of a dict, or of a list of pairs."""
    if not args:
        return {}
    if len(args) == 1 and isinstance(args[0], dict):
        return args[0]
    if len(args) == 1 and isinstance(args[0], list):
        allowance.spend(_ENTRY * len(args[0]))
        return {check_key(key, allowance): value for key, value in args[0]}
    raise Refused("is damaged: a dict in it is made of something else")


def _default_mapping(args: Args, allowance: Allowance) -> dict[Any, Any]:
    """`defaultdict`, without its factory."""
    return _mapping(args[1:], allowance)


def _sequence(args: Args, _: Allowance) -> Any:
    """`list`, `tuple`, `torch.Size`: what they were given."""
    if not args:
        return []
    if not isinstance(args[0], list | tuple):
        raise Refused("is damaged: a list in it is made of something else")
    return args[0]


def _deque(args: Args, allowance: Allowance) -> list[Any]:
    """A list of its own: the items are often appended afterwards."""
    items = _sequence(args, allowance)
    allowance.spend(_ENTRY * len(items))
    return list(items)


def _set(args: Args, allowance: Allowance) -> set[Any]:
    items = _sequence(args, allowance)
    allowance.spend(_ENTRY * len(items))
    return {check_key(item, allowance) for item in items}


def _complex(args: Args, _: Allowance) -> complex:
    real, imaginary = args
    return complex(float(real), float(imaginary))


def _type(args: Args, _: Allowance) -> Name:
    """`type(None)` is how None's class is pickled; anything else makes classes."""
    if args == (None,):
        return Name("builtins.NoneType")
    raise Refused("is refused, for it asks to run builtins.type, which no checkpoint needs")


def _device(args: Args, _: Allowance) -> str:
    return ":".join(str(part) for part in args if isinstance(part, str | int))[:40]


def _dtype(args: Args, _: Allowance) -> Kind:
    return make_kind(args[0])


def _class_dtype(code: str) -> Callable[[Args, Allowance], Kind]:
    return lambda _args, _allowance: make_kind(Name(code))


def _scalar(args: Args, allowance: Allowance) -> Any:
    return make_scalar(args[0], args[1], allowance)


def _from_buffer(args: Args, allowance: Allowance) -> Any:
    """Protocol-5 arrays, kept in the pickle: (buffer, dtype, shape, order)."""
    data, kind, shape, order = args
    return make_array(kind, shape, data, fortran=order == "F", allowance=allowance)


def _whole_array(args: Args, allowance: Allowance) -> Any:
    """The arrays of dill and jax: (numpy's _reconstruct, its arguments, the state, extras)."""
    target = args[0]
    if not isinstance(target, Name) or target.qualified != "numpy.core.multiarray._reconstruct":
        raise Refused("is damaged: an array in it is not numpy's")
    return restore_array(args[2], allowance)


def _record(args: Args, allowance: Allowance) -> Record:
    """The named tuples of dill: (name, fields, module)."""
    name, fields = args[:2]
    if not isinstance(name, str) or not isinstance(fields, tuple | list):
        raise Refused("is damaged: a named tuple in it has no fields")
    if not all(isinstance(part, str) for part in fields):
        raise Refused("is damaged: a named tuple in it has a field without a name")
    allowance.spend(_ENTRY * len(fields))
    return Record(name, tuple(fields))


def _old_object(args: Args, allowance: Allowance) -> Any:
    """`copyreg._reconstructor`, of protocols 0 and 1: (class, base, base's state)."""
    made = call(args[0], (), allowance)
    if isinstance(made, Stub) and isinstance(args[2], dict):
        made.entries = args[2]
    elif isinstance(made, Stub) and isinstance(args[2], list):
        made.elements = args[2]
    return made


def _new_object(args: Args, allowance: Allowance) -> Any:
    """`copyreg.__newobj__`: (class, *arguments)."""
    return call(args[0], args[1:], allowance)


MAPPINGS = frozenset(
    {
        "builtins.dict",
        "collections.OrderedDict",
        "collections.Counter",
        "flax.core.frozen_dict.FrozenDict",
        "haiku._src.data_structures.FlatMapping",
        "haiku._src.data_structures.FlatMap",
        "haiku._src.data_structures.frozendict",
        "haiku.data_structures.FlatMapping",
        "haiku.data_structures.frozendict",
    }
)
REBUILDERS: dict[str, Callable[[Args, Allowance], Any]] = {
    **dict.fromkeys(MAPPINGS, _mapping),
    "collections.defaultdict": _default_mapping,
    "collections.deque": _deque,
    "builtins.list": _sequence,
    "builtins.tuple": _sequence,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.complex": _complex,
    "builtins.type": _type,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _old_object,
    "copyreg.__newobj__": _new_object,
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda args, _: _want_tensor(args[0]),
    "torch._utils._rebuild_parameter_with_state": lambda args, _: _want_tensor(args[0]),
    "torch._utils._rebuild_device_tensor_from_numpy": lambda args, _: _want_tensor(args[0]),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda args, _: _want_tensor(args[0]),
    "torch._tensor._rebuild_from_type_v2": _typed_tensor,
    "torch.Size": _sequence,
    "torch.device": _device,
    "numpy.dtype": _dtype,
    "numpy.core.multiarray._reconstruct": lambda _args, _: Unbuilt(),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    **{f"numpy.dtypes.{kind}DType": _class_dtype(f"{kind}DType") for kind in _NUMPY_KINDS},
    "dill._dill._create_array": _whole_array,
    "dill._dill._create_namedtuple": _record,
    "dill.dill._create_array": _whole_array,
    "dill.dill._create_namedtuple": _record,
    "jax._src.array._reconstruct_array": _whole_array,
    "jax._src.device_array.reconstruct_device_array": _whole_array,
    "jax.interpreters.xla.reconstruct_device_array": _whole_array,
    "jax.interpreters.xla._reconstruct_array": _whole_array,
}
# Names that stand for themselves, as an argument of one of the above.
KNOWN = (
    REBUILDERS.keys()
    | STORAGES.keys()
    | DTYPES.keys()
    | {"numpy.ndarray", "torch.Tensor", "torch.nn.parameter.Parameter"}
)
