"""`--explain`, and its short form at the head of every run: what will be done, and who said so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from finetune_mile.config.resolve import Resolved
from finetune_mile.config.schema import Recipe
from finetune_mile.images.bad_images import say_unreadable
from finetune_mile.learning.phases import trace
from finetune_mile.training.plan import MOST_LABELS, Plan, has_trial, unintended
from finetune_mile.training.settings import phase_table, runs_of, settings_table

if TYPE_CHECKING:
    from finetune_mile.training.processes import Device
    from finetune_mile.training.task import Model, Task

SCHEDULE = ("mile.k_t", "mile.k_s", "mile.rho", "mile.warmup", "batch_size", "steps", "epochs")
SWITCHES = (
    "channels_last", "cudnn_benchmark", "fused_optimizer", "compile", "gradient_checkpointing", "deterministic",
)  # fmt: skip
PIPED_WIDTH = 240  # columns where no terminal says how many there are: a setting is a line


def explain(resolved: Resolved, task: Task, model: Model, device: Device, *, full: bool) -> None:
    """Print the run: a few lines, or with `full` also every setting and the first phases."""
    out = Console(stderr=not full, highlight=False, soft_wrap=True)
    if full and not out.is_terminal:
        out.width = max(out.width, PIPED_WIDTH)
    recipe, plan, report, world = task.recipe, task.plan, model.report, device.accelerator.num_processes
    if full:
        out.print(settings_table(resolved.recipe, resolved.said_by, resolved.sources))
        out.print(phase_table(plan.phases))
        steps = trace(plan.phases)
        out.print(f"trace   {runs_of(steps[:400])}{' ...' if len(steps) > 400 else ''}")
    out.print(f"recipe  {resolved.path.name} ({resolved.why})")
    new = f" ({', '.join(report.reset)})" if 0 < len(report.reset) < 3 else ""
    out.print(
        f"init    {model.card.name}: {report.arch}, format {report.format} ({report.why}); "
        f"{len(report.loaded)} tensors loaded, {len(report.reset)} new{new}, "
        f"{len(report.dropped)} ignored"
    )
    if recipe.data.partition(":")[0] != "demo" and model.card.name == "simclr-demo":
        weights = sum(p.numel() for p in model.network.parameters())
        out.print(
            f"warning: --init {model.card.name} is tiny ({weights:,} parameters) and has seen {model.card.data} only. "
            "Use --init FILE, or a name from `finetune-mile weights ls`, for more accuracy.",
            style="yellow", markup=False,
        )  # fmt: skip
    if report.assumed:
        out.print(f"        assumed: {'; '.join(report.assumed)}", markup=False)
    if report.others:
        others = ", ".join(f"::{name}" for name in report.others)
        out.print(f"        other backbones in the file: {others} ({report.reason})", markup=False)
    labelled, everything = len(task.pools.indices["labelled"]), len(task.pools.images)
    aside, size = len(task.pools.calibration), task.preprocess.size
    out.print(
        f"data    {task.data.name}: {labelled:,} of {everything:,} training images keep their label, "
        f"{f'{aside:,} are held out for rho: auto, ' if aside else ''}"
        f"{len(task.data.val):,} validation images, "
        f"{'' if task.data.test is None else f'{len(task.data.test):,} test images (scored once, at the end), '}"
        f"{task.num_classes:,} classes, shown at {size} x {size} pixels (--size)"
    )
    given = task.data.train.given
    unused = len(given) - int(((given > 0).any(1) if given.ndim == 2 else given >= 0).sum())
    if recipe.semi == "none" and unused:
        out.print(f"        {unused:,} images have no label and are not used; use them with --method mile --semi all")
    if schedule_is_given(resolved):  # else it is the recipe's business
        for sentence in unintended(recipe, plan, labelled, task.num_classes):
            out.print(f"warning: {sentence}", style="yellow", markup=False)
    for sentence in task.data.notes:
        out.print(f"note: --data {recipe.data}: {sentence}", markup=False)
    if task.data.unreadable:
        sentence = say_unreadable(task.data.unreadable)
        out.print(f"warning: --data {recipe.data}: {sentence}", style="yellow", markup=False)
    own = None if recipe.init == "none" else model.own_size
    if own is not None and size < own and recipe.trunk != "frozen":
        out.print(
            f"note: --size {size} is below the checkpoint's own {own} pixels, which can cost more accuracy than "
            "fine-tuning brings. Compare with --trunk frozen without --size (docs/own-photos.md has a table).",
            markup=False,
        )
    if recipe.trunk != "all":
        learning = sum(p.numel() for p in model.learner.parameters() if p.requires_grad)
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
        f"part{'s' if recipe.accumulate != 1 else ''} x {share} images, on {device.accelerator.device} with "
        f"{threads} thread{'s' if threads > 1 else ''}, precision {recipe.precision}"
    )
    on, off = ([name for name in SWITCHES if getattr(recipe, name) is value] for value in (True, False))
    if full or on:
        out.print(f"speed   on: {', '.join(on) or 'nothing'}; off: {', '.join(off) or 'nothing'} (docs/gpus.md)")


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
