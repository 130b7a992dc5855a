"""`finetune-mile preflight`: minutes before hours. Are the checkpoint, the data and this machine what a run needs?"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from finetune_mile.checkpoints.cards import Card, fetch_card, find_card
from finetune_mile.checkpoints.init import Init, parse_init, parse_source
from finetune_mile.config.flags import Parser
from finetune_mile.config.flags import parse as parse_run
from finetune_mile.config.resolve import resolve
from finetune_mile.core.cores import local_processes, usable_cores
from finetune_mile.core.problems import Failed, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from finetune_mile.checkpoints.loading import Opened
    from finetune_mile.images.order import Indices
    from finetune_mile.learning.loop import StepRecord
    from finetune_mile.learning.phases import Decision
    from finetune_mile.training.features import Split
    from finetune_mile.training.setup import Setup

EPILOG = """examples:
  finetune-mile preflight --init simclrv2-sk1 --fraction 0.01                      ImageNet: IMAGENET_DIR
  accelerate launch -m finetune_mile.cli preflight --init mocov2 --fraction 0.1    a step on every GPU
  finetune-mile preflight --init mocov2 --fraction 0.1 --bank all                  k-NN as it was published

Checked: the file's hash, tensors and features against its card; its own linear classifier and k-NN
against the published top-1; a few steps on every process; memory, disk, shared memory, and how fast
images are read. What was seen of a card's file is recorded (docs/imagenet.md: send it in).
Exit code: 0 ready, 1 something is off, 2 the command or its input is wrong.
"""
MOST_IMAGES = 10**7
CLASSES = 1000  # of ImageNet
FEW, MANY = 20_000, 100_000  # training images of a quick k-NN; features that are better kept on disk
EACH = 128  # images of a forward pass, per process
STEPS = 4  # the first one warms up
PREFETCHED = 2  # batches that a loader process reads ahead, torch's default
SAME = 1e-6  # relative difference of the processes' weights that unlike GPUs may have
GOOD_ENOUGH = 0.9  # of the images that a step needs; less is reported as slow
State = Literal["ok", "off", "slow", "-"]


class Check(NamedTuple):
    """One line of the answer."""

    name: str
    state: State
    text: str
    advice: str = ""  # what to check next


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile preflight", allow_abbrev=False, epilog=EPILOG,
        usage="finetune-mile preflight --init NAME [--images N] [--bank N] [flags of finetune-mile run]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Check what a run needs before it starts. Takes the flags of the run (`finetune-mile run --help`).",
    )  # fmt: skip
    parser.add_argument("--images", default="2000", metavar="N", help="validation images of the accuracies, or all "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--bank", metavar="N", help="training images of k-NN, or all, as published (default: 20000 if "
                        "nothing else can be compared)")  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    """The command: 0 ready, 1 something is off, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options, rest = build_parser().parse_known_args(argv)
    images, bank = _count("--images", options.images), _count("--bank", options.bank)
    run = parse_run(rest)
    for flag in ("resume", "explain", "json", "seeds"):
        if getattr(run, flag):
            raise Problem(f"--{flag}: not available here. Give the flags of a new run.")
    recipe = resolve(run.given, run.sets).recipe
    if recipe.trunk == "frozen":
        raise Problem("--trunk frozen: preflight takes steps on images; leave it out")
    init = parse_init(recipe.init)
    teacher = None if recipe.teacher is None else parse_source(recipe.teacher, "--teacher")
    if init.kind == "card":
        fetch_card(find_card(init.name))
    from finetune_mile.training.processes import Signals, Stopped
    from finetune_mile.training.setup import set_up

    with Signals() as signals, tempfile.TemporaryDirectory() as scratch:
        setup = set_up(recipe, init, teacher, Path(scratch), signals)
        try:
            return _checks(setup, init, images, bank, run.out or Path("runs"))
        except Stopped as stopped:
            return 128 + stopped.signum


def _count(flag: str, text: str | None) -> int | None:
    """A number of images; `all` is more than there are."""
    if text is None or text == "all":
        return None if text is None else MOST_IMAGES
    if not text.isdecimal() or not 1 <= int(text[:20]) <= MOST_IMAGES:
        raise Problem(f"{flag} {text[:80]}: must be from 1 to {MOST_IMAGES:,}, or all")
    return int(text)


def _checks(setup: Setup, init: Init, images: int | None, bank: int | None, out: Path) -> int:
    """Run the checks, print each as it ends, and sum up; all processes call it."""
    from accelerate.utils import broadcast_object_list

    from finetune_mile.verbs.weights import record, verify_card

    main = setup.accelerator.is_main_process
    card = find_card(init.name) if init.kind == "card" else None
    seen: dict[str, Any] = {}
    done: list[Check] = []

    def say(*checks: Check) -> None:
        done.extend(checks)
        for check in checks if main else ():
            sys.stdout.write(f"{check.name:<9}{check.state:<6}{check.text}\n")
            sys.stdout.flush()

    if main and card is not None and init.choice is None:
        fine, words, seen = verify_card(card)
        advice = f"another file than the card's, or read in another way: finetune-mile weights check {card.name}"
        say(Check("file", "ok" if fine else "off", f"{card.name}: {words}", advice))
    elif main:
        say(Check("file", "-", f"{init}: {setup.report.arch}; there is no card to compare it with"))
    report = setup.report
    new = [name for name in report.reset if not name.endswith("num_batches_tracked")]  # torch's counters of batch norm
    counts = f"{len(report.loaded)} tensors loaded, {len(new)} new ({', '.join(new[:3])}{', ...' * (len(new) > 3)})"
    counts += f", {len(report.dropped)} ignored"
    say(Check("load", "ok", f"{counts}; format {report.format}, padding {report.padding}"))
    accuracies = _accuracies(setup, init, images, bank)
    say(*(check for check, _ in accuracies))
    step, checks = _steps(setup, out)
    say(*checks)
    if main:
        say(*_loading(setup, step))
        if seen and card is not None:
            say(Check("record", "-", str(record(card, seen | {"accuracies": dict(f for _, f in accuracies if f)}))))
    off = broadcast_object_list([[check for check in done if check.state == "off"]])[0]
    if main:
        for check in off:
            sys.stdout.write(f"{check.name} is off. Check next: {check.advice}\n")
        slow = ", but reading images will limit the speed" if any(check.state == "slow" for check in done) else ""
        names = ", ".join(check.name for check in off)
        sys.stdout.write(f'not ready: {names} (docs/imagenet.md, "A number is off")\n' if off else f"ready{slow}\n")
    return 1 if off else 0


# ------------------------------------------------------------------------------------ accuracies


def _accuracies(
    setup: Setup, init: Init, images: int | None, bank: int | None
) -> list[tuple[Check, tuple[str, Any] | None]]:
    """Top-1 of the file's own classifier and of k-NN, against the card's; each with its entry in the record.

    All processes compute features; the first one compares.
    """
    from finetune_mile.checkpoints.loading import open_trunk
    from finetune_mile.images.splits import one_label_each
    from finetune_mile.learning.probe import neighbours
    from finetune_mile.measures.predictions import pick_probe
    from finetune_mile.measures.probing import hits

    data, card, published = setup.data, setup.card, is_imagenet(setup)
    opened = open_trunk(init, arch=setup.recipe.arch)
    has_head = opened.report.classifier == setup.num_classes
    if bank is None and (card.knn_top1 is not None or not has_head) and published:
        bank = FEW
    if init.kind == "none" or (not has_head and bank is None):
        text = "not measured: published ones are ImageNet's; with a checkpoint, --bank N measures k-NN on this data"
        return [(Check("accuracy", "-", text), None)]
    rows: dict[Split, Indices] = {"val": pick_probe(len(data.val), images or MOST_IMAGES).numpy()}
    if bank is not None:
        rows["train"] = pick_probe(len(data.train), bank).numpy()
    found = _features(setup, init, opened, rows)
    if not setup.accelerator.is_main_process:
        return []
    queries, given = found["val"]
    answers: list[tuple[Check, tuple[str, Any] | None]] = []
    if has_head:
        right = hits(_head_of(opened)(queries).argmax(1), given)
        other = published and card.linear_top1 is not None and not card.linear_head
        what = "the classifier in the file" + (", which is not the published linear one" if other else "")
        top1 = card.linear_top1 if card.linear_head and published else None
        answers.append(_compared("head", what, right, top1, setup.num_classes, card))
    if bank is not None:
        base, labels = found["train"]
        guesses = neighbours(
            queries, base, one_label_each(labels), setup.num_classes, k=card.knn_k, temperature=card.knn_temperature
        )
        complete = len(rows["train"]) == len(data.train)
        what = f"k-NN (k {card.knn_k}) with {len(base):,} of {len(data.train):,} training images"
        if published and card.knn_top1 is not None and not complete:
            what += f" (with all, published: {card.knn_top1:g}; --bank all compares)"
        known = card.knn_top1 if published and complete else None
        answers.append(_compared("k-NN", what, hits(guesses, given), known, setup.num_classes, card))
    return answers


def _features(
    setup: Setup, init: Init, opened: Opened, rows: dict[Split, Indices]
) -> dict[Split, tuple[Tensor, Tensor]]:
    """Features (n, D) and labels of the images in `rows` that can be read; many are kept on disk, as `probe` does."""
    import torch

    from finetune_mile.verbs.embed import features_of

    recipe, data, accelerator = setup.recipe, setup.data, setup.accelerator
    sets = {"train": data.train, "val": data.val}
    if sum(map(len, rows.values())) > MANY:
        options = argparse.Namespace(
            arch=recipe.arch, size=None, dtype="float16", verify=False, data=recipe.data, workers=recipe.workers,
            batch_size=EACH * accelerator.num_processes,
        )  # fmt: skip
        store = features_of(init, data, options, accelerator, setup.viewer.signals, rows=rows)
        read = {split: store.rows(split, some) for split, some in rows.items()}
    else:
        viewer = dataclasses.replace(
            setup.viewer, preprocess=opened.card.preprocess, batch_size=EACH * accelerator.num_processes
        )
        network = opened.network.to(accelerator.device)
        read = {split: viewer.outputs(network, sets[split], some) for split, some in rows.items()}
    found = {}
    for split, (features, good) in read.items():
        found[split] = features[good], sets[split].given[torch.from_numpy(rows[split])][good]
    return found


def is_imagenet(setup: Setup) -> bool:
    """Are the published accuracies about this data? A part of the classes would be easier."""
    data = setup.recipe.data
    named = data.partition(":")[0] == "imagenet" or "imagenet-1k" in data.lower()
    return named and setup.num_classes == CLASSES


def _head_of(opened: Opened) -> Any:
    """The classifier of a file: features (n, D) to logits (n, C)."""
    from finetune_mile.checkpoints.loading import keep_own_head
    from finetune_mile.networks.heads import get_head

    return get_head(keep_own_head(opened).network).cpu().requires_grad_(False)


def _compared(
    name: str, what: str, right: Tensor, published: float | None, classes: int, card: Card
) -> tuple[Check, tuple[str, Any]]:
    """An accuracy with its 95 % interval. Off: the published one is outside, or a guess is as good."""
    from finetune_mile.measures.intervals import wilson

    right = right[~right.isnan()]
    top1, count = float(right.mean()), len(right)
    low, high = (100 * edge for edge in wilson(top1 / 100, count))
    text = f"{what}: top-1 {top1:.1f} ({low:.1f} to {high:.1f}) on {count:,} validation images"
    advice = ""
    if low <= 100 / classes:
        advice = (
            "no better than guessing. Either the validation labels have another order (finetune-mile doctor), or the "
            f"weights were not loaded (finetune-mile weights check {card.name} --names)"
        )
    elif published is not None and high < published:
        advice = (
            f"the load report above, then input and padding (finetune-mile weights show {card.name}), then all "
            "validation images (--images all)"
        )
    elif published is not None and low > published:
        advice = (
            "it is better than published. Training images may be among the validation images (finetune-mile doctor)"
        )
    if published is not None:
        text += f"; published {published:g}"
    return Check(name, "off" if advice else "ok", text, advice), (
        name, {"top1": round(top1, 2), "low": round(low, 2), "high": round(high, 2), "images": count, "what": what},
    )  # fmt: skip


# ------------------------------------------------------------------------------------ steps and room


class _Enough(Exception):
    """A few steps were taken."""


class _Timer:
    """A monitor that times some steps and ends the training."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loss = math.nan
        self._began = time.perf_counter()

    def on_step(self, record: StepRecord) -> None:
        self.loss = float(record.loss)  # waits for the device
        self.seconds.append(time.perf_counter() - self._began)
        self._began = time.perf_counter()
        if len(self.seconds) >= STEPS:
            raise _Enough

    def on_decision(self, step: int, decision: Decision) -> None:
        """Nothing is decided before the first phase."""


def _steps(setup: Setup, out: Path) -> tuple[float, list[Check]]:
    """Take the first steps of the run on one batch, on every process; seconds of one, and what was seen."""
    import torch
    from accelerate.utils import gather_object
    from rich.filesize import decimal

    from finetune_mile.training.display import Display, duration
    from finetune_mile.training.folder import KEPT_CHECKPOINTS, RunFolder
    from finetune_mile.training.memory import advice as advice_on_memory
    from finetune_mile.training.processes import computing, weight_spread
    from finetune_mile.training.train import make_loop

    accelerator, recipe, phase = setup.accelerator, setup.recipe, setup.plan.phases[0]
    feed = setup.feed(phase.pool, 0)
    batches = [next(feed) for _ in range(int(recipe.accumulate))]
    del feed  # ends its loader processes: the steps are timed without them
    timer = _Timer()
    switches = computing(
        precision=recipe.precision, benchmark=recipe.cudnn_benchmark is True, deterministic=recipe.deterministic
    )
    try:
        with switches, Display(setup.plan.total_steps, visible=False) as display:
            loop = make_loop(setup, RunFolder(setup.viewer.bad.path.parent), display)
            loop = dataclasses.replace(loop, feed=lambda _pool, _step: itertools.cycle(batches))
            with contextlib.suppress(_Enough):
                loop.train([dataclasses.replace(phase, steps=STEPS + 1)], 0, timer)
    except torch.OutOfMemoryError as error:
        raise Failed(advice_on_memory(setup)) from error
    ranks: list[tuple[float, float, int]] = gather_object(
        [(timer.loss, sorted(timer.seconds[1:])[STEPS // 2 - 1], _memory_used(accelerator.device))]
    )
    same = weight_spread(loop.roles.learner) <= SAME
    step, world = max(seconds for _, seconds, _ in ranks), len(ranks)
    finite = all(math.isfinite(loss) for loss, _, _ in ranks)
    total_steps = setup.plan.total_steps
    parts = world * int(recipe.accumulate)
    text = (
        f"{world} process{'es' if world > 1 else ''}, {recipe.batch_size:,} images in {parts} part{'s'[: parts - 1]}: "
        f"{step:.2f} s, loss {timer.loss:.3f}; {total_steps:,} steps take {duration(step * total_steps)}"
    )
    advice = "the processes have different weights after a step" if finite else "the accuracies, then a smaller --lr"
    checks = [Check("step", "ok" if finite and same else "off", text, advice)]
    used, total = max(memory for _, _, memory in ranks), _memory_total(accelerator.device, world)
    text = f"a process has used {decimal(used)} of its {decimal(total)}"
    checks.append(
        Check("memory", "ok" if used <= total else "off", text, "--set accumulate=N: the batch stays the same")
    )
    saved = _bytes(loop.state_dict()) * (KEPT_CHECKPOINTS + 1)  # one more while the next is written
    place = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    text = f"checkpoints take {decimal(saved)}, {decimal(free)} are free in {place}"
    checks.append(Check("disk", "ok" if saved <= free else "off", text, "more space, or another place for --out"))
    return step, checks


def _memory_used(device: torch.device) -> int:
    """Most bytes that this process has had on its device so far."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _memory_total(device: torch.device, world: int) -> int:
    """Bytes of the device; of a machine without one, the share of this process."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_processes(world)


def _bytes(tree: Any) -> int:
    """Bytes of all tensors in nested dicts and lists."""
    if isinstance(tree, Mapping):
        return sum(_bytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(_bytes(value) for value in tree)
    return int(getattr(tree, "nbytes", 0))


def _loading(setup: Setup, step: float) -> list[Check]:
    """Are images read as fast as a step needs them, and do the batches that are read ahead fit into shared memory?"""
    from rich.filesize import decimal

    from finetune_mile.images.pipeline import Augmentation, Views
    from finetune_mile.training.pricing import time_views

    recipe, viewer, world = setup.recipe, setup.viewer, setup.accelerator.num_processes
    workers, here = viewer.workers, local_processes(world)
    if not workers:
        return [Check("loading", "-", "no loader processes: images are read between the steps")]
    views = Views(setup.pools.images, viewer.preprocess, Augmentation(**recipe.augment.of_one_image), 0)
    one = 1 / float(time_views(views)[1])
    cores = usable_cores()
    reading, needed = one * min(workers * here, cores), recipe.batch_size / step * here / world
    text = (
        f"{one:,.0f} images a second by one loader process, {reading:,.0f} by {workers * here} on {cores} cores; the "
        f"steps need {needed:,.0f}"
    )
    checks = [Check("loading", "ok" if reading >= GOOD_ENOUGH * needed else "slow", text)]
    shared = Path("/dev/shm")
    if shared.is_dir():
        images = PREFETCHED * workers * here * (recipe.batch_size // (world * int(recipe.accumulate)))
        need, free = images * 3 * viewer.preprocess.size**2, shutil.disk_usage(shared).free
        text = f"batches that are read ahead take {decimal(need)}, {decimal(free)} are free in {shared}"
        advice = f"start the container with --shm-size {math.ceil(1.5 * need / 1e9)}g, or use --set workers=N"
        checks.append(Check("shm", "ok" if need <= free else "off", text, advice))
    return checks
