"""The two ends of fine-tuning: a probe as the first classifier, and weights between the first and the last ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn

from finetune_mile.images.splits import one_label_each, stratified
from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.probe import fit_probe
from finetune_mile.learning.roles import tensors_of
from finetune_mile.networks.heads import Features, StandardisedLinear, get_head, set_head
from finetune_mile.training.setup import Setup

MOST_PROBE_IMAGES = 20_000  # of a probe that starts a classifier; more would hardly move it


def start_head(setup: Setup, *, fit: bool) -> None:
    """Put a standardised classifier on the network, as a linear probe of the labelled images; all processes call it.

    Args:
        setup: its network is changed.
        fit: False: a checkpoint will fill it.
    """
    network, accelerator = setup.network, setup.accelerator
    old = get_head(network)
    head = StandardisedLinear(old.in_features, old.out_features)
    if fit:
        labelled = setup.pools.indices["labelled"]
        if len(labelled) > MOST_PROBE_IMAGES:
            labels = one_label_each(setup.pools.images.given)[torch.from_numpy(labelled)].numpy()
            ids = [setup.pools.images.ids[i] for i in labelled]
            labelled = labelled[stratified(labels, ids, MOST_PROBE_IMAGES / len(labelled), setup.recipe.seed)]
        network.to(accelerator.device)
        features, given = setup.training_logits(Features(network), labelled)
        targets = given_matrix(given, setup.num_classes)
        probe = fit_probe(features, targets, setup.recipe.activation, seed=setup.recipe.seed)
        with torch.no_grad():
            for name in ("mean", "scale", "weight", "bias"):
                getattr(head, name).copy_(getattr(probe, name))
    set_head(network, head.to(accelerator.device))
    for tensor in (*head.parameters(), *head.buffers()):
        tensor.data = broadcast(tensor.data)


def between(learner: nn.Module, first: Mapping[str, Tensor], share: float) -> nn.Module:
    """A copy of the learner whose weights lie between the first ones (share 0) and its own (share 1)."""
    mixed = copy.deepcopy(learner)
    with torch.no_grad():
        for name, tensor in tensors_of(mixed).items():
            if tensor.is_floating_point():
                tensor.lerp_(first[name], 1 - share)
    return mixed
