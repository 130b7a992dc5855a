"""A learning method is a list of phases; a phase is a value; one loop trains any list. No torch here.

Interaction = learn from the given labels, imitation = learn from the teacher's labels (the paper, Sec. 3). Which phase
a run is in follows from its step alone. A saved run stores that one integer and its method's own state, which is empty
for all methods but `auto` and `role`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from finetune_mile.core.types import Pool, in_steps

Role = Literal["init", "teacher", "student"]
Loss = Literal["bce", "cross_entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`steps` optimiser steps of one learner on one kind of target."""

    name: Literal["interaction", "imitation"]
    generation: int  # tau in Algorithm 1, from 0
    steps: int  # at least 1
    start: Role  # the weights that the learner begins with; the first student is the init
    becomes: tuple[Role, ...]  # the roles that the learner's weights take at the end
    loss: Loss
    pool: Pool = "labelled"
    given: bool = True  # the targets are the given labels; False: the teacher's
    union: bool = False  # the given label, where there is one, is added to the teacher's
    soft: bool = False  # the teacher's labels are probabilities, not 0 and 1
    continues: bool = False  # optimiser and average go on from the phase before, as in plain training
    values: Any = None  # the method's own frozen values for this phase, such as a threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a method lays its phases out over."""

    total_steps: int
    steps_per_epoch: float  # of the labelled images
    pool: Pool = "labelled"  # that an imitation draws from

    def steps(self, amount: int | str) -> int:
        """An amount of the recipe in steps; 0 stays 0."""
        if amount == 0:
            return 0
        return in_steps(amount, total_steps=self.total_steps, steps_per_epoch=self.steps_per_epoch)


def after(step: int, phases: Iterable[Phase]) -> Iterator[tuple[Phase, int]]:
    """What is left after `step` optimiser steps: each phase with the steps already done in it."""
    for phase in phases:
        if step < phase.steps:
            yield phase, max(step, 0)
        step -= phase.steps


def trace(phases: Iterable[Phase]) -> str:
    """One letter a step: T while the teacher learns (interaction), S while the student does (imitation)."""
    return "".join(("T" if p.name == "interaction" else "S") * p.steps for p in phases)


def drawn(step: int, phases: Iterable[Phase]) -> dict[Pool, int]:
    """How many of the first `step` steps drew from each pool: where each pool's order continues."""
    counts: dict[Pool, int] = {"labelled": 0, "unlabelled": 0, "all": 0}
    for phase in phases:
        counts[phase.pool] += min(max(step, 0), phase.steps)
        step -= phase.steps
    return counts


def one_interaction(budget: Budget, loss: Loss, values: Any = None) -> list[Phase]:
    """Supervised training: one long interaction."""
    return [
        Phase(
            name="interaction", generation=0, steps=budget.total_steps, start="init", becomes=("student",), loss=loss,
            values=values,
        )
    ]  # fmt: skip
