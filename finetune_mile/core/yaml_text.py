"""YAML from people: bounded in size, depth and aliases before it becomes values. No torch here.

libyaml builds nested values by recursion and crashes on deep ones, and a few aliases can stand for gigabytes. So the
text is first read as a flat list of events, in which depth and size with all aliases expanded are counted. `1:30` and
`010` are text here; YAML 1.1 would make them 90 and 8.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from finetune_mile.core.files import read_regular

MOST_BYTES = 2**20
DEEPEST = 50  # values inside each other
MOST_VALUES = 100_000  # with aliases expanded

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_LOADER: Any = type("_Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
_LOADER.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
    for first, resolvers in _LOADER.yaml_implicit_resolvers.items()
}
_LOADER.add_implicit_resolver(
    _INT, re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_LOADER.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


class TooMuch(yaml.MarkedYAMLError):
    """YAML that is larger, deeper or more repetitive than any file of ours."""


def load(text: str) -> Any:
    """The one value of a YAML text; None where there is none.

    Raises:
        yaml.YAMLError: the text is not YAML, or too much of it.
    """
    return construct(compose(text))


def load_file(path: Path) -> Any:
    """The one value of a YAML file; raises as `read_text` and `load`."""
    return load(read_text(path))


def read_text(path: Path) -> str:
    """The text of a YAML file.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than 1 MB.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_regular(path, MOST_BYTES).decode("utf-8")


def compose(text: str) -> yaml.Node | None:
    """The tree of nodes of a YAML text, bounded; None where the text is empty or a comment."""
    try:
        _check(text)
        node: yaml.Node | None = _LOADER(text).get_single_node()
    except UnicodeError as error:
        raise yaml.YAMLError("it holds characters that are not Unicode") from error
    return node


def construct(node: yaml.Node | None) -> Any:
    """The values of a tree of nodes."""
    if node is None:
        return None
    try:
        return _LOADER("").construct_document(node)
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # such as !!int x, or the date 2024-13-01
        raise yaml.MarkedYAMLError(problem=f"a value cannot be read: {error}", problem_mark=node.start_mark) from error


def _check(text: str) -> None:
    if len(text) > MOST_BYTES:
        raise TooMuch(problem="it is longer than 1 MB")
    known: dict[str, tuple[int, int]] = {}  # anchor: values and depth of what it stands for
    inside: list[tuple[str | None, int]] = []  # open collections: anchor, depth of the deepest part so far
    counts: list[int] = [0]
    for event in yaml.parse(text, Loader=_LOADER):
        anchor: str | None = getattr(event, "anchor", None)
        mark: Any = event.start_mark
        values, depth = 1, 0
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append((anchor, 0))
            counts.append(1)
            values = 0
        elif isinstance(event, yaml.CollectionEndEvent):
            (anchor, below), values = inside.pop(), counts.pop()
            depth = below + 1
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == name for name, _ in inside):
                raise TooMuch(problem=f"*{anchor} is inside of &{anchor}, in a circle", problem_mark=mark)
            values, depth = known.get(str(anchor), (1, 0))
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if values and anchor is not None:
            known[anchor] = (values, depth)
        counts[-1] += values
        if inside:
            inside[-1] = (inside[-1][0], max(inside[-1][1], depth))
        if len(inside) + depth > DEEPEST:
            raise TooMuch(problem=f"it is nested more than {DEEPEST} levels deep", problem_mark=mark)
        if sum(counts) > MOST_VALUES:
            raise TooMuch(problem=f"it holds more than {MOST_VALUES:,} values, aliases expanded", problem_mark=mark)
