"""Numbers out: a network over an image set, on all processes, and every score that its labels allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune_mile.images.pipeline import Views, batches
from finetune_mile.measures import metrics

Activation = Literal["softmax", "sigmoid"]
THRESHOLDS = (0.25, 0.5)


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
    if world == 1:
        return torch.cat(parts).cpu()
    return _gather(accelerator, torch.cat(parts), len(indices))


def _gather(accelerator: Accelerator, mine: Tensor, total: int) -> Tensor:
    """Weave the processes' rows back into one order; the last row of a shorter share is padding."""
    world = accelerator.num_processes
    longest = -(-total // world)
    padded = nn.functional.pad(mine, (0, 0, 0, longest - len(mine)))
    gathered = accelerator.gather(padded).unflatten(0, (world, longest))
    woven: Tensor = gathered.transpose(0, 1).flatten(0, 1)[:total].cpu()
    counts = accelerator.gather(torch.tensor([len(mine)], device=mine.device))
    assert int(counts.sum()) == total, f"{int(counts.sum())} images were seen, there are {total}"
    return woven


def score(
    logits: Tensor,
    given: Tensor,
    truth: Tensor | None,
    *,
    activation: Activation,
    prediction_set: metrics.SetRule,
    rho: float | None,
) -> dict[str, float]:
    """The flat dictionary of results.json: percent 0-100, except coverage (labels per image).

    Args:
        logits: (N, C).
        given: (N,) integers, or (N, C) of 0 and 1.
        truth: (N, C) booleans where the true label sets are known; images with an empty set do not count there.
        activation: how logits become probabilities.
        prediction_set: which rule the plain `f1@...` uses; the other ones are given by name.
        rho: the pseudo-label threshold, for f1@rho.
    """
    probabilities = logits.softmax(1) if activation == "softmax" else logits.sigmoid()
    found: dict[str, float] = {"images": len(logits)}
    if given.ndim == 1:
        labelled = given >= 0
        found["accuracy"] = _percent(metrics.top_k(logits[labelled], given[labelled], 1))
        found["top5"] = _percent(metrics.top_k(logits[labelled], given[labelled], 5))
    elif truth is None:
        truth = given > 0
    found["coverage@0.25"] = float((probabilities > 0.25).sum(1).float().mean())
    if truth is not None:
        found |= _set_scores(logits, probabilities, truth, prediction_set, rho)
    return found


def _set_scores(
    logits: Tensor,
    probabilities: Tensor,
    truth: Tensor,
    prediction_set: metrics.SetRule,
    rho: float | None,
) -> dict[str, float]:
    known = truth.any(1)
    logits, probabilities, truth = logits[known], probabilities[known], truth[known]
    found = {
        "images_with_set": float(known.sum()),
        "real_acc": _percent(metrics.top_1_in_set(logits, truth)),
        "lrap": _percent(metrics.ranking_precision(logits, truth)),
        "trivial_f1": 100 * metrics.constant_f1(truth)[0],
    }
    thresholds = {f"{t:g}": t for t in THRESHOLDS} | ({"rho": rho} if rho is not None else {})
    for name, threshold in thresholds.items():
        rules: tuple[metrics.SetRule, ...] = ("threshold", "argmax_or_threshold")
        for rule in rules:
            sets = metrics.predicted_set(probabilities, threshold, rule)
            value = _percent(metrics.sample_f1(sets, truth))
            found[f"f1_{rule}@{name}"] = value
            if rule == prediction_set:
                found[f"f1@{name}"] = value
    best, where = metrics.best_threshold_f1(probabilities, truth, prediction_set)
    return found | {"f1@best": 100 * best, "best_threshold": where}


def _percent(values: Tensor) -> float:
    return 100 * float(values.float().mean())
