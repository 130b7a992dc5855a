"""A pre-training run from an opened folder to its checkpoint: resume if there is something, train, look, write."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import whole_file, write_json
from finetune_mile.images.index import say_skipped
from finetune_mile.learning.optim import decay_groups, make_optimizer, rate_at
from finetune_mile.networks.heads import build
from finetune_mile.pages.report import write_pretrain_report
from finetune_mile.pretraining.looping import Recorder, restore, save, train
from finetune_mile.pretraining.methods import METHODS
from finetune_mile.pretraining.session import Session
from finetune_mile.training import resume
from finetune_mile.training.display import Display
from finetune_mile.training.finish import open_on_main, warn_of_spread, weight_spread
from finetune_mile.training.folder import RunFolder
from finetune_mile.training.monitor import Signals, recorded

CHECKPOINT = "checkpoint.ckpt"


def make_method(session: Session) -> nn.Module:
    """The network and what its method puts around it, with random weights."""
    recipe = session.recipe
    trunk = build(recipe.arch)
    features = trunk.num_features
    assert isinstance(features, int)
    return METHODS[recipe.method](trunk, features, recipe, session.steps)


def open_folder(session: Session, path: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """The run folder with all that is known before the first step; the first process makes or completes it."""
    facts = {"verb": "pretrain", "images": len(session.images)}
    recipe = to_yaml(session.recipe)
    return open_on_main(session.accelerator, path, recipe, {}, facts, resume=resume, overwrite=overwrite)


def play(session: Session, method: nn.Module, folder: RunFolder, signals: Signals) -> int:
    """Train what is left, then finish; returns the exit code."""

    def work() -> dict[str, object]:
        session.keep()
        before, recorder = _train(session, method, folder, signals)
        spread = weight_spread(method)
        _finish(session, method, folder, before)
        pace = 1000 * recorder.busy_seconds / recorder.steps_seen if recorder.steps_seen else None
        return {"milliseconds_per_step": None if pace is None else round(pace, 1), **warn_of_spread(spread)}

    return recorded(session.accelerator, folder, signals, work)


def _train(session: Session, method: nn.Module, folder: RunFolder, signals: Signals) -> tuple[float | None, Recorder]:
    """Returns the neighbours' accuracy before the first step, and the recorder."""
    recipe, accelerator, settings = session.recipe, session.accelerator, session.recipe.optimizer
    if recipe.sync_batch_norm and accelerator.num_processes > 1:
        method = nn.SyncBatchNorm.convert_sync_batchnorm(method)
    method.to(accelerator.device)
    method.to(memory_format=torch.channels_last)  # a third faster on CPUs
    groups = decay_groups(method.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    bare = make_optimizer(settings.name, groups, momentum=settings.momentum, nesterov=settings.nesterov)
    wrapped, optimizer = accelerator.prepare(method, bare)
    content = resume.load_together(folder, accelerator)
    step = 0
    if content is not None:
        step = restore(content, accelerator, method, optimizer)
        before = content["extra"]["neighbours_before"]
    else:
        before = session.neighbours(_trunk(method))
        torch.manual_seed(recipe.seed + accelerator.process_index)  # dropout differs between processes
    if accelerator.is_main_process:
        folder.rewind(step)

    def rate(at: int) -> float:
        return rate_at(at, total_steps=recipe.steps, schedule=settings.schedule, warmup=session.steps(settings.warmup))

    with Display(recipe.steps, step, visible=accelerator.is_main_process, unit="epoch") as display:
        recorder = Recorder(
            accelerator, folder, display, signals, method=recipe.method, batch_size=recipe.batch_size,
            steps_per_epoch=len(session.images) / recipe.batch_size, log_every=recipe.log_every,
            checkpoint_every=recipe.checkpoint_every, total_steps=recipe.steps,
            save=lambda at: save(folder, accelerator, at, method, optimizer, {"neighbours_before": before}),
        )  # fmt: skip
        train(
            accelerator, method, wrapped, optimizer, session.feed(step), rate,
            first_step=step, total_steps=recipe.steps, clip=settings.clip, on_step=recorder,
        )  # fmt: skip
    return before, recorder


def _trunk(method: nn.Module) -> nn.Module:
    return method.get_submodule("backbone")


def _finish(session: Session, method: nn.Module, folder: RunFolder, before: float | None) -> None:
    """Look at the features and write what a run leaves behind."""
    recipe = session.recipe
    after = session.neighbours(_trunk(method))
    if not session.accelerator.is_main_process:  # what follows is files only; no process waits for another
        return
    last = [r for r in folder.metrics() if r["kind"] == "train"]
    skipped = len(session.bad.read())
    results = {
        "loss": last[-1]["loss"] if last else None, "neighbours_before": before, "neighbours": after,
        "steps": recipe.steps, "images": len(session.images), "bad_images": skipped,
    }  # fmt: skip
    write_checkpoint(folder.path / "export", session, method)
    write_pretrain_report(session, folder, results)
    write_json(folder.path / "results.json", results)
    out = Console(stderr=True, highlight=False, soft_wrap=True)
    k = recipe.neighbours.k
    if before is not None and after is not None:
        out.print(f"{k} nearest neighbours: {before:.1f} % before, {after:.1f} % after (a look, not used for training)")
    if skipped:
        out.print(say_skipped(skipped, session.bad.path), markup=False)
    out.print(f"fine-tune it with --init {folder.path}")
    out.print(str(folder.path / "report.html"))


def write_checkpoint(folder: Path, session: Session, method: nn.Module) -> None:
    """Write `checkpoint.ckpt` as lightly's modules save it, and `config.json` with what its tensors do not say."""
    recipe = session.recipe
    folder.mkdir(exist_ok=True)
    state: dict[str, Tensor] = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in method.state_dict().items()
    }
    content = {
        "state_dict": state,
        "global_step": recipe.steps,
        "epoch": int(recipe.steps * recipe.batch_size / len(session.images)),
        "hyper_parameters": {"method": recipe.method, "arch": recipe.arch, "recipe": to_yaml(recipe)},
    }
    with whole_file(folder / CHECKPOINT) as part:
        torch.save(content, part)
    write_json(folder / "config.json", recipe.facts())
