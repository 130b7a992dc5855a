"""Processes: how they start, stop together, and whether they agree; and the device on which they compute."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, gather_object, set_seed
from accelerate.utils.environment import parse_flag_from_env
from torch import Tensor, nn

from finetune_mile.compute.passes import Outputs, outputs_of
from finetune_mile.config.schema import Recipe
from finetune_mile.core.cores import chosen_threads, local_processes, usable_cores
from finetune_mile.core.files import unwritable
from finetune_mile.core.problems import Failed, Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images.order import Indices
from finetune_mile.images.pipeline import Readers, Views, normalise
from finetune_mile.learning.probe import SMALL

Precision = Literal["no", "tf32", "fp16", "bf16"]
SAME_SIGNAL = 1.0  # seconds
AGREE_EVERY = 8  # steps between two looks at whether another process was told to stop
# Seconds that a process waits for the others; longer than any work that only one of them does.
TIMEOUT = 1800
MOST_THREADS = 1024
Value = TypeVar("Value")


def connect() -> PartialState:
    """Connect the processes that a launcher started, or a `Problem` with the command to use. Again, it does nothing.

    A process waits for the others at most TIMEOUT seconds, or FINETUNE_MILE_TIMEOUT: one that is dead or hangs ends
    the run.
    """
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true":
            raise Problem(
                f"Accelerate is configured for {plugin}, which is not supported: the teacher and student are copies of "
                "the complete network. Use `accelerate config` with data parallel training (multi-GPU)"
            )
    wanted = os.environ.get("FINETUNE_MILE_TIMEOUT", str(TIMEOUT))
    if not wanted.isdigit() or int(wanted) == 0:
        raise Problem(f"FINETUNE_MILE_TIMEOUT is {wanted!r}; it must be a whole number of seconds above zero")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        atexit.unregister(leave_group)
        atexit.register(leave_group)
        importlib.import_module("torch.distributed.nn")  # later, as torch itself does, it would keep the group for ever
    processes = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"), timeout=timedelta(seconds=int(wanted)))
    if world > 1 and processes.num_processes == 1:
        # On a machine without accelerators each rank would believe to be alone and write the same folder.
        raise Problem(
            f"{world} processes were started, but each sees only itself; on CPUs start them with: "
            f"ACCELERATE_USE_CPU=1 torchrun --nproc_per_node {world} finetune_mile/run.py ..."
        )
    return processes


def from_first(work: Callable[[], Value]) -> Value:
    """What some work of the first process gives, on every process; a `Problem` there is raised on all of them."""
    box: list[Any] = [None]
    if connect().is_main_process:
        try:
            box = [work()]
        except Problem as problem:
            box = [problem]
        except OSError as error:
            box = [unwritable(error.filename or "a file", error)]
    broadcast_object_list(box)
    if isinstance(box[0], Problem):
        raise box[0]
    value: Value = box[0]
    return value


def start(*, precision: str, seed: int, track: str, project: str, broadcast_buffers: bool = True) -> Accelerator:
    """An accelerator that is what the user asked for, or a `Problem` with the command to use.

    Args:
        precision: of matrix products.
        seed: of torch's own generators.
        track: where metrics go.
        project: folder of the run.
        broadcast_buffers: send buffers in every step; else the caller makes them agree (`Loop.agree`).
    """
    use_threads()
    connect()
    if track == "wandb":
        os.environ.setdefault("WANDB_MODE", "offline")  # `wandb sync` uploads it; WANDB_MODE=online does so at once
    mixed = "no" if precision == "tf32" else precision  # `computing` sets TF32
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed:
        AcceleratorState._reset_state()  # of an earlier run in this process; it would be an error
    accelerator = Accelerator(
        mixed_precision=mixed,
        step_scheduler_with_optimizer=False,
        log_with=None if track == "none" else track,
        project_dir=project,
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=broadcast_buffers)
        ],
    )
    set_seed(seed)
    return accelerator


def leave_group() -> None:
    """Leave the other processes; an interpreter that ends with gloo's threads alive may abort.

    They end with the last reference to the group, which Accelerate may have left already (pytorch#190489).
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()


def wanted_precision(recipe: Precision | Literal["auto"]) -> Precision:
    """`accelerate launch --mixed_precision` wins over the recipe, as flags do."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched in ("fp16", "bf16"):
        return "fp16" if launched == "fp16" else "bf16"
    if recipe != "auto":
        return recipe
    return "bf16" if computes_in_bf16() else "tf32" if uses_gpu() else "no"


def uses_gpu() -> bool:
    """Will Accelerate choose a CUDA device?"""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def computes_in_bf16() -> bool:
    """Has the device instructions for bfloat16? Without them it is slower than float32."""
    if uses_gpu():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch has no public name for them
    return any(bool(getattr(torch.cpu, name, bool)()) for name in known)


def launched() -> bool:
    """Was this process started by `accelerate launch`, which sets both of its variables here, or by `torchrun`?"""
    by_accelerate = {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} <= os.environ.keys()
    return by_accelerate or "TORCHELASTIC_RUN_ID" in os.environ


def use_threads() -> int:
    """Use the cores: `accelerate launch` and `torchrun` on a CPU machine set OMP_NUM_THREADS to 1 by themselves.

    FINETUNE_MILE_THREADS is taken as it is, and so is the user's own OMP_NUM_THREADS.
    """
    wanted = os.environ.get("FINETUNE_MILE_THREADS")
    if wanted is not None:
        if not wanted.isdecimal() or not 1 <= int(wanted[:9]) <= MOST_THREADS:
            raise Problem(
                f"FINETUNE_MILE_THREADS is {wanted[:40]!r}; it must be a whole number from 1 to {MOST_THREADS}"
            )
        torch.set_num_threads(int(wanted))
    elif launched() and os.environ.get("OMP_NUM_THREADS") == "1" and not torch.cuda.is_available():
        if chosen_threads(Path("/proc", str(os.getppid()))):
            return torch.get_num_threads()
        torch.set_num_threads(max(usable_cores() // local_processes(int(os.environ.get("WORLD_SIZE", "1"))), 1))
    return torch.get_num_threads()


def on_device(recipe: Recipe) -> Recipe:
    """A recipe with precision and switches spelled out for the device of this process."""
    gpu = uses_gpu()
    chosen = {"channels_last": gpu, "cudnn_benchmark": gpu and not recipe.deterministic, "fused_optimizer": gpu}
    update: dict[str, object] = {name: value for name, value in chosen.items() if getattr(recipe, name) == "auto"}
    return recipe.model_copy(update=update | {"precision": wanted_precision(recipe.precision)})


@contextlib.contextmanager
def computing(*, precision: str, benchmark: bool, deterministic: bool = False) -> Iterator[None]:
    """Set torch's own switches for a run, and put them back."""
    cudnn, matmul = torch.backends.cudnn, torch.get_float32_matmul_precision()
    before = cudnn.benchmark, cudnn.deterministic
    strict = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        cudnn.benchmark = benchmark
        if precision == "tf32" and uses_gpu():
            torch.set_float32_matmul_precision("high")
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
            cudnn.deterministic = True
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)


class Stopped(Exception):
    """A signal asked for an end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Signals:
    """SIGTERM and SIGINT become a flag that is looked at between steps; a second Ctrl-C ends at once.

    Launchers repeat what they get: SLURM signals every process, and torchrun then signals its own once more. So a
    second SIGTERM, or a SIGINT within a second of the first, counts as the same.

    A launcher that is killed passes nothing on: a run that has lost its launcher stops as after SIGTERM.

    Args:
        parent: the process that started this one; it is found before torch is imported, which takes seconds.
    """

    def __init__(self, parent: int | None = None) -> None:
        self._caught: int | None = None
        self._caught_at = 0.0
        self._launcher = (os.getppid() if parent is None else parent) if launched() else None  # None: by hand
        ours = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        self._before = {s: signal.signal(s, self._catch) for s in ours}  # Python lets other threads have no handler

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():  # back to whoever had them
            signal.signal(signum, handler)

    @property
    def caught(self) -> int | None:
        """The signal that asked for an end; None: none did."""
        if self._caught is None and self._launcher not in (None, os.getppid()):
            sys.stderr.write(f"the launcher (process {self._launcher}) is gone: stopping with a checkpoint\n")
            self.stop(signal.SIGTERM)
        return self._caught

    def stop(self, signum: int) -> None:
        """Ask for an end."""
        self._caught, self._caught_at = signum, time.monotonic()

    def _catch(self, signum: int, _: FrameType | None) -> None:
        if self._caught is None:
            self.stop(signum)
        elif signum == signal.SIGINT and time.monotonic() - self._caught_at > SAME_SIGNAL:
            raise KeyboardInterrupt

    def raise_if_caught(self) -> None:
        """Stop in the middle of something that can be done again."""
        caught = self.caught
        if caught is not None:
            raise Stopped(caught)


def stop_together(accelerator: Accelerator, signals: Signals, step: int) -> None:
    """Raise `Stopped` if a signal came: all processes at the same step, or none."""
    if accelerator.num_processes > 1:
        if step % AGREE_EVERY:
            return
        flag = torch.tensor([signals.caught or 0], device=accelerator.device)
        caught = int(accelerator.gather(flag).max())
        if not caught:
            return  # a signal since then waits for the next look
        signals.stop(caught)
    signals.raise_if_caught()


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


def stoppable(work: Callable[[Accelerator, Signals], None]) -> int:
    """Start the processes and work; a signal stops it at a moment that the same command continues from."""
    with Signals() as signals:
        accelerator = start(precision=wanted_precision("no"), seed=0, track="none", project=".")
        try:
            work(accelerator, signals)
        except Stopped as stopped:
            accelerator.print("stopped; run the same command again to continue", file=sys.stderr)
            return 128 + stopped.signum
    return 0
