"""Images to rows: networks are shown images here when nothing is learned from them. B images of a batch, D outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import tee
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from finetune_mile.images.order import Indices, Key
from finetune_mile.images.pipeline import Readers, Views

if TYPE_CHECKING:
    from accelerate import Accelerator

Prepare = Callable[[Tensor], Tensor]  # uint8 images (B, 3, H, W) to the network's input, on its device


class Outputs(NamedTuple):
    """Rows of n images, and which of them could be read.

    The other rows are NaN, so that a caller who forgets to ask gets no plausible number.
    """

    rows: Tensor  # (n, D)
    readable: Tensor  # (n,) booleans


@torch.no_grad()
def show(network: nn.Module, images: Tensor) -> Tensor:
    """Outputs (B, D) of a network for prepared images (B, 3, H, W); it is in eval mode meanwhile."""
    was_training = network.training
    rows: Tensor = network.eval()(images)
    network.train(was_training)
    return rows


@torch.no_grad()
def stream(
    network: nn.Module,
    views: Views,
    keys: Iterable[list[Key]],
    prepare: Prepare,
    readers: Readers,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[tuple[Indices, Outputs]]:
    """Samples (B,) and their float32 outputs, batch by batch; rows are on the network's device, `readable` is not.

    Args:
        network: bare (not wrapped); in eval mode for each batch, then as it was.
        views: the images and their preprocessing.
        keys: of each batch.
        prepare: images to the network's input.
        readers: loader processes.
        precision: the context to compute in, such as `accelerator.autocast`.
    """
    asked, keys = tee(keys)
    for batch, those in zip(readers.batches(views, keys), asked, strict=True):
        with precision():
            rows = show(network, prepare(batch.images)).float()
        samples = np.array([sample for _, sample in those])
        readable = torch.from_numpy(~np.isin(samples, list(views.bad)))
        if not bool(readable.all()):
            rows[~readable] = torch.nan
        yield samples, Outputs(rows, readable)


def outputs_of(
    accelerator: Accelerator,
    network: nn.Module,
    views: Views,
    indices: Indices,
    prepare: Prepare,
    readers: Readers,
    tick: Callable[[], None] = lambda: None,
) -> Outputs:
    """Outputs on the CPU, in the order of `indices`, the same on every process; all processes call it.

    Args:
        accelerator: for devices and processes.
        network: bare (not wrapped), on the device.
        views: the images and their preprocessing.
        indices: which images.
        prepare: images to the network's input.
        readers: loader processes.
        tick: called after each batch; it may raise to stop.
    """
    mine = indices[accelerator.process_index :: accelerator.num_processes]
    parts: list[Outputs] = []
    for _, part in stream(network, views, keys_of(mine, readers.batch_size), prepare, readers, accelerator.autocast):
        parts.append(part)
        tick()
    if sum(len(part.rows) for part in parts) != len(mine):
        raise RuntimeError(f"not all of {len(mine)} images were evaluated: this is a bug, please report it")
    flags = [part.readable.unsqueeze(1).float() for part in parts]
    return Outputs(
        _woven(accelerator, [part.rows for part in parts], len(indices)),
        _woven(accelerator, flags, len(indices)).flatten().bool(),
    )


def keys_of(samples: Indices, batch_size: int, epoch: int = 0) -> Iterator[list[Key]]:
    """Keys of the batches of some samples, in their order."""
    for at in range(0, len(samples), batch_size):
        yield [(epoch, int(sample)) for sample in samples[at : at + batch_size]]


def _woven(accelerator: Accelerator, parts: list[Tensor], total: int) -> Tensor:
    """Weave the processes' rows back into one order; a shorter share is padded, and may even be empty."""
    world, mine = accelerator.num_processes, torch.cat(parts) if parts else torch.zeros(0, 0)
    if world == 1:
        return mine.cpu()
    longest, mine = -(-total // world), mine.to(accelerator.device)
    width = int(accelerator.gather(torch.tensor([mine.shape[1]], device=mine.device)).max())
    padded = nn.functional.pad(mine, (0, width - mine.shape[1], 0, longest - len(mine)))
    gathered = accelerator.gather(padded).unflatten(0, (world, longest))
    woven: Tensor = gathered.transpose(0, 1).flatten(0, 1)[:total].cpu()
    return woven
