"""Checkpoints of a run: all that a bit-exact resume needs, in one file, written whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from finetune_mile.learning.loop import Average
from finetune_mile.learning.roles import Roles
from finetune_mile.problems import Problem
from finetune_mile.runlog import RunFolder, whole_file


def random_states(accelerator: Accelerator) -> dict[str, Any]:
    """This process's generators; only layers such as dropout draw from them."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    if accelerator.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(accelerator.device)
    return states


def restore_random_states(accelerator: Accelerator, states: dict[str, Any]) -> None:
    """Put the generators back."""
    torch.set_rng_state(states["torch"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in states and accelerator.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], accelerator.device)


def save(
    folder: RunFolder,
    accelerator: Accelerator,
    *,
    step: int,
    roles: Roles,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    extra: dict[str, Any],
) -> None:
    """Write the checkpoint of `step` of a run with roles; all processes call it."""
    content = {
        "roles": roles.state_dict(),
        "optimizer": optimizer.state_dict(),
        "average": None if average is None else average.weights,
        "extra": extra,
    }
    write(folder, accelerator, step, content)


def write(folder: RunFolder, accelerator: Accelerator, step: int, content: dict[str, Any]) -> None:
    """Write a checkpoint, then drop the old ones; all processes call it, the first one writes."""
    states = [random_states(accelerator)] * accelerator.num_processes
    if accelerator.num_processes > 1:
        torch.distributed.all_gather_object(states, states[0])
    if not accelerator.is_main_process:
        return
    content = content | {
        "step": step,
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "random": states,
    }
    with whole_file(folder.checkpoint_path(step)) as part:
        torch.save(content, part)
    folder.prune()


def load_latest(folder: RunFolder) -> dict[str, Any] | None:
    """The newest checkpoint's content on the CPU; None where the run had not saved one yet."""
    paths = folder.saved()
    return _read(paths[-1]) if paths else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError) as error:
        raise Problem(f"checkpoint {path} is damaged ({error}); remove it to go on from the one before") from error
    return content


def restore(
    content: dict[str, Any],
    accelerator: Accelerator,
    *,
    roles: Roles,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
) -> int:
    """Put everything back as it was; returns the step."""
    roles.load_state_dict(content["roles"])
    optimizer.load_state_dict(content["optimizer"])
    if average is not None:
        from finetune_mile.learning.roles import copy_into

        copy_into(average.weights, content["average"])
    return restore_process(content, accelerator)


def restore_process(content: dict[str, Any], accelerator: Accelerator) -> int:
    """Put back what belongs to the process rather than to the network; returns the step."""
    if accelerator.scaler is not None and content["scaler"] is not None:
        accelerator.scaler.load_state_dict(content["scaler"])
    states = content["random"]
    if len(states) == accelerator.num_processes:
        restore_random_states(accelerator, states[accelerator.process_index])
    return int(content["step"])
