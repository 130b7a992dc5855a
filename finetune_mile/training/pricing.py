"""What a run would take on this machine: images and phases counted, a few steps of each kind timed, all added up.

Where the data is here, `lay_out` counts, as in the run itself. ImageNet and WebVision may be elsewhere: then their
published sizes are used. A time is a tensor of three: lower quartile, median and upper quartile, in seconds.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from rich.filesize import decimal
from torch import Tensor

from finetune_mile.checkpoints.cards import SCRATCH, Card, Missing, find_card, is_cached
from finetune_mile.checkpoints.init import Init, parse_init, parse_source, read_config
from finetune_mile.checkpoints.loading import open_trunk
from finetune_mile.config.resolve import Resolved
from finetune_mile.config.schema import Augment, Recipe
from finetune_mile.core.files import shipped
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool, Preprocess
from finetune_mile.images.pipeline import Augmentation, Views, default_workers
from finetune_mile.images.sources import load_data, load_unlabelled
from finetune_mile.images.splits import held_out_share, read_cards
from finetune_mile.learning.losses import bce
from finetune_mile.learning.optim import make_optimizer, parameter_groups
from finetune_mile.networks.heads import build, new_head
from finetune_mile.networks.parts import choose_trainable
from finetune_mile.networks.resnets import Padding
from finetune_mile.training.display import duration
from finetune_mile.training.explain import schedule_is_given
from finetune_mile.training.folder import KEPT_CHECKPOINTS
from finetune_mile.training.memory import GPUS, Need, copies, kept_per_image, numbers_in
from finetune_mile.training.plan import HELD_OUT, Plan, has_trial, make_plan, trial_steps, unintended
from finetune_mile.training.processes import on_device
from finetune_mile.training.task import PROBE_IMAGES, lay_out

open_data = lru_cache(maxsize=8)(load_data)  # once for all cells of a table; its columns may be other data

# Scheme of --data: training images, validation images, classes.
PUBLISHED = {"imagenet": (1_281_167, 50_000, 1000), "webvision": (2_439_574, 50_000, 1000)}
START = torch.tensor([4.0, 8.0, 16.0])  # seconds for imports, opening the data, the report
MOST_AT_ONCE = 64  # images of a timed step; with more, an image is hardly faster
STEP_SECONDS = 0.5  # a timed step has as many images as take about this long
ENOUGH_SECONDS, FEWEST_STEPS, MOST_STEPS = 1.0, 3, 20  # of timing one kind of step


# ------------------------------------------------------------------------------------ counting


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run does, counted."""

    plan: Plan
    pools: dict[Pool, int]  # images
    val: int
    classes: int
    here: bool  # False: the data is not on this machine
    epochs: float  # of the labelled images
    imitation_steps: int
    generations: int
    teacher_images: int  # forward passes for pseudo-labels
    evaluation_images: int  # forward passes at the ends of phases, at the end, and for labels.parquet
    label_bytes: int  # most that the stored pseudo-labels of a pool take
    notes: list[str]  # about the estimate itself
    warnings: list[str]  # about the schedule: what is likely not intended


def count(recipe: Recipe) -> Work:
    pools, val, classes, plan, here = _lay_out(recipe)
    imitations = [phase for phase in plan.phases if phase.name == "imitation"]
    steps, label_bytes = sum(phase.steps for phase in imitations), 0
    teacher_images = steps * recipe.batch_size
    if imitations and recipe.labels_once_per_cycle:
        sizes = [pools[phase.pool] for phase in imitations]
        teacher_images = sum(sizes)
        soft = any(phase.soft for phase in imitations)  # at most 32 values and their classes; else a bit per class
        label_bytes = max(sizes) * (4 + 4 * min(32, classes) if soft else -(-classes // 8))
    evaluate, labelled = recipe.evaluate, pools["labelled"]
    evaluations = len(plan.phases) + (plan.total_steps // plan.steps(evaluate.every) if evaluate.every else 0)
    probes = sum("teacher" in phase.becomes for phase in plan.phases) * min(PROBE_IMAGES, labelled)
    evaluated = evaluations * min(evaluate.images or val, val) + probes + val + (labelled if evaluate.labels else 0)
    if recipe.head_init == "probe":
        evaluated += labelled * (1 + has_trial(recipe, labelled)) + val
    notes = ["the time is that of training on images; with --trunk frozen each image passes the network once"]
    return Work(
        plan=plan, pools=pools, val=val, classes=classes, here=here, epochs=plan.total_steps / plan.steps_per_epoch,
        imitation_steps=steps, generations=plan.generations, label_bytes=label_bytes,
        notes=notes if recipe.trunk == "frozen" else [], warnings=unintended(recipe, plan, labelled, classes),
        teacher_images=teacher_images, evaluation_images=evaluated,
    )  # fmt: skip


def _lay_out(recipe: Recipe) -> tuple[dict[Pool, int], int, int, Plan, bool]:
    """The sizes of the pools, validation images, classes and phases; whether the data is here."""
    try:
        data = open_data(recipe.data)
    except Problem as problem:
        scheme = "imagenet" if recipe.data == "hf:ILSVRC/imagenet-1k" else recipe.data.partition(":")[0]
        if scheme not in PUBLISHED:
            raise Problem(*problem.sentences, "a plan needs the data, unless it is ImageNet or WebVision") from problem
    else:
        # The truth changes no count and may be a download.
        _, pools, plan = lay_out(recipe.model_copy(update={"truth": None}), data)
        sizes = {name: len(members) for name, members in pools.indices.items()}
        return sizes, len(data.val), len(data.classes), plan, True
    train, val, classes = PUBLISHED[scheme]
    lists = {card.fraction: card.count for card in read_cards() if card.data == scheme}
    labelled = lists.get(recipe.fraction, round(recipe.fraction * train))
    held_out = round(labelled * held_out_share(recipe.calibration, labelled))
    more = 0 if recipe.unlabelled is None else len(load_unlabelled(recipe.unlabelled).train)
    sizes = {"labelled": labelled - held_out, "unlabelled": train - labelled + more, "all": train - held_out + more}
    return sizes, val, classes, make_plan(recipe, sizes), False


# ------------------------------------------------------------------------------------ the network


class Network(NamedTuple):
    """The build of a network: all that timing it needs."""

    arch: str
    padding: Padding
    size: int  # of an image, in pixels
    here: bool  # are its weights on this machine?


def find_network(init: str | Init, arch: str | None, size: int | None) -> Network:
    """The network of --init and --arch. A card says which one it is, so its weights need not be here."""
    try:
        init = parse_init(init)
    except Missing:
        if arch is None:
            raise
        return Network(arch, SCRATCH.padding, size or SCRATCH.preprocess.size, here=False)
    config = read_config(init.path) if init.path and init.kind == "folder" else {}
    if {"arch", "size"} <= config.keys():
        return Network(config["arch"], config.get("padding", "torch"), size or config["size"], here=True)
    card, here = SCRATCH, init.kind != "hf"
    if init.kind == "card":
        card = find_card(init.name)
        here = is_cached(card)
    elif init.path and arch is None:
        card, arch = _read_file(init)
    arch = arch or (f"timm:{init.name}" if init.kind == "timm" else card.arch)
    if arch is None:
        raise Problem(f"{init.flag} {init}: which network? Name it with --arch.")
    return Network(arch, card.padding, size or card.preprocess.size, here=here)


@lru_cache(maxsize=16)
def _read_file(init: Init) -> tuple[Card, str]:
    trunk = open_trunk(init)
    return trunk.card, trunk.report.arch


# ------------------------------------------------------------------------------------ timing


@lru_cache(maxsize=64)
def time_network(
    network: Network, classes: int, at_once: int, precision: str, channels_last: bool,
    optimizer: Literal["sgd", "adamw", "lars", "relative"], trunk: str = "all",
) -> tuple[Tensor, Tensor, Tensor, int, tuple[int, int]]:  # fmt: skip
    """Time a network with random weights on random images, at most `at_once` in a step.

    Returns:
        Time per image of forward, loss and backward; time of a step of the optimiser; time per image of a forward pass;
        number of parameters and buffers; bytes per image that are kept for the backward pass, in float32 and bf16.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(network.arch, padding=network.padding)
    new_head(model, classes, "prior")
    if trunk not in ("all", "frozen"):  # less is learned, and the gradient ends earlier
        choose_trainable(model, trunk)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.to(device).to(memory_format=layout).train()
    autocast = torch.autocast(
        device.type, torch.bfloat16 if precision == "bf16" else torch.float16, enabled=precision in ("fp16", "bf16")
    )

    def learn(images: Tensor) -> None:
        with autocast:
            logits = model(images)
        bce(logits, torch.zeros(logits.shape, device=device)).backward()

    def forward(images: Tensor) -> None:
        with torch.no_grad(), autocast:
            model(images)

    def images(number: int) -> Tensor:
        return torch.rand(number, 3, network.size, network.size, device=device).to(memory_format=layout)

    def per_image(step: Callable[[Tensor], None]) -> Tensor:
        two = images(2)
        step(two)
        seconds = max(_seconds(lambda: step(two)) / 2, 1e-9)
        batch = images(max(min(at_once, int(STEP_SECONDS / seconds)), 2))
        return _quartiles(lambda: step(batch)) / len(batch)

    learning = per_image(learn)
    groups = parameter_groups(model, lr=1e-6, head_lr=None, weight_decay=0.0)
    updating = _quartiles(make_optimizer(optimizer, groups, momentum=0.9, nesterov=False).step)
    model.eval()
    seeing = per_image(forward)
    kept = [kept_per_image(model, network.size, half=half) for half in (False, True)]
    return learning, updating, seeing, numbers_in(model), (kept[0], kept[1])


@lru_cache(maxsize=16)
def time_reading(data: str, size: int, augment: Augment) -> Tensor:
    """Time of reading and augmenting one image in one process."""
    return time_views(Views(open_data(data).train, Preprocess(size=size), Augmentation(**augment.of_one_image), 0))


def time_views(views: Views) -> Tensor:
    """Time of reading one image in this process."""
    numbers = itertools.count()  # other images each time: those that were read are in the system's cache
    return _quartiles(lambda: views.read([(0, next(numbers) % len(views.images)) for _ in range(16)])) / 16


def _quartiles(step: Callable[[], Any]) -> Tensor:
    number = int(ENOUGH_SECONDS / max(_seconds(step), 1e-9))
    trials = [_seconds(step) for _ in range(max(FEWEST_STEPS, min(number, MOST_STEPS)))]
    return torch.tensor(trials).quantile(torch.tensor([0.25, 0.5, 0.75]))


def _seconds(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


# ------------------------------------------------------------------------------------ adding up


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run would take on this machine."""

    work: Work
    network: Network
    teacher: Network | None  # of a distillation
    parameters: int
    seconds: Tensor
    disk: dict[str, int]  # most bytes that a run folder holds at once, by purpose
    memory: int  # bytes
    on_gpus: Need  # of one process, in the recipe's precision; auto: bf16

    @property
    def left(self) -> int:
        """Bytes of a finished run folder."""
        return sum(self.disk.values()) - self.disk["checkpoints"]

    def warnings(self, *, schedule: bool = True) -> list[str]:
        """About the disk and memory of this machine and, with `schedule`, about that of the recipe."""
        sentences = [*self.work.notes, *(self.work.warnings if schedule else [])]
        disk, free = sum(self.disk.values()), shutil.disk_usage(".").free
        if disk > free:
            sentences.append(f"disk: a run needs {decimal(disk)}, {decimal(free)} are free")
        if torch.cuda.is_available():
            memory = int(torch.cuda.get_device_properties(0).total_memory)
        else:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.memory > memory:
            sentences.append(
                f"memory: a run needs about {decimal(self.memory)}, this machine has {decimal(memory)}; "
                "set accumulate, or use more processes"
            )
        return sentences


def estimate(recipe: Recipe, *, network: Network | None = None, teacher: Network | None = None) -> Estimate:
    """Estimate a run.

    Args:
        recipe: of the run.
        network: the one that learns, where --init is the folder of a run that is still to come.
        teacher: the same for --teacher.
    """
    work = count(recipe)
    network = network or find_network(recipe.init, recipe.arch, recipe.size)
    if recipe.teacher is not None and teacher is None:
        teacher = find_network(parse_source(recipe.teacher, "--teacher"), None, network.size)
    wanted, (recipe, precision) = recipe.precision, on_device(recipe)
    part = recipe.batch_size // (1 if recipe.accumulate == "auto" else recipe.accumulate)
    kind = (
        work.classes, max(min(part, MOST_AT_ONCE), 2), precision, recipe.channels_last is True,
        recipe.optimizer.name, recipe.trunk,
    )  # fmt: skip
    learn, update, forward, parameters, kept = time_network(network, *kind)
    _, _, label, teacher_parameters, _ = time_network(teacher or network, *kind)
    steps = work.plan.total_steps
    if has_trial(recipe, work.pools["labelled"]):
        steps += trial_steps(steps, 1 - HELD_OUT)
    trained = steps * recipe.batch_size
    seconds = (
        START + learn * trained + update * steps + label * work.teacher_images + forward * work.evaluation_images
    )  # fmt: skip
    if work.here:
        reading = time_reading(recipe.data, network.size, recipe.augment)
        workers = recipe.workers
        if workers is None:
            workers = 0 if open_data(recipe.data).train.in_memory else default_workers(1)
        if workers:  # they read ahead: only what they are slower than the steps counts
            reading = reading / workers * max(1 - float(workers * learn[1] / reading[1]), 0.0)
        labelled = work.teacher_images if recipe.labels_once_per_cycle else 0  # else they are read to be trained on
        seconds += reading * (trained + labelled + work.evaluation_images)
    weights, teacher_weights = 4 * parameters, 4 * teacher_parameters  # bytes
    saved = weights * (1 + copies(recipe, work.plan.phases))
    held = saved + weights + (teacher_weights if recipe.teacher else 0)
    return Estimate(
        work=work, network=network, teacher=teacher, parameters=parameters, seconds=seconds,
        disk={
            "checkpoints": saved * (KEPT_CHECKPOINTS + 1),  # one more while the next is written
            "export": weights, "pseudo-labels": work.label_bytes,
        },
        memory=held + kept[precision in ("fp16", "bf16")] * part + work.label_bytes,
        on_gpus=Need(held, kept[wanted in ("fp16", "bf16", "auto")]),
    )  # fmt: skip


# ------------------------------------------------------------------------------------ in words


def describe(resolved: Resolved, price: Estimate) -> str:
    """One line per fact, then the warnings."""
    recipe, work, network, plan = resolved.recipe, price.work, price.network, price.work.plan
    weights = "" if network.here else f"; the weights of {recipe.init} are not here, which changes no timing"
    teacher = f"; teacher {price.teacher.arch}" if price.teacher else ""
    lines = {
        "recipe": f"{resolved.path.stem} ({resolved.why}): {recipe.method}, {recipe.variant} variant",
        "data": f"{recipe.data.partition(':')[0]}: {work.pools['labelled']:,} labelled of {work.pools['all']:,} "
                f"images, {work.val:,} validation images, {work.classes:,} classes"
                + ("" if work.here else "; not on this machine, counted from its description"),
        "network": f"{network.arch} at {network.size} px, {price.parameters / 1e6:.1f} million parameters"
                   f"{weights}{teacher}",
        "steps": f"{plan.total_steps:,} of batch {recipe.batch_size} = {work.epochs:.1f} epochs of the labelled images"
                 f": {plan.total_steps - work.imitation_steps:,} interaction, {work.imitation_steps:,} imitation",
        "generations": f"{work.generations} in {len(plan.phases)} phases",
        "forwards": f"{work.teacher_images:,} images by the teacher, {work.evaluation_images:,} to evaluate",
        "disk": f"{decimal(sum(price.disk.values()))} at most: "
                + ", ".join(f"{name} {decimal(size)}" for name, size in price.disk.items())
                + f"; {decimal(price.left)} when it is finished (--keep-checkpoints keeps the checkpoints too)",
        "memory": f"about {decimal(price.memory)} for weights, optimiser and activations in one process",
        "GPUs": gpu_words(recipe, price.on_gpus),
        "time": time_words(price.seconds) + ("" if work.here else "; reading images is not in it"),
    }  # fmt: skip
    text = "".join(f"{name:<12}{line}\n" for name, line in lines.items())
    # A warning about a recipe of ours that nobody changed would be no advice.
    schedule = schedule_is_given(resolved) or not resolved.path.is_relative_to(shipped("recipes"))
    return text + "".join(f"warning: {sentence}\n" for sentence in price.warnings(schedule=schedule))


def gpu_words(recipe: Recipe, need: Need) -> str:
    """Memory per GPU, and the `accumulate` that fits: on one GPU and on eight."""
    batch, lines = recipe.batch_size, []
    for gpus in (1, 8):
        if batch % gpus == 0:
            fitting = (need.parts(batch // gpus, size * 1e9, recipe) for size in GPUS)
            lines.append(f"{', '.join('-' if n is None else str(n) for n in fitting)} on {gpus}")
    sizes = ", ".join(map(str, GPUS))
    share = batch // 8 if batch % 8 == 0 else batch
    precision = "bf16" if recipe.precision == "auto" else recipe.precision
    return (
        f"about {decimal(need.of(share))} for {share} images each in precision {precision}; with {sizes} GB, "
        f"accumulate = {'; '.join(lines)}"
    )


def time_words(seconds: Tensor) -> str:
    low, middle, high = map(duration, seconds.tolist())
    if torch.cuda.is_available():
        return f"{middle} ({low} to {high}) on one {torch.cuda.get_device_name()}"
    threads = torch.get_num_threads()
    return f"{middle} ({low} to {high}) on the CPU, {threads} thread{'s' if threads > 1 else ''}"
