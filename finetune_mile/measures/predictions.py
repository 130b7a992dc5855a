"""A model's logits on disk, so that every measure can be taken again without the model: one parquet file.

Columns id, logits (C floats), given, truth and main (class numbers; null where not known). The schema's
metadata hold the classes, the activation, where model and data came from, and a hash over ids, classes and logits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune_mile.core.problems import Problem
from finetune_mile.measures.scoring import Activation

FORMAT = b"finetune_mile.logits"
ROWS = 4096  # in a row group


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What a classifier says of N images, C classes, and their labels."""

    ids: Sequence[str]
    classes: tuple[str, ...]
    logits: Tensor  # (N, C) float32
    given: Tensor  # (N,) integers, -1 = unlabelled; or (N, C) of 0 and 1
    truth: Tensor | None  # (N, C) booleans
    activation: Activation
    main: Tensor | None = None  # (N,) the class of the main object, where it is known
    about: dict[str, Any] = field(default_factory=dict)  # model, data, and what else is worth keeping

    def digest(self) -> str:
        """A sha256 over ids, classes, activation and logits."""
        names = json.dumps([list(self.ids), list(self.classes), self.activation]).encode()
        found = hashlib.sha256(names)
        found.update(self.logits.float().contiguous().numpy().data)
        return found.hexdigest()


def write_predictions(path: Path, found: Predictions) -> None:
    """Write; the caller sees to it that a half-written file is never taken for a whole one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, width = found.logits.shape
    facts = {
        "version": 1, "classes": list(found.classes), "activation": found.activation, "sha256": found.digest(),
        "one_label": found.given.ndim == 1, "about": found.about,
    }  # fmt: skip
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("logits", pa.list_(pa.float32(), width)),
            ("given", pa.list_(pa.int32())),
            ("truth", pa.list_(pa.int32())),
            ("main", pa.int32()),
        ],
        metadata={FORMAT: json.dumps(facts).encode()},
    )
    # The bytes of floats are sorted by their place first: exponents are alike and can be packed.
    with pq.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=False,
        column_encoding={"logits.list.element": "BYTE_STREAM_SPLIT"},
    ) as writer:  # fmt: skip
        for at in range(0, count, ROWS):
            rows = slice(at, at + ROWS)
            flat = pa.array(found.logits[rows].float().contiguous().numpy().ravel())
            columns = [
                pa.array(list(found.ids[rows]), pa.string()),
                pa.FixedSizeListArray.from_arrays(flat, width),
                pa.array(_numbers(found.given[rows]), pa.list_(pa.int32())),
                pa.array(
                    [None] * len(flat[::width]) if found.truth is None else _numbers(found.truth[rows]),
                    pa.list_(pa.int32()),
                ),
                pa.array([None] * len(flat[::width]) if found.main is None else found.main[rows].tolist(), pa.int32()),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def read_predictions(path: Path) -> Predictions:
    """Read a file of write_predictions; a damaged or foreign file is said to be one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise Problem(f"{path}: not a whole parquet file of logits ({str(error).splitlines()[0]})") from error
    notes = (table.schema.metadata or {}).get(FORMAT)
    if notes is None:
        raise Problem(f"{path}: not a file of logits that `finetune-mile eval` wrote")
    facts = json.loads(notes)
    classes = tuple(facts["classes"])
    flat = table["logits"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    logits = torch.from_numpy(np.array(flat, dtype=np.float32).reshape(-1, len(classes)))
    given = _flags(table["given"], len(classes))
    truth = None if table["truth"].null_count else _flags(table["truth"], len(classes))
    known = "main" in table.column_names and not table["main"].null_count  # older files have no such column
    found = Predictions(
        main=torch.tensor(table["main"].to_pylist()) if known else None,
        ids=table["id"].to_pylist(), classes=classes, logits=logits, truth=truth, activation=facts["activation"],
        given=_first(given) if facts["one_label"] else given.long(), about=facts["about"],
    )  # fmt: skip
    if found.digest() != facts["sha256"]:
        raise Problem(f"{path}: its contents do not fit its hash: it was changed or damaged; run eval --model again")
    return found


def _numbers(labels: Tensor) -> list[list[int]]:
    """Class numbers of each image, from (n,) integers or (n, C) flags."""
    if labels.ndim == 1:
        return [[label] if label >= 0 else [] for label in labels.tolist()]
    rows, columns = (labels > 0).nonzero(as_tuple=True)
    sizes = torch.bincount(rows, minlength=len(labels)).tolist()
    return [part.tolist() for part in columns.split(sizes)]


def _flags(column: Any, num_classes: int) -> Tensor:
    """(N, C) booleans from a column of class numbers."""
    lists = column.combine_chunks()
    sizes = torch.from_numpy(np.diff(lists.offsets.to_numpy()))
    rows = torch.arange(len(lists)).repeat_interleave(sizes)
    flags = torch.zeros(len(lists), num_classes, dtype=torch.bool)
    flags[rows, torch.from_numpy(lists.flatten().to_numpy().astype(np.int64))] = True
    return flags


def _first(flags: Tensor) -> Tensor:
    """(N,) the one label of each row, -1 without one."""
    return torch.where(flags.any(1), flags.int().argmax(1), -1)
