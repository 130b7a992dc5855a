"""Rules by which a teacher's logits become labels; several methods share them. B images, C classes.

A rule is a frozen value that a phase carries. torch is imported when a rule is applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Section
from finetune_mile.learning.phases import Budget, Loss, Phase
from finetune_mile.methods import Activation, Traits

if TYPE_CHECKING:
    from torch import Tensor

MOST_GENERATIONS = 100_000  # every phase is an object in a list


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The teacher's sigmoids strictly above `rho` (Alg. 1, l. 11): a multi-hot pseudo-label.

    An image without a sigmoid above rho is trained towards zero in every class, which is what Alg. 1 says when read
    literally; `empty: argmax` takes the teacher's best class instead. Either way the loop counts such images, and a
    guard warns when there are many.
    """

    rho: float
    empty: Literal["negative", "argmax"] = "negative"

    def labels(self, teacher_logits: Tensor, _loss: Loss) -> Tensor:
        """Multi-hot (B, C)."""
        above = (teacher_logits.float().sigmoid() > self.rho).float()
        if self.empty == "argmax":
            import torch

            above = torch.where(above.any(1, keepdim=True), above, Argmax().labels(teacher_logits, "bce"))
        return above


@dataclass(frozen=True, slots=True, kw_only=True)
class Soften:
    """The teacher's probabilities at a temperature: softmax for cross-entropy, sigmoids for BCE.

    The loss divides the learner's logits by the same temperature (`methods.named_loss`).
    """

    temperature: float

    def labels(self, teacher_logits: Tensor, loss: Loss) -> Tensor:
        """Probabilities (B, C)."""
        scaled = teacher_logits.float() / self.temperature
        return scaled.softmax(1) if loss == "cross_entropy" else scaled.sigmoid()


@dataclass(frozen=True, slots=True, kw_only=True)
class Argmax:
    """The teacher's best class alone: the control that tells hard labels from multi-labels."""

    def labels(self, teacher_logits: Tensor, _loss: Loss) -> Tensor:
        """One-hot (B, C)."""
        import torch.nn.functional as F

        return F.one_hot(teacher_logits.argmax(1), teacher_logits.shape[1]).float()


Rule = Threshold | Soften | Argmax


def as_phase(rule: Rule, *, union: bool) -> dict[str, Any]:
    """The fields of an imitation's phase that follow from its rule."""
    return {"given": False, "values": rule, "union": union, "soft": isinstance(rule, Soften)}


# ------------------------------------------------------------------------------------ shared settings


def _a_number(value: object) -> object:
    if value == "auto":
        raise ValueError("auto is for --method mile; here it must be a number between 0 and 1")
    return value


Rho = Annotated[float, Field(gt=0, lt=1), BeforeValidator(_a_number)]


class Imitation(Section):
    """What noisy-student, self-distill and distill imitate."""

    targets: Literal["threshold", "argmax", "soft"] = Field(
        description="labels above rho, the best class alone, or all probabilities"
    )
    loss: Loss = Field(description="bce: each class by itself; cross_entropy: the classes compete")
    rho: Rho = Field(description="for `threshold`; also what f1@rho is read at")
    temperature: float = Field(
        gt=0, description="for `soft`: divides the logits of teacher and student; the loss is multiplied by its square"
    )
    union: bool = Field(description="add the given label to the teacher's")
    pseudo_labels: Literal["batch", "cycle"] = Field(
        description="label each augmented batch, or the plain images once per generation"
    )

    @property
    def rule(self) -> Rule:
        """How the teacher's logits become labels."""
        if self.targets == "threshold":
            return Threshold(rho=self.rho)
        return Argmax() if self.targets == "argmax" else Soften(temperature=self.temperature)


def imitation_traits(block: Imitation) -> Traits:
    """The outputs of a network are read as the block's loss trains them."""
    activation: Activation = "sigmoid" if block.loss == "bce" else "softmax"
    return Traits(activation=activation, pseudo_labels=block.pseudo_labels, rho=block.rho)


def fresh_imitations(block: Imitation, budget: Budget, *, interaction: int, generations: int) -> list[Phase]:
    """One interaction, then imitations of equal length from fresh weights, each student the next teacher."""
    if budget.total_steps - interaction < generations:
        raise Problem(
            f"steps: {budget.total_steps} do not hold an interaction of {interaction} and {generations} imitation"
            f"{'s' if generations > 1 else ''}; raise --steps or lower interaction"
        )
    check_generations(generations, budget)
    left = budget.total_steps - interaction
    lengths = [left // generations + (1 if i < left % generations else 0) for i in range(generations)]
    first = Phase(
        name="interaction", generation=0, steps=interaction, start="init", becomes=("teacher",), loss=block.loss
    )
    return [first] + [
        Phase(
            name="imitation", generation=generation, steps=steps, start="init", becomes=("teacher", "student"),
            loss=block.loss, pool=budget.pool, **as_phase(block.rule, union=block.union),
        )
        for generation, steps in enumerate(lengths)
    ]  # fmt: skip


def check_generations(generations: int, budget: Budget) -> None:
    """Refuse more phases than fit into memory."""
    if generations > MOST_GENERATIONS:
        raise Problem(
            f"steps: {budget.total_steps:,} steps make {generations:,} generations (at most {MOST_GENERATIONS:,}); "
            "lower --steps or raise --k-t and --k-s"
        )
