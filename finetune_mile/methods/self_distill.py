"""Self-distillation: an interaction, then one imitation of its soft labels from fresh weights."""

from __future__ import annotations

from pydantic import Field

from finetune_mile.core.types import Amount
from finetune_mile.learning.phases import Budget, Phase
from finetune_mile.methods import Method
from finetune_mile.methods.pseudo_labels import Imitation, fresh_imitations, imitation_traits


class Block(Imitation):
    """Interaction, then one imitation of it from fresh weights."""

    interaction: Amount = Field(description="steps on the given labels before the imitation")


def phases(block: Block, budget: Budget) -> list[Phase]:
    """One interaction, one imitation."""
    return fresh_imitations(block, budget, interaction=budget.steps(block.interaction), generations=1)


METHOD = Method(
    name="self-distill", phases=phases, Block=Block, traits=imitation_traits, needs=frozenset({"teacher"}),
    flags={"rho": "self_distill.rho"},
)  # fmt: skip
