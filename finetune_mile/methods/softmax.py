"""Softmax training: cross-entropy on the given labels."""

from __future__ import annotations

from finetune_mile.learning.phases import Budget, Phase, one_interaction
from finetune_mile.methods import Method, Traits


def phases(_block: None, budget: Budget) -> list[Phase]:
    """One long interaction."""
    return one_interaction(budget, "cross_entropy")


METHOD = Method(name="softmax", phases=phases, traits=lambda _: Traits(activation="softmax"))
