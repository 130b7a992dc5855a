"""Checkpoints of a run: all that a bit-exact resume needs, in one file, written whole."""

from __future__ import annotations

import random
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from finetune_mile.core.files import whole_stream
from finetune_mile.core.problems import Problem, warn
from finetune_mile.learning.loop import Loop
from finetune_mile.training.folder import RunFolder
from finetune_mile.training.processes import from_first


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


def write(folder: RunFolder, accelerator: Accelerator, step: int, content: dict[str, Any]) -> None:
    """Write a checkpoint, then drop the old ones; all processes call it, the first one writes."""
    states = [random_states(accelerator)] * accelerator.num_processes
    if accelerator.num_processes > 1:
        torch.distributed.all_gather_object(states, states[0])
    if not accelerator.is_main_process:
        return
    content = content | {
        "step": step,
        "run": folder.info.get("recipe_sha256"),
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "random": states,
    }
    with whole_stream(folder.checkpoint_path(step)) as stream:
        torch.save(content, stream)
    folder.prune()


def load_latest(folder: RunFolder, warn: Callable[[str], object]) -> dict[str, Any] | None:
    """The content of the newest checkpoint that is good, on the CPU; None where the run had not saved one yet.

    Args:
        folder: the run's.
        warn: told of each damaged one, in a sentence.
    """
    damaged: list[str] = []
    for path in folder.saved()[::-1]:
        try:
            content = _read(path, folder.info.get("recipe_sha256"))
        except _Damaged as why:
            damaged.append(f"{path.name} {why}")
            continue
        for sentence in damaged:
            warn(f"checkpoint {sentence}; continuing from an older one, {path.name}")
        return content
    if damaged:
        raise Problem(
            f"{folder.path} has no usable checkpoint: {'; '.join(damaged)}. Restore a good one, or start again with "
            f"--recipe {shlex.quote(str(folder.path / 'recipe.yaml'))} --out DIR"
        )
    return None


def load_together(folder: RunFolder, accelerator: Accelerator) -> dict[str, Any] | None:
    """`load_latest` on all processes: the first one chooses, so that none starts from another step."""
    content: dict[str, Any] | None = None

    def choose() -> int | None:
        nonlocal content
        content = load_latest(folder, warn)
        return None if content is None else content["step"]

    step = from_first(choose)
    return content if step is None or accelerator.is_main_process else _read(folder.checkpoint_path(step), None)


class _Damaged(Exception):
    """Why a checkpoint is not used."""


def _read(path: Path, run: str | None) -> dict[str, Any]:
    """A checkpoint's content.

    torch writes a CRC-32 of every record and does not compare it when it loads: one flipped bit would be trained on.

    Args:
        path: its file.
        run: the hash of the recipe that it must belong to; None: any.
    """
    if not path.is_file():
        raise _Damaged("is not a file")
    try:
        with zipfile.ZipFile(path) as records:
            spoilt = records.testzip()
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a reader trips over: the file is not what was written
        raise _Damaged(f"is damaged ({str(error).splitlines()[0] if str(error) else type(error).__name__})") from error
    if spoilt is not None:
        raise _Damaged(f"is damaged (the checksum of {spoilt} is wrong)")
    if not isinstance(content, dict) or "run" not in content:
        raise _Damaged("was not written by this version of finetune_mile")
    if run is not None and content["run"] != run:
        raise _Damaged("belongs to another run")
    return content


def restore(loop: Loop, folder: RunFolder, seed: int) -> tuple[int, dict[str, Any] | None]:
    """Put a loop back to the newest good checkpoint: the steps done, and what the monitor kept there.

    0 and None where there is no checkpoint; what was recorded after it is forgotten.
    """
    accelerator = loop.accelerator
    content = load_together(folder, accelerator)
    step, extra = 0, None
    if content is None:
        torch.manual_seed(seed + accelerator.process_index)  # dropout differs between processes
    else:
        loop.load_state_dict(content)
        if accelerator.scaler is not None and content["scaler"] is not None:
            accelerator.scaler.load_state_dict(content["scaler"])
        states = content["random"]
        if len(states) == accelerator.num_processes:
            restore_random_states(accelerator, states[accelerator.process_index])
        step, extra = int(content["step"]), content["extra"]
    if accelerator.is_main_process:
        folder.rewind(step)
    return step, extra
