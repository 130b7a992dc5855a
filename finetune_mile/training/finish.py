"""What a finished run leaves behind: results, the labels it found, the export, the report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from finetune_mile.checkpoints.exporting import THRESHOLD, write_export
from finetune_mile.config.schema import Recipe
from finetune_mile.core.files import whole_file, write_json
from finetune_mile.core.in_memory import SCHEME
from finetune_mile.images.index import say_skipped
from finetune_mile.images.splits import label_names
from finetune_mile.measures import CLOSING, say_images
from finetune_mile.measures.guards import RATES, lower_rates
from finetune_mile.measures.intervals import wilson
from finetune_mile.measures.metrics import TAKEN_FOR
from finetune_mile.measures.predictions import PER_CLASS, write_per_class
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
from finetune_mile.training.folder import START, TRIAL, RunFolder
from finetune_mile.training.setup import Setup
from finetune_mile.training.start import MOST_PROBE_IMAGES

LABEL_BATCH = 65536  # rows written at once
FEW_IMAGES = 200  # an interval of 14 points or more


def finish(setup: Setup, learner: nn.Module, folder: RunFolder, chosen: dict[str, float], share: float) -> None:
    """Score the student on everything and write what a run leaves behind.

    Args:
        setup: of the run.
        learner: with the weights that are scored and exported.
        folder: of the run.
        chosen: is added to the results.
        share: how far these weights went from the first ones (0) to the last ones (1).
    """
    recipe, data, viewer = setup.recipe, setup.data, setup.viewer
    every = np.arange(len(data.val))
    results, per_class = setup.scores(viewer.outputs(learner, data.val, every), torch.from_numpy(every))
    tables = {PER_CLASS: per_class}
    if data.test is not None:  # here and nowhere else
        every = np.arange(len(data.test))
        logits = viewer.outputs(learner, data.test, every)
        scores, tables[f"test_{PER_CLASS}"] = setup.scores(logits, torch.from_numpy(every), data.test)
        kept = {"images", *(key for key, _, _ in CLOSING)}
        results |= {f"test_{key}": value for key, value in scores.items() if key in kept}
    labelled = setup.pools.indices["labelled"]
    found = viewer.outputs(learner, setup.pools.images, labelled) if recipe.evaluate.labels else None
    shown = viewer.outputs(learner, data.val, gallery_images(setup).numpy())
    if not setup.accelerator.is_main_process:  # what follows is files only; no process waits for another
        return
    skipped = len(viewer.bad.read())
    results |= {"bad_images": skipped, "unreadable_files": sum(data.unreadable.values())} | chosen
    start = folder.path / START
    if start.is_file():
        lines = json.loads(start.read_text(encoding="utf-8"))
        results["probe_accuracy"] = lines["accuracy"]
        results |= {key: value for key, value in lines.items() if key == "knn_accuracy"}
    for name, table in tables.items():
        write_per_class(folder.path / name, data.classes, table)
    write_json(folder.path / "results.json", results)
    advice = lower_rates(float(recipe.optimizer.lr), recipe.optimizer.head_lr)
    warning, published = (  # what is published has no local path
        learned_nothing(results, steps=recipe.steps or 0, data=name, advice=advice) or worse_than_probe(results)
        for name in (recipe.data, data.name)
    )
    threshold = recipe.rho or THRESHOLD
    if found is not None:
        good = ~found.isnan().all(1)
        labelled = labelled[good.numpy()]
        ids = [setup.pools.images.ids[i] for i in labelled]
        given = setup.pools.images.given[torch.from_numpy(labelled)]
        probabilities = setup.probabilities(found[good])
        write_labels(folder.path / "labels.parquet", ids, given, probabilities, data.classes, threshold)
    network_name = setup.report.arch
    config = {
        "arch": exported_arch(network_name) if network_name.startswith("timm:") else recipe.arch or setup.card.arch,
        "padding": setup.card.padding, "num_classes": len(data.classes),
        "classes": list(data.classes), **viewer.preprocess.model_dump(mode="json"),
        "activation": recipe.activation, "threshold": threshold, "method": recipe.method, "data": data.name,
        "init": public_name(recipe.init), "licence": setup.card.licence, "fraction": recipe.fraction,
        "steps": int(chosen.get("chosen_step", recipe.steps or 0)), "seed": recipe.seed,
    }  # fmt: skip
    if published is not None:
        config["warning"] = published
    write_export(folder.path / "export", setup.exported(learner), config)
    with whole_file(folder.path / "export/README.md") as part:
        part.write_text(model_card(config, results, "own"), encoding="utf-8")
    notes = say_images(results, trial=(folder.path / TRIAL).is_dir(), share=share, step=config["steps"])
    if start.is_file():
        fitted = min(len(setup.pools.indices["labelled"]), MOST_PROBE_IMAGES)
        notes.append(
            f"probe_accuracy is of a linear {recipe.activation} classifier, fitted to the features of {fitted:,} "
            "labelled training images before fine-tuning. It is scored on the same validation images."
        )
    notes += lowest_class(data.classes, per_class)
    on_disk = not any(name.startswith(f"{SCHEME}:") for name in (recipe.init, recipe.data))
    if recipe.init != "none" and on_disk and not start.is_file():
        notes.append(f"Two lines to beat, a linear probe and k-NN of the checkpoint: {probe_command(recipe)}")
    write_report(setup, shown, folder, results, tables, notes, warning, threshold)
    if recipe.track != "none":
        track_pictures(setup, shown, folder, threshold)
    title = f"{recipe.method} on {data.name}: results on {int(results['images']):,} validation images"
    out, aside = Console(), Console(stderr=True)  # results go where a pipe or `tee` finds them
    if warning is not None:
        out.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    out.print(closing_table(results, title))
    if len(notes) > 1:  # the first one is the title's
        out.print("\n".join(notes), markup=False, highlight=False, soft_wrap=True)
    if skipped:
        aside.print(say_skipped(skipped, viewer.bad.path), markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"Labels of new images: finetune-mile predict {shlex.quote(str(folder.path))} IMAGES "
        f"(labels above {threshold:g}, and always the best one)\n\n{folder.path / 'report.html'}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def worse_than_probe(results: Mapping[str, float]) -> str | None:
    """A sentence if the accuracy is below that of a linear probe of the checkpoint, beyond chance."""
    if not {"accuracy", "probe_accuracy"} <= results.keys():
        return None
    accuracy, probe = results["accuracy"], results["probe_accuracy"]
    images = int(results.get("images_with_label", results["images"]))
    if 100 * wilson(accuracy / 100, images)[1] >= probe:
        return None
    return (
        f"Fine-tuning made this model worse: accuracy {accuracy:.1f} %, and the linear probe of its checkpoint has "
        f"{probe:.1f} %. Use --keep best, or fewer --steps; if the images must not be mirrored or cropped (digits, "
        "text), set augment.flip=false and augment.crop=none."
    )


def learned_nothing(results: Mapping[str, float], *, steps: int, data: str, advice: str) -> str | None:
    """A sentence if the accuracy is that of guessing, or less than a constant answer has; None if it is better.

    Where few images cannot tell guessing from learning, the sentence says this instead.

    Args:
        results: of results.json.
        steps: of the run.
        data: --data, for the advice.
        advice: the flags that lower the learning rates.
    """
    if not {"accuracy", "chance_accuracy", "majority_accuracy"} <= results.keys():
        return None
    accuracy, chance, majority = (results[key] for key in ("accuracy", "chance_accuracy", "majority_accuracy"))
    images = int(results.get("images_with_label", results["images"]))
    low, high = (100 * edge for edge in wilson(accuracy / 100, images))
    interval = f"95 % interval of the accuracy {low:.1f} to {high:.1f}"
    causes = (
        f"{RATES} (try {advice}), {steps:,} steps are too few (raise --steps or --epochs), the checkpoint or the image "
        "size does not suit the images (--init, --size), or the labels are wrong "
        f"(finetune-mile doctor --data {data})."
    )
    if low <= chance <= high and images < FEW_IMAGES:
        return (
            f"{images:,} validation images are too few to tell whether this model learned anything: accuracy "
            f"{accuracy:.1f} %, guessing has {chance:.1f} % ({interval}). Use {FEW_IMAGES} validation images or more. "
            f"Likely causes if the accuracy stays there: {causes}"
        )
    if low <= chance <= high:
        why = f"no better than guessing ({chance:.1f} %; {interval})"
    elif accuracy < majority:
        why = f"less than always answering the most frequent class ({majority:.1f} %)"
    else:
        return None
    return (
        f"This model learned nothing useful: accuracy {accuracy:.1f} % on {images:,} validation images is {why}. "
        f"Likely causes: {causes}"
    )


def lowest_class(classes: tuple[str, ...], table: dict[str, Tensor]) -> list[str]:
    """A sentence about the class with the lowest accuracy; none where all are right. Columns of `table` are (C,)."""
    accuracy = table.get("accuracy")
    if accuracy is None or bool((accuracy.isnan() | (accuracy == 100)).all()):
        return []
    low = int(accuracy.nan_to_num(nan=torch.inf).argmin())
    return [
        f"Lowest accuracy of a class: {classes[low]}, {accuracy[low]:.1f} % of {int(table['given'][low]):,} images, "
        f"most often taken for {classes[int(table[TAKEN_FOR][low])]}. All classes are in {PER_CLASS}."
    ]


def track_pictures(setup: Setup, shown: Tensor, folder: RunFolder, threshold: float) -> None:
    """Give the timeline of generations and sample predictions to the tracker, where it takes images.

    Args:
        setup: of the run.
        shown: logits (n, C) on the `gallery_images`.
        folder: of the run.
        threshold: least probability of a label beside the best one.
    """
    figures = {
        "generations": generation_plot(folder.metrics()),
        "predictions": gallery_figure(gallery(setup, shown, threshold)),
    }
    pictures = {name: pixels(figure)[None] for name, figure in figures.items() if figure is not None}
    for tracker in setup.accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log_images(pictures, step=setup.recipe.steps, dataformats="NHWC")
        elif hasattr(tracker, "log_images"):
            tracker.log_images(pictures, step=setup.recipe.steps)


def probe_command(recipe: Recipe) -> str:
    """The command that scores the checkpoint of a run without training it."""
    given = (("init", recipe.init), ("data", recipe.data), ("arch", recipe.arch), ("size", recipe.size))
    words = [word for name, value in given if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(["finetune-mile", "probe", *words, "--fraction", f"{recipe.fraction:g}"])


def write_labels(
    path: Path, ids: list[str], given: Tensor, probabilities: Tensor, classes: tuple[str, ...], threshold: float
) -> None:
    """labels.parquet: for each image its given label, the labels found, and their probabilities.

    Args:
        path: where to.
        ids: N names.
        given: (N,) or (N, C).
        probabilities: (N, C).
        classes: C names.
        threshold: what counts as found.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("id", pa.string()),
            ("given", pa.list_(pa.string())),
            ("found", pa.list_(pa.string())),
            ("probability", pa.list_(pa.float32())),
        ]
    )
    with whole_file(path) as part, pq.ParquetWriter(part, schema) as writer:
        for at in range(0, len(ids), LABEL_BATCH):
            rows = slice(at, at + LABEL_BATCH)
            columns: list[Any] = [ids[rows], label_names(given[rows], classes), [], []]
            for row in probabilities[rows]:
                order = row.argsort(descending=True)
                kept = order[row[order] > threshold].tolist()
                columns[2].append([classes[c] for c in kept])
                columns[3].append([float(row[c]) for c in kept])
            writer.write_table(pa.table(columns, schema=schema))
