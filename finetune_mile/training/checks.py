"""Is a run ready? Its data, its checkpoint against card and published accuracies, a few real steps, and their cost."""

from __future__ import annotations

import importlib
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate.utils import gather_object
from rich.filesize import decimal

from finetune_mile.checkpoints.cards import find_card
from finetune_mile.checkpoints.init import Init, parse_init
from finetune_mile.checkpoints.inspecting import record, verify_card
from finetune_mile.config.resolve import Resolved
from finetune_mile.core.cores import local_processes, usable_cores
from finetune_mile.core.files import shipped
from finetune_mile.images.sets import Data
from finetune_mile.training.explain import schedule_is_given
from finetune_mile.training.memory import gpu_words, need_of
from finetune_mile.training.pricing import Pace, Price, find_data, find_weights, price, rehearse, stage, time_words
from finetune_mile.training.processes import Device, Signals, weight_spread
from finetune_mile.training.task import Model, Task, second_cost

MOST_READ = 50_000  # images; of more, near-duplicates are not searched either
LONGEST = 5.0  # seconds of a timed step
PREFETCHED = 2  # batches that a loader process reads ahead, torch's default
SAME = 1e-6  # relative difference of the processes' weights that unlike GPUs may have
GOOD_ENOUGH = 0.9  # of the images that a step needs; less is reported as slow


class Check(NamedTuple):
    """One line of the answer."""

    name: str
    state: Literal["ok", "off", "slow", "-"]
    text: str
    advice: str = ""  # what to check next
    seen: dict[str, Any] = {}  # noqa: RUF012  facts for the record of a card


Look = Callable[[Data], tuple[list[str], int]]


def check_run(
    resolved: Resolved, look: Look, counts: tuple[int, int] | None, images: int, bank: int | None, out: Path,
    signals: Signals,
) -> Iterator[Check]:  # fmt: skip
    """Data, checkpoint, a few steps and the cost of a run, one after the other; all processes call it.

    Args:
        resolved: the recipe.
        look: reads all images: lines about them, and how many cannot be read.
        counts: images and classes of data that is elsewhere.
        images: validation images of the accuracies.
        bank: training images of k-NN.
        out: where the run folder would be.
        signals: whether to stop.
    """
    recipe, data, here = find_data(resolved.recipe, counts)
    yield from check_images(data, recipe.data, look if here else None)
    init = parse_init(recipe.init)
    if not here:
        recipe, init = find_weights(recipe)
    with tempfile.TemporaryDirectory() as folder:
        task, model, device = stage(recipe, init, Path(folder), signals, data)
        if recipe.init == resolved.recipe.init:
            yield from check_checkpoint(task, model, device, init, images if here else None, bank)
        else:
            text = f"{resolved.recipe.init}: {model.report.arch}; its weights are not here, random ones are used"
            yield Check("load", "-", text)
        pace = rehearse(task, model, device, LONGEST, Path(folder), here=here)
        cost = price(task.recipe, data, task.pools, task.plan, pace, second=second_cost(task), here=here)
        yield from check_step(task, model, device, pace, cost)
    yield from check_cost(task, model, cost, out)
    # A warning about a recipe of ours that nobody changed would be no advice.
    if schedule_is_given(resolved) or not resolved.path.is_relative_to(shipped("recipes")):
        yield from (Check("warning", "-", sentence) for sentence in cost.warnings)


def check_images(data: Data, name: str, look: Look | None) -> Iterator[Check]:
    """What `look` sees, on the first process, where there are not too many images; None: they are elsewhere."""
    counts = f"{len(data.train):,} training and {len(data.val):,} validation images, {len(data.classes):,} classes"
    if look is None:
        yield Check("data", "-", f"{counts}; counted, they are not on this machine")
    elif len(data.train) + len(data.val) > MOST_READ:
        text = f"{counts}; too many to be read now: `finetune-mile check --data {shlex.quote(name)}` reads all of them"
        yield Check("data", "-", text)
    elif os.environ.get("RANK", "0") == "0":
        lines, bad = look(data)
        yield from (Check("data", "-", line) for line in lines)
        if bad:
            yield Check("data", "off", f"{bad:,} images cannot be read", "the lines above; --list FILE names them all")


# ------------------------------------------------------------------------------------ the checkpoint


def check_checkpoint(
    task: Task, model: Model, device: Device, init: Init, images: int | None, bank: int | None
) -> Iterator[Check]:
    """The file against its card, the load report, and accuracies against the published ones; all processes call it.

    `images` and `bank` as in `check_run`; None: there are no images to measure accuracies on.
    """
    main, report, seen = device.accelerator.is_main_process, model.report, dict[str, Any]()
    card = find_card(init.name) if init.kind == "card" and init.chosen is None else None
    if card is None:
        yield Check("file", "-", f"{init}: {report.arch}; there is no card to compare it with")
    elif main:
        fine, words, seen = verify_card(card)
        advice = f"another file than the card's, or read in another way: finetune-mile weights check {card.name}"
        yield Check("file", "ok" if fine else "off", f"{card.name}: {words}", advice)
    new = [name for name in report.reset if not name.endswith("num_batches_tracked")]  # torch's counters of batch norm
    counts = f"{len(report.loaded)} tensors loaded, {len(new)} new ({', '.join(new[:3])}{', ...' * (len(new) > 3)})"
    counts += f", {len(report.dropped)} ignored"
    yield Check("load", "ok", f"{counts}; format {report.format}, padding {report.padding}")
    if images is None:
        return
    published = importlib.import_module("finetune_mile.paper.published")
    found: list[Check] = list(published.check_accuracies(task, model, device, init, images, bank))
    yield from found
    if card is not None and main:
        accuracies = {check.name: check.seen for check in found if check.seen}
        try:
            text = str(record(card, seen | {"accuracies": accuracies}))
        except OSError as error:
            text = f"not written: {error}"
        yield Check("record", "-", text)


# ------------------------------------------------------------------------------------ a step, and its room


def check_step(task: Task, model: Model, device: Device, pace: Pace, cost: Price) -> Iterator[Check]:
    """The steps that were taken, on every process: time, loss, memory; then reading."""
    recipe, world = task.recipe, device.accelerator.num_processes
    if recipe.trunk == "frozen":
        yield Check("step", "-", f"--trunk frozen: an image passes the network once, in {float(pace.forward[1]):.3f} s")
        return
    mine = (pace.loss, float(pace.step[1]), _memory(device, used=True))
    ranks: list[tuple[float, float, int]] = gather_object([mine])
    same, finite = weight_spread(model.learner) <= SAME, all(math.isfinite(loss) for loss, _, _ in ranks)
    step, parts = max(seconds for _, seconds, _ in ranks), world * int(recipe.accumulate)
    shown = pace.shown * world
    scaled = "" if shown == recipe.batch_size else f" (from steps with {shown:,} images)"
    advice = "the processes have different weights after a step" if finite else "the accuracies, then a smaller --lr"
    yield Check("step", "ok" if finite and same else "off", f"{world} process{'es' if world > 1 else ''}, "
                f"{recipe.batch_size:,} images in {parts} part{'s'[: parts - 1]}: {step:.2f} s{scaled}, loss "
                f"{pace.loss:.3f}", advice)  # fmt: skip
    used, total = max(memory for _, _, memory in ranks), _memory(device, used=False)
    text = f"a process has used {decimal(used)} of its {decimal(total)}"
    if scaled:
        used = max(used, cost.need.here(recipe.batch_size // parts))
        text += f"; with the complete batch it takes about {decimal(used)}"
    yield Check("memory", "ok" if used <= total else "off", text, "--set accumulate=N: the batch stays the same")
    if device.workers:
        yield from _check_loading(task, device, pace, step)
    else:
        yield Check("loading", "-", "no loader processes: images are read between the steps")


def _memory(device: Device, *, used: bool) -> int:
    """Most bytes that this process has had on its device so far, or bytes of the device: of a CPU its share."""
    place = device.accelerator.device
    if place.type == "cuda":
        most, total = torch.cuda.max_memory_reserved(place), torch.cuda.get_device_properties(place).total_memory
        return int(most if used else total)
    if used:
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    share = local_processes(device.accelerator.num_processes)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // share


def _check_loading(task: Task, device: Device, pace: Pace, step: float) -> Iterator[Check]:
    """Are images read as fast as a step needs them, and do the batches that are read ahead fit into shared memory?"""
    recipe, world = task.recipe, device.accelerator.num_processes
    here = local_processes(world)
    workers, cores, one = device.workers * here, usable_cores(), 1 / float(pace.reading[1] * device.workers)
    reading, needed = one * min(workers, cores), recipe.batch_size / step * here / world
    text = f"{one:,.0f} images a second by one loader process, {reading:,.0f} by {workers} on {cores} cores; the steps "
    yield Check("loading", "ok" if reading >= GOOD_ENOUGH * needed else "slow", f"{text}need {needed:,.0f}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        images = PREFETCHED * workers * (recipe.batch_size // (world * int(recipe.accumulate)))
        need, free = images * 3 * task.preprocess.size**2, shutil.disk_usage(shared).free
        text = f"batches that are read ahead take {decimal(need)}, {decimal(free)} are free in {shared}"
        advice = f"start the container with --shm-size {math.ceil(1.5 * need / 1e9)}g, or use --set workers=N"
        yield Check("shm", "ok" if need <= free else "off", text, advice)


# ------------------------------------------------------------------------------------ the cost


def check_cost(task: Task, model: Model, price: Price, out: Path) -> Iterator[Check]:
    """Steps, forward passes, disk, GPUs and time of the run."""
    recipe, plan, work = task.recipe, price.plan, price.work
    imitation = sum(phase.steps for phase in plan.phases if phase.name == "imitation")
    text = (
        f"{plan.total_steps:,} of batch {recipe.batch_size} = {plan.total_steps / plan.steps_per_epoch:.1f} epochs of "
        f"the labelled images: {plan.total_steps - imitation:,} interaction, {imitation:,} imitation; "
        f"{plan.generations} generations in {len(plan.phases)} phases"
    )
    yield Check("steps", "-", text)
    text = f"{work.teacher_images:,} images by the teacher, {work.evaluation_images:,} to evaluate"
    yield Check("forwards", "-", text)
    place = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    needed, free = sum(price.disk.values()), shutil.disk_usage(place).free
    parts = ", ".join(f"{name} {decimal(size)}" for name, size in price.disk.items())
    text = (
        f"{decimal(needed)} at most: {parts}; {decimal(price.left)} when it is finished (--keep-checkpoints keeps the "
        f"checkpoints too); {decimal(free)} are free in {place}"
    )
    yield Check("disk", "ok" if needed <= free else "off", text, "more space, or another place for --out")
    wanted = task.requested.model_copy(update={"precision": "bf16"} if task.requested.precision == "auto" else {})
    need = need_of(wanted, plan.phases, model.learner, model.teacher, task.preprocess.size)
    yield Check("GPUs", "-", gpu_words(wanted, need))
    yield Check("time", "-", time_words(price.seconds) + ("" if price.here else "; reading images is not in it"))
