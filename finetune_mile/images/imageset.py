"""What every source of images gives: ids, labels, and a way to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # names of sources are checked before torch is needed
    from torch import Tensor


ExtraScores: TypeAlias = "Callable[[Tensor, Tensor], dict[str, float]]"
"""From probabilities (n, C) and the validation images (n,) that they belong to."""


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
    in_memory: bool = False  # reading is cheap: no loader processes are wanted
    encoded: Callable[[int], bytes] | None = None  # index to the bytes of the file, where there is one
    environment: Tensor | None = None  # (N,) integers from 0: where each image was drawn, for losses over environments

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A training and a validation set over the same classes."""

    name: str
    classes: tuple[str, ...]
    train: ImageSet
    val: ImageSet
    extra_scores: ExtraScores | None = None  # numbers of its own for results.json
    unreadable: Mapping[str, int] = field(default_factory=dict)  # files beside the images, by ending: .heic, .dng, ...
