"""`--explain`, and its short form at the head of every pre-training run."""

from __future__ import annotations

from rich.console import Console
from torch import nn

from finetune_mile.pretraining.session import Session
from finetune_mile.pretraining.settings import Resolved
from finetune_mile.training.explain import settings_table


def describe(resolved: Resolved, session: Session, method: nn.Module, *, full: bool) -> None:
    """Print the run: a few lines, or with `full` also every setting."""
    out = Console(stderr=not full, highlight=False, soft_wrap=True)
    recipe, world, count = session.recipe, session.accelerator.num_processes, len(session.images)
    if full:
        out.print(settings_table(recipe, resolved.said_by, {}))
    weights = sum(p.numel() for p in method.get_submodule("backbone").parameters())
    out.print(f"recipe  {resolved.path.name} ({resolved.why})")
    out.print(f"data    {session.data.name}: {count:,} images without their labels")
    out.print(f"network {recipe.arch}, {weights:,} weights, at {recipe.size} pixels")
    out.print(
        f"method  {recipe.method}: {recipe.steps:,} steps = {recipe.steps * recipe.batch_size / count:.1f} epochs"
    )
    out.print(f"batch   {recipe.batch_size} images in {world} process{'es' if world > 1 else ''}")
