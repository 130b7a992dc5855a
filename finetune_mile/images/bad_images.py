"""Images that cannot be read: a run skips them, lists them, and stops when they are many."""

from __future__ import annotations

import contextlib
import csv
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from finetune_mile.core.files import whole_file, writing
from finetune_mile.core.problems import Problem, cell, inert, uncell, warn

SHARE, AT_LEAST = 0.001, 10  # more than this share of a split's images, and more than this many, is an error
HEADER = ("split", "id", "reason")


def allowed(images: int) -> int:
    """How many of so many images may be bad."""
    return max(AT_LEAST, int(SHARE * images))


def say_unreadable(endings: Mapping[str, int]) -> str:
    """A clause about files in formats that we do not read, such as `12 files end in .heic, which ...`."""
    (first, count), *others = endings.items()
    more = "".join(f" and {number} in {ending}" for ending, number in others)
    files = f"{count:,} {'file ends' if count == 1 else 'files end'} in {first}{more}"
    return f"{files}, which cannot be read; convert {'it' if sum(endings.values()) == 1 else 'them'} to JPEG"


def say_skipped(count: int, path: Path) -> str:
    were = "image could not be read and was" if count == 1 else "images could not be read and were"
    return f"{count:,} {were} skipped; see {path}"


class BadImages:
    """The list of a run, kept in a file that all its processes add to and that a resumed run continues."""

    _told: ClassVar[set[tuple[str, str, str]]] = set()  # data, split and id; each is told once by a process

    @classmethod
    def told(cls, data: str, split: str, ids: Iterable[str]) -> None:
        """Do not tell these bad images any more: the user knows them."""
        cls._told |= {(data, split, name) for name in ids}

    def __init__(self, path: Path, data: str) -> None:
        """The list is bad_images.csv; it is written with the first bad image. `data` is --data, for messages."""
        self.path, self.data = path, data
        self._seen: set[tuple[str, str]] = set()

    def add(self, split: str, ids: Sequence[str], bad: Mapping[int, str]) -> None:
        """List bad images; raise if there are more than are allowed.

        Args:
            split: train, val or test.
            ids: of all images of that split.
            bad: index to reason.
        """
        reasons = {(split, ids[index]): reason for index, reason in bad.items()}
        if reasons.keys() <= self._seen:
            return
        self._seen |= set(self.read())  # other processes, or the same run before it was resumed
        new = [(name, why) for (_, name), why in reasons.items() if (self.data, split, name) not in self._told]
        if new and not self._seen:
            name, reason = new[0]
            warn(f"{split} image {inert(name)} is bad ({reason}) and is skipped; {self.path} lists all of them")
        write_list(self.path, [(*k, reason) for k, reason in reasons.items() if k not in self._seen], append=True)
        self._seen |= set(reasons)
        self.told(self.data, split, [name for _, name in reasons])
        count = sum(part == split for part, _ in self._seen)
        if count > allowed(len(ids)):
            raise Problem(
                f"--data {self.data}: {count} of {len(ids):,} {split} images cannot be read, which is more than "
                f"{allowed(len(ids))} ({SHARE:.1%}, at least {AT_LEAST}). {self.path} lists them. "
                f"`finetune-mile check --data {shlex.quote(self.data)}` finds all of them"
            )

    def read(self) -> dict[tuple[str, str], str]:
        """The content of the file: (split, id) to reason."""
        if not self.path.is_file():
            return {}
        with self.path.open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
            return {(row["split"], uncell(row["id"])): row["reason"] for row in csv.DictReader(stream)}


def write_list(path: Path, lines: Sequence[tuple[str, str, str]], *, append: bool = False) -> None:
    """Write (split, id, reason) lines, with a header where the file begins; a new file is written in one step."""
    new = not (append and path.is_file())
    with (
        writing(path),
        contextlib.nullcontext(path) if append else whole_file(path) as target,
        target.open("w" if new else "a", encoding="utf-8", errors="surrogateescape", newline="") as stream,
    ):
        quoted = [(split, cell(name), cell(reason)) for split, name, reason in lines]
        csv.writer(stream).writerows([HEADER, *quoted] if new else quoted)
