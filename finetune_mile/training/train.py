"""A run from its first step to its results: first classifier, trial, optimiser, resume, loop, finish, refit."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from finetune_mile.config.resolve import to_yaml
from finetune_mile.config.schema import Recipe
from finetune_mile.core.files import write_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.splits import Pools, balanced_weights, hold_out
from finetune_mile.learning.loop import LabelObjective, Loop
from finetune_mile.learning.losses import bce_entries, given_matrix, shared
from finetune_mile.learning.optim import make_optimizer, parameter_groups, relative_groups
from finetune_mile.learning.phases import MethodState, RunView
from finetune_mile.learning.probe import SMALL, threads_for
from finetune_mile.learning.roles import Average, Roles
from finetune_mile.measures.guards import LossAlarm, lower_rates
from finetune_mile.measures.intervals import clearly_above
from finetune_mile.measures.metrics import Measured
from finetune_mile.measures.verdicts import SCORES, score_of
from finetune_mile.networks.heads import StandardisedLinear, get_head
from finetune_mile.training import resume
from finetune_mile.training.device import Device
from finetune_mile.training.display import Display
from finetune_mile.training.features import on_features
from finetune_mile.training.finish import finish
from finetune_mile.training.folder import OWN_SIZE, REFIT, START, TRIAL, RunFolder, open_on_main, requested_settings
from finetune_mile.training.labelling import pool_labeller
from finetune_mile.training.monitor import Enough, LabelMonitor, recorded
from finetune_mile.training.plan import HELD_OUT, MOST_LABELS, has_trial, make_plan, trial_steps
from finetune_mile.training.processes import computing, warn_of_spread, weight_spread
from finetune_mile.training.refit import on_all_labels, open_refit, replace_export
from finetune_mile.training.start import between, own_size_scores, scores_to_beat, start_head
from finetune_mile.training.task import Model, Task, feed, on_held_out


def open_folder(task: Task, model: Model, device: Device, path: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """The run folder with all that is known before the first step; the first process makes or completes it."""
    recipe = task.recipe
    split = partial(task.pools.to_json, recipe.fraction, recipe.seed)
    notes: dict[str, Callable[[], object]] = {"init.json": model.report.to_json, "split.json": split}
    if resume and (path / "split.json").is_file():
        before, now = json.loads((path / "split.json").read_text(encoding="utf-8")), split()
        if any(before.get(key) != now[key] for key in ("labelled", "unlabelled", "sha256")):
            raise Problem(
                f"--resume {path}: the training images changed since the run began: {before.get('labelled')} labelled "
                f"and {before.get('unlabelled')} not, now {now['labelled']} and {now['unlabelled']}; restore them, or "
                f"start a new run with --recipe {shlex.quote(f'{path}/recipe.yaml')}"
            )
    facts = {"card": model.card.model_dump(mode="json"), "requested": requested_settings(task.requested, recipe)}
    return open_on_main(device.accelerator, path, to_yaml(recipe), notes, facts, resume=resume, overwrite=overwrite)


def train(task: Task, model: Model, device: Device, folder: RunFolder) -> tuple[int, Measured | None]:
    """Train what is left, then finish; returns the exit code, and what the scores of this call are means of."""
    measured: Measured | None = None

    def work() -> dict[str, object]:
        nonlocal measured
        first = model.copied() if folder.info.get(REFIT) else None
        if "share" not in folder.info or not (folder.path / "results.json").is_file():  # else only the refit is left
            shown, place = on_features(task, model, device)  # the task and device of features, with a frozen trunk
            compare_sizes(task, model, device, folder)
            try:
                share = share_by_trial(shown, model, place, folder)  # may train first: the trial
                loop, monitor = train_phases(shown, model, place, folder)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                from finetune_mile.training.memory import advise

                advise(task, model, device.accelerator, error)
                raise
            learner, spread = learner_of(loop, share), weight_spread(model.learner)
            measured = finish(shown, model, place, learner, folder, monitor.chosen, share)
            if device.accelerator.is_main_process:
                speed = round(monitor.images_seen / monitor.busy_seconds, 1) if monitor.busy_seconds else None
                folder.update(images_per_second=speed, share=share, **warn_of_spread(spread))
        if first is not None:
            refit(task, first, device, folder)
        return {}

    keep, recipe = bool(folder.info.get("keep_checkpoints")), task.recipe
    with computing(
        precision=recipe.precision, benchmark=recipe.cudnn_benchmark is True, deterministic=recipe.deterministic
    ):
        code = recorded(device.accelerator, folder, device.signals, work, keep_checkpoints=keep)
    return code, measured


def learner_of(loop: Loop, share: float) -> nn.Module:
    """What is scored and exported: the learner, or a network between its first and its last weights."""
    return loop.learner() if share == 1 else between(loop.learner(), loop.roles.weights("init"), share)


def refit(task: Task, model: Model, device: Device, folder: RunFolder) -> None:
    """`--refit`: train on all labels and export that; the model is as before the first step."""
    main = device.accelerator.is_main_process
    device.accelerator.wait_for_everyone()  # the first process has written the results that all read
    again = on_all_labels(task, folder)
    shown, place = on_features(again, model, device, scored=False)
    inside = open_refit(again, device, folder)
    if main:
        labels = len(again.pools.indices["labelled"])
        sys.stderr.write(f"refit   {again.plan.total_steps:,} steps with {labels:,} labels\n")
    loop, _ = train_phases(shown, model, place, inside)
    learner = learner_of(loop, float(folder.info["share"]) if main else 1.0)
    if main:
        sys.stdout.write(replace_export(again, model, learner, folder, inside) + "\n")


def compare_sizes(task: Task, model: Model, device: Device, folder: RunFolder) -> None:
    """At the start of a run below the checkpoint's own image size: what a probe at that size reaches, if cheap."""
    own = None if task.recipe.init == "none" else model.own_size
    if own is None or task.preprocess.size >= own or folder.saved() or OWN_SIZE in folder.start():
        return
    lines = own_size_scores(task, device, own)
    if lines is None or not device.accelerator.is_main_process:
        return
    write_json(folder.path / START, folder.start() | {OWN_SIZE: lines})
    key = score_of(lines) or ""
    sys.stderr.write(
        f"size    to beat: a linear probe at the checkpoint's own {lines['size']} pixels has {lines[key]:.1f} % "
        f"{SCORES[key]}; this run shows images at {task.preprocess.size} pixels\n"
    )


def train_phases(
    task: Task, model: Model, device: Device, folder: RunFolder, *, visible: bool = True, after: int = 0
) -> tuple[Loop, LabelMonitor]:
    """Train the phases that are left; `after` so many steps of another run follow."""
    recipe, accelerator, plan = task.recipe, device.accelerator, task.plan
    start_classifier(task, model, device, folder)
    with Display(plan.total_steps, visible=visible and accelerator.is_main_process, after=after) as display:
        loop = make_loop(task, model, device, folder, display)
        if recipe.track != "none":
            accelerator.init_trackers(folder.path.name, config={"recipe": to_yaml(recipe)})
        step, extra = resume.restore(loop, folder, recipe.seed)
        display.begin(step)
        monitor = LabelMonitor(task, device, loop, folder, display, alarm(task))
        last = plan.total_steps
        try:
            if extra is not None:
                monitor.resume(step, extra)
            with threads_for(work_of_a_step(task, model)):
                loop.train(plan.phases, step, monitor)
        except Enough as enough:
            (last,) = enough.args
        monitor.take_best(last)
    return loop, monitor


def work_of_a_step(task: Task, model: Model) -> int:
    """Multiplications of one operation of a step of a classifier of features; of a network of images: enough."""
    if task.recipe.trunk != "frozen":
        return SMALL  # all threads
    return task.recipe.batch_size * sum(each.numel() for each in model.learner.parameters())


def start_classifier(task: Task, model: Model, device: Device, folder: RunFolder) -> None:
    """Fit the first classifier where the recipe asks for it; and write the scores that a run must beat."""
    recipe, new, lines = task.recipe, not folder.saved(), None
    if recipe.head_init == "probe":
        if not isinstance(get_head(model.learner), StandardisedLinear):  # else it was fitted before
            lines = start_head(task, device, model.learner, fit=new)
    elif new and recipe.init != "none":
        lines = scores_to_beat(task, model, device)
    if lines is not None and device.accelerator.is_main_process:
        write_json(folder.path / START, folder.start() | lines)


def make_loop(task: Task, model: Model, device: Device, folder: RunFolder, display: Display) -> Loop:
    """The network with its optimiser, roles and method, on the device."""
    recipe, accelerator, settings, images = task.recipe, device.accelerator, task.recipe.optimizer, task.pools.images
    network = model.learner
    if recipe.sync_batch_norm and accelerator.num_processes > 1:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    network.to(accelerator.device)
    teacher = None if model.teacher is None else model.teacher.to(accelerator.device)
    roles = Roles(network, task.plan.phases, teacher, keep_init=recipe.keep == "best")
    held_out = partial(on_held_out, task, device)
    seen = RunView(
        roles=roles, num_classes=task.num_classes, given=images.given, environment=images.environment,
        held_out=held_out,
    )  # fmt: skip
    state = recipe.method_value.State(seen)
    bare = optimizer_of(recipe, network, state)
    if recipe.compile:  # in place: names and copies are those of the bare networks
        for learned in (network, *([] if roles.teacher is None else [roles.teacher])):
            learned.compile()
    wrapped, optimizer = accelerator.prepare(network, bare)
    weights = None
    if recipe.class_weights == "balanced":
        weights = balanced_weights(images.given, task.num_classes).to(accelerator.device)
    labeller = pool_labeller(task, device, roles, folder.path, display.labels)
    objective = LabelObjective(
        accelerator=accelerator, network=wrapped, roles=roles, method=recipe.method_value, state=state,
        num_classes=task.num_classes, total_steps=task.plan.total_steps, class_weights=weights,
        prepare=partial(device.prepare, preprocess=task.preprocess),
        label_pool=labeller if recipe.labels_once_per_cycle else None,
        label_smoothing=recipe.label_smoothing, mixing=task.mixing,
    )  # fmt: skip
    return Loop(
        accelerator=accelerator, network=wrapped, roles=roles, optimizer=optimizer, state=state, objective=objective,
        average=None if settings.ema is None else Average(network, settings.ema), feed=partial(feed, task, device),
        rate=task.rate, accumulate=int(recipe.accumulate), clip=settings.clip,
        reset_optimizer=recipe.traits.optimizer_state == "reset",
        frozen_norm=recipe.batch_norm == "frozen" and recipe.trunk != "frozen",  # a head's norm is not the checkpoint's
    )  # fmt: skip


def optimizer_of(recipe: Recipe, network: nn.Module, state: MethodState) -> torch.optim.Optimizer:
    """The optimiser of a network and of what its method learns beside it."""
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
        settings.name, groups + state.parameter_groups(), momentum=settings.momentum, nesterov=settings.nesterov,
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


# -------------------------------------------------------------------- how far fine-tuning goes

SHARES = (1.0, 0.5)  # in the order of preference


def share_by_trial(task: Task, model: Model, device: Device, folder: RunFolder) -> float:
    """How far the weights of a run go from the first ones (0) to the last ones (1).

    All the way for `keep: last`, and with very many labels. Otherwise a trial decides: a run that holds a fifth of the
    labels out, in a folder of its own inside the run's, where a stopped one is continued. It takes the first of SHARES
    that these labels do not reject. Few labels cannot judge: half the way.
    """
    if task.recipe.keep == "last":
        return 1.0
    path, decided = folder.path / TRIAL, folder.path / TRIAL / "decision.json"
    if decided.is_file():
        return float(json.loads(decided.read_text(encoding="utf-8"))["share"])
    accelerator, labelled = device.accelerator, len(task.pools.indices["labelled"])
    if not has_trial(task.recipe, labelled):
        return 1.0 if labelled > MOST_LABELS else 0.5
    try:
        pools = hold_out(task.pools, HELD_OUT, task.recipe.seed)
    except Problem:  # one image a class
        return 0.5
    trial = with_fewer_labels(task, pools)
    if accelerator.is_main_process and not (path / "recipe.yaml").is_file():
        RunFolder.create(path, to_yaml(trial.recipe), overwrite=False)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        sys.stderr.write(
            f"trial   {trial.plan.total_steps:,} steps with {len(pools.calibration):,} labels held out, "
            "which decide how far the weights go; then the run with all labels\n"
        )
    loop, _ = train_phases(trial, model.copied(), device, RunFolder.reopen(path), after=task.plan.total_steps)
    losses = {each: held_out_losses(trial, device, learner_of(loop, each)) for each in (*SHARES, 0.0)}
    share, means = not_rejected(losses), {f"{each:g}": float(some.mean()) for each, some in losses.items()}
    if accelerator.is_main_process:
        write_json(decided, {"share": share, "held_out": len(pools.calibration), "losses": means})
        RunFolder(path).prune(0)  # as large as those of the run, and of no more use
    accelerator.free_memory()
    return share


def not_rejected(losses: Mapping[float, Tensor]) -> float:
    """The first of SHARES whose losses (n,) are not clearly above those of the first weights; 0 if there is none."""
    return next((share for share in SHARES if not clearly_above(losses[share], losses[0.0])), 0.0)


def with_fewer_labels(task: Task, pools: Pools) -> Task:
    """The same task without the held-out labels, whose steps shrink with them; it is not evaluated."""
    sizes = {name: len(members) for name, members in pools.indices.items()}
    steps = trial_steps(task.plan.total_steps, sizes["labelled"] / len(task.pools.indices["labelled"]))
    evaluate = task.recipe.evaluate.model_copy(update={"images": 0})
    recipe = task.recipe.model_copy(update={"steps": steps, "evaluate": evaluate, "track": "none", "patience": None})
    return dataclasses.replace(task, recipe=recipe, pools=pools, plan=make_plan(recipe, sizes))


def held_out_losses(trial: Task, device: Device, network: nn.Module) -> Tensor:
    """The loss (n,) of each held-out image.

    One given label: minus the log share of its probability among those of all classes, so that more labels cost
    nothing. A set of given labels says which labels are wrong, too: the loss that the activation is trained with.
    """
    logits, given = on_held_out(trial, device, network)
    if given.ndim == 2:
        targets = given_matrix(given, trial.num_classes)
        if trial.recipe.activation == "sigmoid":
            return bce_entries(logits, targets).sum(1)
        return -(shared(targets) * logits.log_softmax(1)).sum(1)
    probabilities = trial.probabilities(logits.double())
    shares = probabilities / probabilities.sum(1, keepdim=True).clamp(min=1e-30)
    return -shares.gather(1, given.unsqueeze(1)).squeeze(1).clamp(min=1e-30).log()
