"""What a method sees of a run, and what it remembers from step to step. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_mile.learning.phases import Phase

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finetune_mile.learning.roles import Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What the state of a method may ask of a run. N training images, C classes."""

    roles: Roles
    num_classes: int
    given: Tensor  # (N,) or (N, C) labels of all training images; -1: hidden or none
    held_out: Callable[[nn.Module], tuple[Tensor, Tensor]]  # logits and labels of the images that no phase trains on


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One part of a batch, as a loss sees it. B images, C classes."""

    step: int  # optimiser steps done before this one
    total_steps: int
    samples: Tensor  # (B,) which training images
    given: Tensor  # (B, C) given labels; a row of zeros where there is none
    teacher_logits: Tensor | None  # (B, C) in an imitation that labels batch by batch
    environment: Tensor | None  # (B,) where images come from several environments
    environments: int
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


class State:
    """What a method remembers; this one, the default, remembers nothing."""

    def __init__(self, run: RunView) -> None:
        self.run = run

    def decide(self, phase: Phase) -> Decision | None:
        """Called before a phase begins."""
        del phase
        return None

    def as_decided(self, phase: Phase) -> Phase:
        """A planned phase as it is trained; as it was planned where nothing is decided."""
        return phase

    def entered(self, phase: Phase) -> None:
        """Called when the learner has the weights that a phase starts from."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Extra groups for the optimiser."""
        return []

    def after_step(self, step: StepView, logits: Tensor) -> None:
        """Called after the backward pass of each part of a batch."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
