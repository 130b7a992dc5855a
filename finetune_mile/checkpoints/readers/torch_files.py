"""torch.save's two containers (the zip archive of today, the run of pickles before it), pickles, safetensors.

Pickles are read by a child process (sending.py). What it sends is not trusted more than the file: the only names it
may use are those in `Received._made`, and every tensor is checked against its storage, every storage against the file.
`plain_tree` is the last pass over what a pickle gave: plain containers only, of bounded depth and width.
"""

import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

import finetune_mile
from finetune_mile.checkpoints.readers import (
    LONGEST_NAME,
    Container,
    Contents,
    Refused,
    Stub,
    bounded,
    check_shape,
    require,
)
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.sending import REFUSED, Header
from finetune_mile.checkpoints.readers.unpickling import DTYPES, NUMBERS

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error)
_DEEPEST = 64
_LARGEST_HEADER = 16 * 2**20  # of a safetensors file
_WIDEST = 2_000_000
_ENDLESS = "is refused: its containers are nested without end"
_MODULE_PARTS = ("_modules", "_parameters", "_buffers")
_ROOT = Path(finetune_mile.__file__).resolve().parent.parent
_CODE = "import sys; sys.path.append(sys.argv[1]); from {0} import main; main(*sys.argv[2:])"
_COMMAND = ["-I", "-S", "-c", _CODE.format("finetune_mile.checkpoints.readers.sending"), str(_ROOT)]
# Seconds, and one more for so many bytes of the pickle. Where the child limits its processor time, that is the limit:
# on a machine that is busy with other work four seconds of the processor took more than a minute.
_PATIENCE, _SLOWEST = (900 if os.name == "posix" else 60), 2**20
_OUT_OF_TIME = -24  # ended by SIGXCPU, on Linux and macOS
_DTYPES = {name: getattr(torch, name) for name in DTYPES} | {None: torch.uint8}  # a storage without one counts bytes
_SMALL = 4096  # a tensor may be an expanded view of fewer numbers (stride 0), if it is small
# What our own code and torch raise on arguments of the wrong kind or number.
_NONSENSE = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError)

# ---------------------------------------------------------------------------------------- zip archives


def read_zip(file: MappedFile) -> Contents:
    """A zip archive of torch.save: one pickle, and one uncompressed record per storage."""
    records = _list_records(file)
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    require(len(pickles) == 1, "is a zip file, but not one of torch.save; unpack it and give what is inside")
    prefix = pickles[0].removesuffix("/data.pkl")
    order = records.get(f"{prefix}/byteorder")
    require(
        order is None or bytes(file.view[order[0] : sum(order)]) == b"little",
        "was written on a big-endian machine, which is not supported",
    )

    start, count = records[pickles[0]]
    with received(file, "torch-zip", start, count) as child:
        for key, (dtype, items) in child.header.storages.items():
            require(f"{prefix}/data/{key}" in records, f"is damaged: storage {key} is not in the archive")
            place, size = records[f"{prefix}/data/{key}"]
            wanted = items * _dtype(dtype).itemsize
            require(wanted <= size, f"is damaged: storage {key} should have {wanted} bytes, it has {size}")
            child.places[key] = place
        return _contents("torch-zip", child)


def _list_records(file: MappedFile) -> dict[str, tuple[int, int]]:
    """Start and size of every record of the archive, once its name, size and place have been checked."""
    try:
        with zipfile.ZipFile(file.path) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    except _BAD_ZIP as error:
        raise Refused(f"is a damaged zip file, fetch it again ({error})") from error
    names = [entry.filename for entry in entries]
    require(
        not any("/code/" in name or name.endswith("/constants.pkl") for name in names)
        or not any(name.endswith("/data.pkl") for name in names),
        "is a TorchScript archive, a program with its weights; save its weights and use that: "
        "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth')",
    )
    records: dict[str, tuple[int, int]] = {}
    free = 0  # where the last record ended
    for entry in entries:
        name = entry.filename
        require(
            not (name.startswith("/") or "\\" in name or ".." in name.split("/")),
            "is refused: its archive has names that point outside of it",
        )
        require(name not in records, "is refused: its archive has two records of one name")
        if entry.compress_type or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            raise Refused(
                "is a compressed or encrypted zip file, which torch.save never writes; unpack it "
                "and give what is inside"
            )
        start = _locate(file, entry)
        require(entry.header_offset >= free, "is refused: its archive has records that overlap")
        free = start + entry.file_size
        records[name] = start, entry.file_size
    return records


def _locate(file: MappedFile, entry: zipfile.ZipInfo) -> int:
    """Where a record's own bytes begin: behind its local header, which must name the same record."""
    name_at = entry.header_offset + _LOCAL_HEADER.size
    file.check(entry.header_offset, _LOCAL_HEADER.size)
    magic, *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(file.view, entry.header_offset)
    start: int = name_at + name_length + extra_length
    file.check(start, entry.file_size)
    codec = "utf-8" if entry.flag_bits & 0x800 else "cp437"
    name = bytes(file.view[name_at : name_at + name_length]).decode(codec, "replace")
    if magic != b"PK\x03\x04" or name != entry.orig_filename:
        raise Refused("is a damaged zip file: its list of records does not fit the records")
    return start


# ---------------------------------------------------------- runs of pickles, one pickle, safetensors


def read_legacy(file: MappedFile) -> Contents:
    """torch.save before 1.6: pickles, then for each storage its number of items and the items."""
    with received(file, "torch-legacy", 0, file.size) as child:
        position = child.header.end
        for key, (dtype, items) in child.header.storages.items():
            file.check(position, 8 + items * _dtype(dtype).itemsize)
            (count,) = struct.unpack_from("<q", file.view, position)
            require(count == items, "is damaged: a storage in it has another size than its tensors say")
            child.places[key] = position + 8
            position += 8 + items * _dtype(dtype).itemsize
        return _contents("torch-legacy", child)


def read_pickle(file: MappedFile) -> Contents:
    """A plain pickle: haiku's, detectron's, a dict of numpy arrays."""
    with received(file, "pickle", 0, file.size) as child:
        require(not child.header.storages, "is damaged: it points to data outside of itself")
        return _contents("pickle", child)


def _contents(container: Container, child: "Received") -> Contents:
    return Contents(container=container, tree=plain_tree(child.load()), stubs=tuple(child.header.stubs))


def read_safetensors(file: MappedFile) -> Contents:
    """Through the library, which checks the header and maps the tensors."""
    header = int.from_bytes(file.view[:8], "little")
    require(header <= _LARGEST_HEADER or header > file.size, "has a header of many megabytes, more than any network")
    try:
        with safe_open(file.path, framework="pt", device="cpu") as opened:
            names = [name for name, _ in bounded((name, None) for name in opened.keys())]  # noqa: SIM118
            tree = {name: opened.get_tensor(name) for name in names}
            metadata = dict(opened.metadata() or {})
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise Refused(f"is a damaged safetensors file, fetch it again ({error})") from error
    return Contents(container="safetensors", tree=tree, metadata=metadata)


READERS: dict[str, Callable[[MappedFile], Contents]] = {
    "torch-zip": read_zip,
    "torch-legacy": read_legacy,
    "safetensors": read_safetensors,
    "pickle": read_pickle,
}


# ----------------------------------------------------------------- from what a pickle gave to plain data


def plain_tree(root: Any) -> dict[str, Any]:
    """The top level as a dict of plain values; a complete nn.Module becomes its state dict."""
    _weigh(root)
    settled = _module_tensors(root)
    if not isinstance(settled, dict):
        kind = f"the class {settled.name[:200]}" if isinstance(settled, Stub) else f"type {type(settled).__name__}"
        raise Refused(f"holds an object of {kind}, not a dict of tensors; save a state_dict and use that")
    require(len(set(map(str, settled))) == len(settled), "is damaged: two of its keys have the same name")
    return {str(key): _module_tensors(value) for key, value in settled.items()}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a tree with its path, parts joined by `/`."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, f"{path}/{key}" if path else str(key))


def _is_module(value: Any) -> bool:
    state = value.state if isinstance(value, Stub) else None
    return isinstance(state, dict) and all(isinstance(state.get(part), dict) for part in _MODULE_PARTS)


def _module_tensors(value: Any) -> Any:
    """What state_dict() of a pickled nn.Module would give, from its stub's state; other values are returned."""
    if not _is_module(value):
        return value
    return dict(bounded(_parts_of_module("", value, set())))


def _parts_of_module(prefix: str, module: Stub, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module and of those inside it that are not in `seen` (their ids)."""
    require(len(prefix) <= LONGEST_NAME, _ENDLESS)
    seen.add(id(module))
    temporary = module.state.get("_non_persistent_buffers_set", ())
    for name, tensor in (module.state["_parameters"] | module.state["_buffers"]).items():
        if isinstance(tensor, torch.Tensor) and name not in temporary:
            yield f"{prefix}{name}", tensor
    for name, child in module.state["_modules"].items():
        if _is_module(child) and id(child) not in seen:
            yield from _parts_of_module(f"{prefix}{name}.", child, seen)


def _weigh(root: Any) -> None:
    """Refuse what is nested too deep or in a circle, and what would unfold to too many items."""
    weights: dict[int, int] = {}  # by id; 0 while it is open
    stubs: list[Stub] = []

    def weigh(node: Any, depth: int) -> int:
        if isinstance(node, Stub) and id(node) not in weights:
            weights[id(node)] = 1
            stubs.append(node)
        if not isinstance(node, dict | list | tuple | set | frozenset):
            return 1
        if id(node) not in weights:
            require(depth <= _DEEPEST, _ENDLESS)
            weights[id(node)] = 0
            items = (*node, *node.values()) if isinstance(node, dict) else node  # keys become text, as names do
            weights[id(node)] = 1 + sum(weigh(item, depth + 1) for item in items)
        require(weights[id(node)], _ENDLESS)
        return weights[id(node)]

    heavy = weigh(root, 0) > max(_WIDEST, 8 * len(weights))
    require(not heavy, "is refused: its nested lists would unfold to millions of items")
    for stub in stubs:  # grows during the loop: stubs may refer to each other
        for part in (stub.args, stub.state, stub.elements, stub.entries):
            weigh(part, 0)


# ------------------------------------------------------------------ the child, and tensors from what it sends


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
            self._storages[key] = self._file.storage(self.places[key], count * _dtype(kind).itemsize, align)
        count = count * _dtype(kind).itemsize // dtype.itemsize
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


def _dtype(name: str | None) -> torch.dtype:
    require(name in _DTYPES, "holds a tensor of a dtype that is not known")
    return _DTYPES[name]


def _name(qualified: str) -> str | Stub:
    """A class or function that a file names: dtypes are plain data."""
    return qualified if qualified.removeprefix("torch.") in DTYPES else Stub(qualified)
