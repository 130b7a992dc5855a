"""TensorFlow checkpoints and SavedModels, read without TensorFlow.

A checkpoint is an index (a LevelDB table: variable -> dtype, shape, shard, offset, size) and shards
of raw little-endian data. The index's checksums are checked; those of the data are not, which would
take longer than the reading (a card's sha256 is for that).
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from finetune_mile.checkpoints.readers import TABLE_MAGIC, Container, Contents, Refused, check_shape, require
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.wire import message, raw, shape, table, varint, whole

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"

_DATA_NAME = re.compile(r"(?P<prefix>.+)\.data-\d{5}-of-\d{5}")
_LATEST = re.compile(r'^model_checkpoint_path:\s*"([^"\n]+)"', re.MULTILINE)
_LARGEST_INDEX = 16 * 2**20
_STRING = 7
_NOT_NUMBERS = frozenset({_STRING, 20, 21})  # strings, resources, variants
_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    8: torch.complex64,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    17: torch.uint16,
    18: torch.complex128,
    19: torch.float16,
    22: torch.uint32,
    23: torch.uint64,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a variable is stored: TensorFlow's BundleEntryProto."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int


def find_index(path: Path) -> Path | None:
    """The index that a checkpoint's prefix or one of its data files belongs to, if there is one."""
    match = _DATA_NAME.fullmatch(path.name)
    index = path.with_name(f"{match['prefix'] if match else path.name}.index")
    if (path.exists() and not match) or not index.is_file():
        return None
    with index.open("rb") as file:
        file.seek(max(0, index.stat().st_size - len(TABLE_MAGIC)))
        return index if file.read() == TABLE_MAGIC else None


def read_directory(directory: Path) -> Contents:
    """A SavedModel, or a folder with one checkpoint."""
    if (directory / "saved_model.pb").exists():
        index = directory / "variables" / "variables.index"
        require(index.exists(), "is a SavedModel without variables/variables.index; fetch all of it again")
        return read_checkpoint(index, directory, "tf-savedmodel")
    return read_checkpoint(_choose_index(directory))


def _choose_index(directory: Path) -> Path:
    """The checkpoint that the `checkpoint` file calls the latest, else the only one."""
    names = sorted(path.name for path in directory.glob("*.index"))
    latest = directory / "checkpoint"
    if latest.is_file() and not latest.is_symlink() and latest.stat().st_size < 2**20:
        match = _LATEST.search(latest.read_text(encoding="utf-8", errors="replace"))
        # Only the last part: the rest is the folder of the machine that it was trained on.
        name = re.split(r"[/\\]", match[1])[-1] + ".index" if match else ""
        if name in names:
            return directory / name
    if len(names) > 1:
        listed = ", ".join(name.removesuffix(".index") for name in names[:20])
        raise Refused(f"holds several checkpoints; give one of them: {listed}")
    require(names, "is a folder without a TensorFlow checkpoint (*.index) or a SavedModel; give the file")
    return directory / names[0]


def read_checkpoint(index: Path, home: Path | None = None, container: Container = "tf-checkpoint") -> Contents:
    """Every variable of numbers, and the full names of the object graph, of TF1 or TF2.

    Args:
        index: of the checkpoint; its data files are beside it.
        home: the folder that no link may lead out of; None: that of the index.
        container: what the index belongs to.
    """
    home = home or index.parent
    require(
        index.suffix == ".index", "is a TensorFlow index without the ending .index; rename it to match its data files"
    )
    file = _open_inside(index, home)
    require(file.size <= _LARGEST_INDEX, f"has an index of {file.size} bytes, more than any checkpoint needs")
    entries = table(bytes(file.view))
    count = _count_shards(entries.pop(b"", None))
    paths = [index.with_suffix(f".data-{i:05}-of-{count:05}") for i in range(count)]
    for path in paths:
        require(path.exists(), f"needs {path.name} beside its index; fetch that too")
    shards = [_open_inside(path, home) for path in paths]
    parsed = {key.decode("utf-8", "replace"): _parse_entry(value) for key, value in entries.items()}
    require(
        sum(entry.size for entry in parsed.values()) <= sum(shard.size for shard in shards),
        "is damaged: its variables are larger than its data files; fetch them again",
    )
    tree: dict[str, torch.Tensor] = {}
    full_names: dict[str, str] = {}
    for key, entry in parsed.items():
        require(entry.shard < len(shards), f"is damaged: {key[:200]} is in a data file that does not exist")
        shard = shards[entry.shard]
        shard.check(entry.offset, entry.size)
        if key == GRAPH_KEY and entry.dtype == _STRING:
            full_names = _full_names(_one_string(shard, entry))
        elif entry.dtype not in _NOT_NUMBERS:
            tree[key] = _tensor(key, shard, entry)
    return Contents(container=container, tree=tree, full_names=full_names)


def _open_inside(path: Path, home: Path) -> MappedFile:
    """Map a file in `home`; a link must not lead out of it."""
    require(
        path.resolve().is_relative_to(home.resolve()),
        f"is refused: {path.name} is a link to a file outside of the folder; copy the file",
    )
    return MappedFile(path)


def _count_shards(header: bytes | None) -> int:
    """The number of data files, from the header (BundleHeaderProto)."""
    if header is None:
        raise Refused("is not a checkpoint of TensorFlow 1.0 or later: its index has no header")
    fields = dict(message(header))
    require(whole(fields.get(2, 0)) == 0, "was written on a big-endian machine, which is not supported")
    count = whole(fields.get(1, 0))
    require(1 <= count <= 1024, f"is damaged: its index names {count} data files")
    return count


def _parse_entry(data: bytes) -> _Entry:
    fields = dict(message(data))
    require(7 not in fields, "holds partitioned variables; save it again without a partitioner")
    dtype, shard, offset, size = (whole(fields.get(number, 0)) for number in (1, 3, 4, 5))
    require(min(shard, offset, size) >= 0, "is damaged: a variable in its index has a negative position or size")
    return _Entry(dtype, check_shape(shape(raw(fields.get(2, b"")))), shard, offset, size)


def _tensor(key: str, shard: MappedFile, entry: _Entry) -> torch.Tensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise Refused(f"holds {key[:200]}, of TensorFlow's dtype {entry.dtype}, which is not read")
    require(
        prod(entry.shape) * dtype.itemsize == entry.size,
        f"is damaged: {key[:200]} has shape {entry.shape} and {entry.size} bytes, which differ",
    )
    flat = torch.empty(0, dtype=dtype).set_(shard.storage(entry.offset, entry.size, dtype.itemsize))
    return flat.reshape(entry.shape)


def _one_string(shard: MappedFile, entry: _Entry) -> bytes:
    """A scalar string: its length, the length's checksum, then the bytes."""
    data = bytes(shard.view[entry.offset : entry.offset + entry.size])
    count, position = varint(data, 0)
    require(
        prod(entry.shape) == 1 and position + 4 + count == len(data),
        "is damaged: its object graph is not a single string",
    )
    return data[position + 4 :]


def _full_names(graph: bytes) -> dict[str, str]:
    """Checkpoint key to full name, from a TrackableObjectGraph (nodes, their attributes)."""
    names: dict[str, str] = {}
    for node in (raw(value) for number, value in message(graph) if number == 1):
        for attribute in (raw(value) for number, value in message(node) if number == 2):
            fields = {n: raw(value).decode("utf-8", "replace") for n, value in message(attribute) if n in (2, 3)}
            if fields.get(2) and fields.get(3):
                names[fields[3]] = fields[2]
    return names
