"""The literals of a pickle: where each opcode's argument ends and what it says, within bounds."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable
from typing import Any, Literal

from finetune_mile.checkpoints.readers.arrays import Blob
from finetune_mile.checkpoints.readers.contents import Refused
from finetune_mile.checkpoints.readers.mapped import MappedFile

_LONG = 2**16  # a string or bytes from here on stays in the file until it is wanted
_LINES = (2**7, 2**12, 2**17, 2**22)  # look for a line's end that far, then further
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


class Cursor:
    """A position in a range of a file that cannot leave the range."""

    def __init__(self, file: MappedFile, start: int, end: int) -> None:
        file.check(start, end - start)
        self.file, self.position, self.end = file, start, end
        self._view = file.view

    def skip(self, count: int) -> int:
        """Go on by `count` bytes; gives where they begin."""
        start = self.position
        if count < 0 or count > self.end - start:
            raise Refused("is cut short or damaged: a value in it is longer than the file")
        self.position = start + count
        return start

    def byte(self) -> int:
        """The next byte."""
        return self._view[self.skip(1)]

    def number(self, form: str) -> Any:
        """The next number, in a form of `struct`."""
        return struct.unpack_from(form, self._view, self.skip(struct.calcsize(form)))[0]

    def take(self, count: int) -> bytes:
        """The next bytes."""
        start = self.skip(count)
        return bytes(self._view[start : start + count])

    def line(self) -> bytes:
        """The bytes up to the next newline, which is passed over."""
        start = self.position
        for reach in _LINES:
            chunk = bytes(self._view[start : min(self.end, start + reach)])
            length = chunk.find(b"\n")
            if length >= 0:
                self.position = start + length + 1
                return chunk[:length]
        raise Refused("is cut short or damaged: a line in it has no end")

    def long(self, count: int, form: Literal["text", "bytes"]) -> str | bytes | Blob:
        """The next string or bytes: at once if short, else as a Blob."""
        if count >= _LONG:
            return Blob(self.file, self.skip(count), count, form)
        raw = self.take(count)
        return str(raw, "utf-8", "surrogatepass") if form == "text" else raw


def _text_integer(cursor: Cursor) -> int | bool:
    """Protocol 0 spells True and False as the integers 01 and 00."""
    line = cursor.line()
    return line == b"01" if line in (b"00", b"01") else int(line)


def _quoted(cursor: Cursor) -> str:
    line = cursor.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise Refused("is damaged: a string in it has no quotes")
    return str(_ESCAPE.sub(_unescape, line[1:-1]), "latin-1")


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if len(code) == 3 and code[:1] == b"x":
        return bytes([int(code[1:], 16)])
    if code.isdigit() and code < b"8":
        return bytes([int(code, 8) & 0xFF])
    return _ESCAPED.get(code, code)


def _whole(cursor: Cursor, form: str) -> int:
    return int.from_bytes(cursor.take(cursor.number(form)), "little", signed=True)


LITERALS: dict[int, Callable[[Cursor], Any]] = {
    code[0]: read
    for code, read in {
        pickle.NONE: lambda _: None,
        pickle.NEWTRUE: lambda _: True,
        pickle.NEWFALSE: lambda _: False,
        pickle.EMPTY_DICT: lambda _: {},
        pickle.EMPTY_LIST: lambda _: [],
        pickle.EMPTY_TUPLE: lambda _: (),
        pickle.EMPTY_SET: lambda _: set(),
        pickle.INT: _text_integer,
        pickle.LONG: lambda cursor: int(cursor.line().rstrip(b"L")),
        pickle.FLOAT: lambda cursor: float(cursor.line()),
        pickle.BININT: lambda cursor: cursor.number("<i"),
        pickle.BININT1: lambda cursor: cursor.byte(),
        pickle.BININT2: lambda cursor: cursor.number("<H"),
        pickle.LONG1: lambda cursor: _whole(cursor, "<B"),
        pickle.LONG4: lambda cursor: _whole(cursor, "<i"),
        pickle.BINFLOAT: lambda cursor: cursor.number(">d"),
        pickle.STRING: _quoted,
        pickle.BINSTRING: lambda cursor: str(cursor.take(cursor.number("<i")), "latin-1"),
        pickle.SHORT_BINSTRING: lambda cursor: str(cursor.take(cursor.byte()), "latin-1"),
        pickle.UNICODE: lambda cursor: str(cursor.line(), "raw-unicode-escape"),
        pickle.SHORT_BINUNICODE: lambda cursor: cursor.long(cursor.byte(), "text"),
        pickle.BINUNICODE: lambda cursor: cursor.long(cursor.number("<I"), "text"),
        pickle.BINUNICODE8: lambda cursor: cursor.long(cursor.number("<Q"), "text"),
        pickle.SHORT_BINBYTES: lambda cursor: cursor.take(cursor.byte()),
        pickle.BINBYTES: lambda cursor: cursor.long(cursor.number("<I"), "bytes"),
        pickle.BINBYTES8: lambda cursor: cursor.long(cursor.number("<Q"), "bytes"),
        pickle.BYTEARRAY8: lambda cursor: cursor.long(cursor.number("<Q"), "bytes"),
    }.items()
}
