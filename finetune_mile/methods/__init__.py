"""Learning methods, one file each. No torch here, nor when a method's module is imported.

To add a method, write a module with `METHOD = Method(name=..., phases=...)` and add its line to METHODS. Every other
field of `Method` has a default.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from finetune_mile.core.types import Section
from finetune_mile.learning.phases import Budget, MethodState, Phase, RunView, StepView

if TYPE_CHECKING:
    from torch import Tensor

METHODS = {
    "softmax": "finetune_mile.methods.softmax",
    "sigmoid": "finetune_mile.methods.sigmoid",
    "mile": "finetune_mile.methods.mile",
    "auto": "finetune_mile.methods.auto",
    "noisy-student": "finetune_mile.methods.noisy_student",
    "self-distill": "finetune_mile.methods.self_distill",
    "distill": "finetune_mile.methods.distill",
    "averaged-teacher": "finetune_mile.methods.averaged_teacher",
    "wan": "finetune_mile.methods.wan",
    "large-loss": "finetune_mile.paper.large_loss",
    "role": "finetune_mile.paper.role",
    "irm": "finetune_mile.paper.irm",
    "rex": "finetune_mile.paper.rex",
}
NEEDS = {
    "teacher": "it imitates a teacher: --semi, --rho and pseudo-labels make sense",
    "teacher_file": "a trained network, --teacher",
    "held_out": "labelled images that no phase trains on",
    "environments": "training images from several environments",
    "image_state": "it remembers something of each image: no mixup, no cutmix",
    "hard_labels": "it tells the classes that were given from the others: no label smoothing",
    "whole_batch": "the loss of a complete batch at once: no accumulation",
}
METHOD_FLAGS = ("k_t", "k_s", "rho")

Activation = Literal["softmax", "sigmoid"]
HeadBias = Literal["zero", "prior"]


def labels_of_rule(phase: Phase, teacher_logits: Tensor) -> Tensor:
    """Labels (B, C) by the rule that a phase carries (`methods/pseudo_labels.py`)."""
    labels: Tensor = phase.values.labels(teacher_logits, phase.loss)
    return labels


def named_loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    """The loss that a phase names: a scalar.

    Soft labels of a temperature T are compared with the learner's logits divided by T; the loss is multiplied by T^2,
    so that its gradients keep their size (Hinton et al. 2015; SimCLR-v2's distillation).

    With a `label_weight` w the loss is (1 - w) of that and w of the one against the given labels. Images without a
    label count as zero there, so that each labelled image has the weight w in the mean over the batch.
    """
    from finetune_mile.learning.losses import LOSSES

    rows, heat = LOSSES[phase.loss], phase.temperature
    loss = heat**2 * rows(logits / heat, targets, step.class_weights).mean()
    if phase.label_weight == 0:
        return loss
    return (1 - phase.label_weight) * loss + phase.label_weight * rows(logits, step.given, step.class_weights).mean()


def loss_of_new_head(phase: Phase, num_classes: int, labels: float, head_bias: HeadBias) -> float | None:
    """The loss that a new head gives before its first step.

    Args:
        phase: says which loss.
        num_classes: C.
        labels: labels per image in the targets.
        head_bias: every sigmoid starts at one half (`zero`) or at 1 / (C + 1) (`prior`).
    """
    heat = phase.temperature
    if phase.loss == "cross_entropy":
        return math.log(num_classes) * ((1 - phase.label_weight) * heat**2 + phase.label_weight)
    chance = 0.5 if head_bias == "zero" else 1 / (num_classes ** (1 / heat) + 1)
    return heat**2 * (-labels * math.log(chance) - (num_classes - labels) * math.log(1 - chance))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a run must know of a method's settings, whatever the method."""

    activation: Activation = "sigmoid"  # how logits become probabilities
    optimizer_state: Literal["keep", "reset"] = "keep"  # the momentum, where the learner's weights are swapped
    pseudo_labels: Literal["batch", "cycle"] = "batch"  # cycle: made once per generation, on the plain images
    rho: float | None = None  # the pseudo-label threshold, where there is one; f1@rho is read there
    teacher: Literal["snapshot", "average"] = "snapshot"  # a copy of the learner, or its running average


def _default_traits(_block: Any) -> Traits:
    return Traits()


def _first_block(*blocks: Any) -> Any:
    return blocks[0] if blocks else None


def _no_sentences(*_: Any) -> list[str]:
    return []


def _no_state(_run: RunView) -> MethodState:
    return MethodState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method. `block` below is what `settings` returns: by default the method's own settings, None without any."""

    name: str  # of --method; the key of its settings in a recipe is the same with `_` for `-`
    phases: Callable[[Any, Budget], list[Phase]]  # (block, budget)
    Block: type[Section] | None = None  # its settings
    more_blocks: tuple[str, ...] = ()  # keys of other methods' settings that it needs too
    settings: Callable[..., Any] = _first_block  # (own block, *more blocks) -> block
    traits: Callable[[Any], Traits] = _default_traits  # (block)
    needs: frozenset[str] = frozenset()  # any of NEEDS
    # {"paper": {field: value}, "published": {field: value}} for fields that a recipe may leave out
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)  # the settings that --k-t, --k-s and --rho write
    guarded: bool = True  # False: the monitor does not judge its pseudo-labels, the method does
    check: Callable[[Any, Any], list[str]] = _no_sentences  # (block, recipe): settings that do not go together
    # (block, budget, generations, num_classes, new_head): what is likely not intended; new_head: it starts untrained
    warnings: Callable[[Any, Budget, int, int, bool], list[str]] = _no_sentences
    # (phase, teacher_logits (B, C)) -> labels (B, C) of an imitation; given labels are changed in `loss` (wan.py)
    targets: Callable[[Phase, Tensor], Tensor] = labels_of_rule
    loss: Callable[[Phase, Tensor, Tensor, StepView], Tensor] = named_loss  # (phase, logits, targets, step) -> scalar
    # (phase, num_classes, labels, head_bias) -> loss before the first step; None: not comparable
    untrained_loss: Callable[[Phase, int, float, HeadBias], float | None] = loss_of_new_head
    State: Callable[[RunView], MethodState] = _no_state  # what it remembers between steps (`learning/phases.py`)

    @property
    def block(self) -> str:
        """The key of its settings in a recipe."""
        return self.name.replace("-", "_")

    @property
    def blocks(self) -> tuple[str, ...]:
        """The keys of all settings that it needs."""
        return (*(() if self.Block is None else (self.block,)), *self.more_blocks)


def get_method(name: str) -> Method:
    """A method by its name in METHODS."""
    method: Method = importlib.import_module(METHODS[name]).METHOD
    return method
