"""Lists that name the labelled images: published ones, which are fetched, and the user's (--split). No torch here."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_mile.core.download import RemoteFile, fetch
from finetune_mile.core.files import cache, open_regular, size_in_words
from finetune_mile.core.problems import Problem
from finetune_mile.images.index import locate
from finetune_mile.images.order import Indices

if TYPE_CHECKING:
    from finetune_mile.images.splits import SplitCard

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
        text = data.decode("utf-8")
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
                f"({reason}); fetch {card.urls[0]} elsewhere and put it at {place}, or give it with --split FILE"
            ) from error
    text = place.read_bytes()
    names = text.decode("utf-8").split()
    if hashlib.sha256(text).hexdigest() != card.sha256 or len(names) != card.count:
        raise Problem(
            f"{place} is not the published list {card.name} (its sha256 differs); delete it, and it is fetched again"
        )
    return names


def find(
    names: Sequence[str], ids: Sequence[str], flag: str, fraction: float, with_label: int | None = None
) -> Indices:
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
    of = len(ids) if with_label is None else with_label
    share = len(indices) / of
    if fraction < 1 and not 0.5 * fraction <= share <= 2 * fraction:
        images = "images" if of == len(ids) else "labelled images"
        raise Problem(f"{flag} holds {share:.2%} of all {images}, --fraction is {fraction:.2%}; leave out one of them")
    return indices
