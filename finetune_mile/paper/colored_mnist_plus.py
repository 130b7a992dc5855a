"""ColoredMNIST+ (the paper's own): a third of the training images shows no digit, only a colour, which is the label."""

from __future__ import annotations

from finetune_mile.images.imageset import Data
from finetune_mile.paper.colored_mnist import BLANK, load_task


def load(where: str) -> Data:
    """As `colored-mnist:`, with two more classes; what is evaluated on shows digits only."""
    return load_task("colored-mnist+", where, blank=BLANK)
