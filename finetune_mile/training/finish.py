"""What a finished run leaves behind: the labels it found, and the certainty that all processes agree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from finetune_mile.core.files import whole_file
from finetune_mile.training.folder import RunFolder, environment

LABEL_BATCH = 65536  # rows written at once


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
            columns: list[Any] = [ids[rows], _names(given[rows], classes), [], []]
            for row in probabilities[rows]:
                order = row.argsort(descending=True)
                kept = order[row[order] > threshold].tolist()
                columns[2].append([classes[c] for c in kept])
                columns[3].append([float(row[c]) for c in kept])
            writer.write_table(pa.table(columns, schema=schema))


def _names(given: Tensor, classes: tuple[str, ...]) -> list[list[str]]:
    if given.ndim == 1:
        return [[classes[label]] if label >= 0 else [] for label in given.tolist()]
    return [[classes[c] for c in row.nonzero().flatten().tolist()] for row in given > 0]


def weight_spread(network: nn.Module) -> float:
    """By how much the processes' weights differ, relative; all processes call it.

    Sums are compared, on the CPU in double precision (MPS has none): any difference moves them.
    """
    total = sum(float(p.detach().cpu().double().abs().sum()) for p in network.parameters())
    sums: list[float] = gather_object([total])
    return (max(sums) - min(sums)) / max(max(sums), 1e-30)


def warn_of_spread(spread: float) -> dict[str, object]:
    """Warn where the processes ended with different weights, after the results are written; facts for run.json."""
    if spread == 0:
        return {}
    sys.stderr.write(
        f"warning: the processes ended with different weights (sums differ by {spread:.1e}, relative). The export has "
        "those of the first process. A tiny difference can come from unlike GPUs; otherwise please report it.\n"
    )
    return {"processes_differ": spread}


def open_on_main(
    accelerator: Accelerator,
    path: Path,
    recipe: str,
    notes: Mapping[str, Callable[[], object]],
    facts: Mapping[str, object],
    *,
    resume: bool,
    overwrite: bool,
) -> RunFolder:
    """A run folder that the first process makes, or completes where it is resumed.

    Args:
        accelerator: for processes.
        path: where it is.
        recipe: its recipe.yaml.
        notes: name.json to its content.
        facts: for run.json, beside machine, versions and processes.
        resume: the run was made before.
        overwrite: replace a run.
    """

    def every_fact() -> dict[str, object]:
        here = {"world_size": accelerator.num_processes, "device": str(accelerator.device)}
        return {**facts, **here, "threads": torch.get_num_threads(), **environment()}

    if accelerator.is_main_process:
        if resume:
            run = RunFolder.reopen(path)
            run.complete(notes, every_fact)
            began, now = run.info["world_size"], accelerator.num_processes
            if began != now:
                sys.stderr.write(
                    f"warning: {path} began with {began} processes and continues with {now}; sums are rounded in "
                    "another order, so the weights will differ in their last digits\n"
                )
        else:
            RunFolder.create(path, recipe, overwrite=overwrite, notes=notes, facts=every_fact)
    accelerator.wait_for_everyone()
    return RunFolder.reopen(path)
