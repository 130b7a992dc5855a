"""ROLE, regularised online label estimation (Cole et al. 2021): label estimates per image, learned with the network.

Every labelled image has an estimate of all its labels. The network learns the given label and the estimates; the
estimates learn the given label and the network's outputs; both should have `expected` labels per image on average.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Section
from finetune_mile.learning.phases import Budget, MethodState, Phase, RunView, StepView, one_interaction
from finetune_mile.methods import Method

if TYPE_CHECKING:
    from torch import Tensor

GIVEN, SPREAD = 0.995, 0.1  # first estimate of a given label; half the range around 0.5 of the others


class Block(Section):
    """ROLE."""

    expected: float = Field(default=1.5, gt=0, description="labels per image, on average")
    estimate_lr: float = Field(default=1.0, gt=0, description="step size of an image's estimates, on its own loss")


def phases(block: Block, budget: Budget) -> list[Phase]:
    """One long interaction."""
    return one_interaction(budget, "bce", values=block)


def loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    """Half of the network's loss and half of the estimates', each against the other's outputs held fixed."""
    import torch

    block: Block = phase.values
    estimates = step.state.rows(step.samples, logits.device)
    with torch.enable_grad():
        own = _side(estimates, logits, targets, step, block.expected) / 2
        (slope,) = torch.autograd.grad(own, estimates)  # here: a scaler of mixed precision does not touch it
    step.state.change = -block.estimate_lr * len(logits) * slope
    return _side(logits, estimates, targets, step, block.expected) / 2 + own.detach()


def untrained_loss(*_: object) -> None:
    """The first estimates are near one half, so the loss starts far above that of BCE: there is nothing to compare."""


def _side(learner: Tensor, other: Tensor, targets: Tensor, step: StepView, expected: float) -> Tensor:
    import torch.nn.functional as F

    from finetune_mile.learning.losses import bce_entries

    learner = learner.float()
    positives = -(targets * F.logsigmoid(learner))
    entries = positives + bce_entries(learner, other.detach().float().sigmoid(), step.class_weights)
    mean = learner.sigmoid().sum(1).mean()  # over this process's part; the sum over processes is added without gradient
    everyone = step.add_up(mean.detach()) / step.processes
    excess = (mean - mean.detach() + everyone - expected).square() / learner.shape[1] ** 2
    return entries.sum(1).mean() + excess


class State(MethodState):
    """The estimates: logits (M, C) of the M labelled training images, the same on every process."""

    def __init__(self, run: RunView) -> None:
        import torch

        self.run = run
        first = run.given if run.given.ndim == 1 else run.given[:, 0]
        labelled = (first >= 0).nonzero().flatten()
        needed, free = 4 * len(labelled) * run.num_classes, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 2 * needed > free:
            raise Problem(
                f"--method role keeps {needed:,} bytes of label estimates ({len(labelled):,} images x "
                f"{run.num_classes:,} classes), and as much in each checkpoint; {free:,} bytes are free. "
                "Lower --fraction."
            )
        self.row = torch.full((len(run.given),), -1).index_copy_(0, labelled, torch.arange(len(labelled)))
        draws = torch.rand(len(labelled), run.num_classes, generator=torch.Generator().manual_seed(0))
        self.estimates = (2 * draws - 1) * torch.tensor(0.5 + SPREAD).logit()
        given = run.given[labelled]
        positive = given > 0 if given.ndim == 2 else torch.nn.functional.one_hot(given, run.num_classes).bool()
        self.estimates[positive] = float(torch.tensor(GIVEN).logit())
        self.change: Tensor | None = None  # (B, C) that a step makes to the estimates of its images

    def rows(self, samples: Tensor, device: Any) -> Tensor:
        """Estimates (B, C) of a batch."""
        from finetune_mile.learning.losses import upload

        return upload(self.estimates[self.row[samples]], device).requires_grad_()

    def after_step(self, step: StepView, logits: Tensor) -> None:
        """Move the estimates of the batch of all processes."""
        assert self.change is not None
        from finetune_mile.learning.losses import upload

        rows = step.gather(upload(self.row[step.samples], logits.device)).cpu()
        self.estimates.index_add_(0, rows, step.gather(self.change).cpu())

    def state_dict(self) -> dict[str, Any]:
        """The estimates."""
        return {"estimates": self.estimates}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore them."""
        self.estimates.copy_(saved["estimates"])


METHOD = Method(
    name="role", phases=phases, Block=Block, needs=frozenset({"whole_batch", "hard_labels", "image_state"}),
    loss=loss, untrained_loss=untrained_loss, State=State,
)  # fmt: skip
