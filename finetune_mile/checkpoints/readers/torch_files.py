"""torch.save's two containers: the zip archive of today, the run of pickles before it; and a pickle alone."""

from __future__ import annotations

import re
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import torch

from finetune_mile.checkpoints.readers.allowance import Allowance
from finetune_mile.checkpoints.readers.contents import Contents, Refused
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.names import Name
from finetune_mile.checkpoints.readers.pickles import Machine
from finetune_mile.checkpoints.readers.plain import plain_tree
from finetune_mile.checkpoints.readers.tensors import STORAGES, Storage

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error)


@dataclass(frozen=True, slots=True)
class _Record:
    """Where a file of the archive lies, uncompressed."""

    start: int
    count: int


def _parse_id(pid: Any) -> tuple[torch.dtype | None, str, int, Any]:
    """A storage's persistent id, checked: dtype, key, number of items, view; the device is moot."""
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
        raise Refused("is damaged: a storage in it has no description")
    _, kind, key, _, count = pid[:5]
    if not isinstance(kind, Name) or kind.qualified not in STORAGES:
        raise Refused("holds a tensor of a kind that is not read (quantised or sparse)")
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise Refused("is damaged: a storage in it has a key that is no plain name")
    if type(count) is not int or count < 0:
        raise Refused("is damaged: a storage in it has no size")
    return STORAGES[kind.qualified], key, count, pid[5] if len(pid) == 6 else None


def _itemsize(dtype: torch.dtype | None) -> int:
    return 1 if dtype is None else dtype.itemsize


class _ZipStorages:
    """Finds the storages of an archive; each key is mapped once."""

    def __init__(self, file: MappedFile, records: dict[str, _Record], prefix: str) -> None:
        self._file, self._records, self._prefix = file, records, prefix
        self._found: dict[str, Storage] = {}

    def __call__(self, pid: Any) -> Storage:
        dtype, key, count, _ = _parse_id(pid)
        known = self._found.get(key)
        if known is not None:
            if (known.dtype, known.count) != (dtype, count):
                raise Refused(f"is damaged: it gives storage {key} two sizes or types")
            return known
        record = self._records.get(f"{self._prefix}/data/{key}")
        if record is None:
            raise Refused(f"is damaged: storage {key} is not in the archive")
        size = count * _itemsize(dtype)
        if size > record.count:
            raise Refused(
                f"says that storage {key} has {size} bytes, but it has {record.count}: it is damaged or it lies"
            )
        align = 8 if dtype is None else dtype.itemsize
        found = Storage(self._file.storage(record.start, size, align), dtype, count)
        self._found[key] = found
        return found


class _LegacyStorages:
    """Makes the storages of a legacy file; their bytes follow behind the pickles."""

    def __init__(self, file: MappedFile) -> None:
        self._left = file.size
        self.found: dict[str, Storage] = {}

    def __call__(self, pid: Any) -> Storage:
        dtype, key, count, view = _parse_id(pid)
        if view is not None:
            raise Refused("has views of storages, as before torch 0.4; save it again with torch.save")
        known = self.found.get(key)
        if known is None:
            size = count * _itemsize(dtype)
            if size > self._left:
                raise Refused("says that its tensors are larger than the file: damaged or a lie")
            self._left -= size
            room = torch.empty(size, dtype=torch.uint8).untyped_storage()
            known = self.found[key] = Storage(room, dtype, count)
        elif (known.dtype, known.count) != (dtype, count):
            raise Refused(f"is damaged: it gives storage {key} two sizes or types")
        return known


def read_zip(file: MappedFile) -> Contents:
    """A zip archive of torch.save: one pickle, and one uncompressed record per storage."""
    records = _list_records(file)
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise Refused("is a zip file, but not one of torch.save; unpack it and give what is inside")
    prefix = pickles[0].removesuffix("/data.pkl")
    if any(name.startswith((f"{prefix}/code/", f"{prefix}/constants.pkl")) for name in records):
        raise Refused("is a TorchScript archive; save its state_dict() with torch.save and use that")
    order = records.get(f"{prefix}/byteorder")
    if order and bytes(file.view[order.start : order.start + order.count]) != b"little":
        raise Refused("was written on a big-endian machine, which is not supported")
    body = records[pickles[0]]
    machine = Machine(
        file,
        body.start,
        body.start + body.count,
        allowance=Allowance(file.size),
        find_storage=_ZipStorages(file, records, prefix),
    )
    tree = plain_tree(machine.run())
    return Contents(container="torch-zip", tree=tree, stubs=tuple(sorted(machine.stubs)))


def _list_records(file: MappedFile) -> dict[str, _Record]:
    """Every record of the archive, once its name, size and place have been checked."""
    try:
        with zipfile.ZipFile(file.path) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    except _BAD_ZIP as error:
        raise Refused(f"is a damaged zip file, fetch it again ({error})") from error
    records: dict[str, _Record] = {}
    free = 0  # where the last record ended
    for entry in entries:
        name = entry.filename
        if name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise Refused("is refused, for its archive has names that lead out of it")
        if name in records:
            raise Refused("is refused, for its archive has two records of one name")
        if entry.compress_type or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            raise Refused(
                "is a compressed or encrypted zip file, which torch.save never writes; unpack it "
                "and give what is inside"
            )
        record = _locate(file, entry)
        if entry.header_offset < free:
            raise Refused("is refused, for its archive has records that overlap")
        free = record.start + record.count
        records[name] = record
    return records


def _locate(file: MappedFile, entry: zipfile.ZipInfo) -> _Record:
    """A record's own bytes, behind its local header, which must name the same record."""
    file.check(entry.header_offset, _LOCAL_HEADER.size)
    header = _LOCAL_HEADER.unpack_from(file.view, entry.header_offset)
    name_at = entry.header_offset + _LOCAL_HEADER.size
    start = name_at + header[-2] + header[-1]
    file.check(start, entry.file_size)
    codec = "utf-8" if entry.flag_bits & 0x800 else "cp437"
    name = bytes(file.view[name_at : name_at + header[-2]]).decode(codec, "replace")
    if header[0] != b"PK\x03\x04" or name != entry.orig_filename:
        raise Refused("is a damaged zip file: its list of records does not fit the records")
    return _Record(start, entry.file_size)


def read_legacy(file: MappedFile) -> Contents:
    """torch.save before 1.6: magic number, version, system, object, keys, then raw storages."""
    position, allowance = 0, Allowance(file.size)
    storages = _LegacyStorages(file)
    values: list[Any] = []
    stubs: set[str] = set()
    for part in ("magic", "version", "system", "object", "keys"):
        machine = Machine(file, position, file.size, allowance=allowance)
        if part == "object":
            machine.find_storage = storages
        values.append(machine.run())
        stubs |= machine.stubs
        position = machine.cursor.position
    _, version, system, made, keys = values
    if version != 1001 or not isinstance(system, dict) or not system.get("little_endian"):
        raise Refused("is a torch file of an unknown version, or from a big-endian machine")
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages.found):
        raise Refused("is damaged: it lists other storages than its tensors use")
    _fill(file, position, [storages.found[str(key)] for key in keys])
    tree = plain_tree(made)
    return Contents(container="torch-legacy", tree=tree, stubs=tuple(sorted(stubs)))


def _fill(file: MappedFile, position: int, storages: list[Storage]) -> None:
    """Read the storages' bytes: each is its number of items, then the items."""
    with file.path.open("rb") as stream:
        for storage in storages:
            file.check(position, 8 + storage.data.nbytes())
            (count,) = struct.unpack_from("<q", file.view, position)
            if count != storage.count:
                raise Refused("is damaged: a storage in it has another size than its tensors say")
            stream.seek(position + 8)
            if count:
                room = torch.empty(0, dtype=torch.uint8).set_(storage.data)
                stream.readinto(room.numpy().data)
            position += 8 + storage.data.nbytes()


def read_pickle(file: MappedFile) -> Contents:
    """A pickle that stands alone: haiku's, detectron's, a dict of numpy arrays."""
    machine = Machine(file, 0, file.size, allowance=Allowance(file.size))
    tree = plain_tree(machine.run())
    return Contents(container="pickle", tree=tree, stubs=tuple(sorted(machine.stubs)))
