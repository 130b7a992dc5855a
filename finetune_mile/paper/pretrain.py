"""`finetune-mile pretrain`: self-supervised pre-training with lightly. No torch before the settings are checked."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from finetune_mile.config.flags import RESUME, Flags, Parser, RunOptions, number, parse, resumed, verb_parser
from finetune_mile.config.resolve import resolve_tree
from finetune_mile.core.console import open_console
from finetune_mile.core.files import is_finished
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import split_name
from finetune_mile.paper.pretraining.recipe import Method, Pretrain, ResolvedPretrain, resolve
from finetune_mile.training.folder import choose_folder, resumed_recipe, say_finished

if TYPE_CHECKING:
    from finetune_mile.paper.pretraining.run import PretrainSetup

SETTINGS = ("recipe", "method", "init", "data", "arch", "steps", "batch_size", "lr", "seed")
EPILOG = """examples:
  finetune-mile pretrain                                                   SimCLR on the demo's grids
  finetune-mile pretrain --method byol --data folder:photos --out runs/byol
  finetune-mile run --init runs/byol --data folder:photos --fraction 0.1   and on to fine-tuning
  finetune-mile pretrain --init moco.pth.tar --data folder:photos          continue a checkpoint on your own photos
  ACCELERATE_USE_CPU=1 torchrun --nproc_per_node 2 -m finetune_mile.cli pretrain          two processes
"""
FLAGS: Flags = {
    "--recipe": {"metavar": "FILE", "help": "a recipe file, or its name below recipes/pretrain/"},
    "--method": {"help": " | ".join(get_args(Method))},
    "--init": {"help": "a checkpoint to continue from, as --init of `run` (default: random weights)"},
    "--data": {"help": "any --data of `run`, or a folder of unlabelled images; labels are not used"},
    "--arch": {"help": "network, such as resnet-mini, resnet18-cifar, resnet50, timm:NAME"},
    "--steps": {"type": number, "help": "optimiser steps"},
    "--batch-size": {"type": number, "help": "images per step, over all processes"},
    "--lr": {"type": number, "help": "base learning rate"},
    "--seed": {"type": number, "help": "of weights, order and views"},
    "--set": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "dest": "sets",
        "help": "any other setting of the recipe, such as simclr.temperature=0.1",
    },
    "--out": {"type": Path, "help": "run folder (default: runs/pretrain-<number>)"},
    "--overwrite": {"action": "store_true", "help": "replace a run that is in --out"},
    "--resume": {"type": resumed, "metavar": "DIR|auto", "help": RESUME},
    "--explain": {"action": "store_true", "help": "print what would be done, and stop"},
}


def build_parser() -> Parser:
    about = "Pre-train a network without labels; the result is a lightly checkpoint that --init takes."
    return verb_parser("pretrain", FLAGS, description=about, epilog=EPILOG)


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 the run failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options = parse(argv, build_parser(), SETTINGS)
    return run(*prepare(options))


def prepare(options: RunOptions) -> tuple[RunOptions, ResolvedPretrain, Path]:
    """All that can be checked before torch is imported; nothing is written.

    In the returned options `resume` is a folder or None.
    """
    if isinstance(options.resume, Path):
        return options, resumed_settings(options.resume), options.resume
    resolved = resolve(options.settings, options.sets)
    split_name(resolved.recipe.data)
    path, begun = choose_folder(options, "pretrain", resolved.recipe)
    if begun:
        return replace(options, resume=path), resumed_settings(path), path
    return replace(options, resume=None), resolved, path


def resumed_settings(folder: Path) -> ResolvedPretrain:
    path, tree = resumed_recipe(folder)
    if "neighbours" not in tree:
        raise Problem(f"--resume {folder}: not a pre-training run; resume it with finetune-mile run --resume")
    return resolve_tree(Pretrain, tree, path, "--resume")


def run(options: RunOptions, resolved: ResolvedPretrain, path: Path) -> int:
    """The run itself; from here on torch is needed."""
    if options.resume is not None and not options.explain and is_finished(path):
        return say_finished(path)
    parent = os.getppid()
    from finetune_mile.paper.pretraining.run import open_folder, set_up, train
    from finetune_mile.training.processes import Signals

    with Signals(parent) as signals:
        setup = set_up(resolved.recipe, path, signals)
        if setup.device.accelerator.is_main_process:
            describe(resolved, setup, full=options.explain)
        if options.explain:
            return 0
        folder = open_folder(setup, path, resume=options.resume is not None, overwrite=options.overwrite)
        return train(setup, folder)


def describe(resolved: ResolvedPretrain, setup: PretrainSetup, *, full: bool) -> None:
    """Print the run: a few lines, or with `full` also every setting."""
    from finetune_mile.training.explain import settings_table

    out = open_console(stderr=not full, highlight=False, soft_wrap=True)
    recipe, world = setup.recipe, setup.device.accelerator.num_processes
    if full:
        out.print(settings_table(recipe, resolved.said_by, {}))
    weights = sum(p.numel() for p in setup.learner.backbone.parameters())
    epochs, origin = recipe.steps / setup.plan.steps_per_epoch, recipe.init or "random weights"
    out.print(
        f"recipe  {resolved.path.name} ({resolved.why})",
        f"data    {setup.data.name}: {len(setup.data.train):,} images without their labels",
        f"network {recipe.arch}, {weights:,} parameters, at {recipe.size} pixels, from {origin}",
        f"method  {recipe.method}: {recipe.steps:,} steps = {epochs:.1f} epochs",
        f"batch   {recipe.batch_size} images in {world} process{'es' if world > 1 else ''}",
        sep="\n",
        markup=False,
    )
