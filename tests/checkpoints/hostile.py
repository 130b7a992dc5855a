"""A corpus of files that mean harm, made in code; run as a script, it reads them under limits."""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import sys
import time
import zipfile
from pathlib import Path

import bundles
import numpy as np
import torch
from assembling import LEGACY_MAGIC, call, glob, in_dict, integers, legacy_file, proto2, storage, tensor, text, zip_file
from hostile_pickles import acting_calls, pickle_bodies


def zips() -> dict[str, bytes]:
    """Archives that are wrong as archives."""
    honest = proto2(in_dict(tensor(storage(), 0, integers(4), integers(1))))
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive:
        archive.writestr("archive/data.pkl", honest)
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/data/1", bytes(16))
    duplicate = twice.getvalue().replace(b"archive/data/1", b"archive/data/0")
    overlap = bytearray(twice.getvalue())
    at = overlap.rindex(b"archive/data/0")  # in the central directory, whose header has 46 bytes
    struct.pack_into("<II", overlap, at - 26, 80, 80)
    bomb = zip_file(honest, {"data/0": bytes(50 * 2**20)}, compression=zipfile.ZIP_DEFLATED)
    huge = bytearray(zip_file(honest))
    at = huge.rindex(b"archive/data/0")
    struct.pack_into("<II", huge, at - 26, 2**31, 2**31)
    good = zip_file(honest)
    return {
        "bomb.pth": bomb,
        "bomb_pickle.pth": zip_file(proto2(b"}" + b"N0" * 10_000_000), compression=zipfile.ZIP_DEFLATED),
        "duplicate.pth": duplicate,
        "overlap.pth": bytes(overlap),
        "huge_record.pth": bytes(huge),
        "traversal.pth": zip_file(honest, {"../../evil": b"x", "data/0": bytes(16)}),
        "backslash.pth": zip_file(honest, {"..\\evil": b"x", "data/0": bytes(16)}),
        "local_name.pth": good.replace(b"archive/data/0", b"archive/data/9", 1),
        "cut.pth": good[: len(good) // 2],
        "cut_end.pth": good[:-10],
        "header_only.pth": good[:10],
        "two_pickles.pth": zip_file(honest, {"x": b"", "twice/data.pkl": honest}).replace(
            b"archive/twice/data.pkl", b"archive_twice/data.pkl"
        ),
        "not_torch.zip": zip_file(honest).replace(b"data.pkl", b"data.txt"),
        "torchscript.pt": zip_file(honest, {"constants.pkl": proto2(b")"), "data/0": bytes(16)}),
        "bigendian.pth": zip_file(honest).replace(b"little", b"biggie"),
    }


def write_indices(folder: Path, canary: Path) -> list[Path]:
    """Indexes of shards that lead elsewhere, in circles, or to more than there is, beside some honest shards."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    real = struct.pack("<Q", len(header)) + header + bytes(4)
    lying = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    places: dict[str, object] = {
        "up": {"w": "../real.safetensors"},
        "absolute": {"w": "/etc/passwd.bin"},
        "backslash": {"w": "..\\real.safetensors"},
        "hidden": {"w": ".real.safetensors"},
        "null": {"w": "real\0.bin"},
        "url": {"w": "https://example.org/x.bin"},
        "itself": {"w": "itself.index.json"},
        "circle": {"w": "itself.index.json"},
        "folder": {"w": "folder.bin"},
        "absent": {"w": "model-00001-of-00009.bin"},
        "list": {"w": ["real.safetensors"]},
        "number": {"w": 7},
        "missing_tensor": {"w": "real.safetensors", "v": "real.safetensors"},
        "unlisted_tensor": {"v": "other.safetensors"},
        "many": {f"w{i}": f"{i}.bin" for i in range(5000)},
        "lying_shard": {"w": "lying.safetensors"},
        "harmful_shard": {"w": "harm.bin"},
        "empty": {},
        "none": None,
    }
    total = {"total_size": 2**62}
    files = {name: json.dumps({"metadata": total, "weight_map": map_}).encode() for name, map_ in places.items()} | {
        "deep": b'{"weight_map": ' + b"[" * 100_000,
        "not_json": b"\x80\x02}.",
        "array": b"[1, 2]",
        "giant_number": b'{"weight_map": {"w": ' + b"9" * 100_000 + b"}}",
        "large": b" " * (17 * 2**20),
    }
    (folder / "folder.bin").mkdir(parents=True)
    (folder / "real.safetensors").write_bytes(real)
    (folder / "other.safetensors").write_bytes(real)
    (folder / "lying.safetensors").write_bytes(struct.pack("<Q", len(lying)) + lying)
    (folder / "harm.bin").write_bytes(f"cos\nsystem\n(S'touch {canary}'\ntR.".encode())
    (folder / "model-00001-of-00002.safetensors").write_bytes(real)
    for name, raw in files.items():
        (folder / f"{name}.index.json").write_bytes(raw)
    return [*(folder / f"{name}.index.json" for name in files), folder / "model-00001-of-00002.safetensors"]


def legacies(canary: Path) -> dict[str, bytes]:
    """Legacy files: pickles in the magic number's clothes, and lies about what follows."""
    one = proto2(in_dict(tensor(storage(), 0, integers(4), integers(1))))
    tail = struct.pack("<q", 4) + bytes(16)
    huge = proto2(in_dict(tensor(storage(count=2**36), 0, integers(4), integers(1))))
    attack = proto2(call(glob("os", "system"), text(f"touch {canary}")))
    return {
        "legacy_count.pth": legacy_file(one, ["0"], struct.pack("<q", 2**40) + bytes(16)),
        "legacy_huge.pth": legacy_file(huge, ["0"], tail),
        "legacy_cut.pth": legacy_file(one, ["0"], tail[:-1]),
        "legacy_no_keys.pth": legacy_file(one, [], tail),
        "legacy_more_keys.pth": legacy_file(one, ["0", "1"], tail),
        "legacy_attack_in_keys.pth": legacy_file(one)[: -len(pickle.dumps([], 2))] + attack,
        "legacy_attack_in_system.pth": pickle.dumps(LEGACY_MAGIC, 2) + pickle.dumps(1001, 2) + attack,
        "legacy_magic_alone.pth": pickle.dumps(LEGACY_MAGIC, 2),
        "legacy_view.pth": legacy_file(one.replace(b"tQ", b"(" + text("v") + b"K\x00K\x01ttQ"), ["0"], tail),
    }


def safetensors_files() -> dict[str, bytes]:
    def with_header(header: object, data: bytes = bytes(16), length: int | None = None) -> bytes:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(raw) if length is None else length) + raw + data

    def item(begin: int, end: int, shape=(4,), dtype: str = "F32") -> dict[str, object]:
        return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}

    return {
        "st_length.safetensors": with_header({"a": item(0, 16)}, length=2**62),
        "st_length_a_bit.safetensors": with_header({"a": item(0, 16)}, length=2**20),
        "st_length_short.safetensors": with_header({"a": item(0, 16)}, length=3),
        "st_overlap.safetensors": with_header({"a": item(0, 16), "b": item(8, 24)}, bytes(24)),
        "st_beyond.safetensors": with_header({"a": item(0, 2**40, (2**38,))}),
        "st_shape.safetensors": with_header({"a": item(0, 16, (2**30,))}),
        "st_backwards.safetensors": with_header({"a": item(16, 0)}),
        "st_overflow.safetensors": with_header({"a": item(0, 16, (2**33, 2**33))}),
        "st_dtype.safetensors": with_header({"a": item(0, 16, (4,), "OBJECT")}),
        "st_json.safetensors": with_header(b'{"a": [[[['),
        "st_deep.safetensors": with_header(b'{"a":' + b"[" * 100_000),
    }


def write_bundles(folder: Path) -> list[Path]:
    """TensorFlow checkpoints, each in a folder of its own."""
    e, header = bundles.entry, bundles.header()
    tables = {
        "tf_offset": bundles.table({b"": header, b"w": e(1, (4,), 0, 2**50, 16)}),
        "tf_offset_negative": bundles.table({b"": header, b"w": e(1, (4,), 0, 2**64 - 16, 16)}),
        "tf_size": bundles.table({b"": header, b"w": e(1, (2**38,), 0, 0, 2**40)}),
        "tf_shape": bundles.table({b"": header, b"w": e(1, (2**20,), 0, 0, 16)}),
        "tf_shape_negative": bundles.table({b"": header, b"w": e(1, (2**64 - 4,), 0, 0, 16)}),
        "tf_shard": bundles.table({b"": header, b"w": e(1, (4,), 7, 0, 16)}),
        "tf_shards": bundles.table({b"": bundles.header(2**31), b"w": e(1, (4,), 0, 0, 16)}),
        "tf_endian": bundles.table({b"": bundles.header(1, 1), b"w": e(1, (4,), 0, 0, 16)}),
        "tf_no_header": bundles.table({b"w": e(1, (4,), 0, 0, 16)}),
        "tf_dtype": bundles.table({b"": header, b"w": e(99, (4,), 0, 0, 16)}),
        "tf_slices": bundles.table({b"": header, b"w": e(1, (4,), 0, 0, 16, bundles.field(7, b""))}),
        "tf_snappy": bundles.table({b"": header, b"w": e(1, (4,), 0, 0, 16)}, kind=1),
        "tf_many_views": bundles.table({b"": header} | {b"w%d" % i: e(1, (4,), 0, 0, 16) for i in range(99)}),
        "tf_entry_is_noise": bundles.table({b"": header, b"w": b"\xff" * 40}),
        "tf_no_data": bundles.table({b"": bundles.header(2), b"w": e(1, (4,), 1, 0, 16)}),
    }
    one = bundles.block([(b"", header), (b"w", e(1, (4,), 0, 0, 16))])
    again = bundles.varint(0) + bundles.varint(len(one))
    tables["tf_cyclic"] = bundles.with_index(bundles.finish(one), [(b"%d" % i, again) for i in range(9)])
    tables["tf_varint"] = bundles.with_index(bundles.finish(one), [(b"z", b"\xff" * 30)])
    tables["tf_block_beyond"] = bundles.with_index(
        bundles.finish(one), [(b"z", bundles.varint(2**62) + bundles.varint(2**62))]
    )
    itself = bundles.varint(len(one) + 5 + 13) + bundles.varint(20)
    tables["tf_index_in_itself"] = bundles.with_index(bundles.finish(one), [(b"z", itself)])
    tables["tf_restarts"] = bundles.with_index(bundles.finish(b"\xff" * 8), [(b"z", b"\x00\x08")])
    broken = bytearray(tables["tf_offset"])
    broken[3] ^= 1
    tables["tf_checksum"] = bytes(broken)
    tables["tf_footer"] = tables["tf_offset"][-48:]
    made = []
    for name, raw in tables.items():
        home = folder / name
        home.mkdir()
        (home / "model.ckpt.index").write_bytes(raw)
        (home / "model.ckpt.data-00000-of-00001").write_bytes(bytes(16))
        made.append(home / "model.ckpt")
    return made + _write_links(folder)


def _write_links(folder: Path) -> list[Path]:
    """Folders whose files are links that lead out of them."""
    outside = folder / "outside"
    bundles.write_bundle(outside / "variables", {"w": np.ones(4, np.float32)})
    made = []
    for name, linked in {
        "link_data": ["variables.data-00000-of-00001"],
        "link_index": ["variables.index"],
        "link_folder": None,
    }.items():
        home = folder / name
        home.mkdir()
        (home / "saved_model.pb").write_bytes(b"\x08\x01")
        if linked is None:
            (home / "variables").symlink_to(outside)
        else:
            bundles.write_bundle(home / "variables" / "variables", {"w": np.ones(4, np.float32)})
            for file in linked:
                (home / "variables" / file).unlink()
                (home / "variables" / file).symlink_to(outside / file)
        made.append(home)
    home = folder / "link_latest"
    home.mkdir()
    (home / "checkpoint").write_text('model_checkpoint_path: "../outside/variables"\n')
    (folder / "link_nowhere").symlink_to(folder / "absent")
    (folder / "link_loop").symlink_to(folder / "link_loop")
    return [*made, home, folder / "link_nowhere", folder / "link_loop"]


def write_corpus(folder: Path, canary: Path) -> dict[Path, str]:
    """Write every hostile file; gives what its refusal must name ("" for no matter what)."""
    corpus: dict[Path, str] = {}

    def add(name: str, raw: bytes, names: str = "") -> None:
        (folder / name).write_bytes(raw)
        corpus[folder / name] = names

    for name, (target, body) in acting_calls(canary).items():
        pickled = proto2(in_dict(body))
        add(f"{name}.pkl", pickled, target)
        add(f"{name}.pth", zip_file(pickled), target)
        add(f"{name}.legacy.pth", legacy_file(pickled), target)
    for name, body in pickle_bodies().items():
        pickled = proto2(body)
        add(f"{name}.pkl", pickled)
        add(f"{name}.pth", zip_file(pickled))
        if len(pickled) < 2**20:
            stored = (["0"], struct.pack("<q", 4) + bytes(16)) if b"storage" in pickled else ()
            add(f"{name}.legacy.pth", legacy_file(pickled, *stored))
    add("text.pkl", f"cos\nsystem\n(S'touch {canary}'\ntR.".encode(), "os.system")
    for name, raw in {**zips(), **legacies(canary), **safetensors_files()}.items():
        add(name, raw)
    corpus |= dict.fromkeys([*write_bundles(folder), *write_indices(folder / "indices", canary)], "")
    corpus[folder / "indices" / "harmful_shard.index.json"] = "os.system"
    return corpus


def _processor() -> float:
    """Seconds of the processor so far, those of the reader's child processes included."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main(folder: Path) -> None:
    """Read every path of `paths.json` under limits; print outcome, seconds and peak as JSON."""
    from finetune_mile.checkpoints.readers import read
    from finetune_mile.core.problems import Problem

    torch.zeros(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + 500 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {}
    for path in json.loads((folder / "paths.json").read_text()):
        start = _processor()
        try:
            read(Path(path))
            outcome = "was read"
        except Problem as problem:
            outcome = f"Problem: {problem}"
        except BaseException as error:  # the test wants to see whatever it is
            outcome = f"{type(error).__name__}: {error}"
        outcomes[path] = (outcome, _processor() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    json.dump({"outcomes": outcomes, "megabytes": (peak - before) / 1024}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
