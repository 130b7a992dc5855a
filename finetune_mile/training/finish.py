"""What a finished run leaves behind: results, the labels it found, the export, the report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from finetune_mile.checkpoints.exporting import THRESHOLD, write_export
from finetune_mile.compute.passes import Outputs
from finetune_mile.config.schema import Recipe
from finetune_mile.core.files import whole_file, write_json
from finetune_mile.core.in_memory import SCHEME
from finetune_mile.images.bad_images import say_skipped
from finetune_mile.images.splits import label_names
from finetune_mile.measures import CLOSING, say_images
from finetune_mile.measures.guards import lower_rates
from finetune_mile.measures.labels import say_threshold
from finetune_mile.measures.metrics import Measured, class_table
from finetune_mile.measures.predictions import PER_CLASS, write_per_class
from finetune_mile.measures.verdicts import (
    below_own_size,
    chosen_thresholds,
    edges,
    learned_nothing,
    lowest_class,
    over,
    score_of,
    with_edges,
    worse_than_probe,
)
from finetune_mile.networks.vits import exported_arch
from finetune_mile.pages.card import model_card, public_name
from finetune_mile.pages.report import (
    gallery,
    gallery_figure,
    gallery_images,
    generation_plot,
    pixels,
    write_report,
)  # fmt: skip
from finetune_mile.training.display import closing_table
from finetune_mile.training.folder import OWN_SIZE, TRIAL, RunFolder
from finetune_mile.training.processes import Device
from finetune_mile.training.start import MOST_PROBE_IMAGES
from finetune_mile.training.task import Model, Task

LABEL_BATCH = 65536  # rows written at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What was measured when a run ended. Logits are (n, C)."""

    results: dict[str, float]  # of results.json
    measured: Measured  # what they are means of
    tables: dict[str, dict[str, Tensor]]  # file name to the columns (C,) of per_class.csv
    found: Outputs | None  # logits of the labelled images, for labels.parquet
    shown: Outputs  # logits of the `gallery_images`
    thresholds: list[float]  # least probability of each label beside the best one; empty: the recipe's, for all
    threshold: float | Tensor  # the same, one or (C,)
    warning: str | None
    published: str | None  # the warning without a local path, for the model card
    notes: list[str]  # sentences about the results


def finish(
    task: Task, model: Model, device: Device, learner: nn.Module, folder: RunFolder, chosen: dict[str, float],
    share: float,
) -> Measured | None:  # fmt: skip
    """Score the student on everything and write what a run leaves behind; all processes call it.

    Args:
        task: of the run.
        model: what the learner is a part of.
        device: where to compute.
        learner: with the weights that are scored and exported.
        folder: of the run.
        chosen: is added to the results.
        share: how far these weights went from the first ones (0) to the last ones (1).

    Returns:
        What the scores are means of; None but in the first process.
    """
    scored = score(task, device, learner, folder, chosen, share)
    if scored is None:
        return None
    for name, table in scored.tables.items():
        write_per_class(folder.path / name, task.data.classes, table)
    write_json(folder.path / "results.json", scored.results)
    if scored.found is not None:
        write_labels(task, scored.found, scored.threshold, folder.path / "labels.parquet")
    write_model(task, model, learner, scored, folder.path / "export")
    write_report(task, scored, folder)
    if task.recipe.track != "none":
        track_pictures(task, scored, folder, device.accelerator.trackers)
    say_results(task, scored, folder)
    return scored.measured


def score(
    task: Task, device: Device, learner: nn.Module, folder: RunFolder, chosen: dict[str, float], share: float
) -> Scored | None:
    """All passes over images, and what follows from them; None but in the first process. Arguments as in `finish`."""
    recipe, data, val = task.recipe, task.data, task.views("val")
    every = np.arange(len(data.val))
    outputs = device.outputs(learner, val, every)
    results, measured = task.scores(outputs, torch.from_numpy(every), intervals=True)
    tables = {PER_CLASS: class_table(measured)}
    if data.test is not None:  # here and nowhere else
        every = np.arange(len(data.test))
        scores, tested = task.scores(
            device.outputs(learner, task.views("test"), every), torch.from_numpy(every), "test",
            intervals=True,
        )  # fmt: skip
        tables[f"test_{PER_CLASS}"] = class_table(tested)
        kept = {"images", *(f"{key}{end}" for key, _, _ in CLOSING for end in ("", "_low", "_high"))}
        results |= {f"test_{key}": value for key, value in scores.items() if key in kept}
    labelled, train = task.pools.indices["labelled"], task.views("train")
    found = device.outputs(learner, train, labelled) if recipe.evaluate.labels else None
    shown = device.outputs(learner, val, gallery_images(data).numpy())
    if not device.accelerator.is_main_process:  # what follows is files only; no process waits for another
        return None
    results |= {"bad_images": len(task.bad.read()), "unreadable_files": sum(data.unreadable.values())} | chosen
    lines = folder.start()
    results |= against_probes(results, measured, lines)
    thresholds, f1 = chosen_thresholds(measured)
    results |= f1
    advice = lower_rates(float(recipe.optimizer.lr), recipe.optimizer.head_lr)
    warning, published = (
        learned_nothing(results, steps=recipe.steps or 0, data=name, advice=advice) or worse_than_probe(results)
        for name in (recipe.data, data.name)
    )
    notes = say_images(results, trial=(folder.path / TRIAL).is_dir(), share=share, step=last_step(recipe, results))
    return Scored(
        results=results, measured=measured, tables=tables, found=found, shown=shown, thresholds=thresholds,
        threshold=torch.tensor(thresholds) if thresholds else recipe.rho or THRESHOLD,
        warning=warning or below_own_size(results, task.preprocess.size), published=published,
        notes=[
            *notes, *say_probe(task, lines), *lowest_class(data.classes, tables[PER_CLASS]),
            *say_missing(recipe, lines),
        ],
    )  # fmt: skip


def last_step(recipe: Recipe, results: Mapping[str, float]) -> int:
    """The step that the exported weights are of."""
    return int(results.get("chosen_step", recipe.steps or 0))


def say_probe(task: Task, lines: Mapping[str, Any]) -> list[str]:
    """What `probe_accuracy` or `probe_map` is, where it was measured."""
    if score_of(lines) is None:
        return []
    fitted = min(len(task.pools.indices["labelled"]), MOST_PROBE_IMAGES)
    return [
        f"probe_{score_of(lines)} is of a linear {task.recipe.activation} classifier, fitted to the features of "
        f"{fitted:,} labelled training images before fine-tuning. It is scored on the same validation images."
    ]


def say_missing(recipe: Recipe, lines: Mapping[str, Any]) -> list[str]:
    """The command that gives the scores to compare with, where they were not measured."""
    on_disk = not any(name.startswith(f"{SCHEME}:") for name in (recipe.init, recipe.data))
    if recipe.init == "none" or not on_disk or score_of(lines) is not None:
        return []
    given = (("init", recipe.init), ("data", recipe.data), ("arch", recipe.arch), ("size", recipe.size))
    words = [word for name, value in given if value is not None for word in (f"--{name}", str(value))]
    command = shlex.join(["finetune-mile", "probe", *words, "--fraction", f"{recipe.fraction:g}"])
    return [f"Two lines to beat, a linear probe and k-NN of the checkpoint: {command}"]


def write_labels(task: Task, found: Outputs, threshold: float | Tensor, path: Path) -> None:
    """labels.parquet: for each labelled image its given label, the labels found, and their probabilities.

    Args:
        task: of the run.
        found: logits (N, C) of the labelled images.
        threshold: what counts as found; one for all classes, or (C,).
        path: where to.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    labelled, classes = task.pools.indices["labelled"][found.readable.numpy()], task.data.classes
    ids = [task.pools.images.ids[i] for i in labelled]
    given = task.pools.images.given[torch.from_numpy(labelled)]
    probabilities = task.probabilities(found.rows[found.readable])
    names = pa.list_(pa.string())
    schema = pa.schema(
        [("id", pa.string()), ("given", names), ("found", names), ("probability", pa.list_(pa.float32()))]
    )
    with whole_file(path) as part, pq.ParquetWriter(part, schema) as writer:
        for at in range(0, len(ids), LABEL_BATCH):
            rows = slice(at, at + LABEL_BATCH)
            columns: list[Any] = [ids[rows], label_names(given[rows], classes), [], []]
            for row in probabilities[rows]:
                order = row.argsort(descending=True)
                kept = order[(row > threshold)[order]].tolist()
                columns[2].append([classes[c] for c in kept])
                columns[3].append([float(row[c]) for c in kept])
            writer.write_table(pa.table(columns, schema=schema))


def write_model(task: Task, model: Model, learner: nn.Module, scored: Scored, path: Path) -> None:
    """The export: weights, config.json and the model card."""
    recipe, data, name = task.recipe, task.data, model.report.arch
    config = {
        "arch": exported_arch(name) if name.startswith("timm:") else recipe.arch or model.card.arch,
        "padding": model.card.padding, "num_classes": len(data.classes),
        "classes": list(data.classes), **task.preprocess.model_dump(mode="json"),
        "activation": recipe.activation, "threshold": recipe.rho or THRESHOLD,
        "method": recipe.method, "data": data.name,
        "init": public_name(recipe.init), "licence": model.card.licence, "fraction": recipe.fraction,
        "steps": last_step(recipe, scored.results), "seed": recipe.seed,
    }  # fmt: skip
    if scored.thresholds:
        config["thresholds"] = scored.thresholds
    if scored.published is not None:
        config["warning"] = scored.published
    write_export(path, model.exported(learner), config)
    with whole_file(path / "README.md") as part:
        part.write_text(model_card(config, scored.results, "own"), encoding="utf-8")


def say_results(task: Task, scored: Scored, folder: RunFolder) -> None:
    """Print the closing table, the notes and what to do next."""
    recipe, results = task.recipe, scored.results
    title = f"{recipe.method} on {task.data.name}: results on {int(results['images']):,} validation images"
    out = Console()  # results go where a pipe or `tee` finds them
    if scored.warning is not None:
        out.print(f"warning: {scored.warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    out.print(closing_table(results, title, recipe.method))
    if len(scored.notes) > 1:  # the first one is the title's
        out.print("\n".join(scored.notes), markup=False, highlight=False, soft_wrap=True)
    if results["bad_images"]:
        skipped = say_skipped(int(results["bad_images"]), task.bad.path)
        out.print(skipped, markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"Labels of new images: finetune-mile predict {shlex.quote(str(folder.path))} IMAGES "
        f"(labels above {say_threshold(scored.threshold)}, and always the best one)\n\n{folder.path / 'report.html'}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def against_probes(results: Mapping[str, float], measured: Measured, lines: Mapping[str, Any]) -> dict[str, float]:
    """The scores of start.json for results.json, with their intervals and the differences of the run to them."""
    key, own = score_of(results), lines.get(OWN_SIZE)
    if key is None:
        return {}
    found = with_edges(lines, f"knn_{key}")
    if key in lines:
        found |= with_edges(lines, key, "probe_") | over(measured, lines, "over_probe")
    if own is not None and key in own:
        found |= {"own_size": own["size"]} | with_edges(own, key, "own_size_probe_")
        found |= over(measured, own, "over_own_size_probe")
    return found | edges({**results, **found})


def track_pictures(task: Task, scored: Scored, folder: RunFolder, trackers: list[Any]) -> None:
    """Give the timeline of generations and sample predictions to the tracker, where it takes images."""
    figures = {
        "generations": generation_plot(folder.metrics()),
        "predictions": gallery_figure(gallery(task, scored.shown, scored.threshold)),
    }
    pictures = {name: pixels(figure)[None] for name, figure in figures.items() if figure is not None}
    for tracker in trackers:
        if tracker.name == "tensorboard":
            tracker.log_images(pictures, step=task.recipe.steps, dataformats="NHWC")
        elif hasattr(tracker, "log_images"):
            tracker.log_images(pictures, step=task.recipe.steps)
