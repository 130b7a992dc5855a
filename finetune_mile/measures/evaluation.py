"""A network over an image set, on all processes: its logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune_mile.images.pipeline import Views, batches


@torch.no_grad()
def predict(
    accelerator: Accelerator,
    network: nn.Module,
    views: Views,
    indices: npt.NDArray[np.int64],
    prepare: Callable[[Tensor], Tensor],
    *,
    batch_size: int,
    workers: int,
    tick: Callable[[], None] = lambda: None,
) -> Tensor:
    """Logits (len(indices), C) on the CPU, in the order of `indices`, the same on every process.

    Args:
        accelerator: for devices and processes.
        network: bare (not wrapped); it is put into eval mode and back.
        views: how the images are seen.
        indices: which ones.
        prepare: uint8 images to the network's input.
        batch_size: images per forward pass of one process.
        workers: loader processes.
        tick: called after each batch; it may raise to stop.
    """
    was_training = network.training
    network.eval()
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = indices[rank::world]
    keys = ([(0, int(i)) for i in mine[at : at + batch_size]] for at in range(0, len(mine), batch_size))
    parts = []
    for batch in batches(views, keys, workers=workers, pin=False):
        with accelerator.autocast():
            parts.append(network(prepare(batch.images)).float())
        tick()
    network.train(was_training)
    return _gather(accelerator, parts, len(indices))


def _gather(accelerator: Accelerator, parts: list[Tensor], total: int) -> Tensor:
    """Weave the processes' rows back into one order; a shorter share is padded, and may even be empty."""
    world, device = accelerator.num_processes, accelerator.device
    seen = torch.tensor([sum(map(len, parts)), max((part.shape[1] for part in parts), default=0)], device=device)
    seen = accelerator.gather(seen.unsqueeze(0))
    counted, num_classes = int(seen[:, 0].sum()), int(seen[:, 1].max())
    if counted != total:
        raise RuntimeError(f"{counted} images were seen, there are {total}: this is a bug, please report it")
    mine = torch.cat(parts) if parts else torch.zeros(0, num_classes, device=device)
    if world == 1:
        return mine.cpu()
    longest = -(-total // world)
    padded = nn.functional.pad(mine, (0, 0, 0, longest - len(mine)))
    gathered = accelerator.gather(padded).unflatten(0, (world, longest))
    woven: Tensor = gathered.transpose(0, 1).flatten(0, 1)[:total].cpu()
    return woven
