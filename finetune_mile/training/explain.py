"""`--explain`, and its short form at the head of every run: what will be done, and who said so. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

import yaml
from pydantic import BaseModel
from rich.table import Table

from finetune_mile.config.resolve import Resolved, flat, second_stage
from finetune_mile.config.schema import Recipe
from finetune_mile.core.console import open_console
from finetune_mile.images.bad_images import say_unreadable
from finetune_mile.images.splits import one_label_each
from finetune_mile.learning.phases import Phase, trace
from finetune_mile.training.plan import MOST_LABELS, has_trial, labelled_per_batch, unintended

if TYPE_CHECKING:
    from finetune_mile.training.processes import Device
    from finetune_mile.training.task import Model, Task

SCHEDULE = ("mile.k_t", "mile.k_s", "mile.rho", "mile.warmup", "batch_size", "steps", "epochs")
SWITCHES = (
    "channels_last", "cudnn_benchmark", "fused_optimizer", "compile", "gradient_checkpointing", "deterministic",
)  # fmt: skip
PIPED_WIDTH = 240  # columns where no terminal says how many there are: a setting is a line
SHOWN_PHASES, SHOWN_STEPS = 8, 400


def explain(resolved: Resolved, task: Task, model: Model, device: Device, *, full: bool) -> None:
    """Print the run: a few lines, or with `full` also every setting and the first phases."""
    out = open_console(stderr=not full, highlight=False, soft_wrap=True)
    if full:
        if not out.is_terminal:
            out.width = max(out.width, PIPED_WIDTH)
        out.print(settings_table(resolved.recipe, resolved.said_by, resolved.sources))
        out.print(phase_table(task.plan.phases))
        steps = trace(task.plan.phases)
        out.print(f"trace   {runs_of(steps[:SHOWN_STEPS])}{' ...' if len(steps) > SHOWN_STEPS else ''}")
    out.print(f"recipe  {resolved.path.name} ({resolved.why})", markup=False)
    for part in (about_checkpoint(task, model), about_data(resolved, task), about_training(task, model, device)):
        for line in part:
            out.print(line, style="yellow" if line.startswith("warning: ") else None, markup=False)
    on, off = ([name for name in SWITCHES if getattr(task.recipe, name) is value] for value in (True, False))
    if full or on:
        out.print(f"speed   on: {', '.join(on) or 'nothing'}; off: {', '.join(off) or 'nothing'} (docs/gpus.md)")


def about_checkpoint(task: Task, model: Model) -> Iterator[str]:
    card, report = model.card, model.report
    new = f" ({', '.join(report.reset)})" if 0 < len(report.reset) < 3 else ""
    yield (
        f"init    {card.name}: {report.arch}, format {report.format} ({report.why}); {len(report.loaded)} tensors "
        f"loaded, {len(report.reset)} new{new}, {len(report.dropped)} ignored"
    )
    if task.recipe.data.partition(":")[0] != "demo" and card.name == "simclr-demo":
        weights = sum(p.numel() for p in model.network.parameters())
        yield (
            f"warning: --init {card.name} is tiny ({weights:,} parameters) and has seen {card.data} only. "
            "Use --init FILE, or a name from `finetune-mile weights ls`, for more accuracy."
        )
    if report.assumed:
        yield f"        assumed: {'; '.join(report.assumed)}"
    if report.others:
        others = ", ".join(f"::{name}" for name in report.others)
        yield f"        other backbones in the file: {others} ({report.reason})"


def about_data(resolved: Resolved, task: Task) -> Iterator[str]:
    recipe, data, labelled = task.recipe, task.data, len(task.pools.indices["labelled"])
    aside, size = len(task.pools.calibration), task.preprocess.size
    yield (
        f"data    {data.name}: {labelled:,} of {len(task.pools.images):,} training images keep their label, "
        f"{f'{aside:,} are held out for rho: auto, ' if aside else ''}"
        f"{len(data.val):,} validation images, "
        f"{'' if data.test is None else f'{len(data.test):,} test images (scored once, at the end), '}"
        f"{task.num_classes:,} classes, shown at {size} x {size} pixels (--size)"
    )
    unused = int((one_label_each(data.train.given) < 0).sum())
    if recipe.semi == "none" and unused and second_stage(recipe) is None:
        yield f"        {unused:,} images have no label and are not used; use them with --method mile --semi all"
    if schedule_is_given(resolved):  # else it is the recipe's business
        yield from (f"warning: {text}" for text in unintended(recipe, task.plan, labelled, task.num_classes))
    yield from (f"note: --data {recipe.data}: {text}" for text in data.notes)
    if data.unreadable:
        yield f"warning: --data {recipe.data}: {say_unreadable(data.unreadable)}"


def about_training(task: Task, model: Model, device: Device) -> Iterator[str]:
    import torch

    from finetune_mile.training.task import second_cost, second_task

    recipe, plan, size = task.recipe, task.plan, task.preprocess.size
    own = None if recipe.init == "none" else model.own_size
    if own is not None and size < own and recipe.trunk != "frozen":
        yield (
            f"note: --size {size} is below the checkpoint's own {own} pixels, which can cost more accuracy than "
            "fine-tuning brings. Compare with --trunk frozen without --size (docs/own-photos-results.md has a table)."
        )
    if recipe.trunk != "all":
        learning = sum(p.numel() for p in model.learner.parameters() if p.requires_grad)
        way = "on features that are computed once, without augmentation" if recipe.trunk == "frozen" else "on images"
        yield f"trunk   {recipe.trunk}: {learning:,} parameters learn, {way}"
    if recipe.head_init == "probe":
        rate = f". The learning rate of each tensor is {recipe.optimizer.lr:g} of its size"
        yield (
            "start   the classifier is a linear probe of the labelled images"
            f"{', batch norm is frozen' if recipe.batch_norm == 'frozen' else ''}"
            f"{rate if recipe.optimizer.name == 'relative' else ''}"
            f"{how_far(recipe, len(task.pools.indices['labelled']))}"
        )
    imitation = sum(phase.steps for phase in plan.phases if phase.name == "imitation")
    yield (
        f"method  {recipe.method}{variant_of(recipe)}: {plan.total_steps:,} steps = "
        f"{plan.total_steps / plan.steps_per_epoch:.1f} epochs in {len(plan.phases)} phase"
        f"{'s' if len(plan.phases) > 1 else ''}; "
        f"{plan.total_steps - imitation:,} steps on given labels (interaction), {imitation:,} on the teacher's "
        "(imitation)"
    )
    if (then := second_task(task)) is not None:
        cost = second_cost(task) / plan.total_steps
        yield f"then    {about_second(then)}: {cost:.1f} times the computing of the steps before (docs/unlabelled.md)"
    world, parts, threads = device.accelerator.num_processes, int(recipe.accumulate), torch.get_num_threads()
    yield (
        f"batch   {recipe.batch_size} images = {world} process{'es' if world > 1 else ''} x {parts} "
        f"part{'s' if parts != 1 else ''} x {recipe.batch_size // (world * parts)} images, on "
        f"{device.accelerator.device} with {threads} thread{'s' if threads > 1 else ''} (FINETUNE_MILE_THREADS sets "
        f"another number), precision {recipe.precision}"
    )


def about_second(then: Task) -> str:
    """A second stage in one line."""
    recipe, count = then.recipe, len(then.pools.indices["unlabelled"])
    labelled = labelled_per_batch(recipe)
    return (
        f"{recipe.method}: {then.plan.total_steps:,} steps, each with {labelled} labelled images and "
        f"{recipe.batch_size - labelled} of the {count:,} without a label"
    )


def schedule_is_given(resolved: Resolved) -> bool:
    """Did a flag set a part of the schedule?"""
    return any(resolved.said_by.get(key, "").startswith("--") for key in SCHEDULE)


def variant_of(recipe: Recipe) -> str:
    """Whose reading of its method a run follows, and which settings of that are others; empty where there is one."""
    fields = recipe.method_value.variants.get(recipe.variant)
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
        return ". A trial decides how far the weights go from the first to the last ones"
    if recipe.keep == "best" and labelled <= MOST_LABELS:
        return (
            f". {labelled:,} labels are too few for a trial: the result is halfway between the first and the last "
            "weights"
        )
    return ""


# ------------------------------------------------------------------------------------ every setting, and the phases


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


def phase_table(phases: tuple[Phase, ...]) -> Table:
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


def runs_of(letters: str) -> str:
    """`TTTTSS` as it is while short, else as `T4 S2`."""
    if len(letters) <= 60:
        return letters
    return " ".join(f"{letter}{len(list(same))}" for letter, same in groupby(letters))
