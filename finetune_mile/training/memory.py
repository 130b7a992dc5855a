"""Memory of one training process, estimated without a GPU: what is kept all the time, and per image in a step.

Nothing is computed: the forward pass runs on tensors without contents, and what autograd keeps is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.filesize import decimal
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from finetune_mile.config.schema import Recipe
from finetune_mile.core.problems import Failed
from finetune_mile.learning.phases import Phase

if TYPE_CHECKING:
    from accelerate import Accelerator

    from finetune_mile.training.task import Model, Task

GPUS = (16, 24, 40, 80)  # GB
CONTEXT = 1_500_000_000  # bytes of CUDA, cuDNN and NCCL themselves
SPARE = 1.15  # gradients of activations, and what the allocator cannot use


class Need(NamedTuple):
    """Bytes of one process."""

    fixed: int
    per_image: int  # kept for the backward pass

    def here(self, images: int) -> int:
        """With so many images in a step, without what only a GPU needs."""
        return self.fixed + self.per_image * images

    def of(self, images: int) -> int:
        """On a GPU, with so many images in a step."""
        return int(self.fixed + CONTEXT + SPARE * self.per_image * images)

    def parts(self, batch: int, memory: float, recipe: Recipe) -> int | None:
        """The fewest parts of a process's batch that fit; None where no part of two images does, or none is allowed."""
        pairs = 2 if recipe.augment.mixup or recipe.augment.cutmix else 1
        whole = "whole_batch" in recipe.method_value.needs
        for parts in [1] if whole else range(1, max(batch // 2, 1) + 1):
            if batch % (parts * pairs) == 0 and self.of(batch // parts) <= memory:
                return parts
        return None


def copies(recipe: Recipe, phases: Sequence[Phase]) -> int:
    """Copies of the weights that a checkpoint holds beside them: other roles, the optimiser's moments, the average."""
    used = {"student"} | {role for phase in phases for role in (phase.start, *phase.becomes)}
    imitates = any(phase.name == "imitation" for phase in phases)
    moments = 2 if recipe.optimizer.name in ("adamw", "relative") else 1
    others = len(used & {"init", "student"}) + (imitates and recipe.teacher is None)
    return others + moments + (recipe.optimizer.ema is not None)


def need_of(recipe: Recipe, phases: Sequence[Phase], network: nn.Module, teacher: nn.Module | None, size: int) -> Need:
    """What a network takes as it is trained by a recipe on images of `size` pixels."""
    kept = kept_per_image(network, size, half=recipe.precision in ("bf16", "fp16"))
    return Need(fixed_bytes(4 * numbers_in(network), copies(recipe, phases), 4 * numbers_in(teacher)), kept)


def fixed_bytes(weights: int, copies: int, teacher: int) -> int:
    """Bytes that are kept all the time: weights with their gradients and copies, and a teacher of another run."""
    return weights * (2 + copies) + teacher


def numbers_in(network: nn.Module | None) -> int:
    """Parameters and buffers."""
    return 0 if network is None else sum(each.numel() for each in (*network.parameters(), *network.buffers()))


def kept_per_image(network: nn.Module, size: int, *, half: bool) -> int:
    """Bytes that autograd keeps of an image (3, size, size) for the backward pass of a network that is training."""

    def kept(images: int) -> int:
        stores: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                stores[id(storage)] = storage  # held, so that no other one gets its number
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(network, tensors, torch.empty(images, 3, size, size, device=device))
        return sum(storage.nbytes() for storage in stores.values())

    device = next(network.parameters()).device
    was_training = network.training
    network.train()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=half)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.enable_grad(), autocast:
        named = (*network.named_parameters(), *network.named_buffers())
        tensors: dict[str, Tensor] = {
            name: fake.from_tensor(tensor) for name, tensor in named
        }  # batch norm counts in these
        small, large = kept(2), kept(4)
    network.train(was_training)
    return (large - small) // 2


def gpu_words(recipe: Recipe, need: Need) -> str:
    """Memory per GPU, and the `accumulate` that fits: on one GPU and on eight."""
    batch, lines = recipe.batch_size, []
    for gpus in (1, 8):
        if batch % gpus == 0:
            fitting = (need.parts(batch // gpus, size * 1e9, recipe) for size in GPUS)
            lines.append(f"{', '.join('-' if n is None else str(n) for n in fitting)} on {gpus}")
    share = batch // 8 if batch % 8 == 0 else batch
    return (
        f"about {decimal(need.of(share))} for {share} images each in precision {recipe.precision}; with "
        f"{', '.join(map(str, GPUS))} GB, accumulate = {'; '.join(lines)}"
    )


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU; None for a CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def advise(task: Task, model: Model, accelerator: Accelerator, error: RuntimeError) -> None:
    """Turn an out-of-memory error into a sentence that says which settings fit; of any other error say nothing."""
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        return
    recipe = task.recipe
    batch, memory = recipe.batch_size // accelerator.num_processes, device_memory(accelerator.device)
    now = int(recipe.accumulate)
    need = need_of(recipe, task.plan.phases, model.learner, model.teacher, task.preprocess.size)
    estimated = 1 if memory is None else need.parts(batch, memory, recipe) or batch // 2
    more = next((n for n in range(now + 1, batch // 2 + 1) if batch % n == 0 and n >= estimated), None)
    ways = [] if recipe.gradient_checkpointing or recipe.compile else ["--set gradient_checkpointing=true"]
    if recipe.precision in ("no", "tf32") and memory is not None:
        ways.append("--set precision=auto")
    if more is not None and "whole_batch" not in recipe.method_value.needs:
        ways.insert(
            0, f"--set accumulate={more} (the batch of {recipe.batch_size:,} stays, in parts of {batch // more})"
        )
    ways.append("a smaller --batch-size, with a smaller --lr")
    where = str(accelerator.device) if memory is None else f"{accelerator.device}, which has {decimal(memory)}"
    raise Failed(
        f"out of memory on {where}: a step with {batch // now} images per process takes about "
        f"{decimal(need.of(batch // now))}. Start a new run with {', '.join(ways[:-1])}{', or ' if ways[:-1] else ''}"
        f"{ways[-1]}."
    ) from error
