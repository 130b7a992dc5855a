"""The processes and the processor of a run, and images on their way to a network there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune_mile.compute.passes import Outputs, outputs_of
from finetune_mile.core.problems import Failed
from finetune_mile.core.types import Preprocess
from finetune_mile.images.order import Indices
from finetune_mile.images.pipeline import Readers, Views, normalise
from finetune_mile.learning.probe import SMALL
from finetune_mile.training.processes import Signals, stop_together


@dataclass(slots=True, kw_only=True)
class Device:
    """Where networks compute."""

    accelerator: Accelerator
    signals: Signals
    batch_size: int  # of a pass without learning, over all processes
    workers: int  # loader processes of this process
    layout: torch.memory_format = torch.contiguous_format  # of a network's input
    step_work: int = SMALL  # multiplications of one operation of a step; of a network of images: enough for all threads
    _scales: dict[tuple[float, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    readers: Readers = field(init=False)  # the loader processes of evaluation and labelling

    def __post_init__(self) -> None:
        share = max(self.batch_size // self.accelerator.num_processes, 1)
        self.readers = Readers(workers=self.workers, pin=self.pin, batch_size=share)

    def prepare(self, images: Tensor, preprocess: Preprocess) -> Tensor:
        """uint8 images (B, 3, H, W) to a network's input, on the device; feature rows (B, D) are only moved there."""
        device = self.accelerator.device
        if images.dtype != torch.uint8:
            return images.to(device, non_blocking=True)
        key = (*preprocess.mean, *preprocess.std)
        if key not in self._scales:  # once: a copy from the host in each step would wait for the device
            mean, std = (torch.tensor(v).view(3, 1, 1).to(device) for v in (preprocess.mean, preprocess.std))
            self._scales[key] = mean, std
        return normalise(images.to(device, non_blocking=True, memory_format=self.layout), *self._scales[key])

    @property
    def pin(self) -> bool:
        """Do batches come in memory that a GPU copies from while it computes?"""
        return bool(self.accelerator.device.type == "cuda")

    def tick(self) -> None:
        """Between batches outside of training: stop, where no other process waits for this one."""
        if self.accelerator.num_processes == 1:
            self.signals.raise_if_caught()

    def outputs(
        self, network: nn.Module, views: Views, indices: Indices, tick: Callable[[], None] | None = None
    ) -> Outputs:
        """A bare network's outputs (n, C) for some images; all processes call it."""
        prepare = partial(self.prepare, preprocess=views.preprocess)
        outputs = outputs_of(self.accelerator, network, views, indices, prepare, self.readers, tick or self.tick)
        stop_together(self.accelerator, self.signals, 0)
        if bool(outputs.rows[outputs.readable].isnan().all(1).any()):
            raise Failed("the network's outputs are not numbers any more; lower --lr, or set optimizer.clip")
        return outputs
