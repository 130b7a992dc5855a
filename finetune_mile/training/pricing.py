"""What a run takes on this machine: a few steps of its own loop are timed, images and phases counted, all added up.

Images that are elsewhere are replaced by noise in their number, weights that are elsewhere by random ones. A time is a
tensor of three: lower quartile, median and upper quartile, in seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from finetune_mile.checkpoints.cards import find_card, is_cached
from finetune_mile.checkpoints.init import Init, parse_init, parse_source
from finetune_mile.compute.passes import show
from finetune_mile.config.schema import Recipe
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Batch
from finetune_mile.images.pipeline import Augmentation
from finetune_mile.images.sets import Data, ImageSet, Names
from finetune_mile.images.sources import load_data
from finetune_mile.images.splits import VAL_SHARE, Pools, read_cards
from finetune_mile.learning.loop import Loop, StepRecord
from finetune_mile.learning.phases import Decision, Phase
from finetune_mile.training.display import Display, duration
from finetune_mile.training.folder import KEPT_CHECKPOINTS, RunFolder
from finetune_mile.training.memory import Need, advise, copies, fixed_bytes, kept_per_image, numbers_in
from finetune_mile.training.monitor import PROBE_IMAGES
from finetune_mile.training.plan import HELD_OUT, Plan, has_trial, trial_steps, unintended
from finetune_mile.training.processes import Device, Signals, computing
from finetune_mile.training.steps import make_loop
from finetune_mile.training.task import Model, Task, second_cost, set_up

# Scheme of --data: training images, validation images, classes.
PUBLISHED = {"imagenet": (1_281_167, 50_000, 1000), "webvision": (2_439_574, 50_000, 1000)}
START = torch.tensor([4.0, 8.0, 16.0])  # seconds for imports, opening the data, the report
QUARTILES = torch.tensor([0.25, 0.5, 0.75])
READ = 16  # images that are read at a time, and that fill the timed batch
BRIEF = 0.5  # seconds of a timed step, where many runs are priced
STEPS = 4  # timed steps
ENOUGH_SECONDS, MOST = 1.0, 20  # of timing reading, or forward passes

open_data = lru_cache(maxsize=8)(load_data)  # once for all cells of a table; its columns may be other data


# ------------------------------------------------------------------------------------ what is elsewhere


def find_data(recipe: Recipe, counts: tuple[int, int] | None = None) -> tuple[Recipe, Data, bool]:
    """The images of a recipe, or noise in their number: then the recipe is the one for the noise, and the bool False.

    Args:
        recipe: of the run; ImageNet and WebVision have published numbers.
        counts: images and classes of other data that is elsewhere; a fifth of them validates.
    """
    if counts is not None:
        val = round(VAL_SHARE * counts[0])
        train, classes, scheme = counts[0] - val, counts[1], ""
    else:
        try:
            return recipe, open_data(recipe.data), True
        except Problem as problem:
            scheme = "imagenet" if recipe.data == "hf:ILSVRC/imagenet-1k" else recipe.data.partition(":")[0]
            if scheme not in PUBLISHED:
                more = "for data that is elsewhere say how much it is: --images N --classes N"
                raise Problem(*problem.sentences, more) from problem
        train, val, classes = PUBLISHED[scheme]
    lists = {card.fraction: card.count for card in read_cards() if card.data == scheme}
    labelled = lists.get(recipe.fraction, max(round(recipe.fraction * train), 1))
    without = {"fraction": 1.0, "split": None, "truth": None}  # the fraction is in the number of labels
    return recipe.model_copy(update=without), noise(train, val, classes, labelled), False


@lru_cache(maxsize=8)
def noise(train: int, val: int, classes: int, labelled: int) -> Data:
    """Data whose images are noise; the first `labelled` training images have labels."""

    def images(count: int, labelled: int) -> ImageSet:
        given = torch.full((count,), -1)
        given[:labelled] = torch.arange(labelled) % classes
        return ImageSet(ids=Names.of(map(str, range(count))), given=given, truth=None, content=_noise, in_memory=True)

    names = tuple(map(str, range(classes)))
    return Data(name="noise", classes=names, train=images(train, labelled), val=images(val, val))


def _noise(index: int) -> Tensor:
    return torch.randint(256, (3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))


def find_weights(recipe: Recipe) -> tuple[Recipe, Init]:
    """The checkpoint of a recipe. Where it is not on this machine: random weights for the network of its card."""
    init = parse_init(recipe.init)
    if init.kind == "card" and not is_cached(card := find_card(init.name)):
        update = {"init": "none", "arch": recipe.arch or card.arch, "size": recipe.size or card.preprocess.size}
        return recipe.model_copy(update=update), parse_init("none")
    return recipe, init


# ------------------------------------------------------------------------------------ timing


class Pace(NamedTuple):
    """What a few steps of a run took, in this process."""

    step: Tensor  # time with the complete batch; zero for a frozen trunk, which takes no step on images
    forward: Tensor  # time per image without gradients; of the teacher, if one is brought along
    reading: Tensor  # time per image, of all loader processes together; zero where the images are elsewhere
    ahead: bool  # do loader processes read while a step is computed?
    shown: int  # images of a timed step
    loss: float
    weights: int  # bytes
    teacher: int  # bytes of one that is brought along
    per_image: int  # bytes that are kept for the backward pass


class _Timer:
    """A monitor that notes the loss and the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.loss = 0.0

    def on_step(self, record: StepRecord) -> None:
        self.loss = float(record.loss)  # waits for the device
        self.ends.append(time.perf_counter())

    def on_decision(self, step: int, decision: Decision) -> None:
        """Nothing is decided before the first phase."""


def rehearse(task: Task, model: Model, device: Device, longest: float, folder: Path, *, here: bool = True) -> Pace:
    """Time the first steps of a run in its own loop, on images that are read once; all processes call it.

    Args:
        task: of the run.
        model: its network is changed.
        device: where to compute.
        longest: seconds of a step; where all images take longer, fewer are shown and the time is scaled.
        folder: for what the loop writes.
        here: False: the images are noise, so reading them is not timed.
    """
    recipe, accelerator, phase = task.recipe, device.accelerator, task.plan.phases[0]
    half = recipe.precision in ("bf16", "fp16")
    per_image = kept_per_image(model.learner, task.preprocess.size, half=half)
    part = recipe.batch_size // (accelerator.num_processes * int(recipe.accumulate))
    batch, reading = _read_some(task, phase)
    switches = computing(
        precision=recipe.precision, benchmark=recipe.cudnn_benchmark is True, deterministic=recipe.deterministic
    )
    try:
        with switches, Display(task.plan.total_steps, visible=False) as display:
            few = {name: members[: 4 * READ] for name, members in task.pools.indices.items()}  # for a teacher to label
            small = dataclasses.replace(task, pools=dataclasses.replace(task.pools, indices=few))
            loop = make_loop(small, model, device, RunFolder(folder), display)
            step, shown, loss = torch.zeros(3), min(part, READ), 0.0
            if recipe.trunk != "frozen":
                step, shown, loss = _time_steps(loop, phase, batch, part, longest)
            network = model.teacher or loop.roles.learner
            images = device.prepare(_of_size(batch, shown).images, task.preprocess)
            with accelerator.autocast():
                forward = _quartiles(lambda: show(network, images)) / shown
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        advise(task, model, accelerator, error)
        raise
    return Pace(
        step=step, forward=forward, reading=reading / max(device.workers, 1) * here,
        ahead=device.workers > 0, shown=shown * int(recipe.accumulate), loss=loss,
        weights=4 * numbers_in(model.learner), teacher=4 * numbers_in(model.teacher), per_image=per_image,
    )  # fmt: skip


def _read_some(task: Task, phase: Phase) -> tuple[Batch, Tensor]:
    """The first images of a phase's pool, and the time that reading one takes in one process."""
    pool, numbers = task.pools.indices[phase.pool], itertools.count()
    views = task.views("train", Augmentation(**task.recipe.augment.of_one_image), pool)

    def read() -> Batch:  # other images each time: those that were read are in the system's cache
        return views.read([(0, int(pool[next(numbers) % len(pool)])) for _ in range(READ)])[0]

    return read(), _quartiles(read) / READ


def _of_size(batch: Batch, count: int) -> Batch:
    """As many images, each of the batch again and again."""
    rows = torch.arange(count) % len(batch.images)
    return Batch(*(None if values is None else values[rows] for values in batch))  # type: ignore[arg-type]


def _time_steps(loop: Loop, phase: Phase, batch: Batch, part: int, longest: float) -> tuple[Tensor, int, float]:
    """The time of a step with `part` images at a time, the images that were shown for it, and the loss."""

    def steps(images: int) -> tuple[Tensor, float]:
        timer, some = _Timer(), _of_size(batch, images)
        same = dataclasses.replace(loop, feed=lambda *_: itertools.repeat(some))
        same.train([dataclasses.replace(phase, steps=STEPS + 1)], 0, timer)  # the first one warms up
        return torch.tensor(timer.ends, dtype=torch.double).diff().float(), timer.loss

    images = min(2, part)
    while True:
        seconds, loss = steps(images)
        slowest = max(gather_object([float(seconds.min())]))  # the same on every process
        more = min(part, int(images * longest / slowest) // 2 * 2)
        if images == part or more < min(2 * images, part):
            return seconds.quantile(QUARTILES) * (part / images), images, loss
        images = more


def _quartiles(work: Callable[[], Any]) -> Tensor:
    """The time of some work, repeated for about a second."""
    ends = [time.perf_counter()]
    while len(ends) < STEPS + 1 or (ends[-1] - ends[0] < ENOUGH_SECONDS and len(ends) < MOST):
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    return torch.tensor(ends, dtype=torch.double).diff().float().quantile(QUARTILES)


# ------------------------------------------------------------------------------------ adding up


class Work(NamedTuple):
    """What a run does beside its steps, counted."""

    teacher_images: int  # forward passes for pseudo-labels
    evaluation_images: int  # forward passes at the ends of phases, at the end, and for labels.parquet
    label_bytes: int  # most that the stored pseudo-labels of a pool take


def count(recipe: Recipe, plan: Plan, pools: Pools, val: int, classes: int) -> Work:
    sizes = {name: len(members) for name, members in pools.indices.items()}
    imitations = [phase for phase in plan.phases if phase.name == "imitation"]
    teacher_images, label_bytes = sum(phase.steps for phase in imitations) * recipe.batch_size, 0
    if imitations and recipe.labels_once_per_cycle:
        pooled = [sizes[phase.pool] for phase in imitations]
        teacher_images = sum(pooled)
        soft = any(phase.soft for phase in imitations)  # at most 32 values and their classes; else a bit per class
        label_bytes = max(pooled) * (4 + 4 * min(32, classes) if soft else -(-classes // 8))
    evaluate, labelled = recipe.evaluate, sizes["labelled"]
    evaluations = len(plan.phases) + (plan.total_steps // plan.steps(evaluate.every) if evaluate.every else 0)
    probes = sum("teacher" in phase.becomes for phase in plan.phases) * min(PROBE_IMAGES, labelled)
    evaluated = evaluations * min(evaluate.images or val, val) + probes + val + (labelled if evaluate.labels else 0)
    if recipe.head_init == "probe":
        evaluated += labelled * (1 + has_trial(recipe, labelled)) + val
    return Work(teacher_images, evaluated, label_bytes)


class Price(NamedTuple):
    """What a run would take on this machine."""

    plan: Plan
    work: Work
    seconds: Tensor
    disk: dict[str, int]  # most bytes that a run folder holds at once, by purpose
    need: Need
    memory: int  # bytes of one process here
    warnings: list[str]  # about the schedule
    here: bool  # False: the images are elsewhere

    @property
    def left(self) -> int:
        """Bytes of a finished run folder."""
        return sum(self.disk.values()) - self.disk["checkpoints"]


def price(
    recipe: Recipe, data: Data, pools: Pools, plan: Plan, pace: Pace, *, second: float = 0.0, here: bool = True
) -> Price:
    """Add up what a run takes at a pace; `recipe`, `data`, `pools` and `plan` as they are set up.

    `second`: computing of a second stage, in steps of the first one.
    """
    labelled, classes, steps = len(pools.indices["labelled"]), len(data.classes), plan.total_steps + round(second)
    work = count(recipe, plan, pools, len(data.val), classes)

    def with_reading(computing: Tensor, images: int = 1) -> Tensor:
        reading = pace.reading * images
        return torch.maximum(computing, reading) if pace.ahead else computing + reading

    if recipe.trunk == "frozen":  # each image passes the network once
        seconds = START + with_reading(pace.forward) * (len(pools.images) + len(data.val))
    else:
        if has_trial(recipe, labelled):
            steps += trial_steps(steps, 1 - HELD_OUT)
        passes = work.evaluation_images + (work.teacher_images if recipe.labels_once_per_cycle else 0)
        seconds = START + with_reading(pace.step, recipe.batch_size) * steps + with_reading(pace.forward) * passes
        if not recipe.labels_once_per_cycle:  # labels of a batch: its images were read to be trained on
            seconds += pace.forward * work.teacher_images
    held = copies(recipe, plan.phases)
    saved = pace.weights * (1 + held) * (KEPT_CHECKPOINTS + 1)  # one more while it is written
    need = Need(fixed_bytes(pace.weights, held, pace.teacher), pace.per_image)
    return Price(
        plan=plan, work=work, seconds=seconds, here=here, warnings=unintended(recipe, plan, labelled, classes),
        disk={"checkpoints": saved, "export": pace.weights, "pseudo-labels": work.label_bytes},
        need=need, memory=need.here(recipe.batch_size // int(recipe.accumulate)) + work.label_bytes,
    )  # fmt: skip


def stage(recipe: Recipe, init: Init, folder: Path, signals: Signals, data: Data) -> tuple[Task, Model, Device]:
    """Set a run up for a rehearsal; the features of a frozen trunk, which would be computed first, are not."""
    trunk = "all" if recipe.trunk == "frozen" else recipe.trunk
    teacher = None if recipe.teacher is None else parse_source(recipe.teacher, "--teacher")
    whole = recipe.model_copy(update={"trunk": trunk})
    task, model, device = set_up(whole, init, teacher, folder, signals, data)
    task.recipe = task.recipe.model_copy(update={"trunk": recipe.trunk})
    return task, model, device


def estimate(recipe: Recipe, signals: Signals) -> Price:
    """The price of a run in one process, from steps of half a second."""
    recipe, data, here = find_data(recipe.model_copy(update={"truth": None}))  # which changes no count
    recipe, init = find_weights(recipe)
    with tempfile.TemporaryDirectory() as folder:
        task, model, device = stage(recipe, init, Path(folder), signals, data)
        pace = rehearse(task, model, device, BRIEF, Path(folder), here=here)
    return price(task.recipe, data, task.pools, task.plan, pace, second=second_cost(task), here=here)


def time_words(seconds: Tensor) -> str:
    low, middle, high = map(duration, seconds.tolist())
    if torch.cuda.is_available():
        return f"{middle} ({low} to {high}) on one {torch.cuda.get_device_name()}"
    threads = torch.get_num_threads()
    return f"{middle} ({low} to {high}) on the CPU, {threads} thread{'s' if threads > 1 else ''}"
