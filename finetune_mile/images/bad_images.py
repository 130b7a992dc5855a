"""Images that cannot be read: a run goes on without them, says which they are, and stops when they are many."""

from __future__ import annotations

import csv
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from finetune_mile.core.files import open_regular, whole_file
from finetune_mile.core.problems import Problem

SHARE, AT_LEAST = 0.001, 10  # more than this share of a split's images, and more than this many, is an error
HEADER = ("split", "id", "reason")


def allowed(images: int) -> int:
    """How many of so many images may be bad."""
    return max(AT_LEAST, int(SHARE * images))


def count_endings(names: Iterable[str]) -> dict[str, int]:
    """How many files have each ending, in lower case, the most frequent first."""
    return dict(Counter(name[name.rindex(".") :].lower() for name in names).most_common())


def say_unreadable(endings: Mapping[str, int]) -> str:
    """A clause about files in formats that we do not read, such as `12 files end in .heic, which ...`."""
    (first, count), *others = endings.items()
    more = "".join(f" and {number} in {ending}" for ending, number in others)
    files = f"{count:,} {'file ends' if count == 1 else 'files end'} in {first}{more}"
    return f"{files}, which cannot be read; convert them to JPEG"


def say_skipped(count: int, path: Path) -> str:
    """The closing line of a run."""
    were = "image could not be read and was" if count == 1 else "images could not be read and were"
    return f"{count:,} {were} skipped; see {path}"


class BadImages:
    """The list of a run, kept in a file that all its processes add to and that a resumed run goes on with."""

    def __init__(self, path: Path, data: str) -> None:
        """Nothing is read or written before the first bad image.

        Args:
            path: bad_images.csv.
            data: --data, for messages.
        """
        self.path, self.data = path, data
        self._seen: set[tuple[str, str]] = set()

    def add(self, split: str, ids: Sequence[str], bad: Mapping[int, str]) -> None:
        """List images that were found to be bad; more than are allowed raise.

        Args:
            split: train or val.
            ids: of all images of that split.
            bad: index to reason.
        """
        found = {(split, ids[index]): reason for index, reason in bad.items()}
        fresh = {key: reason for key, reason in found.items() if key not in self._seen}
        if not fresh:
            return
        self._seen |= set(self.read())  # other processes, or the same run before it was resumed
        if not self._seen:
            (_, name), reason = next(iter(fresh.items()))
            sys.stderr.write(
                f"warning: {split} image {name} is bad ({reason}) and is skipped; {self.path} lists all of them\n"
            )
        lines = [(*key, reason) for key, reason in fresh.items() if key not in self._seen]
        write_list(self.path, lines, append=True)
        self._seen |= set(fresh)
        count = sum(1 for part, _ in self._seen if part == split)
        if count > allowed(len(ids)):
            raise Problem(
                f"--data {self.data}: {count} of {len(ids):,} {split} images cannot be read, which is more than "
                f"{allowed(len(ids))} ({SHARE:.1%}, at least {AT_LEAST}); {self.path} lists them, and "
                f"`finetune-mile doctor --data {self.data}` finds all of them"
            )

    def read(self) -> dict[tuple[str, str], str]:
        """What the file lists: (split, id) to reason."""
        if not self.path.is_file():
            return {}
        with self.path.open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
            return {(row["split"], row["id"]): row["reason"] for row in csv.DictReader(stream)}


def write_list(path: Path, lines: Sequence[tuple[str, str, str]], *, append: bool = False) -> None:
    """Write (split, id, reason) lines, with a header where the file begins; a new file is written at once."""
    if not append:
        with whole_file(path) as part:
            _write(part, lines, new=True)
    else:
        _write(path, lines, new=not path.is_file())


def _write(path: Path, lines: Sequence[tuple[str, str, str]], *, new: bool) -> None:
    with path.open("w" if new else "a", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        writer = csv.writer(stream)
        if new:
            writer.writerow(HEADER)
        writer.writerows(lines)


def check_replaceable(path: Path, flag: str) -> None:
    """Refuse to write a list of bad images over a file that is none, or into a folder that is not there."""
    if not path.parent.is_dir():
        raise Problem(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if not path.exists():
        return
    header = ",".join(HEADER).encode()
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            ours = stream.readline(len(header) + 2).rstrip(b"\r\n") == header
    except OSError:
        ours = False
    if not ours:
        raise Problem(f"{flag} {path}: this file exists and is not a list of bad images; choose another name")
