"""A pickle machine of our own: it can build plain data and stubs, and nothing else.

Python's unpickler looks names up and calls what it finds. This one never imports, never calls what
a file names, does not recurse, and checks every length against the file before it allocates.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from finetune_mile.checkpoints.readers.allowance import Allowance
from finetune_mile.checkpoints.readers.arrays import Kind, Unbuilt, restore_array
from finetune_mile.checkpoints.readers.contents import Refused, Stub
from finetune_mile.checkpoints.readers.literals import LITERALS, Cursor
from finetune_mile.checkpoints.readers.mapped import MappedFile
from finetune_mile.checkpoints.readers.names import judge
from finetune_mile.checkpoints.readers.rebuild import KNOWN, REBUILDERS, call, check_key
from finetune_mile.checkpoints.readers.tensors import Storage

FindStorage = Callable[[Any], Storage]

_MOST_OPCODES = 4_000_000
# What our own code raises on arguments of the wrong kind or number; RuntimeError is torch's.
_NONSENSE = (IndexError, KeyError, TypeError, ValueError, OverflowError, RuntimeError)


def no_storage(_: Any) -> Storage:
    """For a pickle that stands alone: it has no business with storages."""
    raise Refused("is damaged: it points to data outside of itself")


class Machine:
    """Runs one pickle in a range of a file.

    Attributes:
        stubs: The foreign names met so far.
        cursor: Stands behind the pickle once `run` is through.
    """

    def __init__(
        self, file: MappedFile, start: int, end: int, *, allowance: Allowance, find_storage: FindStorage = no_storage
    ) -> None:
        self.cursor = Cursor(file, start, end)
        self.stubs: set[str] = set()
        self._allowance = allowance
        self.find_storage = find_storage
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The pickled object, as plain data, stubs and tensors."""
        try:
            return self._run()
        except _NONSENSE as error:
            raise Refused(f"is damaged: its pickle makes no sense ({type(error).__name__})") from error

    def _run(self) -> Any:
        cursor, push = self.cursor, self._stack.append
        for _ in range(_MOST_OPCODES):
            code = cursor.byte()
            literal = LITERALS.get(code)
            if literal is not None:
                push(literal(cursor))
            elif code == _STOP:
                return self._pop()
            else:
                act = _ACTIONS.get(code)
                if act is None:
                    raise Refused(f"is damaged or refused: no checkpoint has the opcode {code:#04x}")
                act(self)
        raise Refused("holds millions of objects beside its tensors; save its state_dict alone and use that")

    # The stack: what lies above the last mark is all that an opcode may touch.

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

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    # Containers.

    def _make_tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Stub):
            target.elements.extend(items)
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise Refused("is damaged: it appends to something that is no list")

    def _add(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, set):
            raise Refused("is damaged: it adds to something that is no set")
        target.update(check_key(item, self._allowance) for item in items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        entries = target.entries if isinstance(target, Stub) else target
        if not isinstance(entries, dict) or len(items) % 2:
            raise Refused("is damaged: it sets entries of something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            entries[check_key(key, self._allowance)] = value

    def _make_dict(self) -> None:
        items = self._pop_to_mark()
        self._stack.append({})
        self._set_items(items)

    def _append_one(self) -> None:
        self._append([self._pop()])

    def _set_one(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    # Names and calls.

    def _name(self, module: object, name: object) -> None:
        found = judge(module, name, KNOWN)
        if found.qualified not in KNOWN and not found.builtin:
            self.stubs.add(found.qualified)
        self._stack.append(found)

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
        made = self._stack[-1]
        if keywords and not (isinstance(made, Stub) and isinstance(keywords, dict)):
            raise Refused("is damaged: a call in it has keywords that nothing takes")
        if keywords:
            made.entries = keywords

    def _instance(self) -> None:
        self._global()
        target = self._pop()
        self._call(target, tuple(self._pop_to_mark()))

    def _object(self) -> None:
        target, *args = self._pop_to_mark()
        self._call(target, tuple(args))

    def _build(self) -> None:
        """Restore a state: arrays are completed, stubs keep it, tensors and dicts need none."""
        state = self._pop()
        target = self._pop()
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
        elif not isinstance(target, torch.Tensor | list | set):
            raise Refused("is damaged: it restores the state of something that has none")
        self._stack.append(target)

    def _restore_mapping(self, target: dict[Any, Any], state: Any) -> None:
        """Old haiku mappings keep their entries in an attribute; others are no weights."""
        inner = state.get("_storage", state.get("_mapping")) if isinstance(state, dict) else None
        if isinstance(inner, dict) and inner is not target and not target:
            self._allowance.spend(100 * len(inner))
            target.update(inner)

    def _storage(self) -> None:
        self._stack.append(self.find_storage(self._pop()))

    def _protocol(self) -> None:
        version = self.cursor.byte()
        if version > 5:
            raise Refused(f"is a pickle of protocol {version}, which is not known")

    def _extension(self) -> None:
        raise Refused("is refused, for it calls on copyreg's extension registry, which no checkpoint needs")

    def _outside_buffer(self) -> None:
        raise Refused("keeps its data outside of the file; save it again without buffers")


_STOP = pickle.STOP[0]
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
        pickle.GET: lambda m: m._get(int(m.cursor.line())),
        pickle.BINGET: lambda m: m._get(m.cursor.byte()),
        pickle.LONG_BINGET: lambda m: m._get(m.cursor.number("<I")),
        pickle.TUPLE: lambda m: m._stack.append(tuple(m._pop_to_mark())),
        pickle.TUPLE1: lambda m: m._make_tuple(1),
        pickle.TUPLE2: lambda m: m._make_tuple(2),
        pickle.TUPLE3: lambda m: m._make_tuple(3),
        pickle.LIST: lambda m: m._stack.append(m._pop_to_mark()),
        pickle.DICT: Machine._make_dict,
        pickle.FROZENSET: lambda m: m._stack.append(
            REBUILDERS["builtins.frozenset"]((m._pop_to_mark(),), m._allowance)
        ),
        pickle.APPEND: Machine._append_one,
        pickle.APPENDS: lambda m: m._append(m._pop_to_mark()),
        pickle.ADDITEMS: lambda m: m._add(m._pop_to_mark()),
        pickle.SETITEM: Machine._set_one,
        pickle.SETITEMS: lambda m: m._set_items(m._pop_to_mark()),
        pickle.GLOBAL: Machine._global,
        pickle.STACK_GLOBAL: Machine._stack_global,
        pickle.REDUCE: Machine._reduce,
        pickle.NEWOBJ: Machine._reduce,
        pickle.NEWOBJ_EX: Machine._reduce_with_keywords,
        pickle.INST: Machine._instance,
        pickle.OBJ: Machine._object,
        pickle.BUILD: Machine._build,
        pickle.BINPERSID: Machine._storage,
        pickle.PERSID: Machine._outside_buffer,
        pickle.EXT1: Machine._extension,
        pickle.EXT2: Machine._extension,
        pickle.EXT4: Machine._extension,
        pickle.NEXT_BUFFER: Machine._outside_buffer,
        pickle.READONLY_BUFFER: Machine._outside_buffer,
    }.items()
}
