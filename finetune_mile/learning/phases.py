"""A learning method is a list of phases; a phase is a value; one loop trains any list. No torch here.

Interaction = learn from the given labels, imitation = learn from the teacher's labels (the paper, Sec. 3). Which phase
a run is in follows from its step alone. A saved run stores that one integer and its method's own state, which is empty
for all methods but `auto` and `role`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from finetune_mile.core.types import Pool, in_steps

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finetune_mile.learning.roles import Roles

Role = Literal["init", "teacher", "student"]
Start = Literal["init", "teacher", "student", "learner"]
Loss = Literal["bce", "cross_entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`steps` optimiser steps of one learner on one kind of target."""

    name: Literal["interaction", "imitation", "pretraining"]
    generation: int  # tau in Algorithm 1, from 0
    steps: int  # at least 1
    start: Start  # the weights that the learner begins with: those of a role, or its own; the first student is the init
    becomes: tuple[Role, ...]  # the roles that the learner's weights take at the end
    loss: Loss | Literal["own"]  # own: the objective has one
    pool: Pool = "labelled"
    given: bool = True  # the targets are the given labels; False: the teacher's
    union: bool = False  # the given label, where there is one, is added to the teacher's
    soft: bool = False  # the teacher's labels are probabilities, not 0 and 1
    continues: bool = False  # optimiser and average go on from the phase before, as in plain training
    values: Any = None  # the method's own frozen values for this phase, such as a threshold
    label_weight: float = 0.0  # of the loss against the given labels, beside that against the teacher's
    given_weak: bool = False  # labelled images are learned from the teacher's kind of view

    @property
    def temperature(self) -> float:
        """What the logits of teacher and learner are divided by."""
        return float(getattr(self.values, "temperature", 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a method lays its phases out over."""

    total_steps: int
    steps_per_epoch: float  # of the labelled images
    pool: Pool = "labelled"  # that an imitation draws from
    labelled_share: float | None = None  # of each batch of an imitation, where the recipe has one

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


# ------------------------------------------------- what a method sees of a run, and what it remembers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What the state of a method may ask of a run. N training images, C classes."""

    roles: Roles
    num_classes: int
    given: Tensor  # (N,) or (N, C) labels of all training images; -1: hidden or none
    environment: Tensor | None  # (N,) integers from 0, where images come from several environments
    held_out: Callable[[nn.Module], tuple[Tensor, Tensor]]  # logits and labels of the images that no phase trains on


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One part of a batch, as a loss sees it. B images, C classes."""

    step: int  # optimiser steps done before this one
    total_steps: int
    samples: Tensor  # (B,) which training images
    given: Tensor  # (B, C) given labels; a row of zeros where there is none
    teacher_logits: Tensor | None  # (B, C) in an imitation that labels batch by batch
    class_weights: Tensor | None  # (C,)
    add_up: Callable[[Tensor], Tensor]  # sums a tensor over the processes, without a gradient
    gather: Callable[[Tensor], Tensor]  # the rows of all processes, without a gradient
    processes: int
    state: Any  # the method's own State


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a method decided before a phase."""

    record: Mapping[str, Any]  # for metrics.jsonl; numbers
    sentence: str
    warning: str | None = None


class MethodState:
    """What a method remembers; this one, the default, remembers nothing. A method's own takes a RunView."""

    def decide(self, phase: Phase) -> Decision | None:
        """Called before a phase begins."""

    def as_decided(self, phase: Phase) -> Phase:
        """A planned phase as it is trained; as it was planned where nothing is decided."""
        return phase

    def entered(self, phase: Phase) -> None:
        """Called when the learner has the weights that a phase starts from."""

    def adjusted(self, phase: Phase, teacher_logits: Tensor, step: int) -> Tensor:
        """The teacher's logits (B, C) as labels are made from them; `step` steps are done."""
        del phase, step
        return teacher_logits

    def after_step(self, step: StepView, logits: Tensor) -> None:
        """Called after the backward pass of each part of a batch."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
