"""Softmax training: cross-entropy on the given labels."""

from __future__ import annotations

from finetune_mile.learning.phases import Budget, Phase, one_interaction

ACTIVATION = "softmax"


def phases(block: None, budget: Budget) -> list[Phase]:
    """One long interaction."""
    del block
    return one_interaction(budget, "cross_entropy")
