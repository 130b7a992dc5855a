"""A pre-training run: its set-up, what is learned from views, and what it leaves behind. The loop is the only one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from finetune_mile.checkpoints.loading import open_trunk
from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.console import open_console
from finetune_mile.core.files import whole_stream, write_json, write_whole
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool, Preprocess
from finetune_mile.images.bad_images import BadImages, say_skipped
from finetune_mile.images.order import Key, Order, micro_batches
from finetune_mile.images.pipeline import Augmentation, Views, batches
from finetune_mile.images.sets import Data
from finetune_mile.images.sources import load_data
from finetune_mile.images.splits import one_label_each
from finetune_mile.learning.loop import Loop, StepRecord
from finetune_mile.learning.optim import decay_groups, make_optimizer, rate_at
from finetune_mile.learning.phases import MethodState, Phase
from finetune_mile.learning.probe import neighbour_votes
from finetune_mile.learning.roles import Roles
from finetune_mile.measures.guards import lower_rates
from finetune_mile.measures.predictions import pick_probe
from finetune_mile.networks.heads import build
from finetune_mile.networks.resnets import Padding
from finetune_mile.networks.vits import exported_arch
from finetune_mile.pages import report
from finetune_mile.pages.card import public_name
from finetune_mile.paper.pretraining.methods import METHODS, Learner
from finetune_mile.paper.pretraining.recipe import Pretrain
from finetune_mile.paper.pretraining.views import SEEDS, draw, make_view
from finetune_mile.training import resume
from finetune_mile.training.display import Display
from finetune_mile.training.folder import RunFolder, open_on_main, requested_settings
from finetune_mile.training.monitor import Monitor, recorded
from finetune_mile.training.plan import Plan
from finetune_mile.training.processes import (
    Device,
    Signals,
    computing,
    start,
    uses_gpu,
    wanted_precision,
    warn_of_spread,
    weight_spread,
)
from finetune_mile.training.task import Split, image_views, images_of, wanted_workers

CHECKPOINT = "checkpoint.ckpt"
WHOLE = Augmentation(crop="none", scale=(1.0, 1.0), shift=0, flip=False)  # nothing is lost before views are cut out
BLOCK = 1024  # images read at once
FEATURE_BATCH = 256  # images per forward pass of a process
VIEWED, CELL = 12, 84  # images whose views the report shows, and about how large


@dataclass(slots=True, kw_only=True)
class PretrainSetup:
    """A pre-training run before its first step. S is `source_size`, s is `size`."""

    recipe: Pretrain  # its sizes are known
    requested: Pretrain
    data: Data
    preprocess: Preprocess
    padding: Padding  # of the network
    bad: BadImages
    device: Device
    plan: Plan
    learner: Learner  # the network and what its method puts around it
    stored: Tensor | None = None  # (N, 3, S, S) uint8: all images, where they fit into memory

    def plain(self) -> Views:
        """Whole training images, as views are cut out of them."""
        preprocess = self.preprocess.model_copy(update={"size": self.recipe.source_size})
        images = self.data.train
        return Views(images, preprocess, WHOLE, self.recipe.seed, on_bad=partial(self.bad.add, "train", images.ids))

    def store_images(self) -> None:
        """Read all images once, where they fit into memory."""
        side, count = self.recipe.source_size or 1, len(self.data.train)
        if count * 3 * side * side > self.recipe.keep_megabytes * 2**20:
            return
        keys = ([(0, i) for i in range(at, min(at + BLOCK, count))] for at in range(0, count, BLOCK))
        self.stored, at = torch.empty(count, 3, side, side, dtype=torch.uint8), 0
        for batch in batches(self.plain(), keys, workers=self.device.workers, pin=False):
            self.stored[at : at + len(batch.images)] = batch.images
            at += len(batch.images)
            self.device.tick()

    def feed(self, _pool: Pool, first_step: int) -> Iterator[list[Tensor]]:
        """The normalised views of this process's part of each batch, from a step on, without end."""
        accelerator, recipe = self.device.accelerator, self.recipe
        order = Order(np.arange(len(self.data.train)), SEEDS * recipe.seed)
        mine, theirs = tee(
            micro_batches(
                order, first_step=first_step, batch_size=recipe.batch_size, accumulate=1,
                rank=accelerator.process_index, world=accelerator.num_processes,
            )
        )  # fmt: skip
        if self.stored is not None:
            stored = self.stored
            sources = (stored[torch.tensor([sample for _, sample in keys])] for keys in theirs)
        else:
            read = batches(self.plain(), theirs, workers=self.device.workers, pin=self.device.pin)
            sources = (batch.images for batch in read)
        mean, std = (torch.tensor(v, device=accelerator.device).view(3, 1, 1) for v in (recipe.mean, recipe.std))
        for images, keys in zip(sources, mine, strict=False):
            views = (view.sub_(mean).div_(std) for view in self.views(images, keys))
            yield [view.contiguous(memory_format=torch.channels_last) for view in views]

    def views(self, images: Tensor, keys: list[Key]) -> list[Tensor]:
        """All views, floats in [0, 1], of images (B, 3, S, S) uint8: two large ones, then the small ones."""
        device, settings, local = self.device.accelerator.device, self.recipe.views, self.recipe.local_views
        kinds = [(settings, self.recipe.size or 1)] * 2
        if local is not None:
            kinds += [(settings.model_copy(update={"area": local.area}), local.size)] * local.count
        images = images.to(device, non_blocking=True)
        draws = (draw(self.recipe.seed, keys, view).to(device) for view in range(len(kinds)))
        return [make_view(images, d, *kind) for d, kind in zip(draws, kinds, strict=True)]

    def rate(self, step: int) -> float:
        """The share of the base learning rate that step `step` (from 0) is taken with."""
        settings = self.recipe.optimizer
        warmup = self.plan.steps(settings.warmup)
        return rate_at(step, total_steps=self.plan.total_steps, schedule=settings.schedule, warmup=warmup)

    def neighbours(self) -> float | None:
        """Accuracy in per cent of k nearest neighbours on the trunk's features; None where there are no labels."""
        settings, data = self.recipe.neighbours, self.data
        bank, bank_labels = self._features("train", settings.bank)
        queries, labels = self._features("val", settings.queries)
        if not len(bank) or not len(queries):
            return None
        votes = neighbour_votes(
            queries, bank, bank_labels, len(data.classes), k=settings.k, temperature=settings.temperature
        )
        return round(100 * float((votes.argmax(1) == labels).float().mean()), 3)

    def _features(self, split: Split, limit: int) -> tuple[Tensor, Tensor]:
        """Features (n, D) and labels (n,) of up to `limit` labelled images of a split that can be read."""
        images = images_of(self.data, split)
        labels = one_label_each(images.given)
        labelled = (labels >= 0).nonzero().flatten()
        if not len(labelled):
            return torch.zeros(0, 1), labelled
        picked = labelled[pick_probe(len(labelled), limit)]
        views = image_views(self.preprocess, self.bad, self.recipe.seed, images, split, None, None)
        features, good = self.device.outputs(self.learner.backbone, views, picked.numpy())
        return features[good], labels[picked][good]


@dataclass(slots=True, kw_only=True)
class ViewObjective:
    """The self-supervised loss of the views of a batch."""

    learner: Learner

    def begin(self, _phase: Phase) -> None:
        """There are no labels to prepare."""

    def backward(self, loop: Loop, views: list[Tensor], record: StepRecord) -> None:
        self.learner.begin_step(record.step)
        loss = self.learner.loss(loop.network(views)) / loop.accumulate
        loop.accelerator.backward(loss)
        self.learner.end_backward()
        record.loss += loss.detach()
        record.images += len(views[0])


def set_up(recipe: Pretrain, path: Path, signals: Signals) -> PretrainSetup:
    """Start the processes, open the data and build the network with random weights; nothing is written."""
    precision = wanted_precision(recipe.precision)
    accelerator = start(precision=precision, seed=recipe.seed, track="none", project=str(path))
    world = accelerator.num_processes
    if recipe.batch_size % world:
        raise Problem(f"--batch-size {recipe.batch_size} must be a multiple of processes = {world}")
    data = load_data(recipe.data, need_labels=False)
    if len(data.train) < 2:
        raise Problem(f"--data {recipe.data}: {len(data.train)} images; views can only be told apart among several")
    trunk, arch, preprocess, padding = first_network(recipe)
    size = recipe.size or (min(data.train.read(0).shape[-2:]) if recipe.init is None else preprocess.size)
    preprocess = preprocess.model_copy(update={"size": size, "crop": 1.0})
    found = {"arch": arch, "mean": preprocess.mean, "std": preprocess.std, "size": size}
    found |= {"source_size": recipe.source_size or size, "precision": precision}
    requested, recipe = recipe, recipe.model_copy(update=found)
    device = Device(
        accelerator=accelerator, signals=signals, batch_size=FEATURE_BATCH * world,
        workers=wanted_workers(recipe.workers, data, accelerator),
    )  # fmt: skip
    phase = Phase(
        name="pretraining", generation=0, steps=recipe.steps, start="learner", becomes=(), loss="own", pool="all"
    )
    plan = Plan(
        total_steps=recipe.steps, steps_per_epoch=len(data.train) / recipe.batch_size, pool="all", phases=(phase,)
    )
    learner = METHODS[recipe.method](trunk, cast(int, trunk.num_features), getattr(recipe, recipe.method), plan)
    return PretrainSetup(
        recipe=recipe, requested=requested, data=data, device=device, plan=plan, learner=learner,
        preprocess=preprocess, padding=padding,
        bad=BadImages(path / "bad_images.csv", recipe.data),
    )  # fmt: skip


def first_network(recipe: Pretrain) -> tuple[nn.Module, str, Preprocess, Padding]:
    """The network without a classifier, the name of its shape, its input and its padding."""
    said = {name: value for name in ("mean", "std") if (value := getattr(recipe, name)) is not None}
    if recipe.init is None:
        arch = cast(str, recipe.arch)
        return build(arch), arch, Preprocess(**said), "torch"
    opened = open_trunk(recipe.init, arch=recipe.arch)
    card = opened.card
    return opened.network, exported_arch(opened.report.arch), card.preprocess.model_copy(update=said), card.padding


def open_folder(setup: PretrainSetup, path: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """The run folder with all that is known before the first step; the first process makes or completes it."""
    requested = requested_settings(setup.requested, setup.recipe)
    facts = {"verb": "pretrain", "images": len(setup.data.train), "requested": requested}
    return open_on_main(
        setup.device.accelerator, path, to_yaml(setup.recipe), {}, facts, resume=resume, overwrite=overwrite
    )


def train(setup: PretrainSetup, folder: RunFolder) -> int:
    """Train what is left, then finish; returns the exit code."""
    switches = computing(precision=setup.recipe.precision, benchmark=uses_gpu())
    with switches, recorded(setup.device, folder, keep_checkpoints=True, verb="pretrain") as ending:
        setup.store_images()
        before, monitor = train_steps(setup, folder)
        spread = weight_spread(setup.learner)
        finish(setup, folder, before)
        if setup.device.accelerator.is_main_process:
            pace = round(1000 * monitor.busy_seconds / monitor.steps_seen, 1) if monitor.steps_seen else None
            folder.update(milliseconds_per_step=pace, **warn_of_spread(spread))
    return ending.code


def train_steps(setup: PretrainSetup, folder: RunFolder) -> tuple[float | None, Monitor]:
    """The steps that are left; returns the neighbours' accuracy before the first step, and the monitor."""
    recipe, accelerator, settings = setup.recipe, setup.device.accelerator, setup.recipe.optimizer
    learner = setup.learner
    if recipe.sync_batch_norm and accelerator.num_processes > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(learner)  # in place: its own class is no batch norm
    learner.to(accelerator.device)
    learner.to(memory_format=torch.channels_last)  # a third faster on CPUs
    groups = decay_groups(learner.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    bare = make_optimizer(settings.name, groups, momentum=settings.momentum, nesterov=settings.nesterov)
    wrapped, optimizer = accelerator.prepare(learner, bare)
    loop = Loop(
        accelerator=accelerator, network=wrapped, roles=Roles(learner, setup.plan.phases), optimizer=optimizer,
        average=None, state=MethodState(), feed=setup.feed, rate=setup.rate, accumulate=1, clip=settings.clip,
        objective=ViewObjective(learner=learner),
        reset_optimizer=False,
    )  # fmt: skip
    step, extra = resume.restore(loop, folder, recipe.seed)
    before = setup.neighbours() if extra is None else extra["neighbours_before"]
    per_epoch = setup.plan.steps_per_epoch
    with Display(recipe.steps, visible=accelerator.is_main_process, steps_per_epoch=per_epoch) as display:
        display.begin(step)
        monitor = Monitor(
            loop=loop, plan=setup.plan, folder=folder, display=display, signals=setup.device.signals,
            log_every=recipe.log_every, checkpoint_every=recipe.checkpoint_every, advice=lower_rates(settings.lr, None),
            kept={"neighbours_before": before},
        )  # fmt: skip
        loop.train(setup.plan.phases, step, monitor)
    return before, monitor


def finish(setup: PretrainSetup, folder: RunFolder, before: float | None) -> None:
    """Score the features and write what a run leaves behind."""
    recipe = setup.recipe
    after = setup.neighbours()
    if not setup.device.accelerator.is_main_process:  # what follows is files only; no process waits for another
        return
    lines = [r for r in folder.metrics() if r["kind"] == "train"]
    skipped = len(setup.bad.read())
    results = {
        "loss": lines[-1]["loss"] if lines else None, "neighbours_before": before, "neighbours": after,
        "steps": recipe.steps, "images": len(setup.data.train), "bad_images": skipped,
    }  # fmt: skip
    write_checkpoint(folder.path / "export", setup)
    write_report(setup, folder, results)
    write_json(folder.path / "results.json", results)
    out = open_console(stderr=True, highlight=False, soft_wrap=True)
    if before is not None and after is not None:
        out.print(
            f"{recipe.neighbours.k} nearest neighbours: {before:.1f} % before, {after:.1f} % after "
            "(measured only, not used for training)"
        )
    if skipped:
        out.print(say_skipped(skipped, setup.bad.path), markup=False)
    out.print(f"fine-tune it with --init {shlex.quote(str(folder.path))}")
    out.print(str(folder.path / "report.html"))


def write_checkpoint(folder: Path, setup: PretrainSetup) -> None:
    """Write `checkpoint.ckpt` as lightly's modules save it, and `config.json` with what its tensors do not say."""
    published = {"data": setup.data.name, "init": setup.recipe.init and public_name(setup.recipe.init)}
    recipe = setup.recipe.model_copy(update=published)
    folder.mkdir(exist_ok=True)
    state = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in setup.learner.state_dict().items()
    }
    content = {
        "state_dict": state, "global_step": recipe.steps, "epoch": int(recipe.steps / setup.plan.steps_per_epoch),
        "hyper_parameters": {"method": recipe.method, "arch": recipe.arch, "recipe": to_yaml(recipe)},
    }  # fmt: skip
    with whole_stream(folder / CHECKPOINT) as stream:
        torch.save(content, stream)
    facts = {name: getattr(recipe, name) for name in ("arch", "method", "data", "steps", "seed")}
    facts |= {"padding": setup.padding, "num_classes": 0, **setup.preprocess.model_dump(mode="json")}
    write_json(folder / "config.json", facts)


def write_report(setup: PretrainSetup, folder: RunFolder, results: dict[str, Any]) -> None:
    """Write report.html and views.png into the run folder."""
    lines = [r for r in folder.metrics() if r["kind"] == "train"]
    plot, (axis,) = report.plot_figure(1, "training loss")
    plot.set_size_inches(9.2, 2.6)
    axis.plot([r["step"] for r in lines], [r["loss"] for r in lines], "-", lw=1, color=report.INK)
    write_whole(folder.path / "views.png", report.png_of(views_picture(setup)))
    report.write_page(
        folder.path / "report.html",
        "pretrain.html",
        title=folder.path.name,
        recipe=setup.recipe,
        results={key: value for key, value in results.items() if value is not None},
        loss=report.data_url(report.png_of_figure(plot)),
        settings=to_yaml(setup.recipe),
    )


def views_picture(setup: PretrainSetup) -> Tensor:
    """Some images in the first row, and each of their views in a row below: (3, H, W) uint8."""
    count = min(VIEWED, len(setup.data.train))
    keys = [(0, i) for i in range(count)]
    images = setup.plain().read(keys)[0].images
    rows = [images.float() / 255, *(view.cpu() for view in setup.views(images, keys))]
    square = (max(CELL // (setup.recipe.size or 1), 1) * (setup.recipe.size or 1),) * 2
    rows = [torch.nn.functional.interpolate(row, square) for row in rows]  # nearest: pixels stay pixels
    framed = [torch.nn.functional.pad(row, (2, 2, 2, 2), value=1.0) for row in rows]
    sheet = torch.cat([torch.cat(list(row), 2) for row in framed], 1)
    return (sheet * 255).round().byte()
