"""Processes: how they start, stop together, and whether they agree; Accelerate's traps are avoided or said aloud."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object, set_seed
from torch import nn

from finetune_mile.core.problems import Problem

Precision = Literal["no", "fp16", "bf16"]
SAME_SIGNAL = 1.0  # seconds
AGREE_EVERY = 8  # steps between two looks at whether another process was told to stop


def start(*, precision: Precision, seed: int, track: str, project: str) -> Accelerator:
    """An accelerator that is what the user asked for, or a `Problem` with the command to use."""
    use_threads()
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true":
            raise Problem(
                f"Accelerate is configured for {plugin}, which is not supported: the teacher and student are copies of "
                "the whole network; use `accelerate config` with data parallel training (multi-GPU)"
            )
    if track == "wandb":
        os.environ.setdefault("WANDB_MODE", "offline")  # `wandb sync` uploads it; WANDB_MODE=online does so at once
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()  # of an earlier run in this process; it would be an error
    atexit.unregister(part)
    atexit.register(part)
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


def part() -> None:
    """Leave the other processes; an interpreter that ends with gloo's threads alive may abort."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def wanted_precision(recipe: Precision | Literal["auto"]) -> Precision:
    """`accelerate launch --mixed_precision` wins over the recipe, as flags do."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched in ("fp16", "bf16"):
        return "fp16" if launched == "fp16" else "bf16"
    return recipe if recipe != "auto" else "bf16" if computes_in_bf16() else "no"


def computes_in_bf16() -> bool:
    """Has the processor instructions for bfloat16? Without them it is slower than float32."""
    if torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU") is None:
        return bool(torch.cuda.is_bf16_supported())
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch has no public name for them
    return any(bool(getattr(torch.cpu, name, bool)()) for name in known)


def launched() -> bool:
    """Was this process started by `accelerate launch` or `torchrun`?"""
    return any(name in os.environ for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"))


def use_threads() -> int:
    """Use the cores: `accelerate launch` and `torchrun` on a CPU machine set OMP_NUM_THREADS to 1 by themselves.

    FINETUNE_MILE_THREADS is taken as it is, and so is the user's own OMP_NUM_THREADS.
    """
    wanted = os.environ.get("FINETUNE_MILE_THREADS")
    if wanted is not None:
        torch.set_num_threads(max(int(wanted), 1))
    elif launched() and os.environ.get("OMP_NUM_THREADS") == "1" and not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(cores // local, 1))
    return torch.get_num_threads()


class Stopped(Exception):
    """A signal asked for an end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Signals:
    """SIGTERM and SIGINT become a flag that is looked at between steps; a second Ctrl-C ends at once.

    Launchers repeat what they get: SLURM signals every process, and torchrun then signals its own once more. So a
    second SIGTERM, or a SIGINT within a second of the first, counts as the same.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._caught_at = 0.0
        ours = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        self._before = {s: signal.signal(s, self._catch) for s in ours}  # Python lets other threads have no handler

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():  # back to whoever had them
            signal.signal(signum, handler)

    def _catch(self, signum: int, _: FrameType | None) -> None:
        if self.caught is None:
            self.caught, self._caught_at = signum, time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - self._caught_at > SAME_SIGNAL:
            raise KeyboardInterrupt

    def raise_if_caught(self) -> None:
        """Stop in the middle of something that can be done again."""
        if self.caught is not None:
            raise Stopped(self.caught)


def stop_together(accelerator: Accelerator, signals: Signals, step: int) -> None:
    """Raise `Stopped` if a signal came: all processes at the same step, or none."""
    if accelerator.num_processes > 1:
        if step % AGREE_EVERY:
            return
        flag = torch.tensor([signals.caught or 0], device=accelerator.device)
        caught = int(accelerator.gather(flag).max())
        if not caught:
            return  # a signal since then waits for the next look
        signals.caught = caught
    signals.raise_if_caught()


def weight_spread(network: nn.Module) -> float:
    """By how much the processes' weights differ, relative; all processes call it.

    Sums are compared, on the CPU in double precision (MPS has none): any difference moves them.
    """
    total = sum(float(p.detach().cpu().double().abs().sum()) for p in network.parameters())
    sums: list[float] = gather_object([total])
    return (max(sums) - min(sums)) / max(max(sums), 1e-30)


def warn_of_spread(spread: float) -> dict[str, object]:
    """Warn where the processes ended with different weights, after the results are written; facts for run.json."""
    if spread == 0:
        return {}
    sys.stderr.write(
        f"warning: the processes ended with different weights (sums differ by {spread:.1e}, relative). The export has "
        "those of the first process. A tiny difference can come from unlike GPUs; otherwise please report it.\n"
    )
    return {"processes_differ": spread}
