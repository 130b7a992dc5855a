"""Multi-MNIST: grids of MNIST digits with one given label each (the paper, Sec. 4.4)."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune_mile.images.grids import make_grids, read_wanted, shrunk
from finetune_mile.images.imageset import Data
from finetune_mile.images.randomness import permutation
from finetune_mile.images.sources.options import check_choices
from finetune_mile.paper.idx import find_mnist, read_mnist

HALVES = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
MARGIN = 4  # columns on either side of a digit that hold next to nothing


@functools.lru_cache(maxsize=2)
def load(where: str) -> Data:
    """Grids of 42x42 pixels; the training grids are made of training digits, the validation grids of test digits.

    The grids depend on `draw` alone, not on a run's seed.

    Args:
        where: a directory with the idx files, and options: `DIR?rows=2&share=0.55&single=0.5&cell=14&train=60000&
            val=10000&draw=1&half=even` (half: which of the test digits), `digits=2` for cells with numbers from 00 to
            99 (100 classes), `download=yes` to let torchvision fetch.
    """
    choices = {"half": tuple(HALVES), "digits": ("1", "2"), "download": ("yes", "no")}
    wanted = read_wanted("multi-mnist", where, cell=14, train=60_000, val=10_000, others=tuple(choices))
    check_choices("multi-mnist", where, wanted.others, choices)
    half, length = wanted.others.get("half", "all"), wanted.others.get("digits", "1")
    digits = read_mnist(find_mnist("multi-mnist", wanted.place, wanted.others.get("download") == "yes"))
    sets = []
    for number, name, images, labels, part, count in (
        (1, "train", digits.train_images, digits.train_labels, slice(None), wanted.train),
        (2, "val", digits.test_images, digits.test_labels, HALVES[half], wanted.val),
    ):
        seed = 2 * wanted.draw + number
        if length == "2":
            pictures, classes = _numbers(images[part], labels.numpy()[part], wanted.cell, seed)
            members = np.arange(len(classes))
        else:
            pictures, classes = shrunk(images, wanted.cell), labels.numpy()
            members = np.arange(len(classes))[part]
        grids = make_grids(
            pictures, classes, members, count, num_classes=10 ** int(length), layout=wanted.layout, seed=seed, name=name
        )
        sets.append(grids)
    names = tuple(f"{number:0{length}}" for number in range(10 ** int(length)))
    return Data(name="multi-mnist", classes=names, train=sets[0], val=sets[1])


def _numbers(
    images: Tensor, labels: npt.NDArray[np.int64], side: int, seed: int
) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """Each digit (N, 28, 28) with another one to its right, (N, side, side), and the number that they are."""
    second = permutation(seed, 1, len(labels))
    narrow = images[:, :, MARGIN:-MARGIN]
    left, right = shrunk(narrow, side, side // 2), shrunk(narrow, side, side - side // 2)
    return torch.cat([left, right[second]], -1), 10 * labels + labels[second]
