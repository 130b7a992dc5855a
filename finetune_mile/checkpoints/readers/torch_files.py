"""torch.save's two containers (the zip archive of today, the run of pickles before it), pickles, safetensors.

`plain_tree` is the last pass over what a pickle gave: plain containers only, of bounded depth and width.
"""

import struct
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from finetune_mile.checkpoints.readers.contents import Container, Contents, Refused, Stub, require
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.receiving import Received, itemsize, received

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error)
_DEEPEST = 64
_WIDEST = 2_000_000
_ENDLESS = "is refused: its containers are nested without end"
_MODULE_PARTS = ("_modules", "_parameters", "_buffers")

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
            wanted = items * itemsize(dtype)
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
            file.check(position, 8 + items * itemsize(dtype))
            (count,) = struct.unpack_from("<q", file.view, position)
            require(count == items, "is damaged: a storage in it has another size than its tensors say")
            child.places[key] = position + 8
            position += 8 + items * itemsize(dtype)
        return _contents("torch-legacy", child)


def read_pickle(file: MappedFile) -> Contents:
    """A plain pickle: haiku's, detectron's, a dict of numpy arrays."""
    with received(file, "pickle", 0, file.size) as child:
        require(not child.header.storages, "is damaged: it points to data outside of itself")
        return _contents("pickle", child)


def _contents(container: Container, child: Received) -> Contents:
    return Contents(container=container, tree=plain_tree(child.load()), stubs=tuple(child.header.stubs))


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
    _weigh(root)
    settled = _module_tensors(root)
    if not isinstance(settled, dict):
        kind = f"the class {settled.name[:200]}" if isinstance(settled, Stub) else f"type {type(settled).__name__}"
        raise Refused(f"holds an object of {kind}, not a dict of tensors; save a state_dict and use that")
    require(len(set(map(str, settled))) == len(settled), "is damaged: two of its keys have the same name")
    return {str(key): _module_tensors(value) for key, value in settled.items()}


def _is_module(value: Any) -> bool:
    state = value.state if isinstance(value, Stub) else None
    return isinstance(state, dict) and all(isinstance(state.get(part), dict) for part in _MODULE_PARTS)


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


def _weigh(root: Any) -> None:
    """Refuse what is nested too deep or in a circle, and what would unfold to too many items."""
    weights: dict[int, int] = {}  # by id; 0 while it is open
    stubs: list[Stub] = []

    def weigh(node: Any, depth: int) -> int:
        if isinstance(node, Stub) and id(node) not in weights:
            weights[id(node)] = 1
            stubs.append(node)
        if not isinstance(node, dict | list | tuple):
            return 1
        if id(node) not in weights:
            require(depth <= _DEEPEST, _ENDLESS)
            weights[id(node)] = 0
            items = node.values() if isinstance(node, dict) else node
            weights[id(node)] = 1 + sum(weigh(item, depth + 1) for item in items)
        require(weights[id(node)], _ENDLESS)
        return weights[id(node)]

    heavy = weigh(root, 0) > max(_WIDEST, 8 * len(weights))
    require(not heavy, "is refused: its nested lists would unfold to millions of items")
    for stub in stubs:  # grows during the loop: stubs may refer to each other
        for part in (stub.args, stub.state, stub.elements, stub.entries):
            weigh(part, 0)
