"""What is likely the same: class names that are spelt in two ways, and photos that are copies of each other."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image

Prints = npt.NDArray[np.float16]  # (..., WIDTH)

SHOWN = 10  # names in a message


def listed(names: Sequence[str], shown: int = SHOWN) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


# ------------------------------------------------------------------------------------ class names

_UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue"})
_BETWEEN = re.compile(r"(?<!\d)[\s_-]+|[\s_-]+(?!\d)")  # 1-2 is not 12


def _key(name: str) -> str:
    """The name without what people spell in different ways: case, accents, blanks, a plural s."""
    text = unicodedata.normalize("NFC", name).casefold().translate(_UMLAUTS)
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    parts = (_BETWEEN.sub("", part) for part in text.split("/"))
    return "/".join(re.sub(r"(?<=[^\W\d]{2}[^\W\ds])s$", "", part) for part in parts) or name


def same_name(name: str, names: Iterable[str]) -> list[str]:
    """Other names that are likely another spelling of `name`."""
    key = _key(name)
    return [other for other in names if other != name and _key(other) == key]


def same_names(names: Iterable[str]) -> list[list[str]]:
    """Groups of names that are likely spellings of the same one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_key(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


# ------------------------------------------------------------------------------------ photos
# The print of a photo is its 16 x 16 lowest cosine coefficients of 32 x 32 grey pixels, without the mean. Each is
# damped, so that a few large ones do not decide alone, and the print has length 1. A turned or mirrored photo has the
# same coefficients with other signs and places, so two photos are compared in all 8 orientations at once.

SIDE, KEPT = 32, 16
WIDTH = KEPT**2  # of a print
NEAR = 0.85  # similarity of two photos, at most 1, that are likely the same one; docs/data.md has the evidence
NEXT = 0.65  # the same for two photos that follow each other in a folder: likely taken one after the other
FLAT = 2.0  # grey levels of contrast; below it a photo is like any other without contrast
MOST_COMPARED = 50_000  # photos; the time grows with the square
_BLOCK = 1024
_ROW, _COLUMN = np.divmod(np.arange(WIDTH), KEPT)
_ORDER = np.lexsort((_COLUMN % 2, _ROW % 2))  # by parity: what a mirror changes the sign of is one block
_TURN = np.argsort(_ORDER)[_COLUMN[_ORDER] * KEPT + _ROW[_ORDER]]
_COSINES = np.cos(np.pi / SIDE * np.outer(np.arange(KEPT), np.arange(SIDE) + 0.5)).astype(np.float32)
_COSINES *= np.where(np.arange(KEPT) > 0, np.sqrt(2), 1).astype(np.float32)[:, None] / np.sqrt(SIDE, dtype=np.float32)


def print_of(photo: Image.Image) -> Prints:
    """(WIDTH,) of a photo of 8 bits; zeros, which are like nothing, where it has no contrast."""
    small = photo.convert("RGB").resize((SIDE, SIDE), resample=2, reducing_gap=2.0)  # 2: bilinear
    grey = np.asarray(small, dtype=np.float32) @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    values = (_COSINES @ grey @ _COSINES.T).ravel()[_ORDER]
    values[0] = 0
    size = np.abs(values)
    if np.sqrt(np.square(size).sum()) < FLAT * SIDE:
        return np.zeros(WIDTH, dtype=np.float16)
    values /= size + np.median(size) + 1e-6
    unit: Prints = (values / np.sqrt(np.square(values).sum())).astype(np.float16)
    return unit


def similarity(some: Prints, others: Prints) -> npt.NDArray[np.float32]:
    """(n, m) how alike photos are, at most 1, each in the best of its 8 orientations."""
    best = np.full((len(some), len(others)), -1, dtype=np.float32)
    step, some, others = WIDTH // 4, some.astype(np.float32), others.astype(np.float32)
    for turned in (others, others[:, _TURN]):
        a, b, c, d = (some[:, at : at + step] @ turned[:, at : at + step].T for at in range(0, WIDTH, step))
        np.maximum(best, a + np.maximum(c + np.abs(b + d), np.abs(b - d) - c), out=best)
    return best


def compare(prints: Prints) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Each photo that has a similar one before it, and its similarity to all before it."""
    for start in range(0, len(prints), _BLOCK):
        block = similarity(prints[start : start + _BLOCK], prints[: start + _BLOCK])
        block[np.triu_indices(len(block), start, block.shape[1])] = -1  # itself, and those after it
        for row in np.flatnonzero(block.max(1) >= NEAR).tolist():
            yield start + row, block[row, : start + row]
