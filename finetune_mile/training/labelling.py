"""A teacher labels a whole pool once per generation: block by block, each kept in the run folder.

A run that is stopped or killed goes on with the blocks that are missing. A block belongs to a teacher's weights, a
target rule, a view and a list of images; one that belongs to anything else is made anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from finetune_mile.core.files import write_whole
from finetune_mile.images.order import Indices
from finetune_mile.learning.phases import Phase
from finetune_mile.learning.roles import Roles, weights_hash
from finetune_mile.learning.stores import Block, LabelStore, encode
from finetune_mile.training.folder import remove_written
from finetune_mile.training.processes import Device
from finetune_mile.training.task import Task

BLOCK = 32768  # images whose logits are held at a time: 131 MB with 1,000 classes
ROWS = 2048  # of them become targets at a time


def pool_labeller(
    task: Task, device: Device, roles: Roles, run: Path, progress: Callable[..., None]
) -> Callable[[Phase], LabelStore]:
    """A function that gives the teacher's labels of a phase's pool, on plain views.

    Args:
        task: the images and the method.
        device: where to compute.
        roles: who is the teacher.
        run: the run folder.
        progress: told (generation, images labelled, images=in the pool) after each batch.
    """

    def label(phase: Phase) -> LabelStore:
        pool = task.pools.indices[phase.pool]
        parts = [pool[at : at + BLOCK] for at in range(0, len(pool), BLOCK)]
        folder = run / f"pseudo_labels/generation-{phase.generation}"
        if device.accelerator.is_main_process:
            _make_room(folder)
        mark = _mark(task, roles, phase)
        paths = [folder / f"block-{number:05d}.safetensors" for number in range(len(parts))]
        marks = [f"{mark} {hashlib.sha256(part.tobytes()).hexdigest()}" for part in parts]
        blocks = [_read(*block) for block in zip(paths, marks, strict=True)]
        known = _known_everywhere(device.accelerator, blocks)
        done = sum(len(part) for part, is_known in zip(parts, known, strict=True) if is_known)
        for number, part in enumerate(parts):
            if not known[number]:
                tell = partial(progress, phase.generation, images=len(pool))
                tick = _Ticks(device, done, task.recipe.batch_size, tell)
                blocks[number] = _label_block(task, device, roles, phase, part, tick)
                if device.accelerator.is_main_process:
                    _write(paths[number], blocks[number], marks[number])
                done += len(part)
        rows = torch.full((len(task.pools.images),), -1, dtype=torch.int32)
        rows[torch.from_numpy(pool)] = torch.arange(len(pool), dtype=torch.int32)
        return LabelStore(rows, blocks, BLOCK, task.num_classes)

    return label


def _label_block(
    task: Task, device: Device, roles: Roles, phase: Phase, part: Indices, tick: Callable[[], None]
) -> Block:
    assert roles.teacher is not None
    logits, readable = device.outputs(roles.teacher, task.views("train"), part, tick)
    for some, read in zip(logits.split(ROWS), readable.split(ROWS), strict=True):  # in place, for the memory
        targets = task.recipe.method_value.targets(phase, some)
        some.copy_(targets.masked_fill(~read.unsqueeze(1), 0.0))  # none, also where the rule would take the best one
    return encode(logits, soft=phase.soft)


def _make_room(folder: Path) -> None:
    """Drop the labels of other generations, and the leftovers of a kill."""
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.glob("generation-*"):
        if other != folder:
            remove_written(other.parent, (f"{other.name}/block-*.safetensors",))
    for part in folder.glob(".block-*.part"):
        part.unlink()


def _mark(task: Task, roles: Roles, phase: Phase) -> str:
    """A hash of all that a label depends on, except for which images there are."""
    assert roles.teacher is not None
    what = (phase.values, phase.loss, task.num_classes, task.recipe.precision, task.preprocess.model_dump_json())
    return weights_hash(roles.teacher, repr(what))


def _read(path: Path, mark: str) -> Block:
    """A block from an earlier setup; an empty one where there is none, or one of another teacher."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("mark") != mark:
                return {}
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError):  # cut off by a full disk: it is made anew
        return {}


def _write(path: Path, block: Block, mark: str) -> None:
    write_whole(path, save(block, metadata={"mark": mark}))


def _known_everywhere(accelerator: Accelerator, blocks: list[Block]) -> list[bool]:
    """Which blocks every process has read: all of them label a block together, or none."""
    mine = torch.tensor([bool(block) for block in blocks], dtype=torch.int32, device=accelerator.device)
    readers: list[int] = accelerator.reduce(mine, reduction="sum").tolist()
    return [count == accelerator.num_processes for count in readers]


class _Ticks:
    """Called after each batch: lets the run stop, and tells how many images all processes have labelled."""

    def __init__(self, device: Device, done: int, batch_size: int, tell: Callable[[int], None]) -> None:
        self.device, self.done, self.batch_size, self.tell = device, done, batch_size, tell

    def __call__(self) -> None:
        self.device.tick()
        self.done += self.batch_size
        self.tell(self.done)
