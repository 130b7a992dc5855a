"""Accuracies of a checkpoint beside the published ones, for `finetune-mile check`: published ones are ImageNet's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from finetune_mile.checkpoints.cards import Card
from finetune_mile.checkpoints.init import Init
from finetune_mile.checkpoints.loading import Opened, keep_own_head, open_trunk
from finetune_mile.images.order import Indices
from finetune_mile.images.splits import one_label_each
from finetune_mile.learning.probe import neighbour_votes
from finetune_mile.measures.intervals import wilson
from finetune_mile.measures.metrics import hits, top_k
from finetune_mile.measures.predictions import pick_probe
from finetune_mile.networks.heads import get_head
from finetune_mile.training.checks import Check
from finetune_mile.training.features import FeatureSet, Split, embed, full_name
from finetune_mile.training.processes import Device
from finetune_mile.training.task import Model, Task, image_views, images_of

CLASSES = 1000  # of ImageNet
FEW, MANY = 20_000, 100_000  # training images of a quick k-NN; features that are better kept on disk
EACH = 128  # images of a forward pass, per process


def check_accuracies(
    task: Task, model: Model, device: Device, init: Init, images: int, bank: int | None
) -> Iterator[Check]:
    """Top-1 of the file's own classifier and of k-NN, against the card's; the first process compares."""
    data, card, name = task.data, model.card, task.recipe.data.lower()
    # Published accuracies are about ImageNet; a part of its classes would be easier.
    published = task.num_classes == CLASSES and (name.startswith("imagenet:") or "imagenet-1k" in name)
    opened = open_trunk(init, arch=task.recipe.arch)
    has_head = opened.report.classifier == task.num_classes
    if bank is None and (card.knn_top1 is not None or not has_head) and published:
        bank = FEW
    if init.kind == "none" or (not has_head and bank is None):
        text = "not measured: published ones are ImageNet's; with a checkpoint, --bank N measures k-NN on this data"
        yield Check("accuracy", "-", text)
        return
    rows: dict[Split, Indices] = {"val": pick_probe(len(data.val), images).numpy()}
    labelled = (one_label_each(data.train.given) >= 0).nonzero().flatten()
    if bank is not None:
        rows["train"] = labelled[pick_probe(len(labelled), bank)].numpy()
    found = _features(task, device, init, opened, rows)
    if not device.accelerator.is_main_process:
        return
    queries, given = found["val"]
    if has_head:
        head = get_head(keep_own_head(opened).network).cpu().requires_grad_(False)
        other = published and card.linear_top1 is not None and not card.linear_head
        what = "the classifier in the file" + (", which is not the published linear one" if other else "")
        known = card.linear_top1 if card.linear_head and published else None
        yield _compared("head", what, hits(top_k(head(queries), 1), given), known, task.num_classes, card)
    if bank is not None:
        base, labels = found["train"][0], one_label_each(found["train"][1])
        votes = neighbour_votes(queries, base, labels, task.num_classes, k=card.knn_k, temperature=card.knn_temperature)
        complete = len(rows["train"]) == len(labelled)
        what = f"k-NN (k {card.knn_k}) with {len(base):,} of {len(labelled):,} training images"
        if published and card.knn_top1 is not None and not complete:
            what += f" (with all, published: {card.knn_top1:g}; --bank all compares)"
        known = card.knn_top1 if published and complete else None
        yield _compared("k-NN", what, hits(top_k(votes, 1), given), known, task.num_classes, card)


def _features(
    task: Task, device: Device, init: Init, opened: Opened, rows: dict[Split, Indices]
) -> dict[Split, tuple[Tensor, Tensor]]:
    """Features (n, D) and labels of the images in `rows` that can be read; many are kept on disk, as `probe` does."""
    network, preprocess = opened.network.to(device.accelerator.device), opened.card.preprocess
    device = dataclasses.replace(device, batch_size=EACH * device.accelerator.num_processes)
    if sum(map(len, rows.values())) > MANY:
        wanted = FeatureSet(
            data=task.data, network=network, arch=full_name(opened.report), preprocess=preprocess,
            precision=device.accelerator.mixed_precision,
        )  # fmt: skip
        store = embed(device, wanted, about={"init": init.text, "data": task.recipe.data}, rows=rows)
        read = {split: store.rows(split, some) for split, some in rows.items()}
    else:
        show = partial(image_views, preprocess, task.bad, task.recipe.seed)
        read = {
            split: device.outputs(network, show(images_of(task.data, split), split, None, None), some)
            for split, some in rows.items()
        }
    return {
        split: (features[good], images_of(task.data, split).given[torch.from_numpy(rows[split])][good])
        for split, (features, good) in read.items()
    }


def _compared(name: str, what: str, right: Tensor, published: float | None, classes: int, card: Card) -> Check:
    """An accuracy with its 95 % interval. Off: the published one is outside, or a guess is as good."""
    right = right[~right.isnan()]
    top1, count, advice = float(right.mean()), len(right), ""
    low, high = (100 * edge for edge in wilson(top1 / 100, count))
    text = f"{what}: top-1 {top1:.1f} ({low:.1f} to {high:.1f}) on {count:,} validation images"
    if low <= 100 / classes:
        advice = (
            "no better than guessing. Either the validation labels have another order (finetune-mile check --data), or "
            f"the weights were not loaded (finetune-mile weights check {card.name} --names)"
        )
    elif published is not None and high < published:
        advice = (
            f"the load report above, then input and padding (finetune-mile weights show {card.name}), then all "
            "validation images (--images all)"
        )
    elif published is not None and low > published:
        advice = "better than published: are training images among the validation images (finetune-mile check --data)?"
    if published is not None:
        text += f"; published {published:g}"
    seen = {"top1": round(top1, 2), "low": round(low, 2), "high": round(high, 2), "images": count, "what": what}
    return Check(name, "off" if advice else "ok", text, advice, seen)
