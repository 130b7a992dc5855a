"""From a file on disk to plain tensors: no file can run code, whatever it holds.

`read` is all there is, and torch is imported when it is called. The container is told by magic bytes;
torch files and pickles go through a pickle machine of our own (pickles.py), TensorFlow files are parsed by hand,
tensors are mapped.
"""

from __future__ import annotations

from pathlib import Path

from finetune_mile.checkpoints.readers.contents import Container, Contents, Refused, Stub
from finetune_mile.core.problems import Problem

__all__ = ["Container", "Contents", "Stub", "read"]


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
        raise Problem(f"{path} asks for more memory than there is") from error


def _read(path: Path) -> Contents:
    from finetune_mile.checkpoints.readers.mapped import MappedFile
    from finetune_mile.checkpoints.readers.safetensors_files import read_safetensors
    from finetune_mile.checkpoints.readers.sniffing import sniff
    from finetune_mile.checkpoints.readers.tensorflow_files import find_index, read_checkpoint, read_directory
    from finetune_mile.checkpoints.readers.torch_files import read_legacy, read_pickle, read_zip

    if path.is_dir():
        return read_directory(path)
    index = find_index(path)
    if index is not None:
        return read_checkpoint(index)
    if not path.exists():
        raise Refused("does not exist")
    file = MappedFile(path)
    container = sniff(file)
    if container == "torch-zip":
        return read_zip(file)
    if container == "torch-legacy":
        return read_legacy(file)
    if container == "safetensors":
        return read_safetensors(file)
    if container == "pickle":
        return read_pickle(file)
    return read_checkpoint(path)
