"""What a file is, by its bytes and never by its name; and a word on what it is not."""

from __future__ import annotations

import struct

from finetune_mile.checkpoints.readers.contents import Container, Refused
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.wire import TABLE_MAGIC

_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # 0x1950a86a20f9469cfc6c, pickled
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


def sniff(file: MappedFile) -> Container:
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
    if _looks_like_safetensors(head, file.size):
        return "safetensors"
    if head[:1] == b"\x80" or (head[:1] in (b"(", b"c", b"}", b"]") and file.view[-1] == ord(".")):
        return "pickle"
    raise Refused("is no checkpoint that is known: not of torch, safetensors, TensorFlow, nor a pickle")


def _looks_like_safetensors(head: bytes, size: int) -> bool:
    """A length, then JSON; a lying length is still for the library to refuse."""
    if head[8:9] != b"{":
        return False
    (length,) = struct.unpack_from("<Q", head)
    return bool(length <= size or head[:1] != b"\x80")
