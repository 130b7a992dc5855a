"""What a finished run leaves behind: results, the labels it found, the export, the report."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

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
from finetune_mile.measures.guards import learned_nothing, lower_rates, worse_than_probe
from finetune_mile.pages.card import model_card, public_name
from finetune_mile.pages.report import gallery_images, write_report
from finetune_mile.training.display import closing_table
from finetune_mile.training.folder import START, TRIAL, RunFolder
from finetune_mile.training.setup import Setup

LABEL_BATCH = 65536  # rows written at once


def finish(setup: Setup, learner: nn.Module, folder: RunFolder) -> None:
    """Score the student on everything and write what a run leaves behind."""
    recipe, data, viewer = setup.recipe, setup.data, setup.viewer
    results = setup.evaluate(learner, None)
    if data.test is not None:  # here and nowhere else
        scores = setup.evaluate(learner, None, data.test)
        kept = {"images", *(key for key, _, _ in CLOSING)}
        results |= {f"test_{key}": value for key, value in scores.items() if key in kept}
    labelled = setup.pools.indices["labelled"]
    logits = viewer.outputs(learner, setup.pools.images, labelled) if recipe.evaluate.labels else None
    shown = viewer.outputs(learner, data.val, gallery_images(setup).numpy())
    if not setup.accelerator.is_main_process:  # what follows is files only; no process waits for another
        return
    skipped = len(viewer.bad.read())
    results |= {"bad_images": skipped, "unreadable_files": sum(data.unreadable.values())}
    start = folder.path / START
    if start.is_file():
        lines = json.loads(start.read_text(encoding="utf-8"))
        results["probe_accuracy"] = lines["accuracy"]
        results |= {key: value for key, value in lines.items() if key == "knn_accuracy"}
    write_json(folder.path / "results.json", results)
    advice = lower_rates(recipe.optimizer.lr, recipe.optimizer.head_lr)
    warning, published = (  # what is published has no local path
        learned_nothing(results, steps=recipe.steps or 0, data=name, advice=advice) or worse_than_probe(results)
        for name in (recipe.data, data.name)
    )
    threshold = recipe.rho or THRESHOLD
    if logits is not None:
        good = ~logits.isnan().all(1)
        labelled = labelled[good.numpy()]
        ids = [setup.pools.images.ids[i] for i in labelled]
        given = setup.pools.images.given[torch.from_numpy(labelled)]
        probabilities = setup.probabilities(logits[good])
        write_labels(folder.path / "labels.parquet", ids, given, probabilities, data.classes, threshold)
    config = {
        "arch": recipe.arch or setup.card.arch, "padding": setup.card.padding, "num_classes": len(data.classes),
        "classes": list(data.classes), **viewer.preprocess.model_dump(mode="json"),
        "activation": recipe.activation, "threshold": threshold, "method": recipe.method, "data": data.name,
        "init": public_name(recipe.init), "licence": setup.card.licence, "fraction": recipe.fraction,
        "steps": recipe.steps, "seed": recipe.seed,
    }  # fmt: skip
    if published is not None:
        config["warning"] = published
    write_export(folder.path / "export", setup.exported(learner), config)
    with whole_file(folder.path / "export/README.md") as part:
        part.write_text(model_card(config, results, "own"), encoding="utf-8")
    notes = say_images(results, trial=(folder.path / TRIAL).is_dir())
    on_disk = not any(name.startswith(f"{SCHEME}:") for name in (recipe.init, recipe.data))
    if recipe.init != "none" and on_disk and not start.is_file():
        notes.append(f"Two lines to beat, a linear probe and k-NN of the checkpoint: {probe_command(recipe)}")
    write_report(setup, shown, folder, results, notes, warning)
    title = f"{recipe.method} on {data.name}: results on {int(results['images']):,} validation images"
    out, aside = Console(), Console(stderr=True)  # results go where a pipe or `tee` finds them
    if warning is not None:
        out.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    out.print(closing_table(results, title))
    if len(notes) > 1:  # the first one is the title's
        out.print("\n".join(notes), markup=False, highlight=False, soft_wrap=True)
    if skipped:
        aside.print(say_skipped(skipped, viewer.bad.path), markup=False, highlight=False, soft_wrap=True)
    out.print(f"\n{folder.path / 'report.html'}")


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
