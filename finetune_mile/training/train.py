"""A run from its set-up to its results: resume if there is something, train, evaluate, write."""

from __future__ import annotations

import copy
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import write_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.splits import Pools, balanced_weights, hold_out
from finetune_mile.learning.loop import LabelObjective, Loop
from finetune_mile.learning.losses import bce_entries, given_matrix, shared
from finetune_mile.learning.optim import make_optimizer, parameter_groups, relative_groups
from finetune_mile.learning.phases import RunView
from finetune_mile.learning.roles import Average, Roles
from finetune_mile.measures.guards import LossAlarm, lower_rates
from finetune_mile.measures.intervals import clearly_above
from finetune_mile.measures.verdicts import SCORES, score_of
from finetune_mile.networks.heads import StandardisedLinear, get_head
from finetune_mile.training import resume
from finetune_mile.training.display import Display
from finetune_mile.training.finish import finish
from finetune_mile.training.folder import OWN_SIZE, REFIT, START, TRIAL, RunFolder, open_on_main, requested_settings
from finetune_mile.training.labelling import pool_labeller
from finetune_mile.training.monitor import Enough, LabelMonitor, recorded
from finetune_mile.training.plan import HELD_OUT, MOST_LABELS, has_trial, make_plan, trial_steps
from finetune_mile.training.processes import warn_of_spread, weight_spread
from finetune_mile.training.refit import on_all_labels, open_refit, replace_export
from finetune_mile.training.setup import Setup
from finetune_mile.training.start import between, lines_to_beat, own_size_lines, start_head


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
                f"start a new run with --recipe {shlex.quote(f'{path}/recipe.yaml')}"
            )
    facts = {"card": setup.card.model_dump(mode="json"), "requested": requested_settings(setup.requested, recipe)}
    return open_on_main(setup.accelerator, path, to_yaml(recipe), notes, facts, resume=resume, overwrite=overwrite)


def train(setup: Setup, folder: RunFolder) -> int:
    """Train what is left, then finish; returns the exit code."""

    def work() -> dict[str, object]:
        if setup.complete is not None:
            setup.viewer.get_ready()
        first = (copy.deepcopy(setup.network), copy.deepcopy(setup.complete)) if folder.info.get(REFIT) else None
        if "share" not in folder.info or not (folder.path / "results.json").is_file():  # else only the refit is left
            score()
        if first is not None:
            refit(setup, folder, *first)
        return {}

    def score() -> None:
        compare_sizes(setup, folder)
        try:
            share = choose_share(setup, folder)
            loop, monitor = train_phases(setup, folder)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            from finetune_mile.training.memory import advise

            advise(setup, error)
            raise
        learner = loop.learner() if share == 1 else between(loop.learner(), loop.roles.weights("init"), share)
        spread = weight_spread(setup.network)
        finish(setup, learner, folder, monitor.chosen, share)
        speed = round(monitor.images_seen / monitor.busy_seconds, 1) if monitor.busy_seconds else None
        if setup.accelerator.is_main_process:
            folder.update(images_per_second=speed, share=share, **warn_of_spread(spread))

    keep = bool(folder.info.get("keep_checkpoints"))
    return recorded(setup.accelerator, folder, setup.viewer.signals, work, keep_checkpoints=keep)


def refit(setup: Setup, folder: RunFolder, network: nn.Module, complete: nn.Module | None) -> None:
    """`--refit`: train on all labels and export that; `network` and `complete` are as before the first step."""
    setup.accelerator.wait_for_everyone()  # the first process has written the results that all read
    again = on_all_labels(setup, folder, network, complete)
    if again.complete is not None:
        again.viewer.get_ready()
    inside = open_refit(again, folder)
    if setup.accelerator.is_main_process:
        sys.stderr.write(
            f"refit   {again.plan.total_steps:,} steps with {len(again.pools.indices['labelled']):,} labels\n"
        )
    loop, _ = train_phases(again, inside)
    share = float(folder.info["share"]) if setup.accelerator.is_main_process else 1.0
    learner = loop.learner() if share == 1 else between(loop.learner(), loop.roles.weights("init"), share)
    if setup.accelerator.is_main_process:
        sys.stdout.write(replace_export(again, learner, folder, inside) + "\n")


def compare_sizes(setup: Setup, folder: RunFolder) -> None:
    """At the start of a run below the checkpoint's own image size: what a probe at that size reaches, if cheap."""
    own = None if setup.recipe.init == "none" else setup.own_size
    if own is None or setup.viewer.preprocess.size >= own or folder.saved() or OWN_SIZE in folder.start():
        return
    lines = own_size_lines(setup, own)
    if lines is None or not setup.accelerator.is_main_process:
        return
    write_json(folder.path / START, folder.start() | {OWN_SIZE: lines})
    key = score_of(lines) or ""
    sys.stderr.write(
        f"size    to beat: a linear probe at the checkpoint's own {lines['size']} pixels has {lines[key]:.1f} % "
        f"{SCORES[key]}; this run shows images at {setup.viewer.preprocess.size} pixels\n"
    )


def train_phases(setup: Setup, folder: RunFolder, *, visible: bool = True, after: int = 0) -> tuple[Loop, LabelMonitor]:
    """Train the phases that are left; `after` so many steps of another run follow."""
    recipe, accelerator, plan = setup.recipe, setup.accelerator, setup.plan
    new, lines = not folder.saved(), None
    if recipe.head_init == "probe":
        if not isinstance(get_head(setup.network), StandardisedLinear):  # else it was fitted before
            lines = start_head(setup, fit=new)
    elif new and recipe.init != "none":
        lines = lines_to_beat(setup)
    if lines is not None and accelerator.is_main_process:
        write_json(folder.path / START, folder.start() | lines)
    with Display(plan.total_steps, visible=visible and accelerator.is_main_process, after=after) as display:
        loop = make_loop(setup, folder, display)
        if recipe.track != "none":
            accelerator.init_trackers(folder.path.name, config={"recipe": to_yaml(recipe)})
        step, extra = resume.restore(loop, folder, recipe.seed)
        display.begin(step)
        monitor = LabelMonitor(setup, loop, folder, display, alarm(setup))
        last = plan.total_steps
        try:
            if extra is not None:
                monitor.resume(step, extra)
            loop.train(plan.phases, step, monitor)
        except Enough as enough:
            (last,) = enough.args
        monitor.take_best(last)
    return loop, monitor


def make_loop(setup: Setup, folder: RunFolder, display: Display) -> Loop:
    """The network with its optimiser, roles and method, on the device."""
    recipe, accelerator, settings = setup.recipe, setup.accelerator, setup.recipe.optimizer
    network = setup.network
    if recipe.sync_batch_norm and accelerator.num_processes > 1:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    network.to(accelerator.device)
    teacher = None if setup.teacher is None else setup.teacher.to(accelerator.device)
    roles = Roles(network, setup.plan.phases, teacher, keep_init=recipe.keep == "best")
    images = setup.pools.images
    state = recipe.method_value.State(
        RunView(roles=roles, num_classes=setup.num_classes, given=images.given, held_out=setup.calibrate)
    )
    lr = float(settings.lr)  # `set_up` has chosen it where it is auto
    if settings.name == "relative":
        groups = relative_groups(network, lr=lr, weight_decay=settings.weight_decay)
    else:
        groups = parameter_groups(
            network, lr=lr, head_lr=settings.head_lr, weight_decay=settings.weight_decay,
            layer_decay=settings.layer_decay,
        )  # fmt: skip
    groups += state.parameter_groups()
    bare = make_optimizer(
        settings.name, groups, momentum=settings.momentum, nesterov=settings.nesterov,
        fused=recipe.fused_optimizer is True,
    )  # fmt: skip
    if recipe.compile:  # in place: names and copies are those of the bare networks
        for learned in (network, *([] if roles.teacher is None else [roles.teacher])):
            learned.compile()
    wrapped, optimizer = accelerator.prepare(network, bare)
    environments = 0 if images.environment is None else int(images.environment.max()) + 1
    weights = None
    if recipe.class_weights == "balanced":
        weights = balanced_weights(images.given, setup.num_classes).to(accelerator.device)
    objective = LabelObjective(
        accelerator=accelerator, network=wrapped, roles=roles, method=recipe.method_value, state=state,
        num_classes=setup.num_classes, total_steps=setup.plan.total_steps, class_weights=weights,
        environment=images.environment, environments=environments, prepare=setup.viewer.prepare,
        label_pool=pool_labeller(setup, roles, folder.path, display.labels) if recipe.labels_once_per_cycle else None,
        label_smoothing=recipe.label_smoothing, mixing=setup.mixing,
    )  # fmt: skip
    return Loop(
        accelerator=accelerator, network=wrapped, roles=roles, optimizer=optimizer, state=state, objective=objective,
        average=None if settings.ema is None else Average(network, settings.ema), feed=setup.feed, rate=setup.rate,
        accumulate=int(recipe.accumulate), clip=settings.clip, reset_optimizer=recipe.traits.optimizer_state == "reset",
        frozen_norm=recipe.batch_norm == "frozen" and setup.complete is None,  # a head's norm is not the checkpoint's
    )  # fmt: skip


def alarm(setup: Setup) -> LossAlarm:
    """What watches the training loss."""
    given, recipe = setup.pools.images.given, setup.recipe
    labels = 1.0
    if given.ndim == 2:
        counts = (given > 0).sum(1).double()
        labels = float(counts[given[:, 0] >= 0].mean())
    return LossAlarm(
        untrained_loss=recipe.method_value.untrained_loss, num_classes=setup.num_classes, given_labels=labels,
        head_bias=recipe.head_bias, advice=lower_rates(float(recipe.optimizer.lr), recipe.optimizer.head_lr),
    )  # fmt: skip


# -------------------------------------------------------------------- how far fine-tuning goes

SHARES = (1.0, 0.5)  # in the order of preference


def choose_share(setup: Setup, folder: RunFolder) -> float:
    """How far the weights of a run go from the first ones (0) to the last ones (1).

    All the way for `keep: last`, and with very many labels. Otherwise a trial decides: a run that holds a fifth of the
    labels out, in a folder of its own inside the run's, where a stopped one is continued. It takes the first of SHARES
    that these labels do not reject. Few labels cannot judge: half the way.
    """
    if setup.recipe.keep == "last":
        return 1.0
    path, decided = folder.path / TRIAL, folder.path / TRIAL / "decision.json"
    if decided.is_file():
        return float(json.loads(decided.read_text(encoding="utf-8"))["share"])
    accelerator, labelled = setup.accelerator, len(setup.pools.indices["labelled"])
    if not has_trial(setup.recipe, labelled):
        return 1.0 if labelled > MOST_LABELS else 0.5
    try:
        pools = hold_out(setup.pools, HELD_OUT, setup.recipe.seed)
    except Problem:  # one image a class
        return 0.5
    trial = _trial(setup, pools)
    if accelerator.is_main_process and not (path / "recipe.yaml").is_file():
        RunFolder.create(path, to_yaml(trial.recipe), overwrite=False)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        sys.stderr.write(
            f"trial   {trial.plan.total_steps:,} steps with {len(pools.calibration):,} labels held out, "
            "which decide how far the weights go; then the run with all labels\n"
        )
    loop, _ = train_phases(trial, RunFolder.reopen(path), after=setup.plan.total_steps)
    learner, first = loop.learner(), loop.roles.weights("init")
    losses = {each: _held_out_losses(trial, between(learner, first, each)) for each in (*SHARES, 0.0)}
    share, means = not_rejected(losses), {f"{each:g}": float(some.mean()) for each, some in losses.items()}
    if accelerator.is_main_process:
        write_json(decided, {"share": share, "held_out": len(pools.calibration), "losses": means})
        RunFolder(path).prune(0)  # as large as those of the run, and of no more use
    accelerator.free_memory()
    return share


def not_rejected(losses: Mapping[float, Tensor]) -> float:
    """The first of SHARES whose losses (n,) are not clearly above those of the first weights; 0 if there is none."""
    return next((share for share in SHARES if not clearly_above(losses[share], losses[0.0])), 0.0)


def _trial(setup: Setup, pools: Pools) -> Setup:
    """The set-up of a run without the held-out labels, whose steps shrink with them; it is not evaluated."""
    sizes = {name: len(members) for name, members in pools.indices.items()}
    steps = trial_steps(setup.plan.total_steps, sizes["labelled"] / len(setup.pools.indices["labelled"]))
    evaluate = setup.recipe.evaluate.model_copy(update={"images": 0})
    recipe = setup.recipe.model_copy(update={"steps": steps, "evaluate": evaluate, "track": "none", "patience": None})
    plan = make_plan(recipe, sizes)
    return dataclasses.replace(setup, recipe=recipe, pools=pools, plan=plan, network=copy.deepcopy(setup.network))


def _held_out_losses(trial: Setup, network: nn.Module) -> Tensor:
    """The loss (n,) of each held-out image.

    One given label: minus the log share of its probability among those of all classes, so that more labels cost
    nothing. A set of given labels says which labels are wrong, too: the loss that the activation is trained with.
    """
    logits, given = trial.calibrate(network)
    if given.ndim == 2:
        targets = given_matrix(given, trial.num_classes)
        if trial.recipe.activation == "sigmoid":
            return bce_entries(logits, targets).sum(1)
        return -(shared(targets) * logits.log_softmax(1)).sum(1)
    probabilities = trial.probabilities(logits.double())
    shares = probabilities / probabilities.sum(1, keepdim=True).clamp(min=1e-30)
    return -shares.gather(1, given.unsqueeze(1)).squeeze(1).clamp(min=1e-30).log()
