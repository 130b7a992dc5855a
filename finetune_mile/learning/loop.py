"""The training loop: it trains a list of phases. B batch, C classes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Batch, Pool
from finetune_mile.learning.optim import set_rate
from finetune_mile.learning.phases import Phase, after, drawn
from finetune_mile.learning.roles import Roles, Weights, copy_into, snapshot
from finetune_mile.learning.state import Decision, State, StepView
from finetune_mile.learning.stores import LabelStore
from finetune_mile.learning.targets import given_matrix


class Rules(Protocol):
    """A method, as far as a step needs it (`methods/__init__.py`)."""

    @property
    def targets(self) -> Callable[[Phase, Tensor], Tensor]:
        """A phase and the teacher's logits (B, C) to labels (B, C)."""

    @property
    def loss(self) -> Callable[[Phase, Tensor, Tensor, StepView], Tensor]:
        """A phase, logits (B, C), targets (B, C) and the step to a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What stays the same from the first step to the last."""

    method: Rules
    state: State
    num_classes: int
    total_steps: int
    accumulate: int
    clip: float | None
    reset_optimizer: bool  # forget the momentum when the learner's weights are swapped
    class_weights: Tensor | None  # (C,)
    prepare: Callable[[Tensor], Tensor]  # uint8 images to the network's input, on the device
    feed: Callable[[Pool, int], Iterator[Batch]]  # this process's parts from a step of a pool on
    label_pool: Callable[[Phase], LabelStore] | None  # labels once per cycle, instead of per batch
    environment: Tensor | None = None  # (N,) of each training image
    environments: int = 0


@dataclass(slots=True)
class StepRecord:
    """What one step did. The tensors stay on the device until somebody looks."""

    step: int  # steps done, this one included
    phase: Phase
    done: int  # steps done in this phase, this one included
    share: float  # of the base learning rate
    loss: Tensor  # ()
    images: int  # in this process
    labels: Tensor | None = None  # (3,): pseudo-labels, empty sets, given labels found; sums over the images
    ended: bool = False  # the phase ended with this step


class Average:
    """Averaged weights of the learner; they start anew wherever the learner's weights are swapped."""

    def __init__(self, learner: nn.Module, decay: float) -> None:
        self.learner, self.decay = learner, decay
        self.weights: Weights = snapshot(learner)

    def restart(self) -> None:
        """Forget the past."""
        copy_into(self.weights, self.learner.state_dict())

    @torch.no_grad()
    def update(self) -> None:
        """Move a little towards the learner; integer buffers follow at once."""
        for name, tensor in self.learner.state_dict().items():
            mine = self.weights[name]
            if mine.is_floating_point():
                mine.lerp_(tensor, 1 - self.decay)
            else:
                mine.copy_(tensor)


def train(
    accelerator: Accelerator,
    network: nn.Module,
    roles: Roles,
    phases: Sequence[Phase],
    optimizer: torch.optim.Optimizer,
    rate: Callable[[int], float],
    loop: Loop,
    *,
    average: Average | None = None,
    first_step: int = 0,
    on_step: Callable[[StepRecord], None],
    on_decision: Callable[[int, Decision], None],
) -> int:
    """Train what is left of `phases` after `first_step` optimiser steps; returns the steps done.

    Args:
        accelerator: for devices, precision and processes.
        network: the prepared learner.
        roles: the same learner unwrapped, and its copies; already restored when resuming.
        phases: the complete list, also what is done.
        optimizer: the prepared optimiser.
        rate: step to the share of the base learning rate.
        loop: everything else that is fixed.
        average: averaged weights to keep up to date, or None.
        first_step: optimiser steps done before.
        on_step: called after each step, and after the roles have changed hands where a phase ended. It may raise to
            stop; what it sees is a state that can be saved and continued from.
        on_decision: called with the steps done and what the method decided before a phase.
    """
    step = first_step
    feeds: dict[Pool, Iterator[Batch]] = {}
    network.train()
    for planned, done in after(step, phases):
        if done == 0 and (decision := loop.state.decide(planned)) is not None:
            on_decision(step, decision)
        phase = loop.state.as_decided(planned)
        if done == 0:
            roles.enter(phase)
            loop.state.entered(phase)
            if loop.reset_optimizer and not phase.continues:
                optimizer.state.clear()
            if average is not None and not phase.continues:
                average.restart()
        store = None
        if loop.label_pool is not None and phase.name == "imitation":
            store = loop.label_pool(phase)
            network.train()
        if phase.pool not in feeds:
            decided = [loop.state.as_decided(each) for each in phases]
            feeds[phase.pool] = loop.feed(phase.pool, drawn(step, decided)[phase.pool])
        for done_now in range(done + 1, phase.steps + 1):
            share = rate(step)
            set_rate(optimizer, share)
            record = _step(accelerator, network, roles, phase, optimizer, loop, feeds[phase.pool], store, step)
            step += 1
            if average is not None:
                average.update()
            record.step, record.done, record.share = step, done_now, share
            record.ended = done_now == phase.steps
            if record.ended:
                _same_buffers(accelerator, roles.learner)
                roles.leave(phase)
            on_step(record)
            network.train()
    return step


def _step(
    accelerator: Accelerator,
    network: nn.Module,
    roles: Roles,
    phase: Phase,
    optimizer: torch.optim.Optimizer,
    loop: Loop,
    feed: Iterator[Batch],
    store: LabelStore | None,
    step: int,
) -> StepRecord:
    """One optimiser step over `loop.accumulate` parts of a batch."""
    record = StepRecord(0, phase, 0, 0.0, torch.zeros((), device=accelerator.device), 0)
    for part in range(loop.accumulate):
        batch = next(feed)
        images = loop.prepare(batch.images)
        labels = batch.labels.to(accelerator.device, non_blocking=True)
        given = given_matrix(labels, loop.num_classes)
        targets, teacher_logits = _targets(roles, phase, images, given, batch, loop, store, accelerator)
        view = _view(accelerator, loop, batch, given, teacher_logits, step)
        last = part == loop.accumulate - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(network):
            logits = network(images)
            loss = loop.method.loss(phase, logits, targets, view) / loop.accumulate
            accelerator.backward(loss)
        loop.state.after_step(view, logits.detach())
        record.loss += loss.detach()
        record.images += len(batch.samples)
        if phase.name == "imitation":
            counted = label_counts(targets, given)
            record.labels = counted if record.labels is None else record.labels + counted
    if loop.clip is not None:
        accelerator.clip_grad_norm_(network.parameters(), loop.clip)
    optimizer.step()
    optimizer.zero_grad()
    return record


def _view(
    accelerator: Accelerator, loop: Loop, batch: Batch, given: Tensor, teacher_logits: Tensor | None, step: int
) -> StepView:
    environment = None
    if loop.environment is not None:
        environment = loop.environment[batch.samples].to(accelerator.device, non_blocking=True)
    return StepView(
        step=step, total_steps=loop.total_steps, samples=batch.samples, given=given, teacher_logits=teacher_logits,
        environment=environment, environments=loop.environments,
        class_weights=loop.class_weights, add_up=partial(accelerator.reduce, reduction="sum"),
        gather=accelerator.gather, processes=accelerator.num_processes, state=loop.state,
    )  # fmt: skip


def _targets(
    roles: Roles,
    phase: Phase,
    images: Tensor,
    given: Tensor,
    batch: Batch,
    loop: Loop,
    store: LabelStore | None,
    accelerator: Accelerator,
) -> tuple[Tensor, Tensor | None]:
    """The target matrix (B, C) of one part of a batch, and the teacher's logits if they were computed for it."""
    if phase.given:
        if bool((batch.labels < 0).any()):  # on the CPU, where labels come from: no wait for the device
            raise Problem("an unlabelled image was drawn in an interaction; this is a bug in the pools")
        return given, None
    teacher_logits = None
    if store is not None:
        targets = store[batch.samples].to(given.device)
    else:
        assert roles.teacher is not None
        with torch.no_grad(), accelerator.autocast():
            teacher_logits = roles.teacher(images)
        targets = loop.method.targets(phase, teacher_logits)
    return torch.maximum(targets, given) if phase.union else targets, teacher_logits


def label_counts(targets: Tensor, given: Tensor) -> Tensor:
    """Sums over a batch: labels at 0.5 or more, images with none, and given labels (B, C) among them: (3,)."""
    labels = targets >= 0.5
    return torch.stack([labels.sum(), (~labels.any(1)).sum(), (labels & given.bool()).sum()]).float()


def _same_buffers(accelerator: Accelerator, learner: nn.Module) -> None:
    """Give every process the first one's batch-norm statistics before they are copied."""
    if accelerator.num_processes == 1:
        return
    for buffer in learner.buffers():
        torch.distributed.broadcast(buffer, src=0)
