"""torch.save's two containers (the zip archive of today, the run of pickles before it), pickles, safetensors.

`plain_tree` is the last pass over what a pickle gave: plain containers only, of bounded depth and width.
"""

import re
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from finetune_mile.checkpoints.readers.contents import Allowance, Contents, Refused, Stub, require
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.names import Name
from finetune_mile.checkpoints.readers.pickles import Machine
from finetune_mile.checkpoints.readers.rebuild import DTYPES, STORAGES, Blob, Kind, Record, Storage, Unbuilt

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error)
_DEEPEST = 64
_WIDEST = 2_000_000
_MODULE_PARTS = ("_modules", "_parameters", "_buffers")

MakeStorage = Callable[[str, int, int], torch.UntypedStorage]  # from its key, size in bytes and alignment


class _Storages:
    """The storages of a file, each made once, from the persistent ids of its pickle; the device is ignored."""

    def __init__(self, make: MakeStorage) -> None:
        self._make = make
        self.by_key: dict[str, Storage] = {}

    def __call__(self, pid: Any) -> Storage | Name:
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], Name):
            return pid[1]  # the class of a module, with its source: how whole networks were saved before torch 1.6
        require(
            isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage",
            "is damaged: a storage in it has no description",
        )
        _, kind, key, _, count = pid[:5]
        require(
            isinstance(kind, Name) and kind.qualified in STORAGES,
            "holds a tensor of a kind that is not read (quantised or sparse)",
        )
        require(
            isinstance(key, str) and _KEY.fullmatch(key), "is damaged: a storage in it has a key that is no plain name"
        )
        require(type(count) is int and count >= 0, "is damaged: a storage in it has no size")
        view = pid[5] if len(pid) == 6 else None
        require(view is None, "has views of storages, as before torch 0.4; save it again with torch.save")
        dtype = STORAGES[kind.qualified]
        if key not in self.by_key:
            size, align = (count, 8) if dtype is None else (count * dtype.itemsize, dtype.itemsize)
            self.by_key[key] = Storage(self._make(key, size, align), dtype, count)
        storage = self.by_key[key]
        require(
            (storage.dtype, storage.count) == (dtype, count), f"is damaged: it gives storage {key} two sizes or types"
        )
        return storage


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

    def make_storage(key: str, size: int, align: int) -> torch.UntypedStorage:
        require(f"{prefix}/data/{key}" in records, f"is damaged: storage {key} is not in the archive")
        start, count = records[f"{prefix}/data/{key}"]
        require(size <= count, f"is damaged: storage {key} should have {size} bytes, it has {count}")
        return file.storage(start, size, align)

    start, count = records[pickles[0]]
    machine = Machine(file, start, start + count, allowance=Allowance(file.size), find_storage=_Storages(make_storage))
    tree = plain_tree(machine.run())
    return Contents(container="torch-zip", tree=tree, stubs=tuple(sorted(machine.stubs)))


def _list_records(file: MappedFile) -> dict[str, tuple[int, int]]:
    """Start and size of every record of the archive, once its name, size and place have been checked."""
    try:
        with zipfile.ZipFile(file.path) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    except _BAD_ZIP as error:
        raise Refused(f"is a damaged zip file, fetch it again ({error})") from error
    names = [entry.filename for entry in entries]
    scripted = any("/code/" in name or name.endswith("/constants.pkl") for name in names)
    require(
        not (scripted and any(name.endswith("/data.pkl") for name in names)),
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
    """torch.save before 1.6: magic number, version, system, object, keys, then raw storages."""
    position, allowance, left = 0, Allowance(file.size), file.size

    def make_storage(_key: str, size: int, _align: int) -> torch.UntypedStorage:
        nonlocal left
        require(size <= left, "is damaged: its tensors would be larger than the file")
        left -= size
        return torch.empty(size, dtype=torch.uint8).untyped_storage()

    storages = _Storages(make_storage)
    values: list[Any] = []
    stubs: set[str] = set()
    for part in ("magic", "version", "system", "object", "keys"):
        machine = Machine(file, position, file.size, allowance=allowance)
        if part == "object":
            machine.find_storage = storages
        values.append(machine.run())
        stubs |= machine.stubs
        position = machine.cursor.position
    _, version, system, root, keys = values
    require(
        version == 1001 and isinstance(system, dict) and system.get("little_endian"),
        "is a torch file of an unknown version, or from a big-endian machine",
    )
    require(
        isinstance(keys, list) and sorted(map(str, keys)) == sorted(storages.by_key),
        "is damaged: it lists other storages than its tensors use",
    )
    with file.path.open("rb") as stream:
        for storage in (storages.by_key[str(key)] for key in keys):  # its number of items, then the items
            file.check(position, 8 + storage.data.nbytes())
            (count,) = struct.unpack_from("<q", file.view, position)
            require(count == storage.count, "is damaged: a storage in it has another size than its tensors say")
            stream.seek(position + 8)
            if count:
                room = torch.empty(0, dtype=torch.uint8).set_(storage.data)
                stream.readinto(room.numpy().data)
            position += 8 + storage.data.nbytes()
    return Contents(container="torch-legacy", tree=plain_tree(root), stubs=tuple(sorted(stubs)))


def read_pickle(file: MappedFile) -> Contents:
    """A plain pickle: haiku's, detectron's, a dict of numpy arrays."""
    machine = Machine(file, 0, file.size, allowance=Allowance(file.size))
    tree = plain_tree(machine.run())
    return Contents(container="pickle", tree=tree, stubs=tuple(sorted(machine.stubs)))


def read_safetensors(file: MappedFile) -> Contents:
    """Through the library, which checks the header and maps the tensors."""
    try:
        with safe_open(file.path, framework="pt", device="cpu") as opened:
            tree = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
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
    settled = _module_tensors(_Settler().settle_all(root))
    if not isinstance(settled, dict):
        kind = f"the class {settled.name[:200]}" if isinstance(settled, Stub) else f"type {type(settled).__name__}"
        raise Refused(f"holds an object of {kind}, not a dict of tensors; save a state_dict and use that")
    require(len(set(map(str, settled))) == len(settled), "is damaged: two of its keys have the same name")
    return {str(key): _module_tensors(value) for key, value in settled.items()}


def _is_module(value: Any) -> bool:
    if not isinstance(value, Stub) or not isinstance(value.state, dict):
        return False
    return all(isinstance(value.state.get(part), dict) for part in _MODULE_PARTS)


def _module_tensors(value: Any) -> Any:
    """What state_dict() of a pickled nn.Module would give, from its stub's state; other values are returned."""
    if not _is_module(value):
        return value
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    queue: list[tuple[str, Stub]] = [("", value)]
    while queue:
        prefix, module = queue.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        temporary = module.state.get("_non_persistent_buffers_set", ())
        for name, tensor in (module.state["_parameters"] | module.state["_buffers"]).items():
            if isinstance(tensor, torch.Tensor) and name not in temporary:
                tensors[f"{prefix}{name}"] = tensor
        for name, child in reversed(module.state["_modules"].items()):
            if _is_module(child) and len(prefix) < 500:
                queue.append((f"{prefix}{name}.", child))
    return tensors


class _Settler:
    """Copies a tree, resolves what the machine left open, and weighs what it unfolds to."""

    def __init__(self) -> None:
        # By id; the first of three is the original, kept so that its id stays its own.
        self._done: dict[int, tuple[Any, Any, int]] = {}
        self._open: set[int] = set()
        self._stubs: list[Stub] = []

    def settle_all(self, root: Any) -> Any:
        """The tree, then the insides of every stub in it; these may refer to each other."""
        settled, weight = self._settle(root, 0)
        require(
            weight <= max(_WIDEST, 8 * len(self._done)),
            "is refused: its nested lists would unfold to millions of items",
        )
        for stub in self._stubs:  # grows during the loop
            for part in ("args", "state", "elements", "entries"):
                setattr(stub, part, self._settle(getattr(stub, part), 0)[0])
        return settled

    def _settle(self, node: Any, depth: int) -> tuple[Any, int]:
        """A node as plain data, and its weight: the number of items in it."""
        if isinstance(node, dict | list | tuple | Stub | Blob):
            return self._settle_once(node, depth)
        if isinstance(node, set):
            return {str(item) if isinstance(item, Stub | Name) else item for item in node}, len(node)
        if isinstance(node, Name):
            return (str(DTYPES[name]) if (name := node.qualified) in DTYPES else Stub(name)), 1
        if isinstance(node, Kind | Unbuilt | Record | Storage):
            return Stub(f"{type(node).__name__.lower()} without use"), 1
        return node, 1

    def _settle_once(self, node: Any, depth: int) -> tuple[Any, int]:
        if id(node) in self._done:
            return self._done[id(node)][1:]
        if depth > _DEEPEST or id(node) in self._open:
            raise Refused("is refused: its containers are nested without end")
        self._open.add(id(node))
        weight, settled = 1, node
        if isinstance(node, Stub):
            self._stubs.append(node)
        elif isinstance(node, Blob):
            settled = node.value()
        elif isinstance(node, dict):
            settled = {}
            for key, value in node.items():
                settled[key.qualified if isinstance(key, Name) else key], more = self._settle(value, depth + 1)
                weight += more
        else:
            pairs = [self._settle(item, depth + 1) for item in node]
            weight += sum(more for _, more in pairs)
            settled = type(node)(value for value, _ in pairs)
        self._open.remove(id(node))
        self._done[id(node)] = node, settled, weight
        return settled, weight
