"""Distillation: imitation of a teacher that is brought along (--teacher) and never learns."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from finetune_mile.learning.phases import Budget, Phase
from finetune_mile.methods import Method
from finetune_mile.methods.pseudo_labels import Imitation, as_phase, imitation_traits


class Block(Imitation):
    """One long imitation, with the given labels beside it or without."""

    label_weight: float | None = Field(
        default=None, gt=0, lt=1,
        description="of the loss against the given labels, the rest is the teacher's; null: given labels are not used",
    )  # fmt: skip


def check(block: Block, _recipe: Any) -> list[str]:
    """What does not go together."""
    if block.label_weight is not None and block.loss != "cross_entropy":
        return [f"distill.label_weight needs distill.loss: cross_entropy, and the loss is {block.loss}"]
    return []


def phases(block: Block, budget: Budget) -> list[Phase]:
    """One long imitation."""
    return [
        Phase(
            name="imitation", generation=0, steps=budget.total_steps, start="init", becomes=("student",),
            loss=block.loss, pool=budget.pool, label_weight=block.label_weight or 0.0,
            **as_phase(block.rule, union=block.union),
        )
    ]  # fmt: skip


METHOD = Method(
    name="distill", phases=phases, Block=Block, traits=imitation_traits, needs=frozenset({"teacher", "teacher_file"}),
    flags={"rho": "distill.rho"}, check=check,
)  # fmt: skip
