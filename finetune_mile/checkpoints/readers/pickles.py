"""A pickle machine of our own: it can build plain data and stubs, and nothing else.

Python's unpickler looks names up and calls what it finds. This one never imports, never calls what a file names, does
not recurse, and checks every length against the file before it allocates. First the literals (where each opcode's
argument ends and what it says), then the machine.
"""

import pickle
import re
import struct
from collections.abc import Callable
from typing import Any, Literal

import torch

from finetune_mile.checkpoints.readers.contents import Allowance, Refused, Stub, require
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.names import Name, judge
from finetune_mile.checkpoints.readers.rebuild import (
    KNOWN,
    Blob,
    Kind,
    Storage,
    Unbuilt,
    call,
    check_key,
    make_set,
    restore_array,
)

_LONG = 2**16  # a string or bytes from here on stays in the file until it is needed
_LINES = (2**7, 2**12, 2**17, 2**22)  # look for a line's end that far, then further
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


class Cursor:
    """A position in a range of a file that cannot leave the range."""

    def __init__(self, file: MappedFile, start: int, end: int) -> None:
        file.check(start, end - start)
        self.file, self.position, self.end, self._view = file, start, end, file.view

    def skip(self, count: int) -> int:
        """Move on by `count` bytes; returns where they begin."""
        start = self.position
        if not 0 <= count <= self.end - start:
            raise Refused("is cut short or damaged: a value in it is longer than the file")
        self.position = start + count
        return start

    def byte(self) -> int:
        return self._view[self.skip(1)]

    def number(self, form: str) -> Any:
        return struct.unpack_from(form, self._view, self.skip(struct.calcsize(form)))[0]

    def take(self, count: int) -> bytes:
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
    require(
        len(line) >= 2 and line[:1] == line[-1:] and line[:1] in (b"'", b'"'),
        "is damaged: a string in it has no quotes",
    )
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


# --------------------------------------------------------------------------------------- the machine

FindStorage = Callable[[Any], Storage | Name]

_MOST_OPCODES = 4_000_000
# What our own code raises on arguments of the wrong kind or number; RuntimeError is torch's.
_NONSENSE = (IndexError, KeyError, TypeError, ValueError, OverflowError, RuntimeError)


def _no_storage(_: Any) -> Storage:
    raise Refused("is damaged: it points to data outside of itself")


class Machine:
    """Runs one pickle in a range of a file.

    Attributes:
        stubs: The foreign names met so far.
        cursor: After `run`, the position behind the pickle.
    """

    def __init__(
        self, file: MappedFile, start: int, end: int, *, allowance: Allowance, find_storage: FindStorage = _no_storage
    ) -> None:
        self.cursor = Cursor(file, start, end)
        self.stubs: set[str] = set()
        self._allowance, self.find_storage = allowance, find_storage
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The pickled object, as plain data, stubs and tensors."""
        cursor, push = self.cursor, self._stack.append
        try:
            for _ in range(_MOST_OPCODES):
                code = cursor.byte()
                if code in LITERALS:
                    push(LITERALS[code](cursor))
                elif code in _ACTIONS:
                    _ACTIONS[code](self)
                elif code == pickle.STOP[0]:
                    return self._pop()
                else:
                    raise Refused(_REFUSED.get(code, f"is damaged: no checkpoint has the opcode {code:#04x}"))
        except _NONSENSE as error:
            raise Refused(f"is damaged: its pickle is not valid ({type(error).__name__})") from error
        raise Refused("holds millions of objects beside its tensors; save its state_dict alone and use that")

    # The stack: an opcode may touch only what is above the last mark.

    def _pop(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise Refused("is damaged: its pickle takes more than it has")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _drop(self) -> None:
        if self._marks and len(self._stack) == self._marks[-1]:
            self._marks.pop()
        else:
            self._stack.pop()

    # The memo.

    def _put(self, index: int) -> None:
        top = self._stack[-1]
        if isinstance(top, Unbuilt):
            top.memo.append(index)
        self._memo[index] = top

    # Containers.

    def _make_tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        elements = target.elements if isinstance(target, Stub) else target
        require(isinstance(elements, list), "is damaged: it appends to something that is no list")
        elements.extend(items)

    def _add(self, items: list[Any]) -> None:
        target = self._stack[-1]
        require(isinstance(target, set), "is damaged: it adds to something that is no set")
        target.update(check_key(item, self._allowance) for item in items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        entries = target.entries if isinstance(target, Stub) else target
        require(
            isinstance(entries, dict) and len(items) % 2 == 0,
            "is damaged: it sets entries of something that is no dict",
        )
        for key, value in zip(items[::2], items[1::2], strict=True):
            entries[check_key(key, self._allowance)] = value

    def _make_dict(self) -> None:
        items = self._pop_to_mark()
        self._stack.append({})
        self._set_items(items)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    # Names and calls.

    def _name(self, module: object, name: object) -> None:
        judged = judge(module, name, KNOWN)
        if judged.qualified not in KNOWN and not judged.qualified.startswith("builtins."):
            self.stubs.add(judged.qualified)
        self._stack.append(judged)

    def _global(self) -> None:
        module, name = self.cursor.line(), self.cursor.line()
        self._name(str(module, "utf-8"), str(name, "utf-8"))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._name(module, name)

    def _call(self, target: Any, args: Any) -> None:
        self._stack.append(call(target, args, self._allowance))

    def _reduce(self) -> None:
        args, target = self._pop(), self._pop()
        self._call(target, args)

    def _reduce_with_keywords(self) -> None:
        keywords, args, target = self._pop(), self._pop(), self._pop()
        self._call(target, args)
        result = self._stack[-1]
        if keywords:
            require(
                isinstance(result, Stub) and isinstance(keywords, dict),
                "is damaged: a call in it has keywords that nothing takes",
            )
            result.entries = keywords

    def _instance(self) -> None:
        self._global()
        target = self._pop()
        self._call(target, tuple(self._pop_to_mark()))

    def _object(self) -> None:
        target, *args = self._pop_to_mark()
        self._call(target, tuple(args))

    def _build(self) -> None:
        """Restore a state: arrays are completed, stubs keep it, tensors and dicts need none."""
        state, target = self._pop(), self._pop()
        if isinstance(target, Unbuilt):
            array = restore_array(state, self._allowance)
            for index in target.memo:
                self._memo[index] = array
            target = array
        elif isinstance(target, Kind):
            target.restore(state)
        elif isinstance(target, Stub):
            target.state = state
        elif isinstance(target, dict):
            self._restore_mapping(target, state)
        else:
            require(
                isinstance(target, torch.Tensor | list | set),
                "is damaged: it restores the state of something that has none",
            )
        self._stack.append(target)

    def _restore_mapping(self, target: dict[Any, Any], state: Any) -> None:
        """Old haiku mappings keep their entries in an attribute; others are no weights."""
        inner = state.get("_storage", state.get("_mapping")) if isinstance(state, dict) else None
        if isinstance(inner, dict) and inner is not target and not target:
            self._allowance.spend(100 * len(inner))
            target.update(inner)

    def _protocol(self) -> None:
        version = self.cursor.byte()
        require(version <= 5, f"is a pickle of protocol {version}, which is not known")


_REFUSED = {
    **dict.fromkeys(
        (pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0]),
        "is refused: it uses copyreg's extension registry, which no checkpoint needs",
    ),
    **dict.fromkeys(
        (pickle.PERSID[0], pickle.NEXT_BUFFER[0], pickle.READONLY_BUFFER[0]),
        "keeps its data outside of the file; save it again without buffers",
    ),
}
_ACTIONS: dict[int, Callable[[Machine], Any]] = {
    code[0]: act
    for code, act in {
        pickle.PROTO: Machine._protocol,
        pickle.FRAME: lambda m: m.cursor.skip(8),
        pickle.MARK: lambda m: m._marks.append(len(m._stack)),
        pickle.POP: Machine._drop,
        pickle.POP_MARK: Machine._pop_to_mark,
        pickle.DUP: lambda m: m._stack.append(m._stack[-1]),
        pickle.PUT: lambda m: m._put(int(m.cursor.line())),
        pickle.BINPUT: lambda m: m._put(m.cursor.byte()),
        pickle.LONG_BINPUT: lambda m: m._put(m.cursor.number("<I")),
        pickle.MEMOIZE: lambda m: m._put(len(m._memo)),
        pickle.GET: lambda m: m._stack.append(m._memo[int(m.cursor.line())]),
        pickle.BINGET: lambda m: m._stack.append(m._memo[m.cursor.byte()]),
        pickle.LONG_BINGET: lambda m: m._stack.append(m._memo[m.cursor.number("<I")]),
        pickle.TUPLE: lambda m: m._stack.append(tuple(m._pop_to_mark())),
        pickle.TUPLE1: lambda m: m._make_tuple(1),
        pickle.TUPLE2: lambda m: m._make_tuple(2),
        pickle.TUPLE3: lambda m: m._make_tuple(3),
        pickle.LIST: lambda m: m._stack.append(m._pop_to_mark()),
        pickle.DICT: Machine._make_dict,
        pickle.FROZENSET: lambda m: m._stack.append(make_set((m._pop_to_mark(),), m._allowance)),
        pickle.APPEND: lambda m: m._append([m._pop()]),
        pickle.APPENDS: lambda m: m._append(m._pop_to_mark()),
        pickle.ADDITEMS: lambda m: m._add(m._pop_to_mark()),
        pickle.SETITEM: Machine._set_item,
        pickle.SETITEMS: lambda m: m._set_items(m._pop_to_mark()),
        pickle.GLOBAL: Machine._global,
        pickle.STACK_GLOBAL: Machine._stack_global,
        pickle.REDUCE: Machine._reduce,
        pickle.NEWOBJ: Machine._reduce,
        pickle.NEWOBJ_EX: Machine._reduce_with_keywords,
        pickle.INST: Machine._instance,
        pickle.OBJ: Machine._object,
        pickle.BUILD: Machine._build,
        pickle.BINPERSID: lambda m: m._stack.append(m.find_storage(m._pop())),
    }.items()
}
