"""--data, --split and truth as text: which source, which options, and all that can be checked before torch is imported.

A source is one function from the text behind its name to `Data`, and one entry of SOURCES.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from finetune_mile.core.in_memory import SCHEME, get_object
from finetune_mile.core.problems import Problem, did_you_mean

if TYPE_CHECKING:
    from finetune_mile.images.sets import Data

# Scheme of --data: module:function that reads it, from the text behind the scheme and the flag with its text.
SOURCES: dict[str, str] = {
    "demo": "finetune_mile.images.sources.grids:load",
    "folder": "finetune_mile.images.sources.folder:load",
    "imagenet": "finetune_mile.images.sources.imagenet:load",
    "hf": "finetune_mile.images.sources.hf:load",
    "csv": "finetune_mile.images.sources.lists:load_csv",
    "wds": "finetune_mile.images.sources.wds:load",
    "webvision": "finetune_mile.images.sources.lists:load_webvision",
    "celeba": "finetune_mile.images.sources.lists:load_celeba",
    "multi-mnist": "finetune_mile.paper.datasets:multi_mnist",
    "mosaic": "finetune_mile.paper.datasets:mosaic",
    "colored-mnist": "finetune_mile.paper.datasets:colored_mnist",
    "colored-mnist+": "finetune_mile.paper.datasets:colored_mnist_plus",
}
DIRECTORIES = ("folder", "imagenet", "wds", "webvision", "celeba", "mosaic")
OF_MNIST = ("multi-mnist", "colored-mnist", "colored-mnist+")
MOST_GRIDS = 10**6  # of the demo
PLACELESS = ("demo", "imagenet", *OF_MNIST)  # their name alone is enough


def load_data(data: str, flag: str = "--data", *, need_labels: bool = True, strict: bool = True) -> Data:
    """Open the images of --data.

    Args:
        data: the text of the flag.
        flag: its name, for messages.
        need_labels: raise if no image has a label.
        strict: raise all `problems` of the data at once; else the caller tells them.
    """
    scheme, where = split_name(data, flag)
    source = "finetune_mile.images.sources.memory:load" if scheme == SCHEME else SOURCES[scheme]
    loaded: Data = pkgutil.resolve_name(source)(where, f"{flag} {scheme}:{where}")
    if strict and loaded.problems:
        raise Problem(*loaded.problems)
    if need_labels and not loaded.classes:
        raise Problem(
            f"{flag} {data}: none of its {len(loaded.train):,} images has a label. Expected class folders "
            "(DIR/CLASS/IMAGE.jpg). Images without labels are for finetune-mile pretrain, or for --unlabelled beside "
            "labelled ones"
        )
    return loaded


def load_unlabelled(spec: str) -> Data:
    """Open --unlabelled: its training images are used, of a folder without train/ all images."""
    scheme, where = split_name(spec, "--unlabelled")
    if scheme == "folder" and "labels=" not in where:
        where += f"{'&' if '?' in where else '?'}labels=none"
    return load_data(f"{scheme}:{where}", "--unlabelled", need_labels=False)


def scheme_and_place(data: str) -> tuple[str, str]:
    """`folder:photos` is ("folder", "photos"); nothing is checked."""
    scheme, colon, where = data.partition(":")
    return (scheme, where) if colon or scheme in PLACELESS else ("folder", data)


def anchored(data: str, base: str | Path) -> str:
    """A --data that was written in the folder `base`, as it is called from here."""
    scheme, where = scheme_and_place(data)
    place, mark, query = where.partition("?")
    there = Path(base) / place
    return f"{scheme}:{there}{mark}{query}" if place and not Path(place).exists() and there.exists() else data


def split_name(data: str, flag: str = "--data") -> tuple[str, str]:
    """`folder:photos` is ("folder", "photos"); a bare directory is a folder; anything else raises."""
    scheme, where = scheme_and_place(data)
    if scheme == SCHEME:
        get_object(data, flag, "give the same images again, as in finetune_mile.train(data=..., resume=FOLDER)")
        return scheme, where
    if scheme not in SOURCES:
        known = [f"{name}:" for name in SOURCES]
        raise Problem(f"{flag} {data}: no source is called {scheme!r}; {did_you_mean(f'{scheme}:', known)}")
    if scheme == "imagenet" and not where.partition("?")[0]:
        folder = imagenet_folder()
        if folder is None:
            raise Problem(
                f"{flag} imagenet: dataset not found; use imagenet:DIR, or set IMAGENET_DIR, or link it at "
                "data/imagenet"
            )
        where = folder + where
    flag, place = f"{flag} {data}", where.partition("?")[0]
    there = Path(place).is_dir() if scheme in DIRECTORIES else _check_place(flag, scheme, place)
    if not there:
        hint = f"; for a list write {f'csv:{place}'!r}" if place.endswith(".csv") and Path(place).is_file() else ""
        raise Problem(f"{flag}: there is no directory {place!r}{hint}")
    return scheme, where


def _check_place(flag: str, scheme: str, place: str) -> bool:
    """Is what a source needs there, if it is a directory? Anything else that is wrong raises."""
    if scheme == "demo":
        if place and not (place.isdecimal() and 0 < int(place[:9]) <= MOST_GRIDS):
            raise Problem(f"{flag[:87]}: write demo, or demo:400 for 400 training grids (at most {MOST_GRIDS:,})")
    elif scheme in OF_MNIST:
        if "download=yes" not in flag:
            importlib.import_module("finetune_mile.paper.idx").find_mnist(scheme, place, flag)
    elif scheme == "csv":
        if not Path(place).is_file():
            raise Problem(f"{flag}: there is no file {place!r}")
    elif not place:
        raise Problem(f"{flag} needs a dataset name or a directory: hf:NAME or hf:DIR")
    elif place.startswith((".", "/", "~")) or place.count("/") > 1:
        return Path(place).expanduser().exists()
    return True


def imagenet_folder() -> str | None:
    """ImageNet's folder on this machine: IMAGENET_DIR, else data/imagenet."""
    places = (os.environ.get("IMAGENET_DIR"), "data/imagenet")
    return next((place for place in places if place and Path(place).is_dir()), None)


def read_options(where: str, known: Sequence[str], flag: str) -> tuple[str, dict[str, str]]:
    """`NAME?key=value&key=value` to the name and its options; for an unknown key the nearest one is suggested."""
    place, _, query = where.partition("?")
    options: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise Problem(f"{flag}: write {key or 'key'}=VALUE after the question mark")
        if key not in known:
            raise Problem(f"{flag}: unknown option {key}; {did_you_mean(key, known)}")
        options[key] = unquote(value)
    return place, options


def check_truth(spec: str) -> None:
    """Refuse a truth that is misspelt or names files that do not exist."""
    kind, _, where = spec.partition(":")
    parts = where.split(",")
    files: list[str] = []
    if kind == "counts":
        files = parts[:2]
        try:
            if len(parts) != 3 or not 0 < float(parts[2]) <= 1:
                raise ValueError
        except ValueError as error:
            raise Problem(f"truth {spec}: write counts:FILE.npy,INDEX.csv,SHARE with a share up to 1") from error
    elif kind == "csv" and where:
        files = [where]
    elif kind != "real" or where:
        raise Problem(f"truth {spec}: write real, csv:FILE, or counts:FILE.npy,INDEX.csv,0.1")
    for file in files:
        if not Path(file).is_file():
            raise Problem(f"truth {spec}: there is no file {file}")


def check_split(split: str) -> None:
    if not Path(split).is_file():
        raise Problem(f"--split {split}: there is no such file; give a list of names, or a run's split.json")
