"""From a file on disk to plain tensors: no file can run code, whatever it holds.

`read` is all there is, and torch is imported when it is called. Which file does what:
    contents.py          what comes out: `Contents`, `Stub`, `Refused`
    mapped.py            a file mapped into memory, every access checked against its size
    torch_files.py       the containers of torch.save, plain pickles, safetensors; a whole module as its state dict
    receiving.py         starts a child process for the pickles of a file, and makes tensors of what it describes
    sending.py           the child: limits of memory and time, no torch, no numpy
    unpickling.py        the child's unpickler: what a file names becomes our own plain data or an inert object
    names.py             which names a pickle may speak of
    shards.py            one state dict in several files with an index
    tensorflow_files.py  TensorFlow's checkpoints and SavedModels
    wire.py              protocol buffers and LevelDB tables, for these
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_mile.checkpoints.readers import shards
from finetune_mile.checkpoints.readers.contents import Container, Contents, Refused, Stub
from finetune_mile.checkpoints.readers.wire import TABLE_MAGIC
from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers.mapped import MappedFile

__all__ = ["Contents", "Stub", "read"]

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
    path = Path(path)
    try:
        return _read(path)
    except Refused as why:
        raise Problem(f"{path} {why}") from why
    except OSError as error:
        raise Problem(f"{path} cannot be read: {error.strerror or error}") from error
    except (MemoryError, RecursionError) as error:
        raise Problem(f"{path} needs more memory than this machine has") from error


def _read(path: Path) -> Contents:
    return _read_file(path) if path.is_file() and not _PART.search(path.name) else _read_parts(path)


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
    if path.name.endswith(shards.INDEX):
        return shards.read_index(path, _read_file)
    shards.check_single(path)
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
