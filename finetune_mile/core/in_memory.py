"""Objects of a Python caller, such as a data set or a network, in the places where a command takes text. No torch here.

`python:Dataset` is the name of such an object for the time of one call. In a recipe.yaml it says that the run cannot be
repeated from the file alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from finetune_mile.core.problems import Problem

SCHEME = "python"
_OBJECTS: ContextVar[dict[str, Any]] = ContextVar("objects", default={})  # noqa: B039  never changed, only replaced


@contextlib.contextmanager
def named(*objects: Any) -> Iterator[list[str | None]]:
    """A name for each object, by which `get_object` finds it as long as the context lasts.

    Args:
        objects: paths and text are their own names; None has none.
    """
    table: dict[str, Any] = {}
    names: list[str | None] = []
    for each in objects:
        if each is None or isinstance(each, str | Path):
            if "\0" in str(each):
                raise Problem(f"{str(each)!r}: no file has a NUL character in its name; remove it")
            names.append(None if each is None else str(each))
            continue
        name, number = f"{SCHEME}:{type(each).__name__}", 1
        while name in table:
            number += 1
            name = f"{SCHEME}:{type(each).__name__}-{number}"
        table[name] = each
        names.append(name)
    token = _OBJECTS.set(_OBJECTS.get() | table)
    try:
        yield names
    finally:
        _OBJECTS.reset(token)


def get_object(name: str, flag: str, fix: str) -> Any:
    """The object of a name; a `Problem` that ends with `fix` where this process was not given it."""
    try:
        return _OBJECTS.get()[name]
    except KeyError as error:
        raise Problem(f"{flag} {name}: was given from Python and is not on disk; {fix}") from error
