"""What a finished run leaves behind: the labels it found, and the certainty that all processes agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune_mile.runlog import whole_file

LABEL_BATCH = 65536  # rows written at once


def write_labels(
    path: Path,
    ids: list[str],
    given: Tensor,
    probabilities: Tensor,
    classes: tuple[str, ...],
    threshold: float,
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


def same_on_every_process(network: nn.Module, gather: Any) -> bool:
    """Did all processes end with the same weights? Compares a sum that any difference moves."""
    total = sum(p.detach().double().abs().sum() for p in network.parameters())
    sums = gather(torch.as_tensor(total).reshape(1))
    return bool((sums == sums[0]).all())
