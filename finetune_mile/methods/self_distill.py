"""Self-distillation: an interaction, then one imitation of its soft labels from fresh weights."""

from __future__ import annotations

from finetune_mile.core.types import Amount
from finetune_mile.learning.phases import Budget, Phase
from finetune_mile.methods.pseudo_labels import Imitation, activation_of_loss, fresh_imitations

ACTIVATION = activation_of_loss
NEEDS = ("teacher",)


class Block(Imitation):
    """Interaction, then one imitation of it from fresh weights."""

    interaction: Amount


def phases(block: Block, budget: Budget) -> list[Phase]:
    """One interaction, one imitation."""
    return fresh_imitations(block, budget, interaction=budget.steps(block.interaction), generations=1)
