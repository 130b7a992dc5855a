"""The two ends of fine-tuning: a probe as the first classifier, and weights between the first and the last ones.

A probe and the nearest neighbours of a checkpoint's features are the two lines that a run must beat.
"""

from __future__ import annotations

import copy
import dataclasses
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
from finetune_mile.measures.metrics import class_precisions
from finetune_mile.measures.probing import hits
from finetune_mile.measures.verdicts import map_edges, score_of, sets_of, units, with_edges
from finetune_mile.networks.heads import Features, StandardisedLinear, get_head, set_head
from finetune_mile.networks.parts import split_head
from finetune_mile.training.features import FrozenViewer, Store, embed, full_name, stored
from finetune_mile.training.plan import HELD_OUT, has_trial, trial_steps
from finetune_mile.training.setup import Setup

MOST_PROBE_IMAGES = 20_000  # of a probe; more would hardly move it
MOST_PROBE_LABELS = 2_000_000  # images times classes of a probe that is only shown: seconds
DEAR = 20  # a run must be so many times as long as the passes that are only for its report
OWN_SIZE_SHARE = 5  # or so many times, as a probe at the checkpoint's own image size


def start_head(setup: Setup, *, fit: bool) -> dict[str, object] | None:
    """Put a standardised classifier on the network, as a linear probe of the labelled images; all processes call it.

    Returns the scores of `_lines`, unless the run is not evaluated.

    Args:
        setup: its network is changed.
        fit: False: a checkpoint will fill it.
    """
    network, accelerator = setup.network, setup.accelerator
    old = get_head(network)
    head = StandardisedLinear(old.in_features, old.out_features)
    if fit:
        network.to(accelerator.device)
        features, given = setup.training_logits(Features(network), _labelled(setup))
        targets = given_matrix(given, setup.num_classes)
        probe = fit_probe(features, targets, setup.recipe.activation, seed=setup.recipe.seed)
        with torch.no_grad():
            for name in ("mean", "scale", "weight", "bias"):
                getattr(head, name).copy_(getattr(probe, name))
    set_head(network, head.to(accelerator.device))
    for tensor in (*head.parameters(), *head.buffers()):
        tensor.data = broadcast(tensor.data)
    if not fit or setup.recipe.evaluate.images == 0:
        return None
    queries = _queries(setup)
    logits = show(head, queries.rows.to(accelerator.device)).float().cpu()
    return _lines(setup, features, given, queries, logits)


def lines_to_beat(setup: Setup) -> dict[str, object] | None:
    """The scores of `_lines` for a run that starts from another classifier; all processes call it.

    None where the features are not kept on disk and cost more than a twentieth of the run, or where the probe has very
    many classes.
    """
    network, accelerator, recipe = setup.network, setup.accelerator, setup.recipe
    labelled, images = _labelled(setup), np.arange(len(setup.data.val))
    if recipe.evaluate.images == 0 or len(labelled) * setup.num_classes > MOST_PROBE_LABELS:
        return None
    network.to(accelerator.device)
    stores: list[Store | None] = [None]
    if setup.complete is None and accelerator.is_main_process:
        stores = [stored(setup.viewer, split_head(network)[0], full_name(setup.report), labelled)]
    store = broadcast_object_list(stores)[0]
    if store is not None:
        bank, given, queries = _kept(setup, store, labelled)
    elif (
        setup.complete is not None
        or DEAR * (len(labelled) + len(images)) <= 3 * (recipe.steps or 0) * recipe.batch_size
    ):
        bank, given = setup.training_logits(Features(network), labelled)
        queries = _queries(setup)
    else:
        return None
    probe = fit_probe(bank, given_matrix(given, setup.num_classes), recipe.activation, seed=recipe.seed)
    return _lines(setup, bank, given, queries, probe.logits(queries.rows))


def own_size_lines(setup: Setup, own: int) -> dict[str, object] | None:
    """Scores of a linear probe at the checkpoint's `own` image size, for a run at a smaller one; all processes call it.

    None where the features are not kept on disk and cost more than a fifth of the run.
    """
    recipe, viewer = setup.recipe, setup.viewer.images if isinstance(setup.viewer, FrozenViewer) else setup.viewer
    size = viewer.preprocess.size
    labelled, images = _labelled(setup), np.arange(len(setup.data.val))
    if recipe.evaluate.images == 0 or len(labelled) * setup.num_classes > MOST_PROBE_LABELS:
        return None
    network, _, report = load_network(
        parse_init(recipe.init), arch=recipe.arch, num_classes=setup.num_classes, head_bias=recipe.head_bias
    )
    viewer = dataclasses.replace(viewer, preprocess=viewer.preprocess.model_copy(update={"size": own}))
    trunk = split_head(network)[0].to(setup.accelerator.device)
    stores: list[Store | None] = [None]
    if setup.accelerator.is_main_process:
        stores = [stored(viewer, trunk, full_name(report), labelled)]
    store = broadcast_object_list(stores)[0]
    cost = OWN_SIZE_SHARE * (len(labelled) + len(images)) * (own / size) ** 2
    trial = trial_steps(setup.plan.total_steps, 1 - HELD_OUT) if has_trial(recipe, len(labelled)) else 0
    if store is None and (
        setup.complete is not None or cost > 3 * (setup.plan.total_steps + trial) * recipe.batch_size
    ):
        return None
    if store is None:
        try:
            store = embed(
                viewer, trunk, arch=full_name(report), about={"init": recipe.init, "data": recipe.data},
                dtype=recipe.feature_dtype, mixed=False, rows={"train": labelled, "val": images},
            )  # fmt: skip
        except Problem as problem:  # the run itself does not need them
            sys.stderr.write(f"warning: no probe at {own} pixels: {problem}\n")
            return None
    bank, given, queries = _kept(setup, store, labelled)
    probe = fit_probe(bank, given_matrix(given, setup.num_classes), recipe.activation, seed=recipe.seed)
    logits = Outputs(probe.logits(queries.rows), queries.readable)
    scores, measured = setup.scores(logits, torch.from_numpy(images), intervals=True)
    key = score_of(scores)
    return None if key is None else {"size": own} | with_edges(scores, key) | units(measured)


def _kept(setup: Setup, store: Store, labelled: Indices) -> tuple[Tensor, Tensor, Outputs]:
    """Features (m, D) on disk of labelled images that could be read, their labels, and the validation features."""
    bank, good = store.rows("train", labelled)
    return bank[good], setup.pools.images.given[torch.from_numpy(labelled)][good], store.rows("val")


def _labelled(setup: Setup) -> Indices:
    """The images of a probe."""
    labelled = setup.pools.indices["labelled"]
    if len(labelled) <= MOST_PROBE_IMAGES:
        return labelled
    labels = one_label_each(setup.pools.images.given)[torch.from_numpy(labelled)].numpy()
    ids = [setup.pools.images.ids[i] for i in labelled]
    return labelled[stratified(labels, ids, MOST_PROBE_IMAGES / len(labelled), setup.recipe.seed)]


def _queries(setup: Setup) -> Outputs:
    """The features (n, D) of all validation images."""
    return setup.viewer.outputs(Features(setup.network), setup.data.val, np.arange(len(setup.data.val)))


def _lines(setup: Setup, bank: Tensor, given: Tensor, queries: Outputs, logits: Tensor) -> dict[str, object]:
    """Scores of a probe on the validation images, its `units`, and the accuracy or map of k nearest neighbours.

    Args:
        setup: of the run.
        bank: (m, D) features of labelled images.
        given: (m,) or (m, C) their labels.
        queries: (n, D) features of the validation images.
        logits: (n, C) of the probe for the queries; on the CPU, as all of these.
    """
    val, good, outputs = setup.data.val, queries.readable, Outputs(logits, queries.readable)
    scores, measured = setup.scores(outputs, torch.arange(len(logits)), intervals=val.given.ndim == 2)
    lines = scores | units(measured)  # the interval of an accuracy follows from it
    if setup.accelerator.is_main_process:
        known = sets_of(val.given, val.truth)
        votes = neighbour_votes(queries.rows[good], bank, given, setup.num_classes)
        if known.ndim == 1:
            lines["knn_accuracy"] = float(hits(votes.argmax(1), known[good]).nanmean())
        else:
            truth = known[good] > 0
            (precisions,) = class_precisions(votes[truth.any(1)], [(truth[truth.any(1)], None)])
            lines["knn_map"] = 100 * float(precisions.nanmean())
            lines |= {f"knn_{key}": value for key, value in map_edges(votes, known[good]).items()}
    return lines


def between(learner: nn.Module, first: Mapping[str, Tensor], share: float) -> nn.Module:
    """A copy of the learner whose weights lie between the first ones (share 0) and its own (share 1)."""
    mixed = copy.deepcopy(learner)
    with torch.no_grad():
        for name, tensor in tensors_of(mixed).items():
            if tensor.is_floating_point():
                tensor.lerp_(first[name], 1 - share)
    return mixed
