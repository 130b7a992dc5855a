"""Multi-MNIST: grids of MNIST digits with one given label each (the paper, Sec. 4.4)."""

from __future__ import annotations

import functools

import numpy as np

from finetune_mile.images.grids import make_grids, read_wanted, shrunk
from finetune_mile.images.idx import find_mnist, read_mnist
from finetune_mile.images.imageset import Data
from finetune_mile.problems import Problem

HALVES = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}


@functools.lru_cache(maxsize=2)
def load(where: str) -> Data:
    """Grids of 42x42 pixels; the training grids are made of training digits, the validation grids of test digits.

    The grids depend on `draw` alone, not on a run's seed.

    Args:
        where: a directory with the idx files, and options: `DIR?rows=2&share=0.55&single=0.5&cell=14&train=60000&
            val=10000&draw=1&half=even` (half: which of the test digits), `download=yes` to let torchvision fetch.
    """
    wanted = read_wanted("multi-mnist", where, cell=14, train=60_000, val=10_000, others=("half", "download"))
    half = wanted.others.get("half", "all")
    if half not in HALVES:
        raise Problem(f"--data multi-mnist:{where}: half={half} must be one of {', '.join(HALVES)}")
    digits = read_mnist(find_mnist("multi-mnist", wanted.place, wanted.others.get("download") == "yes"))
    sets = [
        make_grids(
            shrunk(images, wanted.cell), labels.numpy(), np.arange(len(labels))[part], count, num_classes=10,
            layout=wanted.layout, seed=2 * wanted.draw + number, name=name,
        )
        for number, name, images, labels, part, count in (
            (1, "train", digits.train_images, digits.train_labels, slice(None), wanted.train),
            (2, "val", digits.test_images, digits.test_labels, HALVES[half], wanted.val),
        )
    ]  # fmt: skip
    return Data(name="multi-mnist", classes=tuple(str(d) for d in range(10)), train=sets[0], val=sets[1])
