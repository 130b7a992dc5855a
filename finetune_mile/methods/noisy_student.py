"""Noisy student: an interaction, then long imitations from fresh weights, each student the next teacher."""

from __future__ import annotations

from pydantic import Field

from finetune_mile.core.types import Amount
from finetune_mile.learning.phases import Budget, Phase
from finetune_mile.methods import Method
from finetune_mile.methods.pseudo_labels import Imitation, fresh_imitations, imitation_traits


class Block(Imitation):
    """Interaction, then long imitations from fresh weights."""

    interaction: Amount = Field(description="steps on the given labels before the first imitation")
    generations: int = Field(ge=1, description="how many students, each the teacher of the next")


def phases(block: Block, budget: Budget) -> list[Phase]:
    """One interaction, then `generations` imitations."""
    interaction = budget.steps(block.interaction)
    return fresh_imitations(block, budget, interaction=interaction, generations=block.generations)


METHOD = Method(
    name="noisy-student", phases=phases, Block=Block, traits=imitation_traits, needs=frozenset({"teacher"}),
    flags={"rho": "noisy_student.rho"},
)  # fmt: skip
