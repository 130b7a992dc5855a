"""Averaged teacher: learn from images without labels, with a running average of the learner as the teacher.

Every step has labelled and unlabelled images. The teacher sees a weak view of the unlabelled ones. A class whose
probability is at least `confidence` is their label; images without one do not count. The learner is trained on the
strong view of these images, and on the weak view of the labelled ones with their given labels.

With `renew` the teacher is MILe's instead: a copy of the learner (Algorithm 1), taken anew so many times.

The parts: an averaged teacher after fine-tuning (Semi-ViT, Cai et al. 2022); labels by confidence, weak and strong
views (FixMatch, Sohn et al. 2020); alignment with the label frequencies (ReMixMatch, Berthelot et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from finetune_mile.core.types import Section
from finetune_mile.learning.phases import Budget, Loss, MethodState, Phase, RunView, StepView
from finetune_mile.methods import Activation, HeadBias, Method, Traits
from finetune_mile.methods.pseudo_labels import Rho

if TYPE_CHECKING:
    from torch import Tensor

MOMENTUM = 0.9  # of the running mean of the teacher's probabilities


class Block(Section):
    """One long imitation of the learner's own average, beside the given labels."""

    loss: Loss = Field(default="bce", description="bce: also several labels per image; cross_entropy: one")
    confidence: Rho = Field(default=0.5, description="least probability of a label; images without one do not count")
    align: bool = Field(default=True, description="move the teacher's outputs until their mean is that of the labels")
    weight: float = Field(default=1.0, gt=0, description="of the loss on unlabelled images, beside that on labelled")
    targets: Literal["sets", "best", "soft"] = Field(
        default="sets",
        description="sets: with bce every class of that confidence; best: the best class alone; soft: probabilities, "
        "and every image counts",
    )
    rest: Literal["ignored", "negative"] = Field(
        default="ignored", description="images without a label; negative: they are trained towards no class, as MILe's"
    )
    renew: int | None = Field(
        default=None, gt=0, description="null: the teacher is the running average; N: a copy, taken anew N times"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Confident:
    """The teacher's labels where it is confident, and the weight of an image of each kind."""

    confidence: float
    align: bool
    targets: str
    every: bool  # unlabelled images without a label count, too
    labelled_weight: float
    unlabelled_weight: float

    def labels(self, teacher_logits: Tensor, loss: Loss) -> Tensor:
        """Labels (B, C): the best class, or with BCE every class, of that confidence; a row of zeros has none."""
        logits = teacher_logits.float()
        probabilities = logits.sigmoid() if loss == "bce" else logits.softmax(1)
        if self.targets == "soft":
            return probabilities
        if loss == "bce" and self.targets == "sets":
            return (probabilities >= self.confidence).float()
        best, which = probabilities.max(1, keepdim=True)
        return logits.new_zeros(logits.shape).scatter(1, which, (best >= self.confidence).float())


def phases(block: Block, budget: Budget) -> list[Phase]:
    """One imitation over the complete budget; with `renew` one for each copy that is the teacher."""
    share = budget.labelled_share
    assert share is not None, "`check` asks for it"
    values = Confident(
        confidence=block.confidence, align=block.align, targets=block.targets, every=block.rest == "negative",
        labelled_weight=1 / share, unlabelled_weight=block.weight / (1 - share),
    )  # fmt: skip
    count = min(block.renew or 1, budget.total_steps)
    return [
        Phase(
            name="imitation", generation=number, start="learner" if number else "init", continues=number > 0,
            steps=budget.total_steps // count + (number < budget.total_steps % count),
            becomes=("student",) if block.renew is None else ("teacher", "student"),
            loss=block.loss, pool=budget.pool, given=False, given_weak=True, values=values,
        )
        for number in range(count)
    ]  # fmt: skip


def loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    """Mean loss of labelled images against their given labels, and `weight` times that of unlabelled ones.

    Both means are over all images of their kind, those without a confident label included (they add zero), so that
    the loss is a sum over images and does not depend on how a batch is divided.
    """
    import torch

    from finetune_mile.learning.losses import LOSSES

    values: Confident = phase.values
    labelled = step.given.any(1)
    goal = torch.where(labelled.unsqueeze(1), step.given, targets)
    weights = torch.where(labelled, values.labelled_weight, values.unlabelled_weight * (targets.any(1) | values.every))
    return (weights * LOSSES[phase.loss](logits, goal, step.class_weights)).mean()


def untrained_loss(phase: Phase, num_classes: int, labels: float, head_bias: HeadBias) -> None:
    """None: how many images count is not known before."""
    del phase, num_classes, labels, head_bias


class State(MethodState):
    """The running mean of the teacher's probabilities, beside the frequencies of the given labels. C classes.

    It stays on the device, and nothing here waits for it.
    """

    def __init__(self, run: RunView) -> None:
        """Begin with the mean at the frequencies, where alignment changes nothing."""
        from finetune_mile.learning.losses import given_matrix

        known = run.given[run.given >= 0] if run.given.ndim == 1 else run.given[run.given[:, 0] >= 0]
        frequencies = given_matrix(known, run.num_classes).mean(0).clamp(min=1e-4)
        self.frequencies = frequencies.to(next(run.roles.learner.parameters()).device)  # (C,)
        self.mean = self.frequencies.clone()  # (C,)
        self.sums = self.mean.new_zeros(run.num_classes + 1)  # of the step's probabilities, and of its images
        self.step, self.softmax = -1, True

    def adjusted(self, phase: Phase, teacher_logits: Tensor, step: int) -> Tensor:
        """Logits (B, C) moved by log(frequency / mean): probabilities times that ratio, normalised.

        The mean moves when a step begins, so that all parts of its batch see the same one.
        """
        import torch

        self.softmax = phase.loss == "cross_entropy"
        if step != self.step:
            moved = MOMENTUM * self.mean + (1 - MOMENTUM) * self.sums[:-1] / self.sums[-1].clamp(min=1)
            self.mean = torch.where(self.sums[-1] > 0, moved, self.mean)
            self.sums, self.step = torch.zeros_like(self.sums), step
        if not phase.values.align:
            return teacher_logits
        return teacher_logits.float() + (self.frequencies / self.mean).log()

    def after_step(self, step: StepView, logits: Tensor) -> None:
        """Add the unlabelled images of a part of a batch."""
        import torch

        del logits
        assert step.teacher_logits is not None
        teacher = step.teacher_logits.float()
        probabilities = teacher.softmax(1) if self.softmax else teacher.sigmoid()
        unlabelled = (~step.given.any(1)).float()
        self.sums = self.sums + step.add_up(torch.cat([unlabelled @ probabilities, unlabelled.sum().unsqueeze(0)]))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "sums": self.sums, "step": self.step}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.mean, self.sums = (saved[name].to(self.mean.device) for name in ("mean", "sums"))
        self.step = saved["step"]


def check(block: Block, recipe: Any) -> list[str]:
    """What does not go together."""
    return [
        sentence
        for wrong, sentence in (
            (recipe.labelled_share is None, "method averaged-teacher needs labelled_share, for example 0.33"),
            (
                recipe.optimizer.ema is None and block.renew is None,
                "method averaged-teacher needs optimizer.ema, for example 0.99",
            ),
            (
                block.rest == "negative" and block.loss == "cross_entropy",
                "averaged_teacher.rest: negative needs loss: bce: with cross_entropy an image has a label",
            ),
            (recipe.trunk == "frozen", "method averaged-teacher does not go with --trunk frozen: nothing would move"),
        )
        if wrong
    ]


def traits(block: Block) -> Traits:
    """Outputs are read as the loss trains them."""
    activation: Activation = "softmax" if block.loss == "cross_entropy" else "sigmoid"
    teacher: Literal["snapshot", "average"] = "average" if block.renew is None else "snapshot"
    return Traits(activation=activation, rho=block.confidence, teacher=teacher)


METHOD = Method(
    name="averaged-teacher", phases=phases, Block=Block, traits=traits, needs=frozenset({"teacher"}),
    flags={"rho": "averaged_teacher.confidence"}, check=check, loss=loss, untrained_loss=untrained_loss,
    State=State,
)  # fmt: skip
