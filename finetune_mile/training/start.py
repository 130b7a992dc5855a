"""The two ends of fine-tuning: a probe as the first classifier, and weights between the first and the last ones.

A probe and the nearest neighbours of a checkpoint's features are the two lines that a run must beat.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from accelerate.utils import broadcast, broadcast_object_list
from torch import Tensor, nn

from finetune_mile.images.order import Indices
from finetune_mile.images.splits import one_label_each, stratified
from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.probe import fit_probe, neighbours
from finetune_mile.learning.roles import tensors_of
from finetune_mile.measures.probing import hits
from finetune_mile.networks.heads import Features, StandardisedLinear, get_head, set_head
from finetune_mile.networks.parts import split_head
from finetune_mile.training.features import Store, full_name, stored
from finetune_mile.training.setup import Setup

MOST_PROBE_IMAGES = 20_000  # of a probe; more would hardly move it
MOST_PROBE_LABELS = 2_000_000  # images times classes of a probe that is only shown: seconds
DEAR = 20  # a run must be so many times as long as the passes that are only for its report


def start_head(setup: Setup, *, fit: bool) -> dict[str, float] | None:
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
    with torch.no_grad():
        logits = head(queries.to(accelerator.device)).float().cpu()
    return _lines(setup, features, given, queries, logits)


def lines_to_beat(setup: Setup) -> dict[str, float] | None:
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
        queries, bank = (
            torch.from_numpy(store.features(split)[rows].astype(np.float32))
            for split, rows in (("val", images), ("train", labelled))
        )
        good = ~bank.isnan().all(1)
        bank, given = bank[good], setup.pools.images.given[torch.from_numpy(labelled)][good]
    elif (
        setup.complete is not None
        or DEAR * (len(labelled) + len(images)) <= 3 * (recipe.steps or 0) * recipe.batch_size
    ):
        bank, given = setup.training_logits(Features(network), labelled)
        queries = _queries(setup)
    else:
        return None
    probe = fit_probe(bank, given_matrix(given, setup.num_classes), recipe.activation, seed=recipe.seed)
    return _lines(setup, bank, given, queries, probe.logits(queries))


def _labelled(setup: Setup) -> Indices:
    """The images of a probe."""
    labelled = setup.pools.indices["labelled"]
    if len(labelled) <= MOST_PROBE_IMAGES:
        return labelled
    labels = one_label_each(setup.pools.images.given)[torch.from_numpy(labelled)].numpy()
    ids = [setup.pools.images.ids[i] for i in labelled]
    return labelled[stratified(labels, ids, MOST_PROBE_IMAGES / len(labelled), setup.recipe.seed)]


def _queries(setup: Setup) -> Tensor:
    """The features (n, D) of all validation images."""
    return setup.viewer.outputs(Features(setup.network), setup.data.val, np.arange(len(setup.data.val)))


def _lines(setup: Setup, bank: Tensor, given: Tensor, queries: Tensor, logits: Tensor) -> dict[str, float]:
    """Scores of a probe on the validation images, and the accuracy of k nearest neighbours.

    Args:
        setup: of the run.
        bank: (m, D) features of labelled images.
        given: (m,) or (m, C) their labels.
        queries: (n, D) features of the validation images; NaN for those that cannot be read.
        logits: (n, C) of the probe for the queries; on the CPU, as all of these.
    """
    scores, _ = setup.scores(logits, torch.arange(len(queries)))
    if setup.accelerator.is_main_process:
        good = ~queries.isnan().all(1)
        guesses = neighbours(queries[good], bank, one_label_each(given), setup.num_classes)
        scores["knn_accuracy"] = float(hits(guesses, setup.data.val.given[good]).nanmean())
    return scores


def between(learner: nn.Module, first: Mapping[str, Tensor], share: float) -> nn.Module:
    """A copy of the learner whose weights lie between the first ones (share 0) and its own (share 1)."""
    mixed = copy.deepcopy(learner)
    with torch.no_grad():
        for name, tensor in tensors_of(mixed).items():
            if tensor.is_floating_point():
                tensor.lerp_(first[name], 1 - share)
    return mixed
