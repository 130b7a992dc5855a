"""Accelerate, set up so that its known traps are either avoided or said aloud."""

from __future__ import annotations

import os
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from finetune_mile.core.problems import Problem

Precision = Literal["no", "fp16", "bf16"]


def start(*, precision: Precision, seed: int, track: str, project: str) -> Accelerator:
    """An accelerator that is what the user asked for, or a `Problem` with the command to use."""
    use_threads()
    accelerator = Accelerator(
        mixed_precision=precision,
        step_scheduler_with_optimizer=False,
        log_with=None if track == "none" else track,
        project_dir=project,
    )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and accelerator.num_processes == 1:
        # On a machine without accelerators each rank would believe to be alone and write the same folder.
        raise Problem(
            f"{world} processes were started, but each sees only itself; on CPUs start them with: "
            f"ACCELERATE_USE_CPU=1 torchrun --nproc_per_node {world} finetune_mile/run.py ..."
        )
    set_seed(seed)
    return accelerator


def wanted_precision(recipe: Precision) -> Precision:
    """`accelerate launch --mixed_precision` wins over the recipe, as flags do."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return "fp16" if launched == "fp16" else "bf16" if launched == "bf16" else recipe


def use_threads() -> int:
    """Use the cores: `accelerate launch` and `torchrun` on a CPU machine set OMP_NUM_THREADS to 1.

    FINETUNE_MILE_THREADS, or any other OMP_NUM_THREADS, is taken as it is.
    """
    wanted = os.environ.get("FINETUNE_MILE_THREADS")
    if wanted is not None:
        torch.set_num_threads(max(int(wanted), 1))
    elif os.environ.get("OMP_NUM_THREADS") == "1" and not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(cores // local, 1))
    return torch.get_num_threads()
