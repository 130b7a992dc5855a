"""Protocol buffers and LevelDB tables, as far as TensorFlow's checkpoints need them."""

import struct
from collections.abc import Iterator

from finetune_mile.checkpoints.readers import TABLE_MAGIC, Refused, bounded, require

_FOOTER = 48
_TRAILER = 5  # compression, crc
_DAMAGED = "is damaged: its index is not valid; fetch it again"


def varint(data: bytes, position: int) -> tuple[int, int]:
    """A variable-length integer of at most 64 bits, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        require(position < len(data), _DAMAGED)
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value < 1 << 64:
            return value, position
    raise Refused(_DAMAGED)


def message(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer: number, and integer or bytes."""
    position = 0
    while position < len(data):
        tag, position = varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            count, position = varint(data, position)
        elif wire in (1, 5):
            count = 8 if wire == 1 else 4
        else:
            raise Refused(_DAMAGED)
        require(count <= len(data) - position, _DAMAGED)
        yield tag >> 3, data[position : position + count]
        position += count


def whole(value: int | bytes) -> int:
    """A field that must be an integer; 64-bit two's complement."""
    if not isinstance(value, int):
        raise Refused(_DAMAGED)
    return value - (1 << 64) if value >= 1 << 63 else value


def raw(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise Refused(_DAMAGED)
    return value


def shape(data: bytes) -> list[int]:
    """The sides of a TensorShapeProto: field 2 is a side, whose field 1 is its length."""
    sides = [raw(value) for number, value in message(data) if number == 2]
    return [whole(dict(message(side)).get(1, 0)) for side in sides]


def table(data: bytes) -> dict[bytes, bytes]:
    """Every entry of a LevelDB table, whose blocks must follow each other and match their sums."""
    require(len(data) >= _FOOTER and data[-8:] == TABLE_MAGIC, _DAMAGED)
    footer = len(data) - _FOOTER
    position = footer
    for _ in range(2):  # the meta index's place, which is of no use here
        _, position = varint(data, position)
    offset, position = varint(data, position)
    size, _ = varint(data, position)
    entries: dict[bytes, bytes] = {}
    for key, value in bounded(_all_entries(data, offset, size, footer)):
        require(key not in entries, _DAMAGED)
        entries[key] = value
    return entries


def _all_entries(data: bytes, offset: int, size: int, footer: int) -> Iterator[tuple[bytes, bytes]]:
    """The entries of all blocks, which the block at `offset` lists."""
    free = 0
    for _, handle in _entries(_block(data, offset, size, footer)):
        offset, position = varint(handle, 0)
        size, _ = varint(handle, position)
        require(offset >= free, _DAMAGED)
        free = offset + size + _TRAILER
        yield from _entries(_block(data, offset, size, footer))


def _block(data: bytes, offset: int, size: int, end: int) -> bytes:
    """A block's contents, if they are plain and as they were written."""
    require(offset + size + _TRAILER <= end, _DAMAGED)
    require(data[offset + size] == 0, "has a compressed index, which TensorFlow does not write; save it again")
    (expected,) = struct.unpack_from("<I", data, offset + size + 1)
    if masked_crc(data[offset : offset + size + 1]) != expected:
        raise Refused("is damaged: its index does not match its checksum; fetch it again")
    return data[offset : offset + size]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a block; a key gives only how it differs from the key before."""
    require(len(block) >= 4, _DAMAGED)
    (restarts,) = struct.unpack_from("<I", block, len(block) - 4)
    end = len(block) - 4 - 4 * restarts
    require(end >= 0, _DAMAGED)
    body, position, key = block[:end], 0, b""
    while position < end:
        shared, position = varint(body, position)
        fresh, position = varint(body, position)
        count, position = varint(body, position)
        require(shared <= len(key) and fresh + count <= end - position and shared + fresh <= 4096, _DAMAGED)
        key = key[:shared] + body[position : position + fresh]
        position += fresh
        yield key, body[position : position + count]
        position += count


_CRC = list(range(256))
for _ in range(8):
    _CRC = [(row >> 1) ^ (0x82F63B78 if row & 1 else 0) for row in _CRC]


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as LevelDB stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
