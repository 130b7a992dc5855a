"""Which images there are, how the bytes of one are read, and what happens to those that cannot be read.

`ImageSet` is what every source gives. A source lists files (`scan_tree`, `tars.scan_tar`), numbers their classes and
calls `to_set`. numpy and torch are imported when they are used: they would slow down every `--help`.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import os
import shlex
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from finetune_mile.core.files import (
    LARGEST_IMAGE,
    cache,
    keep_arrays,
    open_regular,
    read_regular,
    size_in_words,
    whole_file,
)
from finetune_mile.core.problems import BadImage, Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from finetune_mile.images.order import Indices

    Labels = npt.NDArray[np.int64] | npt.NDArray[np.int8]  # (N,), -1 = unlabelled; or (N, C) of 0 and 1

T = TypeVar("T")
Bytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """Some images with their labels. N images, C classes.

    Where images have a class and a file name, the id is `<class>/<file name>` and the images are sorted by it: the same
    photos in another container are the same image set.
    """

    ids: Sequence[str]  # N names that stay the same from run to run
    given: Tensor  # (N,) integers, -1 = unlabelled; or (N, C) of 0 and 1
    truth: Tensor | None  # (N, C) booleans, where the true label sets are known; an empty row = unknown
    read: Callable[[int], Tensor]  # index to uint8 (3, H, W); raises BadImage
    main: Tensor | None = None  # (N,) the class of the main object, where it is known: a label without the noise
    in_memory: bool = False  # reading is cheap: no loader processes are needed
    encoded: Bytes | None = None  # index to the bytes of the file, where there is one
    alike: Indices | None = None  # (N,) images with the same number are near-duplicates; -1: alone; None: not searched
    environment: Tensor | None = None  # (N,) integers from 0: where each image was drawn, for losses over environments

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Training, validation and perhaps test images over the same classes."""

    name: str
    classes: tuple[str, ...]  # empty where no image has a label; `load_data` refuses that unless it is asked for
    train: ImageSet
    val: ImageSet
    test: ImageSet | None = None  # scored once, when a run is finished; nothing may depend on them
    # The source's own numbers for results.json, from probabilities (n, C) and the validation images (n,) of the rows.
    extra_scores: Callable[[Tensor, Tensor], dict[str, float]] | None = None
    unreadable: Mapping[str, int] = field(default_factory=dict)  # files beside the images, by ending: .heic, .dng, ...
    notes: tuple[str, ...] = ()  # what else a user should know before a run
    problems: tuple[str, ...] = ()  # why a run stops; `load_data` raises them unless it is asked not to


# ------------------------------------------------------------------------------------ names

MOST_FOLDERS = 64  # at the end of a name that are compared; without a bound a name of slashes takes gigabytes
_ERRORS = "surrogateescape"  # a file name need not be UTF-8


class Names(Sequence[str]):
    """A list of names in one block of bytes: a million of them are loaded at once, and forked without being copied."""

    def __init__(self, blob: npt.NDArray[np.uint8], count: int) -> None:
        """Take over a block of `count` names, each ended by a zero byte."""
        import numpy as np

        self.blob = blob
        self.ends: Indices = np.flatnonzero(blob == 0)
        if len(self.ends) != count:
            raise ValueError(f"{len(self.ends)} names in the block, expected {count}")

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        import numpy as np

        listed = list(names)
        data = "".join(f"{name}\0" for name in listed).encode("utf-8", _ERRORS)
        return cls(np.frombuffer(data, dtype=np.uint8), len(listed))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:  # a name, or a list of them for a slice
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # negative ones too, and IndexError
        start = int(self.ends[position - 1]) + 1 if position else 0
        return bytes(self.blob[start : int(self.ends[position])]).decode("utf-8", _ERRORS)

    def __iter__(self) -> Iterator[str]:
        return iter(self.blob.tobytes().decode("utf-8", _ERRORS).split("\0")[:-1])


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


# ------------------------------------------------------------------------------------ scans
# A scan of a million files is slow on a network disk. It is kept in the cache with a stamp: the modification times
# of all folders, or size and time of a tar. Any file added, removed or renamed changes the stamp.

ENDINGS = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
UNREAD = (".heic", ".heif", ".avif", ".jxl", ".dng", ".nef", ".cr2", ".cr3", ".arw", ".orf", ".rw2", ".raf", ".pef")
FORMAT = 2  # of the files in the cache; another number is another file
WORTH_KEEPING = 5000  # files; fewer are found faster than a cache is read
SETTLED = 2.0  # seconds; a folder that changed just now may change again within the clock's resolution
DEEPEST = 32  # folders inside each other; more is a link to a folder above
_BLOCKS = ("names", "empty", "unread", "stamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Names of files, sorted, and where needed numbers for each (offsets in a tar)."""

    names: Names
    numbers: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # each (N,)
    empty: Names = field(default_factory=lambda: Names.of(()))  # folders without image or subfolder
    unread: Names = field(default_factory=lambda: Names.of(()))  # photos in formats that we do not read


def scan_tree(root: Path, flag: str) -> Scan:
    """Every image below `root`, as sorted relative paths with `/`; from the cache if nothing has changed."""
    place = _cache_file(root, "tree")
    scan, stamp = _load(place)
    if scan is not None and _same_folders(root, stamp):
        return scan
    scan, stamp = _walk(root, flag)
    if len(scan.names) >= WORTH_KEEPING:
        _save(place, scan, stamp)
    return scan


def scan_file(path: Path, kind: str, make: Callable[[], Scan]) -> Scan:
    """The scan that `make` returns for a file; from the cache as long as the file's size and time stay."""
    status = path.stat()
    stamp = {"size": status.st_size, "time": status.st_mtime_ns}
    place = _cache_file(path, kind)
    scan, known = _load(place)
    if scan is None or known != stamp:
        scan = make()
        _save(place, scan, stamp)
    return scan


def _walk(root: Path, flag: str) -> tuple[Scan, dict[str, int]]:
    """The scan of a tree, and each folder's modification time."""
    images: list[str] = []
    empty: list[str] = []
    unread: list[str] = []
    stamp: dict[str, int] = {}
    todo = [""]
    while todo:
        here = todo.pop()
        folder = os.path.join(root, here)  # noqa: PTH118  strings: a million Paths would cost
        if here.count("/") > DEEPEST:
            raise Problem(f"{flag}: folders contain each other in a circle at {here[:80]}; remove the link")
        before = len(images) + len(todo)
        try:
            stamp[here] = os.stat(folder).st_mtime_ns  # noqa: PTH116
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name.lower()
                    if name.startswith("."):
                        continue
                    if name.endswith(ENDINGS):
                        images.append(here + entry.name)
                    elif entry.is_dir():
                        todo.append(f"{here}{entry.name}/")
                    elif name.endswith(UNREAD):
                        unread.append(here + entry.name)
        except OSError as error:
            raise Problem(f"{flag}: the folder {folder} cannot be read ({error.strerror})") from error
        if len(images) + len(todo) == before:
            empty.append(here)
    images.sort()
    return Scan(names=Names.of(images), empty=Names.of(sorted(empty)), unread=Names.of(sorted(unread))), stamp


def _same_folders(root: Path, stamp: Mapping[str, int]) -> bool:
    try:
        return all(os.stat(os.path.join(root, k)).st_mtime_ns == v for k, v in stamp.items())  # noqa: PTH116, PTH118
    except OSError:
        return False  # a folder is gone: scan again


def _cache_file(path: Path, kind: str) -> Path:
    text = f"{FORMAT}\n{kind}\n{path.resolve()}"
    return cache() / "scans" / f"{hashlib.sha256(text.encode('utf-8', _ERRORS)).hexdigest()[:24]}.npz"


def _load(path: Path) -> tuple[Scan | None, dict[str, int]]:
    """A scan and its stamp from the cache; None if it is not there or damaged, such as by a full disk."""
    import numpy as np

    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            content = {key: stored[key] for key in stored.files}
        names, empty, unread, stamped = (Names(content.pop(k), int(content.pop(f"{k}_count"))) for k in _BLOCKS)
        times = content.pop("stamp_times").tolist()
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None, {}
    return Scan(names=names, empty=empty, unread=unread, numbers=content), dict(zip(stamped, times, strict=True))


def _save(path: Path, scan: Scan, stamp: Mapping[str, int]) -> None:
    """Write a scan, unless its folders changed just now. A cache that cannot be written only costs the next start."""
    import numpy as np

    if time.time() - max(stamp.values()) / 1e9 <= SETTLED:
        return
    content: dict[str, Any] = dict(scan.numbers)
    for key, names in zip(_BLOCKS, (scan.names, scan.empty, scan.unread, Names.of(stamp)), strict=True):
        content |= {key: names.blob, f"{key}_count": np.int64(len(names))}
    content["stamp_times"] = np.array(list(stamp.values()), dtype=np.int64)
    keep_arrays(path, content)


# ------------------------------------------------------------------------------------ reading
# Readers travel to loader processes, so each is a small picklable object.


class Files:
    """The bytes of files below a folder."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self.names = str(root), names

    def __call__(self, index: int) -> bytes:
        path = os.path.join(self.root, self.names[index])  # noqa: PTH118  a Path per image would cost
        try:
            return read_regular(path, LARGEST_IMAGE)
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror}") from error


class TarFiles:
    """The bytes of members of tar files, read in place."""

    def __init__(self, paths: Sequence[str], which: Indices, offsets: Indices, sizes: Indices) -> None:
        """Image i is bytes [offsets[i], offsets[i] + sizes[i]) of the file paths[which[i]]; all are (N,)."""
        self.paths, self.which, self.offsets, self.sizes = tuple(paths), which, offsets, sizes
        self._open: dict[int, int] = {}

    def __call__(self, index: int) -> bytes:
        """The member's content. `pread` has no position, so forked processes may share open files."""
        which, size = int(self.which[index]), int(self.sizes[index])
        if size > LARGEST_IMAGE:
            raise BadImage(f"larger than {size_in_words(LARGEST_IMAGE)}")
        try:
            if which not in self._open:
                self._open[which] = open_regular(self.paths[which])
            data = os.pread(self._open[which], size, int(self.offsets[index]))
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise BadImage(f"{self.paths[which]} is cut off before its end")
        return data

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_open", {}).values():
            os.close(descriptor)


class Picked(Generic[T]):
    """Some images of another reader, in the order of `rows`."""

    def __init__(self, inner: Callable[[int], T], rows: Indices) -> None:
        self.inner, self.rows = inner, rows

    def __call__(self, index: int) -> T:
        return self.inner(int(self.rows[index]))


class Joined(Generic[T]):
    """The `count` images of one reader, then those of another."""

    def __init__(self, first: Callable[[int], T], count: int, rest: Callable[[int], T]) -> None:
        self.first, self.count, self.rest = first, count, rest

    def __call__(self, index: int) -> T:
        return self.first(index) if index < self.count else self.rest(index - self.count)


# ------------------------------------------------------------------------------------ image sets

MOST_CLASSES = 10**6  # class numbers are below this: each is an output of the network


def to_set(ids: Sequence[str], labels: Labels, encoded: Bytes) -> ImageSet:
    """The image set of N images that a source lists in any order; it is sorted by id."""
    import numpy as np
    import torch

    from finetune_mile.images.pipeline import decode_from

    listed = list(ids)
    if any(a > b for a, b in pairwise(listed)):
        rows = np.array(sorted(range(len(listed)), key=listed.__getitem__), dtype=np.int64)
        ids, labels, encoded = [listed[i] for i in rows.tolist()], labels[rows], Picked(encoded, rows)
    return ImageSet(
        ids=ids if isinstance(ids, Names) else Names.of(ids), given=torch.from_numpy(labels), truth=None,
        read=partial(decode_from, encoded), encoded=encoded,
    )  # fmt: skip


def number(names: Sequence[str], classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """(N,) the position of each image's class name in `classes`; -1 for "", an image without a label."""
    import numpy as np

    position = {name: i for i, name in enumerate(classes)} | {"": -1}
    return np.array([position[name] for name in names], dtype=np.int64)


def multi_hot(sets: Sequence[Sequence[str]], classes: Sequence[str]) -> npt.NDArray[np.int8]:
    """(N, C) of 0 and 1 from sets of class names; all of them must be known."""
    import numpy as np

    position = {name: i for i, name in enumerate(classes)}
    matrix = np.zeros((len(sets), len(classes)), dtype=np.int8)
    for row, names in zip(matrix, sets, strict=True):
        row[[position[name] for name in names]] = 1
    return matrix


def labels_of(sets: Sequence[Sequence[str]], classes: Sequence[str], several: bool) -> Labels:
    """The labels of images from their class names: one at most for each image, or `several`."""
    return multi_hot(sets, classes) if several else number([names[0] if names else "" for names in sets], classes)


def unique_ids(classes: Sequence[str], files: Sequence[str]) -> list[str]:
    """`<class>/<file name>` for each image; the path instead where two images would share that."""
    ids = [f"{label}/{file.rpartition('/')[2]}" for label, file in zip(classes, files, strict=True)]
    return ids if len(set(ids)) == len(ids) else list(files)


# ------------------------------------------------------------------------------------ bad images
# A run skips images that cannot be read, lists them, and stops when they are many.

SHARE, AT_LEAST = 0.001, 10  # more than this share of a split's images, and more than this many, is an error
HEADER = ("split", "id", "reason")


def allowed(images: int) -> int:
    """How many of so many images may be bad."""
    return max(AT_LEAST, int(SHARE * images))


def count_endings(names: Iterable[str]) -> dict[str, int]:
    """The number of files with each ending, in lower case, the most frequent first."""
    return dict(Counter(name[name.rindex(".") :].lower() for name in names).most_common())


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
            sys.stderr.write(
                f"warning: {split} image {name} is bad ({reason}) and is skipped; {self.path} lists all of them\n"
            )
        write_list(self.path, [(*k, reason) for k, reason in reasons.items() if k not in self._seen], append=True)
        self._seen |= set(reasons)
        self.told(self.data, split, [name for _, name in reasons])
        count = sum(part == split for part, _ in self._seen)
        if count > allowed(len(ids)):
            raise Problem(
                f"--data {self.data}: {count} of {len(ids):,} {split} images cannot be read, which is more than "
                f"{allowed(len(ids))} ({SHARE:.1%}, at least {AT_LEAST}); {self.path} lists them, and "
                f"`finetune-mile check --data {shlex.quote(self.data)}` finds all of them"
            )

    def read(self) -> dict[tuple[str, str], str]:
        """The content of the file: (split, id) to reason."""
        if not self.path.is_file():
            return {}
        with self.path.open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
            return {(row["split"], row["id"]): row["reason"] for row in csv.DictReader(stream)}


def write_list(path: Path, lines: Sequence[tuple[str, str, str]], *, append: bool = False) -> None:
    """Write (split, id, reason) lines, with a header where the file begins; a new file is written in one step."""
    new = not (append and path.is_file())
    with (
        contextlib.nullcontext(path) if append else whole_file(path) as target,
        target.open("w" if new else "a", encoding="utf-8", errors="surrogateescape", newline="") as stream,
    ):
        csv.writer(stream).writerows([HEADER, *lines] if new else lines)
