"""From a file on disk to plain tensors: no file can run code, whatever it holds.

`read` is all there is, and torch is imported when it is called. Here: what comes out (`Contents`, `Stub`, `Refused`),
which reader a file needs, and one state dict in several files with an index. Which file does the rest:
    mapped.py            a file mapped into memory, every access checked against its size
    torch_files.py       the containers of torch.save, plain pickles, safetensors. It starts a child process for the
                         pickles of a file, and makes tensors of what that describes; a whole module as its state dict
    sending.py           the child: limits of memory and time, no torch, no numpy
    unpickling.py        the child's unpickler: what a file names becomes our own plain data or an inert object
    names.py             which names a pickle may speak of
    tensorflow_files.py  TensorFlow's checkpoints and SavedModels
    wire.py              protocol buffers and LevelDB tables, for these
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers.mapped import MappedFile

Container = Literal["torch-zip", "torch-legacy", "safetensors", "tf-checkpoint", "tf-savedmodel", "pickle"]

_LARGEST_SIDE = 2**40
# Of all tensors of a file: more than any network has, and little memory.
MOST_TENSORS, LONGEST_NAME, MOST_LETTERS = 50_000, 1000, 16 * 2**20
Name = TypeVar("Name", str, bytes)
Item = TypeVar("Item")


class Refused(Exception):
    """Why a file is not read; `read` puts the file's name to it and raises a Problem."""


def require(holds: object, why: str) -> None:
    """Refuse the file unless a condition holds."""
    if not holds:
        raise Refused(why)


def check_shape(shape: Any) -> tuple[int, ...]:
    """The sides of a tensor, or its strides: not negative, and none that no machine could hold."""
    require(
        isinstance(shape, tuple | list) and len(shape) <= 32, "is damaged: the shape of a tensor in it is not valid"
    )
    require(
        all(type(side) is int and 0 <= side <= _LARGEST_SIDE for side in shape),
        "is damaged: a tensor in it has a negative or impossibly large side",
    )
    return tuple(shape)


def bounded(named: Iterable[tuple[Name, Item]]) -> Iterator[tuple[Name, Item]]:
    """Pass named things on, and refuse the file where there are too many, or their names are too long.

    Short names can be put together to long ones, and a name can be used again and again: what is counted is what the
    names take once they are written out.
    """
    letters = 0
    for count, (name, thing) in enumerate(named, start=1):
        letters += len(name)
        require(
            len(name) <= LONGEST_NAME, f"is refused: the name of a tensor in it has more than {LONGEST_NAME} letters"
        )
        require(count <= MOST_TENSORS, f"is refused: it has more than {MOST_TENSORS:,} tensors, more than any network")
        require(letters <= MOST_LETTERS, "is refused: the names of its tensors take many megabytes")
        yield name, thing


@dataclass(slots=True, eq=False)
class Stub:
    """A foreign object as inert data: its class was neither imported nor called.

    `args` is what the constructor would have been given, `state` what would have been restored;
    `elements` and `entries` are the contents of a list-like and of a dict-like class.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    elements: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.name}, inert>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A checkpoint file as plain data.

    Attributes:
        container: What the file is, by its first and last bytes.
        tree: Nested dicts, lists, tuples, scalars and strings; the leaves that matter are CPU
            tensors, most of them mapped from the file (private: writing does not reach the disk).
        stubs: Sorted qualified names of the foreign classes that were met and not called.
        metadata: A safetensors file's own notes.
        full_names: Checkpoint key to the variable's full name, for TF2 files with an object graph.
    """

    container: Container
    tree: dict[str, Any]
    stubs: tuple[str, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    full_names: dict[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------ which reader a file needs

TABLE_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)  # the end of a TensorFlow index
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # 0x1950a86a20f9469cfc6c, pickled
_PART = re.compile(r"-\d{5}-of-\d{5}|\.index\.json$")  # of a checkpoint in several files
_PAGE = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")
_ELSE: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "is compressed by gzip; unpack it (`gunzip`, or `tar xf`) and give what is inside"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstandard; unpack it (`zstd -d --long=27`) first"),
    (b"BZh", "is compressed by bzip2; unpack it (`bunzip2`) first"),
    (b"\xfd7zXZ", "is compressed by xz; unpack it (`unxz`) first"),
    (b"7z\xbc\xaf", "is a 7-zip archive; unpack it first"),
    (b"Rar!", "is a RAR archive; unpack it first"),
    (b"version https://git-lfs", "is a git-LFS pointer, not the weights; run `git lfs pull` where it was cloned"),
    (b"\x89HDF", "is an HDF5 file (Keras .h5), which is not read; save a TensorFlow checkpoint"),
    (b"\x93NUMPY", "is a single numpy array, not a dict of tensors"),
    (b"PK\x05\x06", "is an empty zip file; fetch it again"),
)


def read(path: Path) -> Contents:
    """Read a checkpoint: a file, a TensorFlow prefix, a folder with a checkpoint, a SavedModel."""
    from finetune_mile.checkpoints.readers.torch_files import leaves

    path = Path(path)
    try:
        contents = _read_file(path) if path.is_file() and not _PART.search(path.name) else _read_parts(path)
        for _ in bounded(leaves(contents.tree)):
            pass  # whatever the container was
        return contents
    except Refused as why:
        raise Problem(f"{path} {why}") from why
    except OSError as error:
        raise Problem(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # such as a key of 5,000 digits, which becomes no text
        raise Problem(f"{path} is damaged: a name or a number in it is not valid; fetch it again") from error
    except (MemoryError, RecursionError) as error:
        raise Problem(f"{path} needs more memory than this machine has") from error


def _read_parts(path: Path) -> Contents:
    """A folder, or several files that are named by one of them or by what their names begin with."""
    from finetune_mile.checkpoints.readers import tensorflow_files

    if path.is_dir():
        return tensorflow_files.read_directory(path)
    index = tensorflow_files.find_index(path)
    if index is not None:
        return tensorflow_files.read_checkpoint(index)
    if not path.exists():
        raise Refused("does not exist")
    if path.name.endswith(_INDEX):
        return _read_index(path)
    match = _ONE.fullmatch(path.name)
    if match and int(match[2]) > 1:
        raise Refused(
            f"is one of {int(match[2])} shards of a checkpoint; give the folder, or {match[1]}{match[3]}{_INDEX} in it"
        )
    return _read_file(path)


def _read_file(path: Path) -> Contents:
    from finetune_mile.checkpoints.readers import mapped, tensorflow_files, torch_files

    file = mapped.MappedFile(path)
    container = _sniff(file)
    if container == "tf-checkpoint":
        return tensorflow_files.read_checkpoint(path)
    return torch_files.READERS[container](file)


def _sniff(file: "MappedFile") -> Container:
    """The container of a file; what is none is refused with what to do about it."""
    head = bytes(file.view[:64])
    if head.startswith(b"PK\x03\x04"):
        return "torch-zip"
    if bytes(file.view[-8:]) == TABLE_MAGIC:
        return "tf-checkpoint"
    for magic, sentence in _ELSE:
        if head.startswith(magic):
            raise Refused(sentence)
    if bytes(file.view[257:262]) == b"ustar":
        raise Refused("is a tar archive; unpack it (`tar xf`) and give what is inside")
    if head.lstrip().lower().startswith(_PAGE):
        raise Refused("is a web page, not weights: the download got an error page; fetch it again")
    if _LEGACY in head:
        return "torch-legacy"
    # a length, then JSON; a false length is still for the library to refuse
    if head[8:9] == b"{" and (int.from_bytes(head[:8], "little") <= file.size or head[:1] != b"\x80"):
        return "safetensors"
    if head[:1] == b"\x80" or (head[:1] in (b"(", b"c", b"}", b"]") and file.view[-1] == ord(".")):
        return "pickle"
    raise Refused("is not a known kind of checkpoint (torch, safetensors, TensorFlow, pickle)")


# ------------------------------------------------------------------------------------ several files
# A state dict with a JSON index, as transformers and accelerate write it. The index is not trusted: it may name files
# of its own folder only, no other index, and its sizes are not read.

_INDEX = ".index.json"
_LARGEST, _MOST_SHARDS = 16 * 2**20, 4096
_SHARD = re.compile(r"[^/\\\0:]+\.(?:safetensors|bin|pt|pth)")
_ONE = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")


def _read_index(index: Path) -> Contents:
    """Read all shards of an index, which are beside it."""
    places = _places(index)
    shards: dict[str, Contents] = {}
    for shard in sorted(set(places.values())):
        file = index.parent / shard
        require(file.is_file(), f"needs the shard {shard}, which is not beside it; fetch all shards")
        try:
            shards[shard] = _read_file(file)
        except Refused as why:
            raise Refused(f"cannot be read: its shard {shard} {why}") from why
    tree: dict[str, Any] = {}
    for name, shard in places.items():
        require(name in shards[shard].tree, f"says that {name[:100]} is in {shard}, which does not have it")
        tree[name] = shards[shard].tree[name]
    for shard, contents in shards.items():
        extra = next((name for name in contents.tree if places.get(name) != shard), None)
        require(extra is None, f"does not list {str(extra)[:100]}, which is in {shard}")
    stubs = tuple(sorted({stub for contents in shards.values() for stub in contents.stubs}))
    return Contents(container=next(iter(shards.values())).container, tree=tree, stubs=stubs)


def _places(index: Path) -> dict[str, str]:
    """The name of every tensor, and the file that it is in."""
    require(index.stat().st_size <= _LARGEST, f"is larger than {_LARGEST // 2**20} MB, too large for an index")
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Refused(f"is not valid JSON: {str(error)[:200]}") from error
    places: Any = content.get("weight_map") if isinstance(content, dict) else None
    require(isinstance(places, dict) and places, "has no weight_map of tensor names to files")
    for name, shard in places.items():
        usable = isinstance(shard, str) and _SHARD.fullmatch(shard) and not shard.startswith(".")
        require(usable, f"puts {name[:100]} into {str(shard)[:100]!r}, which is not a weights file of its own folder")
    require(len(set(places.values())) <= _MOST_SHARDS, f"names more than {_MOST_SHARDS} files")
    return dict(places)
