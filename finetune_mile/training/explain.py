"""`--explain`, and its short form at the head of every run: what will be done, and who said so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

import yaml
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from finetune_mile.config.resolve import Resolved, flat
from finetune_mile.config.schema import Recipe
from finetune_mile.images.index import say_unreadable
from finetune_mile.learning.phases import Phase, trace
from finetune_mile.training.plan import MOST_LABELS, Plan, has_trial, unintended

if TYPE_CHECKING:
    from finetune_mile.training.setup import Setup

SHOWN_PHASES = 8
SCHEDULE = ("mile.k_t", "mile.k_s", "mile.rho", "mile.warmup", "batch_size", "steps", "epochs")
SWITCHES = (
    "channels_last", "cudnn_benchmark", "fused_optimizer", "compile", "gradient_checkpointing", "deterministic",
)  # fmt: skip
PIPED_WIDTH = 240  # columns where no terminal says how many there are: a setting is a line


def explain(resolved: Resolved, setup: Setup, *, full: bool) -> None:
    """Print the run: a few lines, or with `full` also every setting and the first phases."""
    out = Console(stderr=not full, highlight=False, soft_wrap=True)
    if full and not out.is_terminal:
        out.width = max(out.width, PIPED_WIDTH)
    recipe, plan, report, world = setup.recipe, setup.plan, setup.report, setup.accelerator.num_processes
    if full:
        out.print(settings_table(resolved.recipe, resolved.said_by, resolved.sources))
        out.print(_phases(plan.phases))
        steps = trace(plan.phases)
        out.print(f"trace   {_runs(steps[:400])}{' ...' if len(steps) > 400 else ''}")
    out.print(f"recipe  {resolved.path.name} ({resolved.why})")
    new = f" ({', '.join(report.reset)})" if 0 < len(report.reset) < 3 else ""
    out.print(
        f"init    {setup.card.name}: {report.arch}, format {report.format} ({report.why}); "
        f"{len(report.loaded)} tensors loaded, {len(report.reset)} new{new}, "
        f"{len(report.dropped)} ignored"
    )
    if recipe.data.partition(":")[0] != "demo" and setup.card.name == "simclr-demo":
        weights = sum(p.numel() for p in setup.network.parameters())
        out.print(
            f"warning: --init {setup.card.name} is tiny ({weights:,} parameters) and has seen {setup.card.data} only. "
            "Use --init FILE, or a name from `finetune-mile weights ls`, for more accuracy.",
            style="yellow", markup=False,
        )  # fmt: skip
    if report.assumed:
        out.print(f"        assumed: {'; '.join(report.assumed)}", markup=False)
    if report.others:
        others = ", ".join(f"::{name}" for name in report.others)
        out.print(f"        other backbones in the file: {others} ({report.reason})", markup=False)
    labelled, everything = len(setup.pools.indices["labelled"]), len(setup.pools.images)
    aside, size = len(setup.pools.calibration), setup.viewer.preprocess.size
    out.print(
        f"data    {setup.data.name}: {labelled:,} of {everything:,} training images keep their label, "
        f"{f'{aside:,} are held out for rho: auto, ' if aside else ''}"
        f"{len(setup.data.val):,} validation images, "
        f"{'' if setup.data.test is None else f'{len(setup.data.test):,} test images (scored once, at the end), '}"
        f"{setup.num_classes:,} classes, shown at {size} x {size} pixels (--size)"
    )
    given = setup.data.train.given
    unused = len(given) - int(((given > 0).any(1) if given.ndim == 2 else given >= 0).sum())
    if recipe.semi == "none" and unused:
        out.print(f"        {unused:,} images have no label and are not used; use them with --method mile --semi all")
    if any(resolved.said_by.get(key, "").startswith("--") for key in SCHEDULE):  # else it is the recipe's business
        for sentence in unintended(recipe, plan, labelled, setup.num_classes):
            out.print(f"warning: {sentence}", style="yellow", markup=False)
    notes = [*setup.data.notes, *([say_unreadable(setup.data.unreadable)] if setup.data.unreadable else [])]
    for sentence in notes:
        out.print(f"warning: --data {recipe.data}: {sentence}", style="yellow", markup=False)
    if recipe.trunk != "all":
        learning = sum(p.numel() for p in setup.network.parameters() if p.requires_grad)
        way = "on features that are computed once, without augmentation" if recipe.trunk == "frozen" else "on images"
        out.print(f"trunk   {recipe.trunk}: {learning:,} parameters learn, {way}")
    if recipe.head_init == "probe":
        rate = f", the learning rate of each tensor is {recipe.optimizer.lr:g} of its size"
        out.print(
            "start   the classifier is a linear probe of the labelled images"
            f"{', batch norm is frozen' if recipe.batch_norm == 'frozen' else ''}"
            f"{rate if recipe.optimizer.name == 'relative' else ''}"
            f"{how_far(recipe, labelled)}"
        )
    share, threads = recipe.batch_size // (world * int(recipe.accumulate)), _threads()
    out.print(
        f"method  {recipe.method}{variant_of(recipe)}: {plan.total_steps:,} steps = "
        f"{plan.total_steps / plan.steps_per_epoch:.1f} epochs in {len(plan.phases)} phase"
        f"{'s' if len(plan.phases) > 1 else ''}, "
        f"{steps_of(plan, 'interaction'):,} on given labels (interaction), "
        f"{steps_of(plan, 'imitation'):,} on the teacher's (imitation)"
    )
    out.print(
        f"batch   {recipe.batch_size} images = {world} process{'es' if world > 1 else ''} x {recipe.accumulate} "
        f"part{'s' if recipe.accumulate != 1 else ''} x {share} images, on {setup.accelerator.device} with "
        f"{threads} thread{'s' if threads > 1 else ''}, precision {recipe.precision}"
    )
    on, off = ([name for name in SWITCHES if getattr(recipe, name) is value] for value in (True, False))
    if full or on:
        out.print(f"speed   on: {', '.join(on) or 'nothing'}; off: {', '.join(off) or 'nothing'} (docs/gpus.md)")


def variant_of(recipe: Recipe) -> str:
    """Whose reading of its method a run follows, and which settings of that are others; empty where there is one."""
    fields = recipe.rules.variants.get(recipe.variant)
    if fields is None:
        return ""
    own = [
        f"{key}: {str(value).lower()}"
        for key, expected in fields.items()
        if (value := getattr(recipe.block, key)) != expected
    ]
    return f" ({recipe.variant} variant{', except ' + ', '.join(own) if own else ''})"


def how_far(recipe: Recipe, labelled: int) -> str:
    """What decides how far the weights of a run with so many labels go; empty where they go all the way."""
    if has_trial(recipe, labelled):
        return ", a trial decides how far the weights go from the first to the last ones"
    if recipe.keep == "best" and labelled <= MOST_LABELS:
        return (
            f", {labelled:,} labels are too few for a trial: the result is halfway between the first and the last "
            "weights"
        )
    return ""


def steps_of(plan: Plan, name: str) -> int:
    """Steps in all phases of a kind."""
    return sum(p.steps for p in plan.phases if p.name == name)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def settings_table(recipe: BaseModel, said_by: Mapping[str, str], sources: Mapping[str, str]) -> Table:
    """Every setting, its value, who said so, and where it is from."""
    table = Table(
        "setting", "value", "set by", "source", title="recipe", title_justify="left", box=None, pad_edge=False
    )
    for dotted, leaf in flat(recipe.model_dump(mode="json")).items():
        shown = yaml.safe_dump(leaf, default_flow_style=True).removesuffix("...\n").strip()
        table.add_row(dotted, shown, said_by.get(dotted, "schema"), sources.get(dotted, ""))
    return table


def settings_json(resolved: Resolved) -> str:
    """`--explain --json`: every setting with its value, who set it, and where the value is from, if that is known."""
    settings = {}
    for dotted, leaf in flat(resolved.recipe.model_dump(mode="json")).items():
        source = {"source": resolved.sources[dotted]} if dotted in resolved.sources else {}
        settings[dotted] = {"value": leaf, "set_by": resolved.said_by.get(dotted, "schema"), **source}
    return json.dumps({"recipe": resolved.path.name, "why": resolved.why, "settings": settings}, indent=1)


def _phases(phases: tuple[Phase, ...]) -> Table:
    table = Table(
        "phase", "generation", "steps", "starts from", "becomes", "labels", "loss", "pool", "method's own",
        title=f"phases ({len(phases)})", title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for p in phases[:SHOWN_PHASES]:
        cells = (
            p.name,
            p.generation,
            p.steps,
            p.start,
            ", ".join(p.becomes),
            "given" if p.given else "teacher" if not p.union else "teacher + given",
            p.loss,
            p.pool,
            "" if p.values is None else p.values,
        )
        table.add_row(*(str(c) for c in cells))
    if len(phases) > SHOWN_PHASES:
        table.add_row("...")
    return table


def _runs(letters: str) -> str:
    """`TTTTSS` as it is while short, else as `T4 S2`."""
    if len(letters) <= 60:
        return letters
    return " ".join(f"{letter}{len(list(same))}" for letter, same in groupby(letters))
