"""Where images come from: one function and one entry each. Nothing heavy is imported before it is used."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from finetune_mile.core.problems import Problem, did_you_mean
from finetune_mile.images.imageset import Data

# Scheme of --data: the module whose load(where) reads it, or module:function.
SOURCES: dict[str, str] = {
    "demo": "finetune_mile.images.sources.demo",
    "folder": "finetune_mile.images.sources.folder",
    "imagenet": "finetune_mile.images.sources.imagenet",
    "hf": "finetune_mile.images.sources.hf",
    "csv": "finetune_mile.images.sources.csv_file",
    "wds": "finetune_mile.images.sources.wds",
    "webvision": "finetune_mile.images.sources.webvision",
    "celeba": "finetune_mile.images.sources.celeba",
    "multi-mnist": "finetune_mile.paper.datasets:multi_mnist",
    "mosaic": "finetune_mile.paper.datasets:mosaic",
    "colored-mnist": "finetune_mile.paper.datasets:colored_mnist",
    "colored-mnist+": "finetune_mile.paper.datasets:colored_mnist_plus",
}
DIRECTORIES = ("folder", "imagenet", "wds", "webvision", "celeba", "mosaic")
OF_MNIST = ("multi-mnist", "colored-mnist", "colored-mnist+")
MOST_GRIDS = 10**6  # of the demo
PLACELESS = ("demo", "imagenet", *OF_MNIST)  # their name alone will do


def scheme_and_place(data: str) -> tuple[str, str]:
    """`folder:photos` is ("folder", "photos"); nothing is checked."""
    scheme, colon, where = data.partition(":")
    return (scheme, where) if colon or scheme in PLACELESS else ("folder", data)


def split_name(data: str) -> tuple[str, str]:
    """`folder:photos` is ("folder", "photos"); a bare directory is a folder; what is neither raises."""
    scheme, where = scheme_and_place(data)
    if scheme not in SOURCES:
        known = [f"{name}:" for name in SOURCES]
        raise Problem(f"--data {data}: no source is called {scheme!r}; {did_you_mean(f'{scheme}:', known)}")
    if scheme == "imagenet" and not where.partition("?")[0]:
        where = _imagenet_place() + where
    _check_place(data, scheme, where.partition("?")[0])
    return scheme, where


def _check_place(data: str, scheme: str, place: str) -> None:
    if scheme == "demo" and place and not (place.isdecimal() and 0 < int(place[:9]) <= MOST_GRIDS):
        raise Problem(f"--data {data[:80]}: write demo, or demo:400 for 400 training grids (at most {MOST_GRIDS:,})")
    if scheme in DIRECTORIES and not Path(place).is_dir():
        raise Problem(f"--data {data}: there is no directory {place!r}")
    if scheme in OF_MNIST and "download=yes" not in data:
        importlib.import_module("finetune_mile.paper.idx").find_mnist(scheme, place)
    if scheme == "csv" and not Path(place).is_file():
        raise Problem(f"--data {data}: there is no file {place!r}")
    if scheme == "hf":
        if not place:
            raise Problem("--data hf: names nothing; write hf:NAME or hf:DIRECTORY")
        if (place.startswith((".", "/", "~")) or place.count("/") > 1) and not Path(place).expanduser().exists():
            raise Problem(f"--data {data}: there is no directory {place!r}")


def imagenet_folder() -> str | None:
    """ImageNet's folder on this machine: IMAGENET_DIR, else data/imagenet."""
    places = (os.environ.get("IMAGENET_DIR"), "data/imagenet")
    return next((place for place in places if place and Path(place).is_dir()), None)


def _imagenet_place() -> str:
    place = imagenet_folder()
    if place is None:
        raise Problem(
            "--data imagenet: where is it? Write imagenet:DIR, set IMAGENET_DIR, or put it (or a link) at data/imagenet"
        )
    return place


def load_data(data: str) -> Data:
    """Open a data set by its name."""
    scheme, where = split_name(data)
    module, _, function = SOURCES[scheme].partition(":")
    load = cast(Callable[[str], Data], getattr(importlib.import_module(module), function or "load"))
    return load(where)
