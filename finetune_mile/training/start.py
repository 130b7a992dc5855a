"""The two ends of fine-tuning: a probe as the first classifier, and weights between the first and the last ones.

A probe and the nearest neighbours of a checkpoint's features are the two lines that a run must beat.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping

import numpy as np
import torch
from accelerate.utils import broadcast, broadcast_object_list
from torch import Tensor, nn

from finetune_mile.checkpoints.init import parse_init
from finetune_mile.checkpoints.loading import load_network
from finetune_mile.compute.passes import Outputs, show
from finetune_mile.core.problems import Problem
from finetune_mile.images.order import Indices
from finetune_mile.images.splits import one_label_each, stratified
from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.probe import fit_probe, neighbour_votes
from finetune_mile.learning.roles import tensors_of
from finetune_mile.measures.intervals import map_interval
from finetune_mile.measures.metrics import hits, top_k
from finetune_mile.measures.verdicts import score_of, units, with_edges
from finetune_mile.networks.heads import Features, StandardisedLinear, get_head, set_head
from finetune_mile.networks.parts import split_head
from finetune_mile.training.device import Device
from finetune_mile.training.features import Store, embed, full_name, stored
from finetune_mile.training.plan import HELD_OUT, has_trial, trial_steps
from finetune_mile.training.task import Model, Task, on_training_images

MOST_PROBE_IMAGES = 20_000  # of a probe; more would hardly move it
MOST_PROBE_LABELS = 2_000_000  # images times classes of a probe that is only shown: seconds
REPORT_SHARE = 20  # a run must be so many times as long as the passes that are only for its report
OWN_SIZE_SHARE = 5  # or so many times, as a probe at the checkpoint's own image size


def start_head(task: Task, device: Device, network: nn.Module, *, fit: bool) -> dict[str, object] | None:
    """Put a standardised classifier on the network, as a linear probe of the labelled images; all processes call it.

    Returns the scores of `_lines`, unless the run is not evaluated.

    Args:
        task: of the run.
        device: where to compute.
        network: what learns; its classifier is replaced.
        fit: False: a checkpoint will fill it.
    """
    accelerator = device.accelerator
    old = get_head(network)
    head = StandardisedLinear(old.in_features, old.out_features)
    if fit:
        network.to(accelerator.device)
        features, given = on_training_images(task, device, Features(network), _labelled(task))
        targets = given_matrix(given, task.num_classes)
        probe = fit_probe(features, targets, task.recipe.activation, seed=task.recipe.seed)
        with torch.no_grad():
            for name in ("mean", "scale", "weight", "bias"):
                getattr(head, name).copy_(getattr(probe, name))
    set_head(network, head.to(accelerator.device))
    for tensor in (*head.parameters(), *head.buffers()):
        tensor.data = broadcast(tensor.data)
    if not fit or task.recipe.evaluate.images == 0:
        return None
    queries = _queries(task, device, network)
    logits = show(head, queries.rows.to(accelerator.device)).float().cpu()
    return _lines(task, features, given, queries, logits, main=accelerator.is_main_process)


def scores_to_beat(task: Task, model: Model, device: Device) -> dict[str, object] | None:
    """The scores of `_lines` for a run that starts from another classifier; all processes call it.

    None where the features are not kept on disk and cost more than a twentieth of the run, or where the probe has very
    many classes.
    """
    network, accelerator, recipe = model.learner, device.accelerator, task.recipe
    labelled, images = _labelled(task), np.arange(len(task.data.val))
    if recipe.evaluate.images == 0 or len(labelled) * task.num_classes > MOST_PROBE_LABELS:
        return None
    network.to(accelerator.device)
    stores: list[Store | None] = [None]
    on_rows = recipe.trunk == "frozen"  # the task's images are features already
    if not on_rows and accelerator.is_main_process:
        trunk = split_head(network)[0]
        stores = [stored(task.data, task.preprocess, trunk, full_name(model.report), labelled)]
    store = broadcast_object_list(stores)[0]
    if store is not None:
        bank, given, queries = _kept(task, store, labelled)
    elif on_rows or REPORT_SHARE * (len(labelled) + len(images)) <= 3 * (recipe.steps or 0) * recipe.batch_size:
        bank, given = on_training_images(task, device, Features(network), labelled)
        queries = _queries(task, device, network)
    else:
        return None
    probe = fit_probe(bank, given_matrix(given, task.num_classes), recipe.activation, seed=recipe.seed)
    return _lines(task, bank, given, queries, probe.logits(queries.rows), main=accelerator.is_main_process)


def own_size_scores(task: Task, device: Device, own: int) -> dict[str, object] | None:
    """Scores of a linear probe at the checkpoint's `own` image size, for a run at a smaller one; all processes call it.

    None where the features are not kept on disk and cost more than a fifth of the run.
    """
    recipe, size = task.recipe, task.preprocess.size
    labelled, images = _labelled(task), np.arange(len(task.data.val))
    if recipe.evaluate.images == 0 or len(labelled) * task.num_classes > MOST_PROBE_LABELS:
        return None
    network, _, report = load_network(
        parse_init(recipe.init), arch=recipe.arch, num_classes=task.num_classes, head_bias=recipe.head_bias
    )
    larger = task.preprocess.model_copy(update={"size": own})
    trunk = split_head(network)[0].to(device.accelerator.device)
    stores: list[Store | None] = [None]
    if device.accelerator.is_main_process:
        stores = [stored(task.data, larger, trunk, full_name(report), labelled)]
    store = broadcast_object_list(stores)[0]
    cost = OWN_SIZE_SHARE * (len(labelled) + len(images)) * (own / size) ** 2
    steps = task.plan.total_steps
    steps += trial_steps(steps, 1 - HELD_OUT) if has_trial(recipe, len(labelled)) else 0
    if store is None and (recipe.trunk == "frozen" or cost > 3 * steps * recipe.batch_size):
        return None
    if store is None:
        try:
            store = embed(
                device, task.data, larger, trunk, arch=full_name(report), dtype=recipe.feature_dtype, mixed=False,
                about={"init": recipe.init, "data": recipe.data}, rows={"train": labelled, "val": images},
            )  # fmt: skip
        except Problem as problem:  # the run itself does not need them
            sys.stderr.write(f"warning: no probe at {own} pixels: {problem}\n")
            return None
    bank, given, queries = _kept(task, store, labelled)
    probe = fit_probe(bank, given_matrix(given, task.num_classes), recipe.activation, seed=recipe.seed)
    logits = Outputs(probe.logits(queries.rows), queries.readable)
    scores, measured = task.scores(logits, torch.from_numpy(images), intervals=True)
    key = score_of(scores)
    return None if key is None else {"size": own} | with_edges(scores, key) | units(measured)


def _kept(task: Task, store: Store, labelled: Indices) -> tuple[Tensor, Tensor, Outputs]:
    """Features (m, D) on disk of labelled images that could be read, their labels, and the validation features."""
    bank, good = store.rows("train", labelled)
    return bank[good], task.pools.images.given[torch.from_numpy(labelled)][good], store.rows("val")


def _labelled(task: Task) -> Indices:
    """The images of a probe."""
    labelled = task.pools.indices["labelled"]
    if len(labelled) <= MOST_PROBE_IMAGES:
        return labelled
    labels = one_label_each(task.pools.images.given)[torch.from_numpy(labelled)].numpy()
    ids = [task.pools.images.ids[i] for i in labelled]
    return labelled[stratified(labels, ids, MOST_PROBE_IMAGES / len(labelled), task.recipe.seed)]


def _queries(task: Task, device: Device, network: nn.Module) -> Outputs:
    """The features (n, D) of all validation images."""
    return device.outputs(Features(network), task.views("val"), np.arange(len(task.data.val)))


def _lines(
    task: Task, bank: Tensor, given: Tensor, queries: Outputs, logits: Tensor, *, main: bool
) -> dict[str, object]:
    """Scores of a probe on the validation images, its `units`, and the accuracy or map of k nearest neighbours.

    Args:
        task: of the run.
        bank: (m, D) features of labelled images.
        given: (m,) or (m, C) their labels.
        queries: (n, D) features of the validation images.
        logits: (n, C) of the probe for the queries; on the CPU, as all of these.
        main: is this the first process? Others do without the neighbours.
    """
    val, good, outputs = task.data.val, queries.readable, Outputs(logits, queries.readable)
    scores, measured = task.scores(outputs, torch.arange(len(logits)), intervals=val.given.ndim == 2)
    lines = scores | units(measured)  # the interval of an accuracy follows from it
    if main:
        votes = neighbour_votes(queries.rows[good], bank, given, task.num_classes)
        if measured.given.ndim == 1:
            lines["knn_accuracy"] = float(hits(top_k(votes, 1), measured.given).nanmean())
        elif measured.truth is not None and "map" in scores:
            known = measured.truth.any(1)
            scored = map_interval(votes[known], measured.truth[known])
            lines |= dict(zip(("knn_map", "knn_map_low", "knn_map_high"), scored, strict=True))
    return lines


def between(learner: nn.Module, first: Mapping[str, Tensor], share: float) -> nn.Module:
    """A copy of the learner whose weights lie between the first ones (share 0) and its own (share 1)."""
    mixed = copy.deepcopy(learner)
    with torch.no_grad():
        for name, tensor in tensors_of(mixed).items():
            if tensor.is_floating_point():
                tensor.lerp_(first[name], 1 - share)
    return mixed
