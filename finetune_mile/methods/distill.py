"""Distillation: imitation of a teacher that is brought along (--teacher) and never learns."""

from __future__ import annotations

from finetune_mile.learning.phases import Budget, Phase
from finetune_mile.methods.pseudo_labels import Imitation, activation_of_loss, as_phase

ACTIVATION = activation_of_loss
NEEDS = ("teacher", "teacher_file")
Block = Imitation


def phases(block: Imitation, budget: Budget) -> list[Phase]:
    """One long imitation."""
    return [
        Phase(
            name="imitation", generation=0, steps=budget.total_steps, start="init", becomes=("student",),
            loss=block.loss, pool=budget.pool, **as_phase(block.rule, union=block.union),
        )
    ]  # fmt: skip
