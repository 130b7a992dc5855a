"""A small assembler of pickles, and the containers that a pickle can be dressed in."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def call(target: bytes, *args: bytes) -> bytes:
    return target + b"(" + b"".join(args) + b"tR"


def proto2(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def in_dict(value: bytes, key: str = "state_dict") -> bytes:
    return b"}" + text(key) + value + b"s"


def storage(kind: str = "FloatStorage", key: str = "0", count: int = 4) -> bytes:
    number = pickle.dumps(count, 2)[2:-1]
    pid = text("storage") + glob("torch", kind) + text(key) + text("cpu") + number
    return b"(" + pid + b"tQ"


def integers(*values: int) -> bytes:
    return b"(" + b"".join(pickle.dumps(v, 2)[2:-1] for v in values) + b"t"


def tensor(store: bytes, offset: int, size: bytes, stride: bytes) -> bytes:
    number = pickle.dumps(offset, 2)[2:-1]
    hooks = call(glob("collections", "OrderedDict"))
    return call(glob("torch._utils", "_rebuild_tensor_v2"), store, number, size, stride, b"\x89", hooks)


def zip_file(pickled: bytes, records: dict[str, bytes] | None = None, **options) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", options.get("compression", zipfile.ZIP_STORED)) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for name, raw in ({"data/0": bytes(16)} if records is None else records).items():
            archive.writestr(f"archive/{name}", raw)
    return out.getvalue()


def legacy_file(pickled: bytes, keys: list[str] | None = None, tail: bytes = b"") -> bytes:
    parts = [LEGACY_MAGIC, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
    head = b"".join(pickle.dumps(part, 2) for part in parts)
    return head + pickled + pickle.dumps(keys or [], 2) + tail
