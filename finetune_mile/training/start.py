"""The start of fine-tuning: a linear probe as the first classifier, and the scores that a run must beat.

These are those of a probe and of the nearest neighbours of the checkpoint's features; start.json keeps them.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from accelerate.utils import broadcast
from torch import Tensor, nn

from finetune_mile.checkpoints.init import parse_init
from finetune_mile.checkpoints.loading import load_network
from finetune_mile.compute.passes import Outputs, show
from finetune_mile.core.files import write_json
from finetune_mile.core.problems import Problem, warn
from finetune_mile.images.order import Indices
from finetune_mile.images.splits import one_label_each, stratified
from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.probe import Probe, fit_probe, neighbour_votes
from finetune_mile.measures.intervals import map_interval
from finetune_mile.measures.metrics import hits, top_k
from finetune_mile.measures.verdicts import SCORES, score_of, units, with_edges
from finetune_mile.networks.heads import Features, StandardisedLinear, get_head, set_head
from finetune_mile.networks.parts import split_head
from finetune_mile.training.features import FeatureSet, Store, embed, full_name, stored
from finetune_mile.training.folder import FIRST_STAGE, OWN_SIZE, START, RunFolder
from finetune_mile.training.plan import HELD_OUT, has_trial, trial_steps
from finetune_mile.training.processes import Device, from_first
from finetune_mile.training.task import Model, Task, on_training_images, second_task

MOST_PROBE_IMAGES = 20_000  # of a probe; more would hardly move it
MOST_PROBE_LABELS = 2_000_000  # images times classes of a probe that is only shown: seconds
REPORT_SHARE = 20  # a run must be so many times as long as the passes that are only for its report
OWN_SIZE_SHARE = 5  # or so many times, as a probe at the checkpoint's own image size


def start_classifier(task: Task, model: Model, device: Device, folder: RunFolder) -> None:
    """Fit the first classifier where the recipe asks for it; and write the scores that a run must beat."""
    recipe, new, lines = task.recipe, not folder.saved(), None
    if recipe.head_init == "probe":
        if not isinstance(get_head(model.learner), StandardisedLinear):  # else it was fitted before
            lines = start_head(task, device, model.learner, fit=new)
    elif new and recipe.init != "none":
        lines = scores_to_beat(task, model, device)
    if lines is not None and device.accelerator.is_main_process:
        write_json(folder.path / START, folder.start() | lines)


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
        probe = _fit(task, features, given)
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
    network, main, recipe = model.learner, device.accelerator.is_main_process, task.recipe
    labelled, store = _labelled(task), None
    if _not_shown(task, labelled):
        return None
    network.to(device.accelerator.device)
    on_rows = recipe.trunk == "frozen"  # the task's images are features already
    if not on_rows:
        wanted = FeatureSet(
            data=task.data, network=split_head(network)[0], arch=full_name(model.report), preprocess=task.preprocess
        )
        store = from_first(lambda: stored(wanted, labelled))
    if store is not None:
        bank, given, queries = _kept(task, store, labelled)
    elif on_rows or REPORT_SHARE * (len(labelled) + len(task.data.val)) <= 3 * (recipe.steps or 0) * recipe.batch_size:
        bank, given = on_training_images(task, device, Features(network), labelled)
        queries = _queries(task, device, network)
    else:
        return None
    return _lines(task, bank, given, queries, _fit(task, bank, given).logits(queries.rows), main=main)


def compare_sizes(task: Task, model: Model, device: Device, folder: RunFolder) -> None:
    """At the start of a run below the checkpoint's own image size: what a linear probe at that size reaches.

    Left out where the features are not kept on disk and cost more than a fifth of the run. All processes call it.
    """
    recipe, size, own, main = task.recipe, task.preprocess.size, model.own_size, device.accelerator.is_main_process
    if recipe.init == "none" or own is None or size >= own or folder.saved() or OWN_SIZE in folder.start():
        return
    labelled, images = _labelled(task), np.arange(len(task.data.val))
    if _not_shown(task, labelled):
        return
    network, _, report = load_network(
        parse_init(recipe.init), arch=recipe.arch, num_classes=task.num_classes, head_bias=recipe.head_bias
    )
    wanted = FeatureSet(
        data=task.data, network=split_head(network)[0].to(device.accelerator.device), arch=full_name(report),
        preprocess=task.preprocess.model_copy(update={"size": own}), dtype=recipe.feature_dtype,
    )  # fmt: skip
    store = from_first(lambda: stored(wanted, labelled))
    if store is None:
        cost = OWN_SIZE_SHARE * (len(labelled) + len(images)) * (own / size) ** 2
        steps = task.plan.total_steps
        steps += trial_steps(steps, 1 - HELD_OUT) if has_trial(recipe, len(labelled)) else 0
        if recipe.trunk == "frozen" or cost > 3 * steps * recipe.batch_size:
            return
        about = {"init": recipe.init, "data": recipe.data}
        try:
            store = embed(device, wanted, about=about, rows={"train": labelled, "val": images})
        except Problem as problem:  # the run itself does not need them
            if main:
                warn(f"no probe at {own} pixels: {problem}")
            return
    bank, given, queries = _kept(task, store, labelled)
    logits = Outputs(_fit(task, bank, given).logits(queries.rows), queries.readable)
    scores, measured = task.scores(logits, torch.from_numpy(images), intervals=True)
    key = score_of(scores)
    if key is None or not main:
        return
    lines = {"size": own} | with_edges(scores, key) | units(measured)
    write_json(folder.path / START, folder.start() | {OWN_SIZE: lines})
    sys.stderr.write(
        f"size    to beat: a linear probe at the checkpoint's own {own} pixels has {scores[key]:.1f} % "
        f"{SCORES[key]}; this run shows images at {size} pixels\n"
    )


def score_first_stage(task: Task, device: Device, learner: nn.Module, folder: RunFolder) -> None:
    """Before a second stage: what the first one reaches on all validation images; all processes call it."""
    if second_task(task) is None or FIRST_STAGE in folder.start():
        return
    images = np.arange(len(task.data.val))
    outputs = device.outputs(learner, task.views("val"), images)
    scores, measured = task.scores(outputs, torch.from_numpy(images), intervals=True)
    key = score_of(scores)
    if key is not None and device.accelerator.is_main_process:
        lines = with_edges(scores, key) | units(measured)
        write_json(folder.path / START, folder.start() | {FIRST_STAGE: lines})


def _not_shown(task: Task, labelled: Indices) -> bool:
    """Is a probe of these images not computed for the report: is nothing scored, or does it have too many labels?"""
    return task.recipe.evaluate.images == 0 or len(labelled) * task.num_classes > MOST_PROBE_LABELS


def _fit(task: Task, features: Tensor, given: Tensor) -> Probe:
    """A linear probe of features (n, D) and their labels."""
    targets = given_matrix(given, task.num_classes)
    return fit_probe(features, targets, task.recipe.activation, seed=task.recipe.seed)


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
