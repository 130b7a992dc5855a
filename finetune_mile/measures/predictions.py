"""A model's logits, kept on disk so that all measures can be taken again without it.

The file is parquet. Columns: id, logits (C floats), given, truth and main (class numbers; null where not known). The
schema's metadata hold the classes, the activation, where model and data came from, and a hash over ids, classes and
logits.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune_mile.core.files import whole_file
from finetune_mile.core.problems import Problem, cell
from finetune_mile.measures.metrics import TAKEN_FOR, Activation

FORMAT = b"finetune_mile.logits"
ROWS = 4096  # in a row group
PER_CLASS = "per_class.csv"


def pick_probe(size: int, count: int) -> Tensor:
    """`count` indices spread evenly over `size`: the fixed sample that every generation is evaluated on."""
    picked: Tensor = torch.linspace(0, size - 1, min(size, count), dtype=torch.float64).round().long().unique()
    return picked


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Logits and labels of N images, C classes."""

    ids: Sequence[str]
    classes: tuple[str, ...]
    logits: Tensor  # (N, C) float32
    given: Tensor  # (N,) integers, -1 = unlabelled; or (N, C) of 0 and 1
    truth: Tensor | None  # (N, C) booleans
    activation: Activation
    main: Tensor | None = None  # (N,) the class of the main object, where it is known
    about: dict[str, Any] = field(default_factory=dict)  # model, data and more

    def digest(self) -> str:
        """SHA-256 over ids, classes, activation and logits."""
        names = json.dumps([list(self.ids), list(self.classes), self.activation]).encode()
        digest = hashlib.sha256(names)
        digest.update(self.logits.float().contiguous().numpy().data)
        return digest.hexdigest()


def matched(other: Predictions, first: Predictions, called: str) -> Predictions:
    """The other model's predictions in the order of the first one's images and classes; `called` is for messages."""
    place = {name: i for i, name in enumerate(other.ids)}
    missing = [name for name in first.ids if name not in place]
    if missing or len(place) != len(first.ids):
        some = f"{len(missing)} of the images are missing, first {missing[0]}" if missing else "it has more images"
        raise Problem(f"{called}: both models must have seen the same images; {some}")
    if set(other.classes) != set(first.classes):
        odd = sorted(set(other.classes) ^ set(first.classes))
        raise Problem(f"{called}: its classes differ, for example {odd[0]!r}")
    rows = [place[name] for name in first.ids]
    columns = [other.classes.index(name) for name in first.classes]
    return dataclasses.replace(
        other, ids=first.ids, classes=first.classes, logits=other.logits[rows][:, columns], given=first.given,
        truth=first.truth,
    )  # fmt: skip


def write_predictions(path: Path, predictions: Predictions) -> None:
    """Write the predictions. Not atomic: the caller writes to a temporary path and renames it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, width = predictions.logits.shape
    facts = {
        "version": 1, "classes": list(predictions.classes), "activation": predictions.activation,
        "sha256": predictions.digest(), "one_label": predictions.given.ndim == 1, "about": predictions.about,
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
    logits = pa.array(predictions.logits.float().contiguous().numpy().ravel())
    unknown = [None] * count
    columns = [
        list(predictions.ids),
        pa.FixedSizeListArray.from_arrays(logits, width),
        _numbers(predictions.given),
        unknown if predictions.truth is None else _numbers(predictions.truth),
        unknown if predictions.main is None else predictions.main.tolist(),
    ]
    # The bytes of floats are sorted by their place first: exponents are alike and can be packed.
    pq.write_table(
        pa.table(columns, schema=schema), path, row_group_size=ROWS, compression="zstd", use_dictionary=False,
        column_encoding={"logits.list.element": "BYTE_STREAM_SPLIT"},
    )  # fmt: skip


def read_predictions(path: Path) -> Predictions:
    """Read a file of write_predictions; a damaged or foreign file raises a `Problem`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise Problem(f"{path}: not a complete parquet file of logits ({str(error).splitlines()[0]})") from error
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
    if facts["one_label"]:
        given = torch.where(given.any(1), given.int().argmax(1), -1)
    predictions = Predictions(
        main=torch.tensor(table["main"].to_pylist()) if known else None,
        ids=table["id"].to_pylist(), classes=classes, logits=logits, truth=truth, activation=facts["activation"],
        given=given.long(), about=facts["about"],
    )  # fmt: skip
    if predictions.digest() != facts["sha256"]:
        raise Problem(
            f"{path}: the contents do not match the hash. The file was changed or is damaged; run eval --model again."
        )
    return predictions


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


def write_per_class(path: Path, classes: Sequence[str], table: Mapping[str, Tensor]) -> None:
    """Write a line for each class: percent with four digits, counts, names; empty where nothing counts.

    Args:
        path: the CSV file.
        classes: C names.
        table: columns (C,), as `class_table` has them.
    """
    columns = {name: values.tolist() for name, values in table.items()}
    if TAKEN_FOR in columns:
        columns[TAKEN_FOR] = [cell(classes[i]) if i >= 0 else "" for i in columns[TAKEN_FOR]]
    with whole_file(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["class", *columns])
        for row in zip(map(cell, classes), *columns.values(), strict=True):
            writer.writerow(["" if v != v else f"{v:.4f}" if isinstance(v, float) else v for v in row])
