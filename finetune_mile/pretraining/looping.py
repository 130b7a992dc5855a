"""The loop of pre-training, and what is written while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune_mile.core.problems import Failed
from finetune_mile.learning.optim import set_rate
from finetune_mile.learning.roles import copy_into
from finetune_mile.pretraining.methods import Learner, everything
from finetune_mile.training import resume
from finetune_mile.training.display import Display
from finetune_mile.training.folder import RunFolder
from finetune_mile.training.monitor import Signals, Stopped, stop_together


def train(
    accelerator: Accelerator,
    method: nn.Module,
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    feed: Iterator[list[Tensor]],
    rate: Callable[[int], float],
    *,
    first_step: int,
    total_steps: int,
    clip: float | None,
    on_step: Callable[[int, Tensor, float], None],
) -> None:
    """Do the steps that are left.

    Args:
        accelerator: for devices, precision and processes.
        method: one of `methods.METHODS`, bare.
        wrapped: the same, prepared.
        optimizer: prepared.
        feed: the views of this process's part of each batch.
        rate: step to the share of the base learning rate.
        first_step: steps done before.
        total_steps: where to end.
        clip: largest gradient norm; None: none.
        on_step: called with (steps done, loss (), share of the rate) after each step; it may raise to stop.
    """
    learner = cast(Learner, method)
    wrapped.train()
    for step in range(first_step, total_steps):
        share = rate(step)
        set_rate(optimizer, share)
        learner.begin_step(step)
        loss = learner.loss(wrapped(next(feed)))
        accelerator.backward(loss)
        learner.end_backward()
        if clip is not None:
            accelerator.clip_grad_norm_(wrapped.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        on_step(step + 1, loss.detach(), share)


def save(
    folder: RunFolder,
    accelerator: Accelerator,
    step: int,
    method: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
) -> None:
    """Write a checkpoint: all tensors, queues included."""
    content = {"tensors": everything(method), "optimizer": optimizer.state_dict(), "extra": extra}
    resume.write(folder, accelerator, step, content)


def restore(
    content: dict[str, Any], accelerator: Accelerator, method: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Put everything back; returns the step."""
    with torch.no_grad():
        copy_into(everything(method), content["tensors"])
    optimizer.load_state_dict(content["optimizer"])
    return resume.restore_process(content, accelerator)


class Recorder:
    """The loop's `on_step`: metrics, checkpoints, guards, and stopping."""

    def __init__(
        self,
        accelerator: Accelerator,
        folder: RunFolder,
        display: Display,
        signals: Signals,
        *,
        method: str,
        batch_size: int,
        steps_per_epoch: float,
        log_every: int,
        checkpoint_every: int,
        total_steps: int,
        save: Callable[[int], None],
    ) -> None:
        """Wire it up.

        Args:
            accelerator: for processes.
            folder: where records go.
            display: where the user looks.
            signals: whether to stop.
            method: its name.
            batch_size: images per step, over all processes.
            steps_per_epoch: for the display.
            log_every: steps between metrics.
            checkpoint_every: steps between checkpoints.
            total_steps: the last one is saved too.
            save: writes a checkpoint of a step.
        """
        self.accelerator, self.folder, self.display, self.signals = accelerator, folder, display, signals
        self.method, self.batch_size, self.steps_per_epoch = method, batch_size, steps_per_epoch
        self.log_every, self.checkpoint_every, self.total_steps = log_every, checkpoint_every, total_steps
        self.save = save
        self.steps_seen, self.busy_seconds = 0, 0.0
        self._window: list[Tensor] = []
        self._mark = time.monotonic()

    def __call__(self, step: int, loss: Tensor, share: float) -> None:
        """After each step."""
        self._window.append(loss)
        due = step % self.checkpoint_every == 0 or step == self.total_steps
        if due or step % self.log_every == 0:
            self._flush(step, share)
        if due:
            self.save(step)
        try:
            stop_together(self.accelerator, self.signals, step)
        except Stopped:
            if not due:
                if self._window:
                    self._flush(step, share)
                self.save(step)
            raise

    def _flush(self, step: int, share: float) -> None:
        """Average the window, over all processes, into one line."""
        window, self._window = self._window, []
        loss = float(self.accelerator.reduce(torch.stack(window).mean(), reduction="mean"))
        if not math.isfinite(loss):
            raise Failed(f"the loss is {loss} at step {step}; lower --lr, or set optimizer.clip")
        seconds = time.monotonic() - self._mark
        self._mark += seconds
        self.busy_seconds += seconds
        self.steps_seen += len(window)
        speed = len(window) * self.batch_size / max(seconds, 1e-9)
        if self.accelerator.is_main_process:
            self.folder.append(
                {"step": step, "kind": "train", "loss": loss, "rate": share, "images_per_second": round(speed, 1)}
            )
        self.display.step(step, self.method, int(step / self.steps_per_epoch), speed, loss)
