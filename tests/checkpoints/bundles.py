"""Writes small TensorFlow checkpoints, as tests want them: honest ones and dishonest ones."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from finetune_mile.checkpoints.readers.wire import TABLE_MAGIC, masked_crc

TYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "bool": 10, "float16": 19, "bfloat16": 14}


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def entry(dtype: int, shape, shard: int, offset: int, size: int, extra: bytes = b"") -> bytes:
    sides = b"".join(field(2, field(1, side)) for side in shape)
    return (
        field(1, dtype)
        + field(2, sides)
        + field(3, shard)
        + field(4, offset)
        + field(5, size)
        + varint(6 << 3 | 5)
        + b"\0\0\0\0"
        + extra
    )


def header(shards: int = 1, endianness: int = 0) -> bytes:
    return field(1, shards) + field(2, endianness) + field(3, field(1, 1))


def block(entries: list[tuple[bytes, bytes]]) -> bytes:
    out, restarts, last = b"", [], b""
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % 16 == 0:
            restarts.append(len(out))
        else:
            while key[: shared + 1] == last[: shared + 1] and shared < min(len(key), len(last)):
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return (
        out + b"".join(struct.pack("<I", place) for place in restarts or [0]) + struct.pack("<I", len(restarts or [0]))
    )


def finish(contents: bytes, kind: int = 0) -> bytes:
    whole = contents + bytes([kind])
    return whole + struct.pack("<I", masked_crc(whole))


def table(entries: dict[bytes, bytes], per_block: int = 7, kind: int = 0) -> bytes:
    items = sorted(entries.items())
    out, handles = b"", []
    for first in range(0, len(items), per_block):
        part = items[first : first + per_block]
        contents = block(part)
        handles.append((part[-1][0], varint(len(out)) + varint(len(contents))))
        out += finish(contents, kind)
    return with_index(out, handles)


def with_index(data: bytes, handles: list[tuple[bytes, bytes]]) -> bytes:
    """Data blocks, then the index block and the footer."""
    meta, index = block([]), block(handles)
    places = varint(len(data)) + varint(len(meta))
    places += varint(len(data) + len(meta) + 5) + varint(len(index))
    return data + finish(meta) + finish(index) + places.ljust(40, b"\0") + TABLE_MAGIC


def graph(full_names: dict[str, str]) -> bytes:
    """A TrackableObjectGraph: a root with children, each of one variable."""
    children = b"".join(field(1, field(1, i + 1) + field(2, b"child%d" % i)) for i in range(len(full_names)))
    nodes = field(1, children)
    for key, name in full_names.items():
        attribute = field(1, b"VARIABLE_VALUE") + field(2, name.encode()) + field(3, key.encode())
        nodes += field(1, field(2, attribute))
    return nodes


def string_tensor(value: bytes) -> bytes:
    length = varint(len(value))
    return length + struct.pack("<I", masked_crc(length)) + value


def write_bundle(
    prefix: Path, arrays: dict[str, np.ndarray], *, full_names: dict[str, str] | None = None, shards: int = 1
) -> None:
    """An honest checkpoint: variables in turn over the shards, and an object graph if wanted."""
    data = [bytearray() for _ in range(shards)]
    entries = {b"": header(shards)}
    if full_names is not None:
        packed = string_tensor(graph(full_names))
        entries[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = entry(7, (), 0, 0, len(packed))
        data[0] += packed
    for number, (key, array) in enumerate(sorted(arrays.items())):
        shard = number % shards
        raw = array.tobytes()
        kind = TYPES[array.dtype.name]
        entries[key.encode()] = entry(kind, array.shape, shard, len(data[shard]), len(raw))
        data[shard] += raw
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(entries))
    for shard, raw in enumerate(data):
        name = f"{prefix.name}.data-{shard:05}-of-{shards:05}"
        prefix.with_name(name).write_bytes(raw)
