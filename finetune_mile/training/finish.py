"""What a finished run leaves behind: results, the labels it found, the export, the report."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune_mile.checkpoints.exporting import THRESHOLD, write_export
from finetune_mile.compute.passes import Outputs
from finetune_mile.config.schema import Recipe
from finetune_mile.core.console import open_console
from finetune_mile.core.files import utf8_name, whole_file, write_json, write_whole
from finetune_mile.core.in_memory import SCHEME
from finetune_mile.core.times import bookkeeping, time_rows
from finetune_mile.images.bad_images import say_skipped
from finetune_mile.images.order import Indices
from finetune_mile.images.splits import label_names
from finetune_mile.measures import CLOSING, say_images
from finetune_mile.measures.guards import lower_rates
from finetune_mile.measures.labels import say_threshold
from finetune_mile.measures.metrics import Measured, class_table
from finetune_mile.measures.predictions import PER_CLASS, pick_probe, write_per_class
from finetune_mile.measures.verdicts import (
    below_own_size,
    chosen_thresholds,
    edges,
    learned_nothing,
    lowest_class,
    over,
    score_of,
    units,
    with_edges,
    worse_than_probe,
)
from finetune_mile.networks.vits import exported_arch
from finetune_mile.pages.card import model_card, public_name
from finetune_mile.pages.report import gallery, gallery_figure, generation_plot, pixels, write_report  # fmt: skip
from finetune_mile.training.display import closing_table, duration
from finetune_mile.training.folder import FIRST_STAGE, OWN_SIZE, TRIAL, VALIDATION, RunFolder
from finetune_mile.training.processes import Device
from finetune_mile.training.start import MOST_PROBE_IMAGES
from finetune_mile.training.task import Model, Task, second_task

GUESSES = "unlabelled.parquet"
MOST_GUESSED = 2000  # images without a label that are looked at
LABEL_BATCH = 65536  # rows written at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What was measured when a run ended. Logits are (n, C)."""

    results: dict[str, float]  # of results.json
    measured: Measured  # what they are means of
    tables: dict[str, dict[str, Tensor]]  # file name to the columns (C,) of per_class.csv
    found: Outputs | None  # logits of the labelled images, for labels.parquet
    # images without a label that a second stage saw, their logits, and its confidence
    guessed: tuple[Indices, Outputs, float] | None
    outputs: Outputs  # logits of all validation images
    thresholds: list[float]  # least probability of each label beside the best one; empty: the recipe's, for all
    threshold: float | Tensor  # the same, one or (C,)
    warning: str | None
    published: str | None  # the warning without a local path, for the model card
    notes: list[str]  # sentences about the results


def finish(
    task: Task, model: Model, device: Device, learner: nn.Module, folder: RunFolder, chosen: dict[str, float],
    shares: tuple[float, float],
) -> Measured | None:  # fmt: skip
    """Score the student on everything and write what a run leaves behind; all processes call it.

    Args:
        task: of the run.
        model: what the learner is a part of.
        device: where to compute.
        learner: with the weights that are scored and exported.
        folder: of the run.
        chosen: is added to the results.
        shares: how far the weights went from the first ones (0) to the last ones (1), in each of the two stages.

    Returns:
        What the scores are means of; None but in the first process.
    """
    scored = score(task, device, learner, folder, chosen, shares)
    if scored is None:
        return None
    for name, table in scored.tables.items():
        write_per_class(folder.path / name, task.data.classes, table)
    write_json(folder.path / "results.json", scored.results)
    write_json(folder.path / VALIDATION, seen_images(task, scored))
    if scored.found is not None:
        write_labels(task, scored.found, scored.threshold, folder.path / "labels.parquet")
    if scored.guessed is not None:
        write_guesses(task, *scored.guessed[:2], folder.path / GUESSES)
    write_model(task, model, learner, scored, folder.path / "export")
    folder.update()  # the times so far
    write_report(task, scored, folder)
    if task.recipe.track != "none":
        track_pictures(task, scored, folder, device.accelerator.trackers)
    folder.update()
    say_results(task, scored, folder)
    return scored.measured


def score(
    task: Task, device: Device, learner: nn.Module, folder: RunFolder, chosen: dict[str, float],
    shares: tuple[float, float],
) -> Scored | None:  # fmt: skip
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
    then, guessed = second_task(task), None
    if then is not None and shares[1]:
        pool = then.pools.indices["unlabelled"]
        picked = pool[pick_probe(len(pool), MOST_GUESSED).numpy()]
        guessed = picked, device.outputs(learner, train, picked), then.recipe.rho or THRESHOLD
    if not device.accelerator.is_main_process:  # what follows is files only; no process waits for another
        return None
    results |= {"bad_images": len(task.bad.read()), "unreadable_files": sum(data.unreadable.values())} | chosen
    lines = folder.start()
    results |= against_probes(results, measured, lines)
    if guessed is not None:
        results |= confident(task, guessed[2], guessed[1], measured)
    thresholds, f1 = chosen_thresholds(measured)
    results |= f1
    advice = lower_rates(float(recipe.optimizer.lr), recipe.optimizer.head_lr)
    warning, published = (
        learned_nothing(results, steps=recipe.steps or 0, data=name, advice=advice) or worse_than_probe(results)
        for name in (recipe.data, data.name)
    )
    notes = say_images(results, trial=(folder.path / TRIAL).is_dir(), share=shares[0], step=last_step(recipe, results))
    return Scored(
        results=results, measured=measured, tables=tables, found=found, guessed=guessed, outputs=outputs,
        thresholds=thresholds,
        threshold=torch.tensor(thresholds) if thresholds else recipe.rho or THRESHOLD,
        warning=warning or below_own_size(results, task.preprocess.size), published=published,
        notes=[
            *notes, *say_second(task, results, shares[1]), *say_probe(task, lines),
            *lowest_class(data.classes, tables[PER_CLASS]), *say_missing(recipe, lines),
        ],
    )  # fmt: skip


def seen_images(task: Task, scored: Scored) -> dict[str, object]:
    """For validation.json: which images were scored and what is right, so that runs can be compared image by image."""
    given, readable = scored.measured.given, scored.outputs.readable.nonzero().flatten()
    rows = (given >= 0 if given.ndim == 1 else torch.ones(len(given))).nonzero().flatten()  # with a label
    ids = [task.data.val.ids[i] for i in readable[rows].tolist()]
    listed = hashlib.sha256("\0".join([*ids, "", *task.data.classes]).encode("utf-8", "surrogateescape")).hexdigest()
    return {"images": len(ids), "sha256": listed} | units(scored.measured, rows)


def last_step(recipe: Recipe, results: Mapping[str, float]) -> int:
    """The step that the exported weights are of."""
    return int(results.get("chosen_step", recipe.steps or 0))


def say_second(task: Task, results: Mapping[str, float], share: float) -> list[str]:
    """What the images without a label did, or why they did nothing."""
    then, gap = second_task(task), results.get("over_first_stage")
    if then is None:
        return []
    count = len(then.pools.indices["unlabelled"])
    if share == 0:
        return [
            f"The {count:,} images without a label are not used: held-out labels of the trial showed that the second "
            "stage makes this model worse."
        ]
    words = f"Second stage: {then.plan.total_steps:,} steps with {count:,} images without a label"
    if share < 1:
        words += "; the scored weights are halfway between those before and after it"
    sentences = [f"{words}."]
    if gap is not None:
        low, high = results["over_first_stage_low"], results["over_first_stage_high"]
        chance = "" if low > 0 or high < 0 else ", which may be chance"
        sentences.append(f"It made a difference of {gap:+.1f} points ({low:+.1f} to {high:+.1f}){chance}.")
    if "confident_accuracy" in results:
        sentences.append(
            f"The model is confident (probability {then.recipe.rho:g} or more) on "
            f"{results['unlabelled_confident']:.0f} % of the images without a label ({GUESSES}), and on "
            f"{results['confident']:.0f} % of the validation images. There {results['confident_accuracy']:.0f} % of "
            "its labels are right."
        )
    return [" ".join(sentences)]


def confident(task: Task, confidence: float, guessed: Outputs, measured: Measured) -> dict[str, float]:
    """How many images get a label of that probability, and how many of these labels are right; in per cent.

    Args:
        task: of the run.
        confidence: least probability of a label.
        guessed: logits (n, C) of images without a label.
        measured: of the validation images.
    """
    sure = task.probabilities(guessed.rows[guessed.readable]).amax(1) >= confidence
    found = {"unlabelled_confident": 100 * float(sure.float().mean())}
    right = measured.samples.get("accuracy")
    if right is None:
        return found
    sure = measured.probabilities.amax(1) >= confidence
    known = sure & ~right.isnan()
    found["confident"] = 100 * float(sure.float().mean())
    return found | ({"confident_accuracy": 100 * float((right[known] > 0).float().mean())} if known.any() else {})


def write_guesses(task: Task, picked: Indices, guessed: Outputs, path: Path) -> None:
    """unlabelled.parquet: for images without a label the best class and its probability, the least certain first.

    Args:
        task: of the run.
        picked: (n,) which training images.
        guessed: their logits (n, C).
        path: where to.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = guessed.readable
    best, which = task.probabilities(guessed.rows[good]).max(1)
    order, ids = best.argsort(), [task.pools.images.ids[i] for i in picked[good.numpy()]]
    columns = {
        "id": [ids[i] for i in order.tolist()], "label": [task.data.classes[c] for c in which[order].tolist()],
        "probability": best[order].tolist(),
    }  # fmt: skip
    with whole_file(path) as part:
        pq.write_table(pa.table(columns), part)


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

    labelled, classes = task.pools.indices["labelled"][found.readable.numpy()], [*map(utf8_name, task.data.classes)]
    ids = [utf8_name(task.pools.images.ids[i]) for i in labelled]
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
    write_whole(path / "README.md", model_card(config, scored.results, "own"))


def say_results(task: Task, scored: Scored, folder: RunFolder) -> None:
    """Print the closing table, the notes and what to do next."""
    recipe, results = task.recipe, scored.results
    title = f"{recipe.method} on {task.data.name}: results on {int(results['images']):,} validation images"
    out = open_console()  # results go where a pipe or `tee` finds them
    if scored.warning is not None:
        out.print(f"warning: {scored.warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    out.print(closing_table(results, title, recipe.method))
    if len(scored.notes) > 1:  # the first one is the title's
        out.print("\n".join(scored.notes), markup=False, highlight=False, soft_wrap=True)
    if results["bad_images"]:
        skipped = say_skipped(int(results["bad_images"]), task.bad.path)
        out.print(skipped, markup=False, highlight=False, soft_wrap=True)
    out.print(say_times(folder.info), markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"Labels of new images: finetune-mile predict {shlex.quote(str(folder.path))} IMAGES "
        f"(labels above {say_threshold(scored.threshold)}, and always the best one)\n\n{folder.path / 'report.html'}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def say_times(info: Mapping[str, Any]) -> str:
    """Where the time of a run went, in a line, from run.json."""
    times, total = info.get("times", {}), float(info["seconds"])
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds, _ in time_rows(times, total))
    return (
        f"Time: {duration(total)}. {parts}. Evaluation, saving and report are {bookkeeping(times, total):.0f} % of it."
    )


def against_probes(results: Mapping[str, float], measured: Measured, lines: Mapping[str, Any]) -> dict[str, float]:
    """The scores of start.json for results.json, with their intervals and the differences of the run to them."""
    key, own, first = score_of(results), lines.get(OWN_SIZE), lines.get(FIRST_STAGE)
    if key is None:
        return {}
    found = with_edges(lines, f"knn_{key}")
    if key in lines:
        found |= with_edges(lines, key, "probe_") | over(measured, lines, "over_probe")
    if own is not None and key in own:
        found |= {"own_size": own["size"]} | with_edges(own, key, "own_size_probe_")
        found |= over(measured, own, "over_own_size_probe")
    if first is not None and key in first:
        found |= with_edges(first, key, "first_stage_") | over(measured, first, "over_first_stage")
    return found | edges({**results, **found})


def track_pictures(task: Task, scored: Scored, folder: RunFolder, trackers: list[Any]) -> None:
    """Give the timeline of generations and sample predictions to the tracker, where it takes images."""
    figures = {
        "generations": generation_plot(folder.metrics()),
        "predictions": gallery_figure(gallery(task, scored.outputs, scored.threshold)),
    }
    pictures = {name: pixels(figure)[None] for name, figure in figures.items() if figure is not None}
    for tracker in trackers:
        if tracker.name == "tensorboard":
            tracker.log_images(pictures, step=task.recipe.steps, dataformats="NHWC")
        elif hasattr(tracker, "log_images"):
            tracker.log_images(pictures, step=task.recipe.steps)
