"""Where images come from: one function and one entry each. Nothing heavy is imported before it is used."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from finetune_mile.images.imageset import Data
from finetune_mile.problems import Problem

# Scheme of --data: the module whose load(where) reads it.
SOURCES: dict[str, str] = {
    "demo": "finetune_mile.images.sources.demo",
    "folder": "finetune_mile.images.sources.folder",
}


def split_name(data: str) -> tuple[str, str]:
    """`folder:photos` is ("folder", "photos"); a bare directory is a folder; what is neither raises."""
    scheme, colon, where = data.partition(":")
    if not colon and scheme != "demo":
        scheme, where = "folder", data
    if scheme not in SOURCES:
        near = difflib.get_close_matches(scheme, SOURCES, n=1)
        hint = f"did you mean {near[0]}:?" if near else f"known: {', '.join(SOURCES)}"
        raise Problem(f"--data {data}: no source is called {scheme!r}; {hint}")
    if scheme == "demo" and where and not (where.isdigit() and int(where) > 0):
        raise Problem(f"--data {data}: write demo, or demo:400 for 400 training grids")
    if scheme == "folder" and not Path(where).is_dir():
        raise Problem(f"--data {data}: there is no directory {where!r}")
    return scheme, where


def load_data(data: str) -> Data:
    """Open a data set by its name."""
    scheme, where = split_name(data)
    load = cast(Callable[[str], Data], importlib.import_module(SOURCES[scheme]).load)
    return load(where)
