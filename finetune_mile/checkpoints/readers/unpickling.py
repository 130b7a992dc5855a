"""The child's side: a pickle becomes plain containers and descriptions, and nothing that it names is imported.

Python's own unpickler does the work. For every global it asks `find_class`, which gives a stand-in: a class of ours
whose call makes plain data, a description of a tensor, or an inert `Object`. `REBUILDERS`, at the end, lists what is
rebuilt. Only `sending.py` runs this, in a process with limits, so sizes and hashes are not checked here.
Everything that a pickle can reach has `__setstate__`, so that no file can change an attribute of ours.
"""

import copyreg
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from finetune_mile.checkpoints.readers import Refused, require
from finetune_mile.checkpoints.readers.names import acting, judge

_TYPED = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip
DTYPES = frozenset([*_TYPED.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"])
STORAGES: dict[str, str | None] = {
    **{f"torch.{place}{name}Storage": dtype for name, dtype in _TYPED.items() for place in ("", "cuda.")},
    "torch.storage.UntypedStorage": None,  # its tensors say their dtype
}
_KINDS = {"float": (2, 4, 8), "int": (1, 2, 4, 8), "uint": (1, 2, 4, 8), "complex": (8, 16)}
_SPELT_OUT = {f"{word}{8 * size}": f"{word[0]}{size}" for word, sizes in _KINDS.items() for size in sizes}
_SPELT_OUT["bool"] = "b1"
NUMBERS = frozenset(_SPELT_OUT.values())


class StandIn(type):
    """Stands for a global that a pickle names; calling it runs our code only."""

    qualified: str

    def __setstate__(cls, state: object) -> None:
        raise Refused("is damaged: it restores the state of a class")


def stand_in(qualified: str, make: Callable[..., Any]) -> StandIn:
    """A class, as NEWOBJ needs one, whose instances are what `make` gives."""
    return StandIn("StandIn", (), {"__new__": lambda _, /, *args, **keys: make(*args, **keys), "qualified": qualified})


# ------------------------------------------------ what is sent: the parent knows these classes by their name


class Object:
    """An instance of a foreign class: arguments, state, elements and entries. The parent makes it a Stub."""

    def __init__(self, name: str, /, *args: Any, **keywords: Any) -> None:
        self.parts: dict[str, Any] = {"args": args, "state": None, "elements": [], "entries": keywords}
        self.name = name[:500]

    def __setstate__(self, state: Any) -> None:
        self.parts["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts["entries"][key] = value

    def extend(self, items: Any) -> None:
        self.parts["elements"].extend(items)

    def __call__(self, *args: Any) -> "Object":
        return Object(f"{self.name}()", *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Object, (self.name,), (None, self.parts)


class Mapping(dict[Any, Any]):
    """Any dict-like class. Old haiku mappings keep their entries in an attribute; other states are no weights."""

    def __setstate__(self, state: Any) -> None:
        inner = state.get("_storage", state.get("_mapping")) if isinstance(state, dict) else None
        if isinstance(inner, dict) and not self:
            self.update(inner)


class Described:
    """A tensor, array or scalar, by the arguments of the parent's function of the same name."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """Old parameters restore a state that is no weights."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


class Tensor(Described):
    """Storage's key, dtype, offset, size, stride."""


class Global(Described):
    """The name of a class or function."""


class Scalar(Described):
    """Code and byte order of its dtype, data."""


class Array(Described):
    """Code and byte order of its dtype, shape, whether Fortran order, data; numpy restores them as its state."""

    def __setstate__(self, state: Any) -> None:
        require(isinstance(state, tuple) and len(state) in (4, 5), "is damaged: a numpy array in it has no state")
        shape, kind, fortran, data = state[-4:]
        require(isinstance(kind, Kind), "is damaged: a numpy array in it has no dtype")
        self.args = kind.code, kind.order, shape, bool(fortran), data


def _reduce(named: StandIn) -> tuple[Any, ...]:
    return Global, (named.qualified,)


copyreg.pickle(StandIn, _reduce)


class Leftover:
    """What is of no use unless a tensor or an array takes it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Object, (f"{type(self).__name__.lower()} without use",)


class Storage(Leftover):
    """The data of tensors: its key in the file, dtype (None: bytes) and number of items."""

    def __init__(self, key: str, dtype: str | None, count: int) -> None:
        self.key, self.dtype, self.count = key, dtype, count

    def __setstate__(self, state: object) -> None:
        raise Refused("is damaged: it restores the state of a storage")


class Kind(Leftover):
    """A numpy dtype: its letter and width, its byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        if isinstance(code, StandIn):
            code = code.qualified.rpartition(".")[2]
            code = code.removesuffix("DType").lower() if code.endswith("DType") else code.rstrip("_")
        require(isinstance(code, str) and len(code) <= 20, "is damaged: a numpy dtype in it is not valid")
        order = code[0] if code[:1] in ("<", ">", "|", "=") else ""
        code = code.removeprefix(order)
        self.code, self.order = _SPELT_OUT.get(code, code), ">" if order == ">" else "<"

    def __setstate__(self, state: Any) -> None:
        """Take the byte order; records and objects are refused."""
        require(
            isinstance(state, tuple) and len(state) >= 8 and state[1] in ("<", ">", "|", "="),
            "is damaged: a numpy dtype in it has no byte order",
        )
        require(state[2:5] == (None, None, None), "holds a numpy array of records; only numbers are read")
        self.order = ">" if state[1] == ">" else "<"


# ------------------------------------------------------------------------------------------ the unpickler


class Unpickler(pickle.Unpickler):
    """Reads one pickle; `stubs` are the foreign names that were met, `storages` those of its tensors."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, encoding="latin-1")
        self.stubs: set[str] = set()
        self.storages: dict[str, Storage] = {}
        self._made: dict[str, StandIn] = {}

    def find_class(self, module: str, name: str) -> StandIn:
        qualified, may_be_called = judge(module, name, KNOWN)
        if qualified not in KNOWN and not qualified.startswith("builtins."):
            self.stubs.add(qualified)
        if qualified not in self._made:
            make = REBUILDERS.get(qualified, partial(Object, qualified)) if may_be_called else partial(_act, qualified)
            self._made[qualified] = stand_in(qualified, make)
        return self._made[qualified]

    def persistent_load(self, pid: Any) -> Storage | StandIn:
        """A storage, from its description by torch; the device is ignored."""
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], StandIn):
            return pid[1]  # the class of a module, with its source: how whole networks were saved before torch 1.6
        require(
            isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage",
            "is damaged: a storage in it has no description",
        )
        _, kind, key, _, count, *view = pid
        require(
            isinstance(kind, StandIn) and kind.qualified in STORAGES,
            "holds a tensor of a kind that is not read (quantised or sparse)",
        )
        require(isinstance(key, str) and len(key) <= 64, "is damaged: a storage in it has a key that is no plain name")
        require(type(count) is int and count >= 0, "is damaged: a storage in it has no size")
        require(view in ([], [None]), "has views of storages, as before torch 0.4; save it again with torch.save")
        storage = self.storages.setdefault(key, Storage(key, STORAGES[kind.qualified], count))
        require(
            (storage.dtype, storage.count) == (STORAGES[kind.qualified], count),
            f"is damaged: it gives storage {key} two sizes or types",
        )
        return storage


def _act(qualified: str, *_: Any, **__: Any) -> None:
    raise acting(qualified)


# ----------------------------------------------------- what honest pickles call: torch, numpy, containers


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Tensor:
    """`_rebuild_tensor` and its later versions."""
    require(isinstance(storage, Storage), "is damaged: a tensor in it has no storage")
    dtype = storage.dtype
    if dtype is None:
        named = more[2].qualified if len(more) > 2 and isinstance(more[2], StandIn) else ""
        dtype = named.removeprefix("torch.")
        require(dtype in DTYPES, "holds a tensor of a dtype that is not known")
    if len(more) > 2 and isinstance(more[-1], dict) and any(more[-1].values()):  # signs that its storage lacks
        raise Refused("holds a tensor that is negated or conjugated when it is read; save tensor.resolve_neg() instead")
    return Tensor(storage.key, dtype, offset, size, stride)


def _parameter(data: Any, *_: Any) -> Any:
    require(isinstance(data, Tensor | Array), "is damaged: a parameter in it is not a tensor")
    return data


def _scalar(kind: Any, data: Any) -> Scalar:
    require(isinstance(kind, Kind), "is damaged: a numpy scalar in it has no dtype")
    return Scalar(kind.code, kind.order, data)


def _from_state(*state: Any) -> Array:
    array = Array()
    array.__setstate__(state)
    return array


def _complete_array(make: Any, _: Any, state: Any, *__: Any) -> Array:
    """The arrays of dill and jax: (numpy's _reconstruct, its arguments, the state, extras)."""
    named = make.qualified if isinstance(make, StandIn) else ""
    require(named == "numpy.core.multiarray._reconstruct", "is damaged: an array in it is not numpy's")
    return _from_state(*state)


def _encode(text: Any, codec: Any) -> bytes:
    """`_codecs.encode`, as Python 2 protocols spell bytes: latin-1 and nothing else."""
    require(codec in ("latin1", "latin-1"), "is refused: it uses _codecs.encode for more than latin-1 bytes")
    return bytes(text, "latin-1")


def _bytes(data: Any = b"", *codec: Any) -> bytes:
    """`bytes` and `bytearray`; a number, which would be a length, is refused."""
    if codec:
        return _encode(data, *codec)
    require(isinstance(data, bytes | bytearray), "is damaged: a bytearray in it is not made of bytes")
    return bytes(data)


def _items(items: Any = (), *_: Any) -> list[Any]:
    require(isinstance(items, list | tuple), "is damaged: the contents of a list in it are not valid")
    return list(items)


def _type(*args: Any) -> StandIn:
    """`type(None)` is how None's class is pickled; anything else makes classes."""
    require(args == (None,), "is refused: it asks to run builtins.type, which no checkpoint needs")
    return stand_in("builtins.NoneType", partial(Object, "builtins.NoneType"))


def _attribute(owner: Any, name: Any) -> Object:
    """`getattr(Class, "method")`, as bound and unbound methods of foreign classes are pickled: a stub of that name."""
    named = owner.qualified if isinstance(owner, StandIn) else owner.name if isinstance(owner, Object) else ""
    if not named or not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise acting("builtins.getattr")
    return Object(f"{named[:400]}.{name[:80]}")


def _record(name: Any, fields: Any, *_: Any) -> StandIn:
    """The named tuples of dill: (name, fields, module); each becomes a dict."""
    require(
        isinstance(name, str) and isinstance(fields, tuple | list) and all(isinstance(part, str) for part in fields),
        "is damaged: a named tuple in it has no name or no fields",
    )
    return stand_in(name, lambda *values: dict(zip(fields, values, strict=True)))


def _call(target: Any, *args: Any) -> Any:
    require(isinstance(target, StandIn), "is damaged: it calls something that is not a class")
    return target(*args)


def _old_object(target: Any, _: Any, state: Any) -> Any:
    """`copyreg._reconstructor`, of protocols 0 and 1: (class, base, base's state)."""
    made = _call(target)
    if isinstance(made, Object) and isinstance(state, dict | list):
        made.parts["entries" if isinstance(state, dict) else "elements"] = state
    return made


# ------------------------------------------------------------------------------------- the complete list

_HAIKU = ("_src.data_structures.FlatMapping", "_src.data_structures.FlatMap", "_src.data_structures.frozendict")
_JAX = ("_src.array._reconstruct_array", "_src.device_array.reconstruct_device_array")
REBUILDERS: dict[str, Callable[..., Any]] = {
    "builtins.dict": Mapping,
    "collections.OrderedDict": Mapping,
    "collections.Counter": Mapping,
    "collections.defaultdict": lambda _=None, *args: Mapping(*args),  # without its factory
    "flax.core.frozen_dict.FrozenDict": Mapping,
    **{f"haiku.{name}": Mapping for name in (*_HAIKU, "data_structures.FlatMapping", "data_structures.frozendict")},
    "collections.deque": _items,
    "builtins.list": _items,
    "builtins.tuple": lambda *args: tuple(_items(*args)),
    "torch.Size": lambda *args: tuple(_items(*args)),
    "builtins.set": lambda *args: set(_items(*args)),
    "builtins.frozenset": lambda *args: set(_items(*args)),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.complex": lambda *args: complex(*map(float, args)),
    "builtins.type": _type,
    "builtins.getattr": _attribute,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _old_object,
    "copyreg.__newobj__": _call,
    **{f"torch._utils._rebuild_tensor{version}": _tensor for version in ("", "_v2", "_v3")},
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_device_tensor_from_numpy": _parameter,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _parameter,
    # the tensor without its subclass
    "torch._tensor._rebuild_from_type_v2": lambda make, _, args, *__: _parameter(_call(make, *args)),
    "torch.device": lambda *args: ":".join(str(part) for part in args if isinstance(part, str | int))[:40],
    "numpy.dtype": Kind,
    "numpy.core.multiarray._reconstruct": lambda *_: Array(),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": lambda data, kind, shape, order: _from_state(shape, kind, order == "F", data),
    **{f"numpy.dtypes.{name}DType": partial(Kind, name.lower())
       for name in ("Bool", *(f"{word}{size}" for word in ("Int", "UInt") for size in (8, 16, 32, 64)),
                    "Float16", "Float32", "Float64")},
    **{f"dill.{module}._create_array": _complete_array for module in ("_dill", "dill")},
    **{f"dill.{module}._create_namedtuple": _record for module in ("_dill", "dill")},
    **{f"jax.{name}": _complete_array for name in (*_JAX, "interpreters.xla.reconstruct_device_array",
                                                  "interpreters.xla._reconstruct_array")},
}  # fmt: skip
# And names that stand for themselves, as an argument of one of the above.
KNOWN = (
    REBUILDERS.keys()
    | STORAGES.keys()
    | {f"torch.{name}" for name in DTYPES}
    | {"numpy.ndarray", "torch.Tensor", "torch.nn.parameter.Parameter"}
)
