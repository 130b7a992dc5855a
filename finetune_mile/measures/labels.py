"""Labels of new images: the most likely class, and every other one above its threshold. C classes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from finetune_mile.checkpoints.loading import Opened
from finetune_mile.compute.passes import keys_of, stream
from finetune_mile.core.problems import LONGEST_SHOWN, cell, inert
from finetune_mile.images.pipeline import Readers, Views, default_workers, normalise
from finetune_mile.images.readers import Files
from finetune_mile.images.sets import ImageSet

Labels = list[tuple[str, float, float]]  # class, probability and threshold, the most likely first


def photos(names: Sequence[str]) -> ImageSet:
    """The images of some files, without labels."""
    return ImageSet(ids=names, given=torch.full((len(names),), -1), truth=None, content=Files(Path(), names))


def labelled(
    opened: Opened, images: ImageSet, thresholds: Tensor, *, device: str = "cpu", batch_size: int = 64,
    workers: int | None = None,
) -> Iterator[tuple[int, Labels | str]]:  # fmt: skip
    """Each image's index and labels, in order; or why it cannot be read.

    Args:
        opened: a network with its classifier.
        images: read ahead by loader processes.
        thresholds: (C,) least probability of a label beside the best one.
        device: to compute on.
        batch_size: images of a forward pass.
        workers: loader processes; None: from the cores.
    """
    layout, preprocess = torch.channels_last, opened.card.preprocess  # convolutions are faster with it
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (preprocess.mean, preprocess.std))
    classes = opened.classes or tuple(map(str, range(opened.report.classifier)))
    views = Views(images, preprocess, None, 0)
    if workers is None:  # one batch is read sooner than a process starts
        workers = default_workers(1) if len(images) > batch_size else 0
    readers = Readers(workers=workers, pin=device != "cpu", batch_size=batch_size)

    def prepare(pixels: Tensor) -> Tensor:
        return normalise(pixels.to(device, non_blocking=True), mean, std).contiguous(memory_format=layout)

    network = opened.network.to(device).to(memory_format=layout)
    keys = keys_of(np.arange(len(images)), batch_size)
    for samples, (rows, _) in stream(network, views, keys, prepare, readers):
        logits = rows.cpu()
        chances = logits.sigmoid() if opened.activation == "sigmoid" else logits.softmax(1)
        for sample, row in zip(samples.tolist(), chances, strict=True):
            yield (
                sample,
                views.bad.get(sample)
                or [(classes[c], float(row[c]), float(thresholds[c])) for c in best_and_above(row, thresholds)],
            )


def best_and_above(row: Tensor, thresholds: float | Tensor) -> list[int]:
    """The most likely class of probabilities (C,), then every other one above its threshold, the most likely first."""
    order = row.argsort(descending=True, stable=True)
    above = (row > thresholds)[order]
    above[0] = True
    return order[above].tolist()


def say_labels(form: str, name: str, labels: Labels, *, one: float | None, width: int) -> str:
    """One image's labels: a line of a table, a line of JSON (jsonl), or a line of CSV for each label.

    Args:
        form: table, jsonl or csv.
        name: of the image.
        labels: of `labelled`.
        one: the threshold of all classes; None: each has its own.
        width: of the table's column of names.
    """
    if form == "jsonl":
        own = [{} if one is not None else {"threshold": round(t, 6)} for _, _, t in labels]
        listed = [{"label": k, "probability": round(p, 6), **more} for (k, p, _), more in zip(labels, own, strict=True)]
        return json.dumps({"image": name, "labels": listed, **({} if one is None else {"threshold": one})}) + "\n"
    if form == "csv":
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(
            (cell(name), cell(label), f"{p:.6f}") for label, p, _ in labels
        )
        return lines.getvalue()
    named = [(inert(label, LONGEST_SHOWN), p, t) for label, p, t in labels]
    shown = ", ".join(f"{label} {p:.2f}" if p > t else f"({label} {p:.2f})" for label, p, t in named)
    return f"{inert(name):<{width}}  {shown}\n"


def say_threshold(threshold: float | Tensor) -> str:
    """One threshold as a number, thresholds of the classes (C,) as their range."""
    if isinstance(threshold, float | int):
        return f"{threshold:g}"
    low, high = float(threshold.min()), float(threshold.max())
    return f"{low:.3g}" if low == high else f"the threshold of their class, {low:.2f} to {high:.2f}"
