"""Image sets, which every source gives. N images, C classes. torch is imported when it is used: sources do without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from finetune_mile.images.readers import Picked

if TYPE_CHECKING:
    from torch import Tensor

    from finetune_mile.images.order import Indices

    Labels = npt.NDArray[np.int64] | npt.NDArray[np.int8]  # (N,), -1 = unlabelled; or (N, C) of 0 and 1

MOST_CLASSES = 10**6  # class numbers are below this: each is an output of the network
_ERRORS = "surrogateescape"  # a file name need not be UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """Some images with their labels. N images, C classes.

    Where images have a class and a file name, the id is `<class>/<file name>` and the images are sorted by it: the same
    photos in another container are the same image set.
    """

    ids: Sequence[str]  # N names that stay the same from run to run
    given: Tensor  # (N,) integers, -1 = unlabelled; or (N, C) of 0 and 1
    truth: Tensor | None  # (N, C) booleans, where the true label sets are known; an empty row = unknown
    # Index to the bytes of the file, or to pixels uint8 (3, H, W) where there is no file; raises BadImage.
    content: Callable[[int], bytes | Tensor]
    main: Tensor | None = None  # (N,) the class of the main object, where it is known: a label without the noise
    in_memory: bool = False  # reading is cheap: no loader processes are needed
    alike: Indices | None = None  # (N,) images with the same number are near-duplicates; -1: alone; None: not searched
    environment: Tensor | None = None  # (N,) integers from 0: where each image was drawn, for losses over environments

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, index: int) -> Tensor:
        """The pixels of an image, uint8 (3, H, W); raises BadImage."""
        from finetune_mile.images.pipeline import decode

        content = self.content(index)
        return decode(content) if isinstance(content, bytes) else content


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


class Names(Sequence[str]):
    """A list of names in one block of bytes: a million of them are loaded at once, and forked without being copied."""

    def __init__(self, blob: npt.NDArray[np.uint8]) -> None:
        """Take over a block of names, each ended by a zero byte."""
        self.blob, self.ends = blob, np.flatnonzero(blob == 0)

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        data = "".join(f"{name}\0" for name in names).encode("utf-8", _ERRORS)
        return cls(np.frombuffer(data, dtype=np.uint8))

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


# ------------------------------------------------------------------------------------ from what a source lists


def to_set(ids: Sequence[str], labels: Labels, content: Callable[[int], bytes]) -> ImageSet:
    """The image set of N images that a source lists in any order; it is sorted by id."""
    import torch

    listed = list(ids)
    if any(a > b for a, b in pairwise(listed)):
        rows = np.array(sorted(range(len(listed)), key=listed.__getitem__), dtype=np.int64)
        ids, labels, content = [listed[i] for i in rows.tolist()], labels[rows], Picked(content, rows)
    packed = ids if isinstance(ids, Names) else Names.of(ids)
    return ImageSet(ids=packed, given=torch.from_numpy(labels), truth=None, content=content)


def number(names: Sequence[str], classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """(N,) the position of each image's class name in `classes`; -1 for "", an image without a label."""
    position = {name: i for i, name in enumerate(classes)} | {"": -1}
    return np.array([position[name] for name in names], dtype=np.int64)


def multi_hot(sets: Sequence[Sequence[str]], classes: Sequence[str]) -> npt.NDArray[np.int8]:
    """(N, C) of 0 and 1 from sets of class names; all of them must be known."""
    position = {name: i for i, name in enumerate(classes)}
    matrix = np.zeros((len(sets), len(classes)), dtype=np.int8)
    for row, names in zip(matrix, sets, strict=True):
        row[[position[name] for name in names]] = 1
    return matrix


def labels_of(sets: Sequence[Sequence[str]], classes: Sequence[str], several: bool) -> Labels:
    """The labels of images from their class names: one at most for each image, or `several`."""
    return multi_hot(sets, classes) if several else number([names[0] if names else "" for names in sets], classes)


def unique_ids(sets: Sequence[Sequence[str]], files: Sequence[str]) -> list[str]:
    """`<class>/<file name>` for each image, `unlabelled/` without one; the path where two images would share that."""
    pairs = zip(sets, files, strict=True)
    ids = [f"{names[0] if names else 'unlabelled'}/{file.rpartition('/')[2]}" for names, file in pairs]
    return ids if len(set(ids)) == len(ids) else list(files)
