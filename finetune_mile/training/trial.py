"""Steps around those of a run: the trial of `keep: best`, the second stage, and `--refit`."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from finetune_mile.checkpoints.exporting import CONFIG, write_export
from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import read_json, read_scores, write_json, write_whole
from finetune_mile.core.problems import Problem
from finetune_mile.images.splits import Pools, hold_out, with_validation
from finetune_mile.learning.loop import Loop
from finetune_mile.learning.losses import bce_rows, cross_entropy_rows, given_matrix
from finetune_mile.learning.roles import tensors_of
from finetune_mile.measures.intervals import clearly_above
from finetune_mile.pages.card import model_card
from finetune_mile.training.explain import about_second
from finetune_mile.training.features import on_features
from finetune_mile.training.folder import REFIT, SECOND, TRIAL, RunFolder
from finetune_mile.training.plan import HELD_OUT, MOST_LABELS, computing, has_trial, trial_steps
from finetune_mile.training.processes import Device, from_first
from finetune_mile.training.steps import train_phases
from finetune_mile.training.task import Model, Task, on_training_images, second_cost, second_task, unseen

SHARES = (1.0, 0.5)  # in the order of preference


def shares_by_trial(task: Task, model: Model, device: Device, folder: RunFolder) -> tuple[float, float]:
    """How far the weights of a run go from the first ones (0) to the last ones (1), in each of its two stages.

    All the way for `keep: last`, and with very many labels. Otherwise a trial decides: a run that holds a fifth of the
    labels out, in a folder of its own inside the run's, where a stopped one is continued. For each stage it takes the
    first of SHARES that these labels do not reject. Few labels cannot judge: half the way.
    """
    if task.recipe.keep == "last":
        return 1.0, 1.0
    decided, labelled = folder.path / TRIAL / "decision.json", len(task.pools.indices["labelled"])
    if decided.is_file():
        found = read_json(decided)
        first, then = found.get("share"), found.get("then_share", 1.0)
        if not isinstance(first, int | float) or not isinstance(then, int | float):
            raise Problem(f"{decided} is damaged (a share is not a number); restore it from a copy, or begin a new run")
        return first, then
    if not has_trial(task.recipe, labelled):
        return (1.0, 1.0) if labelled > MOST_LABELS else (0.5, 0.5)
    try:
        pools = hold_out(task.pools, HELD_OUT, task.recipe.seed)
    except Problem:  # one image a class
        return 0.5, 0.5
    trial = with_labels(task, pools, trial_steps(task.plan.total_steps, len(pools.indices["labelled"]) / labelled))
    inside, main = open_inside(trial, device, folder, TRIAL), device.accelerator.is_main_process
    if main:
        sys.stderr.write(
            f"trial   {trial.plan.total_steps:,} steps with {len(pools.calibration):,} labels held out, "
            "which decide how far the weights go; then the run with all labels\n"
        )
    after = task.plan.total_steps + second_cost(task)
    loop, _ = train_phases(trial, model.copied(), device, inside, after=after + second_cost(trial))
    share, losses = decide(trial, device, loop)
    decision: dict[str, Any] = {"held_out": len(pools.calibration), "share": share, "losses": losses}
    then = second_task(trial)
    if then is not None:
        images = after * task.recipe.batch_size
        second = train_second(then, model, device, inside, learner_of(loop, share), images)
        decision["then_share"], decision["then_losses"] = decide(then, device, second)
    if main:
        write_json(decided, decision)
        inside.prune(0)  # as large as those of the run, and of no more use
    device.accelerator.free_memory()
    return share, decision.get("then_share", 1.0)


def decide(trial: Task, device: Device, loop: Loop) -> tuple[float, dict[str, float]]:
    """The share of the way that held-out labels do not reject, and their mean losses by share."""
    losses = {each: held_out_losses(trial, device, learner_of(loop, each)) for each in (*SHARES, 0.0)}
    return not_rejected(losses), {f"{each:g}": float(some.mean()) for each, some in losses.items()}


def with_second(
    task: Task, model: Model, device: Device, folder: RunFolder, learner: nn.Module, share: float
) -> nn.Module:
    """What the second stage of a task makes of the learner of the first one; the learner, where there is none.

    `share`: how far the weights go; 0: the trial has shown that the second stage does harm, and it is left out.
    """
    then = second_task(task)
    if then is None or share == 0:
        return learner
    return learner_of(train_second(then, model, device, folder, learner), share)


def train_second(
    then: Task, model: Model, device: Device, folder: RunFolder, learner: nn.Module, after: float = 0
) -> Loop:
    """Train a second stage in a folder of its own inside that of the first one, where a stopped one is continued.

    What follows it takes as long as learning from `after` images.
    """
    device.accelerator.free_memory()
    network = model.exported(learner)
    inside = open_inside(then, device, folder, SECOND)
    if device.accelerator.is_main_process:
        sys.stderr.write(f"then    {about_second(then)}\n")
    model = dataclasses.replace(
        model, network=network, learner=network, teacher=model.teacher if then.recipe.teacher else None
    )
    return train_phases(then, model, device, inside, after=after / computing(then.recipe))[0]


def not_rejected(losses: Mapping[float, Tensor]) -> float:
    """The first of SHARES whose losses (n,) are not clearly above those of the first weights; 0 if there is none."""
    return next((share for share in SHARES if not clearly_above(losses[share], losses[0.0])), 0.0)


def held_out_losses(trial: Task, device: Device, network: nn.Module) -> Tensor:
    """The loss (n,) of each held-out image.

    One given label: minus the log share of its probability among those of all classes, so that more labels cost
    nothing. A set of given labels says which labels are wrong, too: the loss that the activation is trained with.
    """
    logits, given = on_training_images(trial, device, network, trial.pools.calibration)
    if given.ndim == 2:
        rows = bce_rows if trial.recipe.activation == "sigmoid" else cross_entropy_rows
        return rows(logits, given_matrix(given, trial.num_classes))
    probabilities = trial.probabilities(logits.double())
    shares = probabilities / probabilities.sum(1, keepdim=True).clamp(min=1e-30)
    return -shares.gather(1, given.unsqueeze(1)).squeeze(1).clamp(min=1e-30).log()


def refit(task: Task, model: Model, device: Device, folder: RunFolder) -> None:
    """`--refit`, the last step of a run: train on all labels, those of the validation images included, and export that.

    The scores stay those of the run before: no image is left that could test the new weights. Passes over the labelled
    images stay the same, so there are more steps; how far the weights go from the first to the last ones is known.

    Args:
        task: of the run, whose results are in the folder.
        model: as before the first step.
        device: where to compute.
        folder: of the run.
    """
    main = device.accelerator.is_main_process
    device.accelerator.wait_for_everyone()  # the first process has written the results that all read
    if task.pools.images.environment is not None:
        raise Problem("--refit: images that come from several environments cannot be joined with validation images")
    pools = with_validation(task.pools, task.data.val)
    labels, before = (len(each.indices["labelled"]) for each in (pools, task.pools))
    results = read_scores(folder.path / "results.json")
    steps = results.get("chosen_step", task.plan.total_steps) * labels / before
    again = with_labels(task, pools, max(round(steps), 1))
    again = dataclasses.replace(again, data=dataclasses.replace(task.data, train=pools.images))
    step_task, step_device = on_features(again, model, device, scored=False)
    split = pools.to_json(task.recipe.fraction, task.recipe.seed) | {"val_ids": list(task.data.val.ids)}
    inside = open_inside(again, device, folder, REFIT, {"split.json": split})
    if main:
        sys.stderr.write(f"refit   {again.plan.total_steps:,} steps with {labels:,} labels\n")
    loop, _ = train_phases(step_task, model, step_device, inside)
    shares = from_first(lambda: (float(folder.info["share"]), float(folder.info.get("then_share", 1.0))))
    learner = with_second(again, model, device, inside, learner_of(loop, shares[0]), shares[1])
    if not main:
        return
    config = read_json(folder.path / "export" / CONFIG)
    config |= {"refit_labels": labels, "steps": again.plan.total_steps}
    write_export(folder.path / "export", model.exported(learner), config)
    write_whole(folder.path / "export/README.md", model_card(config, results, "own"))
    inside.prune(0)
    sys.stdout.write(
        f"Trained again on all {labels:,} labelled images (--refit): predict and export use these weights. The scores "
        "are of the run before, which had not seen the validation images.\n"
    )


def with_labels(task: Task, pools: Pools, steps: int) -> Task:
    """The same task with other labels, in so many steps; it is not evaluated."""
    return unseen(task, task.recipe.model_copy(update={"steps": steps}), pools)


def open_inside(
    task: Task, device: Device, folder: RunFolder, name: str, notes: Mapping[str, object] | None = None
) -> RunFolder:
    """The folder of another run inside that of a run; made by the first process, or continued."""
    path = folder.path / name
    if device.accelerator.is_main_process and not (path / "recipe.yaml").is_file():
        RunFolder.create(path, to_yaml(task.recipe), overwrite=False, notes=notes)
    device.accelerator.wait_for_everyone()
    return RunFolder.reopen(path)


def learner_of(loop: Loop, share: float) -> nn.Module:
    """What is scored and exported: the learner, with weights between its first ones (share 0) and its last ones (1)."""
    if share == 1:
        return loop.learner()
    learner, first = copy.deepcopy(loop.learner()), loop.roles.weights["init"]
    for name, tensor in tensors_of(learner).items():
        if tensor.is_floating_point():
            tensor.lerp_(first[name], 1 - share)
    return learner
