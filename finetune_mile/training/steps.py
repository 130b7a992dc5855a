"""How the phases of a run are trained: first classifier, network, method, optimiser, resume, loop."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from finetune_mile.config.resolve import to_yaml
from finetune_mile.config.schema import Recipe
from finetune_mile.images.splits import balanced_weights
from finetune_mile.learning.loop import LabelObjective, Loop
from finetune_mile.learning.optim import make_optimizer, parameter_groups, relative_groups
from finetune_mile.learning.phases import RunView
from finetune_mile.learning.probe import threads_for
from finetune_mile.learning.roles import Average, Roles
from finetune_mile.measures.guards import LossAlarm, lower_rates
from finetune_mile.training import resume
from finetune_mile.training.display import Display
from finetune_mile.training.folder import RunFolder
from finetune_mile.training.labelling import pool_labeller
from finetune_mile.training.monitor import Enough, LabelMonitor
from finetune_mile.training.processes import Device
from finetune_mile.training.start import start_classifier
from finetune_mile.training.task import Model, Task, feed, on_training_images


def train_phases(
    task: Task, model: Model, device: Device, folder: RunFolder, *, visible: bool = True, after: float = 0
) -> tuple[Loop, LabelMonitor]:
    """Train the phases that are left. What follows them takes as long as `after` steps."""
    recipe, accelerator, plan = task.recipe, device.accelerator, task.plan
    with folder.times.of("features"):
        start_classifier(task, model, device, folder)
    with Display(plan.total_steps, visible=visible and accelerator.is_main_process, after=after) as display:
        loop = make_loop(task, model, device, folder, display)
        if recipe.track != "none":
            accelerator.init_trackers(folder.path.name, config={"recipe": to_yaml(recipe)})
        step, extra = resume.restore(loop, folder, recipe.seed)
        display.begin(step)
        watch, (curve, curve_images) = alarm(task), plan.curve(recipe)
        monitor = LabelMonitor(
            loop=loop, plan=plan, folder=folder, display=display, signals=device.signals, log_every=recipe.log_every,
            checkpoint_every=recipe.checkpoint_every, advice=watch.advice, task=task, device=device, alarm=watch,
            curve=curve, curve_images=curve_images,
        )  # fmt: skip
        last = plan.total_steps
        try:
            if extra is not None:
                monitor.resume(step, extra)
            with threads_for(device.step_work), folder.times.of("train"):
                loop.train(plan.phases, step, monitor)
        except Enough as enough:
            (last,) = enough.args
        monitor.take_best(last)
    return loop, monitor


def make_loop(task: Task, model: Model, device: Device, folder: RunFolder, display: Display) -> Loop:
    """The network with its optimiser, roles and method, on the device."""
    recipe, accelerator, settings, images = task.recipe, device.accelerator, task.recipe.optimizer, task.pools.images
    network, method = model.learner, recipe.method_value
    if recipe.sync_batch_norm and accelerator.num_processes > 1:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    network.to(accelerator.device)
    teacher = None if model.teacher is None else model.teacher.to(accelerator.device)
    roles = Roles(network, task.plan.phases, teacher, keep_init=recipe.keep == "best")
    follower = roles.teacher if recipe.traits.teacher == "average" else None
    seen = RunView(
        roles=roles, num_classes=task.num_classes, given=images.given, environment=images.environment,
        held_out=lambda teacher: on_training_images(task, device, teacher, task.pools.calibration),
    )  # fmt: skip
    state = method.State(seen)
    bare = optimizer_of(recipe, network)
    if recipe.compile:  # in place: names and copies are those of the bare networks
        for learned in (network, *([] if roles.teacher is None else [roles.teacher])):
            learned.compile()
    wrapped, optimizer = accelerator.prepare(network, bare)
    weights = None
    if recipe.class_weights == "balanced":
        weights = balanced_weights(images.given, task.num_classes).to(accelerator.device)
    objective = LabelObjective(
        targets=method.targets, loss=method.loss,
        num_classes=task.num_classes, total_steps=task.plan.total_steps, class_weights=weights,
        prepare=partial(device.prepare, preprocess=task.preprocess),
        label_pool=pool_labeller(task, device, roles, folder.path, display.labels)
        if recipe.labels_once_per_cycle else None,
        label_smoothing=recipe.label_smoothing, mixing=task.mixing,
    )  # fmt: skip
    return Loop(
        accelerator=accelerator, network=wrapped, roles=roles, optimizer=optimizer, state=state, objective=objective,
        average=None if settings.ema is None else Average(network, settings.ema, follower),
        feed=lambda pool, step: folder.times.waiting(feed(task, device, pool, step), "data"),
        rate=task.rate, accumulate=int(recipe.accumulate), clip=settings.clip,
        reset_optimizer=recipe.traits.optimizer_state == "reset",
        frozen_norm=recipe.batch_norm == "frozen" and recipe.trunk != "frozen",  # a head's norm is not the checkpoint's
    )  # fmt: skip


def optimizer_of(recipe: Recipe, network: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of a network."""
    settings = recipe.optimizer
    lr = float(settings.lr)  # `set_up` has chosen it where it is auto
    if settings.name == "relative":
        groups = relative_groups(network, lr=lr, weight_decay=settings.weight_decay)
    else:
        groups = parameter_groups(
            network, lr=lr, head_lr=settings.head_lr, weight_decay=settings.weight_decay,
            layer_decay=settings.layer_decay,
        )  # fmt: skip
    return make_optimizer(
        settings.name, groups, momentum=settings.momentum, nesterov=settings.nesterov,
        fused=recipe.fused_optimizer is True,
    )  # fmt: skip


def alarm(task: Task) -> LossAlarm:
    """What watches the training loss."""
    given, recipe = task.pools.images.given, task.recipe
    labels = 1.0
    if given.ndim == 2:
        counts = (given > 0).sum(1).double()
        labels = float(counts[given[:, 0] >= 0].mean())
    return LossAlarm(
        untrained_loss=recipe.method_value.untrained_loss, num_classes=task.num_classes, given_labels=labels,
        head_bias=recipe.head_bias, advice=lower_rates(float(recipe.optimizer.lr), recipe.optimizer.head_lr),
    )  # fmt: skip
