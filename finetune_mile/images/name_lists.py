"""Lists that name images: published ones, which are fetched, and the user's (--split). No torch here."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_mile.core.download import RemoteFile, fetch
from finetune_mile.core.files import cache, open_regular, size_in_words
from finetune_mile.core.problems import Problem
from finetune_mile.images.order import Indices

if TYPE_CHECKING:
    from finetune_mile.images.splits import SplitCard

MOST_FOLDERS = 64  # at the end of a name that are compared; without a bound a name of slashes takes gigabytes
LARGEST_LIST = 2**28  # bytes, unpacked; the names of all of ImageNet take about 40 MB
PACKED: Mapping[str, Callable[[Any], Any]] = {".xz": lzma.LZMAFile, ".gz": lambda file: gzip.GzipFile(fileobj=file)}


def read_list(path: Path) -> list[str]:
    """Names from a text file, one a line (also .xz and .gz), or from a run's split.json."""
    flag = f"--split {path}"
    try:
        with os.fdopen(open_regular(path), "rb") as stream, PACKED.get(path.suffix, lambda f: f)(stream) as unpacked:
            data: bytes = unpacked.read(LARGEST_LIST + 1)
        if len(data) > LARGEST_LIST:
            raise OSError(f"larger than {size_in_words(LARGEST_LIST)}")
        text = data.decode("utf-8", "strict" if b"\0" in data else "surrogateescape")
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise Problem(f"{flag}: cannot be read as a list of names ({error})") from error
    if path.name.removesuffix(".xz").removesuffix(".gz").endswith(".json"):
        try:
            names = [str(name) for name in json.loads(text)["ids"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Problem(f"{flag}: not the split.json of a run (it has no list `ids`)") from error
    else:
        names = [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        raise Problem(f"{flag}: the list is empty")
    if len(set(names)) < len(names):
        raise Problem(f"{flag}: {len(names) - len(set(names))} names are listed twice")
    return names


def fetch_list(card: SplitCard) -> list[str]:
    """The names of a published list: from the cache, or fetched into it; never drawn anew."""
    place = cache() / "splits" / f"{card.name}.txt"
    if not place.is_file():
        try:
            fetch((RemoteFile(name=place.name, urls=card.urls, sha256=card.sha256),), place.parent)
        except Problem as error:
            reason = str(error).partition("; fetch ")[0]  # the download's own advice does not know --split
            raise Problem(
                f"--fraction {card.fraction:g} of ImageNet means SimCLR's published list, which could not be fetched "
                f"({reason}). Fetch {card.urls[0]} elsewhere and put it at {place}, or give it with --split FILE"
            ) from error
    text = place.read_bytes()
    names = text.decode("utf-8").split()
    if hashlib.sha256(text).hexdigest() != card.sha256 or len(names) != card.count:
        raise Problem(
            f"{place} is not the published list {card.name} (its sha256 differs); delete it, and it is fetched again"
        )
    return names


def find(names: Sequence[str], ids: Sequence[str], flag: str) -> Indices:
    """The positions in `ids` of the names of a list, sorted; a name that is not there is an error."""
    positions, missing = locate(names, ids)
    if missing:
        raise Problem(
            f"{flag} names {len(missing):,} of {len(names):,} images that the data lacks: "
            f"{', '.join(name[:80] for name in missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}"
        )
    indices = np.unique(np.array(positions, dtype=np.int64))
    if len(indices) < len(names):
        raise Problem(f"{flag}: {len(names) - len(indices)} names point to an image that is already listed")
    return indices


def locate(names: Iterable[str], ids: Sequence[str]) -> tuple[list[int], list[str]]:
    """The position of each of `names` in `ids` (-1: not there), and the names that are not there.

    A name matches an id that equals it or its end (`test/cat/1.jpg` is `cat/1.jpg`). Otherwise it is compared by the
    bare file name, if only one id has it. The suffix that the hub appends to ImageNet's file names is ignored.
    """
    names = list(names)
    tails = {tail for name in names for tail in _tails(name)}
    bare_names = {_bare(name) for name in names}
    by_tail: dict[str, int] = {}
    by_file: dict[str, int] = {}
    for index, name in enumerate(ids):
        if name in tails:
            by_tail[name] = index
        file = _bare(name)
        if file in bare_names:
            by_file[file] = -1 if file in by_file else index  # -1: ambiguous
    positions = []
    for name in names:
        tail = next((tail for tail in _tails(name) if tail in by_tail), None)
        positions.append(by_file.get(_bare(name), -1) if tail is None else by_tail[tail])
    return positions, [name for name, index in zip(names, positions, strict=True) if index < 0]


def _bare(name: str) -> str:
    """The bare file name; ImageNet's files without the `_n01440764` that the hub's copy appends."""
    file = name.rpartition("/")[2]
    stem, dot, ending = file.rpartition(".")
    if stem[-10:-8] == "_n" and stem[-8:].isdigit() and len(stem) > 10:
        return stem[:-10] + dot + ending
    return file


def _tails(name: str) -> list[str]:
    """The name, and the name without its first folder, its first two, and so on."""
    parts = name.rsplit("/", MOST_FOLDERS)
    return [tail for tail in ("/".join(parts[start:]) for start in range(len(parts))) if tail]
