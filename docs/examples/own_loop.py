"""MILe in plain PyTorch: phases, targets and loss from finetune_mile, everything else is yours."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from finetune_mile.learning.losses import bce, given_matrix
from finetune_mile.learning.phases import Budget
from finetune_mile.learning.roles import Roles
from finetune_mile.methods import labels_of_rule, mile


def train(network: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]], *,
          num_classes: int, steps: int, k_t: int, k_s: int, warmup: int, rho: float = 0.25) -> list[float]:  # fmt: skip
    """Train `network` on batches of images (B, 3, H, W) and labels (B,); returns the loss of every step."""
    settings = mile.VARIANTS["paper"] | {"rho": rho, "empty": "negative"}
    block = mile.Block(k_t=k_t, k_s=k_s, warmup=warmup, **settings)
    phases = mile.phases(block, Budget(total_steps=steps, steps_per_epoch=1))  # an epoch is used for "2 epochs" only
    roles = Roles(network, phases)
    losses = []
    for phase in phases:
        roles.enter(phase)  # the weights that this phase starts from
        for _ in range(phase.steps):
            images, labels = next(batches)
            targets = given_matrix(labels, num_classes)
            if not phase.given:  # an imitation: the teacher's labels
                with torch.no_grad():
                    targets = labels_of_rule(phase, roles.teacher(images))
            network.train()
            loss = bce(network(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        roles.leave(phase)  # they become the teacher's, or the student's
    return losses
