"""A run from its folder to its results: features, trial, phases, finish, refit."""

from __future__ import annotations

import shlex
from pathlib import Path

from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import read_json
from finetune_mile.core.problems import Problem
from finetune_mile.measures.metrics import Measured
from finetune_mile.training.features import on_features
from finetune_mile.training.finish import finish
from finetune_mile.training.folder import REFIT, RunFolder, open_on_main, requested_settings
from finetune_mile.training.monitor import recorded
from finetune_mile.training.processes import Device, computing, warn_of_spread, weight_spread
from finetune_mile.training.start import compare_sizes, score_first_stage
from finetune_mile.training.steps import train_phases
from finetune_mile.training.task import Model, Task, second_cost
from finetune_mile.training.trial import learner_of, refit, shares_by_trial, with_second


def open_folder(task: Task, model: Model, device: Device, path: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """The run folder with all that is known before the first step; the first process makes or completes it."""
    recipe, now = task.recipe, task.pools.to_json(task.recipe.fraction, task.recipe.seed)
    if resume and (path / "split.json").is_file():
        before = read_json(path / "split.json")
        if any(before.get(key) != now[key] for key in ("labelled", "unlabelled", "sha256")):
            raise Problem(
                f"--resume {path}: the training images changed since the run began: {before.get('labelled')} labelled "
                f"and {before.get('unlabelled')} not, now {now['labelled']} and {now['unlabelled']}. Restore them, or "
                f"start a new run with --recipe {shlex.quote(f'{path}/recipe.yaml')}"
            )
    notes = {"init.json": model.report.to_json(), "split.json": now}
    facts = {"card": model.card.model_dump(mode="json"), "requested": requested_settings(task.requested, recipe)}
    return open_on_main(device.accelerator, path, to_yaml(recipe), notes, facts, resume=resume, overwrite=overwrite)


def train(task: Task, model: Model, device: Device, folder: RunFolder) -> tuple[int, Measured | None]:
    """Train what is left, then finish; returns the exit code, and what the scores of this call are means of."""
    recipe, info, measured = task.recipe, folder.info, None
    switches = computing(
        precision=recipe.precision, benchmark=recipe.cudnn_benchmark is True, deterministic=recipe.deterministic
    )
    with switches, recorded(device, folder, keep_checkpoints=bool(info.get("keep_checkpoints"))) as ending:
        first = model.copied() if info.get(REFIT) else None
        if "share" not in info or not (folder.path / "results.json").is_file():  # else only the refit is left
            with folder.times.of("features"):
                step_task, step_device = on_features(task, model, device)  # of features, with a frozen trunk
                compare_sizes(task, model, device, folder)
            try:
                with folder.times.of("trial"):
                    share, then = shares_by_trial(step_task, model, step_device, folder)  # may train first
                loop, monitor = train_phases(
                    step_task, model, step_device, folder, after=second_cost(step_task) if then else 0
                )
                learner = learner_of(loop, share)
                if then:
                    score_first_stage(step_task, step_device, learner, folder)
                with folder.times.of("then"):
                    learner = with_second(step_task, model, step_device, folder, learner, then)
                spread = weight_spread(learner)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                from finetune_mile.training.memory import advise

                advise(task, model, device.accelerator, error)
                raise
            if device.accelerator.is_main_process:
                speed = round(monitor.images_seen / monitor.busy_seconds, 1) if monitor.busy_seconds else None
                folder.update(images_per_second=speed)
            with folder.times.of("report"):
                measured = finish(step_task, model, step_device, learner, folder, monitor.chosen, (share, then))
            if device.accelerator.is_main_process:
                folder.update(share=share, then_share=then, **warn_of_spread(spread))
        if first is not None:
            with folder.times.of("refit"):
                refit(task, first, device, folder)
    return ending.code, measured
