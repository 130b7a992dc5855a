"""A run from its set-up to its results: resume if there is something, train, evaluate, write."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.problems import Problem
from finetune_mile.images.splits import balanced_weights
from finetune_mile.learning.loop import LabelObjective, Loop
from finetune_mile.learning.optim import make_optimizer, parameter_groups
from finetune_mile.learning.phases import RunView
from finetune_mile.learning.roles import Average, Roles
from finetune_mile.measures.guards import LossAlarm, lower_rates
from finetune_mile.training import resume
from finetune_mile.training.display import Display
from finetune_mile.training.finish import finish
from finetune_mile.training.folder import RunFolder, open_on_main
from finetune_mile.training.labelling import pool_labeller
from finetune_mile.training.monitor import LabelMonitor, recorded
from finetune_mile.training.processes import warn_of_spread, weight_spread
from finetune_mile.training.setup import Setup


def open_folder(setup: Setup, path: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """The run folder with all that is known before the first step; the first process makes or completes it."""
    recipe = setup.recipe
    split = partial(setup.pools.to_json, recipe.fraction, recipe.seed)
    notes: dict[str, Callable[[], object]] = {"init.json": setup.report.to_json, "split.json": split}
    if resume and (path / "split.json").is_file():
        before, now = json.loads((path / "split.json").read_text(encoding="utf-8")), split()
        if any(before.get(key) != now[key] for key in ("labelled", "unlabelled", "sha256")):
            raise Problem(
                f"--resume {path}: the training images changed since the run began: {before.get('labelled')} labelled "
                f"and {before.get('unlabelled')} not, now {now['labelled']} and {now['unlabelled']}; restore them, or "
                f"start a new run with --recipe {path}/recipe.yaml"
            )
    facts = {"card": setup.card.model_dump(mode="json")}
    return open_on_main(setup.accelerator, path, to_yaml(recipe), notes, facts, resume=resume, overwrite=overwrite)


def train(setup: Setup, folder: RunFolder) -> int:
    """Train what is left, then finish; returns the exit code."""

    def work() -> dict[str, object]:
        if setup.complete is not None:
            setup.viewer.get_ready()
        learner, monitor = train_phases(setup, folder)
        spread = weight_spread(setup.network)
        finish(setup, learner, folder)
        speed = round(monitor.images_seen / monitor.busy_seconds, 1) if monitor.busy_seconds else None
        return {"images_per_second": speed, **warn_of_spread(spread)}

    return recorded(setup.accelerator, folder, setup.viewer.signals, work)


def train_phases(setup: Setup, folder: RunFolder) -> tuple[nn.Module, LabelMonitor]:
    """The phases that are left; returns what is evaluated and exported, and the monitor."""
    recipe, accelerator, plan = setup.recipe, setup.accelerator, setup.plan
    with Display(plan.total_steps, visible=accelerator.is_main_process) as display:
        loop = make_loop(setup, folder, display)
        if recipe.track != "none":
            accelerator.init_trackers(folder.path.name, config={"recipe": to_yaml(recipe)})
        step, extra = resume.restore(loop, folder, recipe.seed)
        display.begin(step)
        monitor = LabelMonitor(setup, loop, folder, display, alarm(setup))
        if extra is not None:
            monitor.resume(step, extra)
        loop.train(plan.phases, step, monitor)
    return setup.network if loop.average is None else loop.average.network(), monitor


def make_loop(setup: Setup, folder: RunFolder, display: Display) -> Loop:
    """The network with its optimiser, roles and method, on the device."""
    recipe, accelerator, settings = setup.recipe, setup.accelerator, setup.recipe.optimizer
    network = setup.network
    if recipe.sync_batch_norm and accelerator.num_processes > 1:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    network.to(accelerator.device)
    roles = Roles(network, setup.plan.phases, None if setup.teacher is None else setup.teacher.to(accelerator.device))
    images = setup.pools.images
    state = recipe.rules.State(
        RunView(roles=roles, num_classes=setup.num_classes, given=images.given, held_out=setup.calibrate)
    )
    groups = parameter_groups(network, lr=settings.lr, head_lr=settings.head_lr, weight_decay=settings.weight_decay)
    groups += state.parameter_groups()
    bare = make_optimizer(settings.name, groups, momentum=settings.momentum, nesterov=settings.nesterov)
    wrapped, optimizer = accelerator.prepare(network, bare)
    weights = None
    if recipe.class_weights == "balanced":
        weights = balanced_weights(images.given, setup.num_classes).to(accelerator.device)
    objective = LabelObjective(
        accelerator=accelerator, network=wrapped, roles=roles, method=recipe.rules, state=state,
        num_classes=setup.num_classes, total_steps=setup.plan.total_steps, class_weights=weights,
        environment=images.environment, prepare=setup.viewer.prepare,
        label_pool=pool_labeller(setup, roles, folder.path, display.labels) if recipe.labels_once_per_cycle else None,
        label_smoothing=recipe.label_smoothing, mixing=setup.mixing,
    )  # fmt: skip
    return Loop(
        accelerator=accelerator, network=wrapped, roles=roles, optimizer=optimizer, state=state, objective=objective,
        average=None if settings.ema is None else Average(network, settings.ema), feed=setup.feed, rate=setup.rate,
        accumulate=recipe.accumulate, clip=settings.clip, reset_optimizer=recipe.optimizer_state == "reset",
    )  # fmt: skip


def alarm(setup: Setup) -> LossAlarm:
    """What watches the training loss."""
    given, recipe = setup.pools.images.given, setup.recipe
    labels = 1.0
    if given.ndim == 2:
        counts = (given > 0).sum(1).double()
        labels = float(counts[given[:, 0] >= 0].mean())
    return LossAlarm(
        untrained_loss=recipe.rules.untrained_loss, num_classes=setup.num_classes, given_labels=labels,
        head_bias=recipe.head_bias, advice=lower_rates(recipe.optimizer.lr, recipe.optimizer.head_lr),
    )  # fmt: skip
