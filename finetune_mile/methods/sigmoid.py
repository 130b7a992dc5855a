"""Sigmoid training: binary cross-entropy on the given labels, every class a question of its own."""

from __future__ import annotations

from finetune_mile.learning.phases import Budget, Phase, one_interaction
from finetune_mile.methods import Method


def phases(_block: None, budget: Budget) -> list[Phase]:
    """One long interaction."""
    return one_interaction(budget, "bce")


METHOD = Method(name="sigmoid", phases=phases)
