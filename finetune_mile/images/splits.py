"""Published and saved lists of labelled images: which names, checked against what the card or the file promises.

No torch here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from finetune_mile.core.download import RemoteFile, fetch
from finetune_mile.core.files import cache, load_yaml_file, open_regular, shipped, size_in_words
from finetune_mile.core.problems import Problem
from finetune_mile.images.names import locate
from finetune_mile.images.subsets import Indices

IMAGENET_CLASSES = 1000
LARGEST_LIST = 2**28  # bytes, unpacked; the names of all of ImageNet take about 40 MB
PACKED: Mapping[str, Callable[[Any], Any]] = {".xz": lzma.LZMAFile, ".gz": lambda file: gzip.GzipFile(fileobj=file)}
_TRAIN_NAME = re.compile(r"(.*/)?n\d{8}_\d+(_n\d{8})?\.JPEG$")


class SplitCard(BaseModel):
    """A published list: facts only. The file is fetched on first use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    data: str = Field(description="which data it is a part of; imagenet is the only one so far")
    fraction: float = Field(gt=0, lt=1)
    count: int = Field(gt=0, description="names in the list")
    urls: tuple[str, ...] = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the list as text, uncompressed")
    source: str
    licence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The labelled images that a list names."""

    indices: Indices  # sorted
    source: str  # for split.json: the card's or the file's name


def read_cards() -> list[SplitCard]:
    """Every card in recipes/splits."""
    paths = sorted((shipped("recipes") / "splits").glob("*.yaml"))
    return [SplitCard.model_validate(load_yaml_file(path)) for path in paths]


def published(ids: Sequence[str], num_classes: int, fraction: float) -> SplitCard | None:
    """The card of a published list for this fraction of this data, if there is one."""
    if num_classes != IMAGENET_CLASSES or not len(ids) or not _TRAIN_NAME.match(ids[0]):
        return None
    return next((card for card in read_cards() if card.data == "imagenet" and card.fraction == fraction), None)


def choose(ids: Sequence[str], num_classes: int, fraction: float, split: str | None) -> Chosen | None:
    """The images that a list names: the one given, else the published one; None: a seeded split is to be drawn.

    Args:
        ids: of the training images.
        num_classes: C.
        fraction: share of the labels that is wanted.
        split: --split, or None.
    """
    if split is not None:
        names = read_list(Path(split))
        return Chosen(indices=find(names, ids, f"--split {split}", fraction), source=Path(split).name)
    card = published(ids, num_classes, fraction)
    if card is None:
        return None
    what = f"the published list {card.name}"
    return Chosen(indices=find(fetch_list(card), ids, what, fraction), source=card.name)


def read_list(path: Path) -> list[str]:
    """Names from a text file, one a line (also .xz and .gz), or from a run's split.json."""
    what = f"--split {path}"
    text = _text(path, what)
    if path.name.removesuffix(".xz").removesuffix(".gz").endswith(".json"):
        try:
            saved = json.loads(text)
            names = [str(name) for name in saved["ids"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Problem(f"{what}: is not the split.json of a run (it has no list `ids`)") from error
    else:
        names = [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        raise Problem(f"{what}: the list is empty")
    if len(set(names)) < len(names):
        raise Problem(f"{what}: {len(names) - len(set(names))} names are listed twice")
    return names


def _text(path: Path, what: str) -> str:
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            if path.suffix in PACKED:
                with PACKED[path.suffix](stream) as unpacked:
                    data: bytes = unpacked.read(LARGEST_LIST + 1)
            else:
                data = stream.read(LARGEST_LIST + 1)
        if len(data) > LARGEST_LIST:
            raise OSError(f"larger than {size_in_words(LARGEST_LIST)}")
        return data.decode("utf-8")
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise Problem(f"{what}: cannot be read as a list of names ({error})") from error


def fetch_list(card: SplitCard) -> list[str]:
    """The names of a published list: from the cache, or fetched into it; never drawn anew."""
    place = cache() / "splits" / f"{card.name}.txt"
    if not place.is_file():
        _download(card, place)
    text = place.read_bytes()
    names = text.decode("utf-8").split()
    if hashlib.sha256(text).hexdigest() != card.sha256 or len(names) != card.count:
        raise Problem(
            f"{place} is not the published list {card.name} (its sha256 differs); delete it, it is fetched again"
        )
    return names


def _download(card: SplitCard, place: Path) -> None:
    try:
        fetch((RemoteFile(name=place.name, urls=card.urls, sha256=card.sha256),), place.parent)
    except Problem as error:
        reason = str(error).partition("; fetch ")[0]  # the download's own advice does not know --split
        raise Problem(
            f"--fraction {card.fraction:g} of ImageNet means SimCLR's published list, which could not be fetched "
            f"({reason}); fetch {card.urls[0]} elsewhere and put it at {place}, or give it with --split FILE"
        ) from error


def find(names: Sequence[str], ids: Sequence[str], what: str, fraction: float) -> Indices:
    """Where the names of a list are among `ids`, sorted; a name that is not there is an error."""
    found, missing = locate(names, ids)
    if missing:
        raise Problem(
            f"{what} names {len(missing):,} of {len(names):,} images that the data lacks: "
            f"{', '.join(name[:80] for name in missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}"
        )
    indices = np.unique(np.array(found, dtype=np.int64))
    if len(indices) < len(names):
        raise Problem(f"{what}: {len(names) - len(indices)} names lead to an image that another name leads to as well")
    share = len(indices) / len(ids)
    if fraction < 1 and not 0.5 * fraction <= share <= 2 * fraction:
        raise Problem(f"{what} holds {share:.2%} of all images, --fraction is {fraction:.2%}; leave out one of them")
    return indices
