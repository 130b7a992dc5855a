"""The training loop: it trains a list of phases. B batch, C classes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Batch, Pool
from finetune_mile.learning.losses import given_matrix, shared, smoothed, upload
from finetune_mile.learning.mixing import Mix
from finetune_mile.learning.optim import set_rate
from finetune_mile.learning.phases import Decision, MethodState, Phase, StepView, after, drawn
from finetune_mile.learning.roles import Average, Roles, copy_into
from finetune_mile.learning.stores import LabelStore


@dataclass(slots=True)
class StepRecord:
    """What one step did. The tensors stay on the device until somebody reads them."""

    step: int  # steps done, this one included
    phase: Phase
    done: int  # steps done in this phase, this one included
    share: float  # of the base learning rate
    loss: Tensor  # ()
    labels: Tensor  # (3,): pseudo-labels, empty sets, given labels among them; sums over the images of an imitation
    images: int = 0  # in this process

    @property
    def ended(self) -> bool:
        """Did the phase end with this step?"""
        return self.done == self.phase.steps


class Objective(Protocol):
    """What is learned from a part of a batch: labels (`LabelObjective`), or views (`paper/pretraining/`)."""

    def begin(self, phase: Phase) -> None:
        """Called before the first step of a phase, also of one that is resumed."""

    def backward(self, loop: Loop, batch: Any, record: StepRecord) -> None:
        """Add the gradient of a part of a batch; `record`, whose step is not done yet, gets what it did."""


class Observer(Protocol):
    """What happens around the steps (`training/monitor.py`)."""

    def on_step(self, record: StepRecord) -> None:
        """After a step, and after the roles changed hands where a phase ended.

        It may raise to stop; what it sees is a state that can be saved and continued from.
        """

    def on_decision(self, step: int, decision: Decision) -> None:
        """After `step` steps the method decided something about the next phase."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """A network that learns phase by phase, with all that a checkpoint must hold."""

    accelerator: Accelerator
    network: nn.Module  # the learner, prepared
    roles: Roles  # the same learner, bare, and its copies
    optimizer: torch.optim.Optimizer  # prepared
    average: Average | None
    state: MethodState  # of the method
    objective: Objective
    feed: Callable[[Pool, int], Iterator[Any]]  # this process's parts of batches, from a step of a pool on
    rate: Callable[[int], float]  # step to the share of the base learning rate
    accumulate: int
    clip: float | None
    reset_optimizer: bool  # forget the momentum when the learner's weights are swapped
    frozen_norm: bool = False  # batch norm keeps the statistics that it has

    def train(self, phases: Sequence[Phase], first_step: int, monitor: Observer) -> None:
        """Train what is left of `phases`, the complete list, after `first_step` optimiser steps."""
        step, device = first_step, self.accelerator.device
        feeds: dict[Pool, Iterator[Any]] = {}
        for planned, done in after(step, phases):
            if done == 0 and (decision := self.state.decide(planned)) is not None:
                monitor.on_decision(step, decision)
            phase = self.state.as_decided(planned)
            if done == 0:
                self._enter(phase)
            self.objective.begin(phase)
            if phase.pool not in feeds:
                decided = [self.state.as_decided(each) for each in phases]
                feeds[phase.pool] = self.feed(phase.pool, drawn(step, decided)[phase.pool])
            for done_now in range(done + 1, phase.steps + 1):
                loss, labels = torch.zeros((), device=device), torch.zeros(3, device=device)
                record = StepRecord(step, phase, done_now, self.rate(step), loss, labels)
                self._step(feeds[phase.pool], record)
                step = record.step = step + 1
                if record.ended:
                    self.agree()
                    self.roles.leave(phase)
                monitor.on_step(record)

    def _enter(self, phase: Phase) -> None:
        self.roles.enter(phase)
        self.state.entered(phase)
        if self.reset_optimizer and not phase.continues:
            self.optimizer.state.clear()
        if self.average is not None and not phase.continues:
            self.average.restart()

    def _step(self, feed: Iterator[Any], record: StepRecord) -> None:
        """One optimiser step over `accumulate` parts of a batch."""
        self.network.train()
        if self.frozen_norm:
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.eval()
        set_rate(self.optimizer, record.share)
        for part in range(self.accumulate):
            last = part == self.accumulate - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.network):
                self.objective.backward(self, next(feed), record)
        if self.clip is not None:
            self.accelerator.clip_grad_norm_(self.network.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()

    def learner(self) -> nn.Module:
        """What is evaluated and exported: the bare learner, with averaged weights where they are kept.

        All processes call it together.
        """
        self.agree()
        return self.roles.learner if self.average is None else self.average.network()

    def agree(self) -> None:
        """Give every process the first one's batch-norm statistics, before they are copied or evaluated.

        Each process keeps its own while it trains: DDP does not broadcast them in every step.
        """
        if self.accelerator.num_processes == 1:
            return
        names = [name for name, _ in self.roles.learner.named_buffers()]
        averaged = [] if self.average is None else [self.average.weights[name] for name in names]
        for buffer in (*self.roles.learner.buffers(), *averaged):
            torch.distributed.broadcast(buffer, src=0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "roles": self.roles.state_dict(), "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.weights, "method": self.state.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.roles.load_state_dict(saved["roles"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.average is not None:
            copy_into(self.average.weights, saved["average"])
        self.state.load_state_dict(saved["method"])


@dataclass(slots=True, kw_only=True)
class LabelObjective:
    """The loss against the given labels, or against the teacher's; `targets` and `loss` are those of `Method`."""

    targets: Callable[[Phase, Tensor], Tensor]  # phase and the teacher's logits (B, C) to labels (B, C)
    loss: Callable[[Phase, Tensor, Tensor, StepView], Tensor]  # phase, logits, targets (B, C) and step to a scalar
    num_classes: int
    total_steps: int
    class_weights: Tensor | None  # (C,)
    prepare: Callable[[Tensor], Tensor]  # uint8 images to the network's input, on the device
    label_pool: Callable[[Phase], LabelStore] | None  # labels once per cycle, instead of per batch
    label_smoothing: float = 0.0
    mixing: Callable[[int, int, int], Mix] | None = None  # of a step, for images of a height and width
    store: LabelStore | None = None

    def begin(self, phase: Phase) -> None:
        self.store = None
        if self.label_pool is not None and phase.name == "imitation":
            self.store = self.label_pool(phase)

    def backward(self, loop: Loop, batch: Batch, record: StepRecord) -> None:
        phase, accelerator, images = record.phase, loop.accelerator, self.prepare(batch.images)
        given = given_matrix(batch.labels.to(images.device, non_blocking=True), self.num_classes)
        weak = None if phase.given or batch.weak is None else self.prepare(batch.weak)
        targets, teacher_logits = self._targets(loop, record, images if weak is None else weak, given, batch)
        if phase.given_weak and weak is not None:
            images = torch.where(given.any(1)[:, None, None, None], weak, images)
        if phase.name == "imitation":
            record.labels += label_counts(targets, given)
        if self.label_smoothing or self.mixing is not None:
            images, targets, given, teacher_logits = self._softened(record, images, targets, given, teacher_logits)
        view = StepView(
            step=record.step, total_steps=self.total_steps, samples=batch.samples, given=given,
            teacher_logits=teacher_logits, class_weights=self.class_weights, state=loop.state,
            add_up=partial(accelerator.reduce, reduction="sum"), gather=accelerator.gather,
            processes=accelerator.num_processes,
        )  # fmt: skip
        logits = loop.network(images)
        loss = self.loss(phase, logits, targets, view) / loop.accumulate
        accelerator.backward(loss)
        loop.state.after_step(view, logits.detach())
        record.loss += loss.detach()
        record.images += len(batch.samples)

    def _targets(
        self, loop: Loop, record: StepRecord, seen: Tensor, given: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """The target matrix (B, C), and the teacher's logits for what it has `seen` if they were computed for it."""
        phase = record.phase
        if phase.given:
            if bool((batch.labels < 0).any()):  # on the CPU, where labels come from: no wait for the device
                raise Problem("an unlabelled image was drawn in an interaction; this is a bug in the pools")
            return given, None
        teacher_logits = None
        if self.store is not None:
            targets = upload(self.store[batch.samples], given.device)
        else:
            assert loop.roles.teacher is not None
            with torch.no_grad(), loop.accelerator.autocast():
                teacher_logits = loop.roles.teacher(seen)
            targets = self.targets(phase, loop.state.adjusted(phase, teacher_logits, record.step))
        return torch.maximum(targets, given) if phase.union else targets, teacher_logits

    def _softened(
        self, record: StepRecord, images: Tensor, targets: Tensor, given: Tensor, teacher_logits: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The arguments after `record` with given labels smoothed, and each image mixed with its neighbour."""
        if record.phase.loss == "cross_entropy":
            targets = shared(targets)
        if record.phase.given and self.label_smoothing:
            targets = smoothed(targets, self.label_smoothing)
        if self.mixing is None:
            return images, targets, given, teacher_logits
        mix = self.mixing(record.step, images.shape[-2], images.shape[-1])
        if teacher_logits is not None:  # logits whose softmax is the mixture
            teacher_logits = mix.rows(teacher_logits.float().softmax(1)).log()
        return mix.images(images), mix.rows(targets), mix.rows(given), teacher_logits


def label_counts(targets: Tensor, given: Tensor) -> Tensor:
    """Sums over a batch: labels at 0.5 or more, images with none, and given labels (B, C) among them: (3,)."""
    labels = targets >= 0.5
    return torch.stack([labels.sum(), (~labels.any(1)).sum(), (labels & given.bool()).sum()]).float()
