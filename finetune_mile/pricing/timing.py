"""Time a few real steps on this machine: learning, the optimiser, forward passes, reading. C classes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn

from finetune_mile.core.types import Preprocess
from finetune_mile.learning.losses import bce
from finetune_mile.learning.optim import make_optimizer, parameter_groups
from finetune_mile.networks.heads import build, new_head
from finetune_mile.pricing.scene import NetworkFacts

ENOUGH_SECONDS = 1.0  # of measuring one kind, after a warm-up
MOST_STEPS, FEWEST_STEPS = 20, 3
PART_SECONDS = 0.5  # a timed step is made about this long
FIRST_BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """What something took, over a few trials: the middle one, and how far they spread."""

    low: float
    middle: float
    high: float

    def __mul__(self, times: float) -> Seconds:
        return Seconds(low=self.low * times, middle=self.middle * times, high=self.high * times)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(low=self.low + other.low, middle=self.middle + other.middle, high=self.high + other.high)


NOTHING = Seconds(low=0.0, middle=0.0, high=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTimes:
    """One network, timed."""

    learn: Seconds  # forward, loss and backward, per image
    forward: Seconds  # evaluation mode, per image
    parameters: int
    activation_bytes: int  # kept for the backward pass, per image


def device_words() -> str:
    """What is timed on."""
    if torch.cuda.is_available():
        return f"one {torch.cuda.get_device_name()}"
    threads = torch.get_num_threads()
    return f"the CPU, {threads} thread{'s' if threads > 1 else ''}"


@lru_cache(maxsize=64)
def time_network(
    facts: NetworkFacts, *, classes: int, share: int, precision: Literal["no", "fp16", "bf16"]
) -> NetworkTimes:
    """Time a network with random weights on synthetic images.

    Args:
        facts: which network, at which size.
        classes: C.
        share: images of a batch that are computed at once; fewer are timed where that takes long.
        precision: as in a recipe.
    """
    network, device = _made(facts, classes)
    kind = torch.bfloat16 if precision == "bf16" else torch.float16

    def images(count: int) -> Any:
        return torch.rand(count, 3, facts.size, facts.size, device=device)

    def learn(batch: Any) -> None:
        with torch.autocast(device.type, kind, enabled=precision != "no"):
            logits = network(batch)
        bce(logits, torch.zeros(len(batch), classes, device=device)).backward()

    def forward(batch: Any) -> None:
        with torch.no_grad(), torch.autocast(device.type, kind, enabled=precision != "no"):
            network(batch)

    small = images(FIRST_BATCH)
    kept = _kept_bytes(lambda: learn(small)) // len(small)
    batch = images(_batch_for(lambda: learn(small), len(small), share))
    learning = _timed(lambda: learn(batch)) * (1 / len(batch))
    network.eval()
    batch = images(_batch_for(lambda: forward(small), len(small), share))
    looking = _timed(lambda: forward(batch)) * (1 / len(batch))
    parameters = sum(p.numel() for p in network.parameters()) + sum(b.numel() for b in network.buffers())
    return NetworkTimes(learn=learning, forward=looking, parameters=parameters, activation_bytes=kept)


@lru_cache(maxsize=64)
def time_optimizer(facts: NetworkFacts, name: Literal["sgd", "adamw", "lars"], *, classes: int) -> Seconds:
    """One step of an optimiser over a network's gradients."""
    network, _ = _made(facts, classes)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    groups = parameter_groups(network, lr=1e-6, head_lr=None, weight_decay=0.0)
    return _timed(make_optimizer(name, groups, momentum=0.9, nesterov=False).step)


def _made(facts: NetworkFacts, classes: int) -> tuple[nn.Module, torch.device]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build(facts.arch, padding=facts.padding)
    new_head(network, classes, "prior")
    return network.to(device).train(), device


def _batch_for(step: Callable[[], None], count: int, share: int) -> int:
    """Images with which a step takes about `PART_SECONDS`; never more than a real step has."""
    began = time.perf_counter()
    step()
    _wait()
    each = (time.perf_counter() - began) / count
    return max(min(share, int(PART_SECONDS / max(each, 1e-9))), 2)


def _timed(step: Callable[[], Any]) -> Seconds:
    """The lower quartile, middle and upper quartile of a few trials."""
    step()
    _wait()
    trials: list[float] = []
    while len(trials) < FEWEST_STEPS or (sum(trials) < ENOUGH_SECONDS and len(trials) < MOST_STEPS):
        began = time.perf_counter()
        step()
        _wait()
        trials.append(time.perf_counter() - began)
    trials.sort()
    last = len(trials) - 1
    return Seconds(low=trials[last // 4], middle=trials[last // 2], high=trials[last - last // 4])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _kept_bytes(step: Callable[[], None]) -> int:
    """Bytes of the tensors that autograd keeps for the backward pass, each memory counted once, weights left out."""
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return sum(seen.values())


@lru_cache(maxsize=16)
def time_reading(
    data: str, size: int, crop: Literal["random-resized", "shift", "none"], scale: tuple[float, float]
) -> Seconds:
    """Reading and augmenting one image in one process."""
    from finetune_mile.images.pipeline import Augmentation, Views
    from finetune_mile.pricing.scene import opened

    train = opened(data).train
    augmentation = Augmentation(crop=crop, scale=scale, shift=1 if crop == "shift" else 0, flip=True)
    views = Views(train, Preprocess(size=size), augmentation, 0)
    count = min(16, len(train))
    offsets = iter(range(0, 10**9, count))

    def step() -> None:
        first = next(offsets)
        views.read([(0, (first + i) % len(train)) for i in range(count)])

    return _timed(step) * (1 / count)
