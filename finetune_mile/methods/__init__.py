"""Learning methods, one file each. No torch here, nor when a method's module is imported.

To add a method, write a module with `phases` and add its line to METHODS; everything else has a default:

    Block           its settings, a `Section`; in a recipe under its name, `_` for `-`
    ACTIVATION      "softmax" or "sigmoid", or a function of the block: how logits become probabilities
    NEEDS           any of NEEDS below
    VARIANTS        {"paper": {field: value}, "published": {field: value}} for fields that a recipe may leave out
    FLAGS           {"k_t": "mile.k_t"}: settings that --k-t, --k-s and --rho write; default: fields of that name
    GUARDED         False: the monitor does not judge its pseudo-labels, the method does
    settings        (recipe) -> what the functions below get as block; default: its block
    check           (block, recipe) -> sentences about settings that do not go together
    warnings        (block, budget, generations, num_classes, new_head) -> sentences about what is likely not intended;
                    new_head: the classifier starts untrained
    phases          (block, budget) -> the phases of a run
    targets         (phase, teacher_logits (B, C)) -> labels (B, C) of an imitation; default: phase.values.labels(...);
                    given labels are changed in `loss` (wan.py)
    loss            (phase, logits, targets, step) -> scalar; default: the loss that the phase names
    untrained_loss  (phase, num_classes, labels, head_bias) -> loss before the first step; None: not comparable
    State           what it remembers between steps (`learning/phases.py`)
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    "wan": "finetune_mile.methods.wan",
    "large-loss": "finetune_mile.methods.large_loss",
    "role": "finetune_mile.methods.role",
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

    measure, heat = LOSSES[phase.loss], phase.temperature
    if heat == 1:
        loss = measure(logits, targets, step.class_weights)
    else:
        loss = heat**2 * measure(logits / heat, targets, step.class_weights)
    if phase.label_weight == 0:
        return loss
    return (1 - phase.label_weight) * loss + phase.label_weight * measure(logits, step.given, step.class_weights)


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
class Method:
    """A method's module, what it leaves out filled in."""

    name: str
    Block: type[Section] | None
    needs: frozenset[str]
    variants: Mapping[str, Mapping[str, Any]]
    flags: Mapping[str, str]
    guarded: bool
    activation: Callable[[Any], Activation]
    check: Callable[[Any, Any], list[str]]
    warnings: Callable[[Any, Budget, int, int, bool], list[str]]
    settings: Callable[[Any], Any]
    phases: Callable[[Any, Budget], list[Phase]]
    targets: Callable[[Phase, Tensor], Tensor]
    loss: Callable[[Phase, Tensor, Tensor, StepView], Tensor]
    untrained_loss: Callable[[Phase, int, float, HeadBias], float | None]
    State: Callable[[RunView], MethodState]

    @property
    def block(self) -> str:
        """The key of its settings in a recipe."""
        return self.name.replace("-", "_")


def _always(value: Any, *_: object) -> Any:
    return value


@functools.cache
def get_method(name: str) -> Method:
    """A method by its name in METHODS."""
    module = importlib.import_module(METHODS[name])
    block = getattr(module, "Block", None)
    activation: Any = getattr(module, "ACTIVATION", "sigmoid")
    key = name.replace("-", "_")
    fields = () if block is None else [field for field in METHOD_FLAGS if field in block.model_fields]
    return Method(
        name=name, Block=block, needs=frozenset(getattr(module, "NEEDS", ())),
        variants=getattr(module, "VARIANTS", {}), guarded=getattr(module, "GUARDED", True),
        flags=getattr(module, "FLAGS", {field: f"{key}.{field}" for field in fields}),
        activation=activation if callable(activation) else functools.partial(_always, activation),
        check=getattr(module, "check", functools.partial(_always, [])),
        warnings=getattr(module, "warnings", functools.partial(_always, [])),
        settings=getattr(module, "settings", lambda recipe: getattr(recipe, key, None)),
        phases=module.phases, targets=getattr(module, "targets", labels_of_rule),
        loss=getattr(module, "loss", named_loss), State=getattr(module, "State", lambda _: MethodState()),
        untrained_loss=getattr(module, "untrained_loss", loss_of_new_head),
    )  # fmt: skip
