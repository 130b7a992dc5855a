"""The last pass over an unpickled tree: plain containers only, of bounded depth and width."""

from __future__ import annotations

from typing import Any

import torch

from finetune_mile.checkpoints.readers.arrays import Blob, Kind, Unbuilt
from finetune_mile.checkpoints.readers.contents import Refused, Stub
from finetune_mile.checkpoints.readers.names import Name
from finetune_mile.checkpoints.readers.rebuild import Record
from finetune_mile.checkpoints.readers.tensors import DTYPES, Storage

_DEEPEST = 64
_WIDEST = 2_000_000
_MODULE_PARTS = ("_modules", "_parameters", "_buffers")


def plain_tree(made: Any) -> dict[str, Any]:
    """The top level as a dict of plain values; a whole nn.Module becomes its state dict.

    Args:
        made: What the pickle machine gives.
    """
    settled = _Settler().settle_all(made)
    if isinstance(settled, Stub):
        settled = _module_tensors(settled)
    if not isinstance(settled, dict):
        raise Refused(f"holds {_describe(settled)}, not a dict of tensors; save a state_dict and use that")
    tree: dict[str, Any] = {}
    for key, value in settled.items():
        if str(key) in tree:
            raise Refused("is damaged: two of its keys have the same name")
        tree[str(key)] = _module_tensors(value) if _is_module(value) else value
    return tree


def _describe(value: Any) -> str:
    if isinstance(value, Stub):
        return f"an object of the class {value.name[:200]}"
    return f"a {type(value).__name__}"


def _is_module(value: Any) -> bool:
    if not isinstance(value, Stub) or not isinstance(value.state, dict):
        return False
    return all(isinstance(value.state.get(part), dict) for part in _MODULE_PARTS)


def _module_tensors(stub: Stub) -> Any:
    """What state_dict() of a pickled nn.Module would give, from the stub's state; else the stub."""
    if not _is_module(stub):
        return stub
    found: dict[str, Any] = {}
    seen: set[int] = set()
    queue: list[tuple[str, Stub]] = [("", stub)]
    while queue:
        prefix, module = queue.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        temporary = module.state.get("_non_persistent_buffers_set", ())
        for part in ("_parameters", "_buffers"):
            for name, value in module.state[part].items():
                if isinstance(value, torch.Tensor) and name not in temporary:
                    found[f"{prefix}{name}"] = value
        for name, child in reversed(module.state["_modules"].items()):
            if _is_module(child) and len(prefix) < 500:
                queue.append((f"{prefix}{name}.", child))
    return found


class _Settler:
    """Copies a tree, resolves what the machine left open, and weighs what it unfolds to."""

    def __init__(self) -> None:
        # By id; the first of three is the original, kept so that its id stays its own.
        self._done: dict[int, tuple[Any, Any, int]] = {}
        self._open: set[int] = set()
        self._stubs: list[Stub] = []

    def settle_all(self, root: Any) -> Any:
        """The tree, then the insides of every stub in it; these may refer to each other."""
        settled, weight = self._settle(root, 0)
        if weight > max(_WIDEST, 8 * len(self._done)):
            raise Refused("is refused, for its nested lists would unfold to millions of items")
        for stub in self._stubs:  # grows while it is walked
            stub.args, _ = self._settle(stub.args, 0)
            stub.state, _ = self._settle(stub.state, 0)
            stub.elements, _ = self._settle(stub.elements, 0)
            stub.entries, _ = self._settle(stub.entries, 0)
        return settled

    def _settle(self, node: Any, depth: int) -> tuple[Any, int]:
        if isinstance(node, dict | list | tuple | Stub | Blob):
            return self._settle_once(node, depth)
        if isinstance(node, set):
            return {str(item) if isinstance(item, Stub | Name) else item for item in node}, len(node)
        if isinstance(node, Name):
            return (str(DTYPES[name]) if (name := node.qualified) in DTYPES else Stub(name)), 1
        if isinstance(node, Kind | Unbuilt | Record | Storage):
            return Stub(f"{type(node).__name__.lower()} without use"), 1
        return node, 1

    def _settle_once(self, node: Any, depth: int) -> tuple[Any, int]:
        if id(node) in self._done:
            return self._done[id(node)][1:]
        if depth > _DEEPEST or id(node) in self._open:
            raise Refused("is refused, for its containers are nested without end")
        self._open.add(id(node))
        weight = 1
        if isinstance(node, Stub):
            self._stubs.append(node)
            made: Any = node
        elif isinstance(node, Blob):
            made = node.value()
        elif isinstance(node, dict):
            made = {}
            for key, value in node.items():
                made[_settle_key(key)], more = self._settle(value, depth + 1)
                weight += more
        else:
            pairs = [self._settle(item, depth + 1) for item in node]
            weight += sum(more for _, more in pairs)
            made = type(node)(item for item, _ in pairs)
        self._open.remove(id(node))
        self._done[id(node)] = node, made, weight
        return made, weight


def _settle_key(key: Any) -> Any:
    return key.qualified if isinstance(key, Name) else key
