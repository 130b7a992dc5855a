"""A run from an opened folder to its results: resume if there is something, train, evaluate, write."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.loading import LoadReport
from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import whole_file, write_json
from finetune_mile.images.index import say_skipped
from finetune_mile.learning.loop import Average, train
from finetune_mile.learning.optim import make_optimizer, parameter_groups, rate_at
from finetune_mile.learning.roles import Roles, copy_into
from finetune_mile.measures.guards import learned_nothing, lower_rates
from finetune_mile.pages.report import gallery_images, model_card, write_report
from finetune_mile.training import resume
from finetune_mile.training.display import Display, closing_table
from finetune_mile.training.finish import open_on_main, warn_of_spread, weight_spread, write_labels
from finetune_mile.training.folder import RunFolder
from finetune_mile.training.labelling import pool_labeller
from finetune_mile.training.monitor import Signals, Watch, recorded
from finetune_mile.training.plan import Plan
from finetune_mile.training.session import Session


def open_folder(session: Session, path: Path, report: LoadReport, *, resume: bool, overwrite: bool) -> RunFolder:
    """The run folder with all that is known before the first step; the first process makes or completes it."""
    recipe, accelerator = session.recipe, session.accelerator
    notes = {"init.json": report.to_json, "split.json": lambda: session.pools.to_json(recipe.fraction, recipe.seed)}
    facts = {"card": session.card.model_dump(mode="json")}
    return open_on_main(accelerator, path, to_yaml(recipe), notes, facts, resume=resume, overwrite=overwrite)


def play(
    session: Session, plan: Plan, network: nn.Module, teacher: nn.Module | None, folder: RunFolder, signals: Signals
) -> int:
    """Train what is left, then finish; returns the exit code."""

    def work() -> dict[str, object]:
        learner, watch = _train(session, plan, network, teacher, folder, signals)
        spread = weight_spread(network)
        _finish(session, learner, folder)
        speed = round(watch.images_seen / watch.busy_seconds, 1) if watch.busy_seconds else None
        return {"images_per_second": speed, **warn_of_spread(spread)}

    return recorded(session.accelerator, folder, signals, work)


def _train(
    session: Session, plan: Plan, network: nn.Module, teacher: nn.Module | None, folder: RunFolder, signals: Signals
) -> tuple[nn.Module, Watch]:
    recipe, accelerator, settings = session.recipe, session.accelerator, session.recipe.optimizer
    if recipe.sync_batch_norm and accelerator.num_processes > 1:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    network.to(accelerator.device)
    roles = Roles(network, plan.phases, None if teacher is None else teacher.to(accelerator.device))
    state = session.method_state(roles)
    groups = parameter_groups(network, lr=settings.lr, head_lr=settings.head_lr, weight_decay=settings.weight_decay)
    groups += state.parameter_groups()
    bare = make_optimizer(settings.name, groups, momentum=settings.momentum, nesterov=settings.nesterov)
    wrapped, optimizer = accelerator.prepare(network, bare)
    average = None if settings.ema is None else Average(network, settings.ema)
    if recipe.track != "none":
        accelerator.init_trackers(folder.path.name, config={"recipe": to_yaml(recipe)})

    content = resume.load_together(folder, accelerator)
    step = 0
    if content is not None:
        step = resume.restore(content, accelerator, roles=roles, optimizer=optimizer, average=average)
    if accelerator.is_main_process:
        folder.rewind(step)
    if content is None:
        torch.manual_seed(recipe.seed + accelerator.process_index)  # dropout differs between processes

    if content is not None:
        state.load_state_dict(content["extra"]["method"])

    def save(at: int, extra: dict[str, Any]) -> None:
        resume.save(
            folder,
            accelerator,
            step=at,
            roles=roles,
            optimizer=optimizer,
            average=average,
            extra=extra | {"method": state.state_dict()},
        )

    with Display(plan.total_steps, step, visible=accelerator.is_main_process) as display:
        watch = Watch(
            accelerator, folder, display, signals, plan, session.alarm(), recipe.playing,
            num_classes=session.num_classes,
            log_every=recipe.log_every, checkpoint_every=recipe.checkpoint_every,
            evaluate_every=None if recipe.evaluate.every is None else plan.steps(recipe.evaluate.every),
            save=save, evaluate=lambda: session.evaluate(network, recipe.evaluate.images),
            probe=lambda: session.probe(network),
        )  # fmt: skip
        if content is not None:
            watch.resume(step, content["extra"])
        label_pool = None
        if recipe.labels_once_per_cycle:
            label_pool = pool_labeller(session, roles, folder.path, display.labels)
        loop = session.loop(plan, state, label_pool)
        train(
            accelerator, wrapped, roles, plan.phases, optimizer, rate_of(session, plan), loop,
            average=average, first_step=step, on_step=watch, on_decision=watch.on_decision,
        )  # fmt: skip
    learner = network
    if average is not None:
        learner = copy.deepcopy(network)
        copy_into(learner.state_dict(), average.weights)
    return learner, watch


def rate_of(session: Session, plan: Plan) -> Any:
    """Step to the share of the base learning rate."""
    settings = session.recipe.optimizer
    warmup = plan.steps(settings.warmup)
    milestones = tuple(plan.steps(m) for m in settings.milestones)

    def rate(step: int) -> float:
        return rate_at(
            step, total_steps=plan.total_steps, schedule=settings.schedule, warmup=warmup,
            milestones=milestones, gamma=settings.gamma,
        )  # fmt: skip

    return rate


def _finish(session: Session, learner: nn.Module, folder: RunFolder) -> None:
    """Score the student on everything and write what a run leaves behind."""
    recipe, accelerator, data = session.recipe, session.accelerator, session.data
    results = session.evaluate(learner, None)
    labelled = session.pools.indices["labelled"]
    found: Tensor | None = None
    if recipe.evaluate.labels:
        logits = session.logits(learner, session.pools.images, labelled)
        good = ~logits.isnan().all(1)
        logits, labelled = logits[good], labelled[good.numpy()]
        found = logits.sigmoid() if recipe.activation == "sigmoid" else logits.softmax(1)
    shown = session.logits(learner, data.val, gallery_images(session).numpy())
    if not accelerator.is_main_process:  # what follows is files only; no process waits for another
        return
    skipped = len(session.bad.read())
    results |= {"bad_images": skipped, "unreadable_files": sum(data.unreadable.values())}
    write_json(folder.path / "results.json", results)
    warning = learned_nothing(
        results, steps=recipe.steps or 0, data=recipe.data,
        advice=lower_rates(recipe.optimizer.lr, recipe.optimizer.head_lr),
    )  # fmt: skip
    if found is not None:
        ids = [session.pools.images.ids[i] for i in labelled]
        given = session.pools.images.given[torch.from_numpy(labelled)]
        write_labels(folder.path / "labels.parquet", ids, given, found, data.classes, recipe.rho or 0.25)
    config = {
        "arch": recipe.arch or session.card.arch, "padding": session.card.padding, "num_classes": len(data.classes),
        "classes": list(data.classes), **session.how.model_dump(mode="json"),
        "activation": recipe.activation, "init": recipe.init, "method": recipe.method,
    }  # fmt: skip
    write_export(folder.path / "export", learner, config)
    with whole_file(folder.path / "export/README.md") as part:
        part.write_text(model_card(recipe, config, results, warning), encoding="utf-8")
    write_report(session, shown, folder, results, warning)
    title = f"{recipe.method} on {data.name}: results on {int(results['images']):,} validation images"
    from rich.console import Console

    out = Console(stderr=True)
    if warning is not None:
        out.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    out.print(closing_table(results, title))
    if skipped:
        out.print(say_skipped(skipped, session.bad.path), markup=False, highlight=False, soft_wrap=True)
    out.print(f"\n{folder.path / 'report.html'}")
