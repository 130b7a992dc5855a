"""`finetune_mile.load`, the door for Python users."""

from __future__ import annotations

from typing import cast

from torch import nn

from finetune_mile.checkpoints.loading import load_network, open_trunk
from finetune_mile.checkpoints.preprocessing import Preprocessor


def load_public(init: str, num_classes: int | None, arch: str | None) -> nn.Module:
    """See `finetune_mile.load`."""
    if num_classes is None:
        opened = open_trunk(init, arch=arch)
        network, card, report = opened.network, opened.card, opened.report
    else:
        network, card, report = load_network(init, arch=arch, num_classes=num_classes, head_bias="zero")
    for name, value in {
        "card": card,
        "report": report,
        "preprocess": Preprocessor(card.preprocess),
    }.items():
        setattr(network, name, cast(nn.Module, value))
    return network.eval()
