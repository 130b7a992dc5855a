"""The four methods, made of lightly's heads, losses, queues and momentum helpers.

Each is one module whose parts carry lightly's names, so that its state dict is a lightly checkpoint. The loop asks of
it `forward` (the views' projections; the only part that runs wrapped), `loss` (of what `forward` gave) and
`begin_step` / `end_backward` (what happens around it). B images, D features, P projection, K prototypes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from lightly.loss import NegativeCosineSimilarity, NTXentLoss, SwaVLoss
from lightly.models.modules import MoCoProjectionHead, SimCLRProjectionHead, SwaVPrototypes
from lightly.models.modules.heads import ProjectionHead
from lightly.models.modules.memory_bank import MemoryBankModule
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils import dist
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor, nn
from torch.nn.functional import normalize

from finetune_mile.paper.pretraining import recipe
from finetune_mile.training.plan import Plan

Outputs = tuple[Tensor, ...]


class Learner(nn.Module):
    """What the loop knows of a method. Some methods have nothing to do around a step."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def begin_step(self, step: int) -> None:
        """Before the views of step `step` (from 0) are looked at."""

    def loss(self, outputs: Outputs) -> Tensor:
        """The loss () of what `forward` gave."""
        raise NotImplementedError

    def end_backward(self) -> None:
        """After the gradients are there, before they are used."""


class WithSlowCopy(Learner):
    """A method with a copy of trunk and projection head that follows them slowly."""

    settings: recipe.MoCoV2Settings | recipe.BYOLSettings
    steps: int
    projection_head: nn.Module

    def add_slow_copy(self) -> None:
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)

    def begin_step(self, step: int) -> None:
        """Let the slow copy follow."""
        m = cosine_schedule(step, self.steps, self.settings.momentum, self.settings.momentum_end)
        update_momentum(self.backbone, self.backbone_momentum, m)
        update_momentum(self.projection_head, self.projection_head_momentum, m)


class SimCLR(Learner):
    """NT-Xent over the projections of both views, of all processes."""

    def __init__(self, backbone: nn.Module, features: int, settings: recipe.SimCLRSettings, _plan: Plan) -> None:
        super().__init__(backbone)
        self.projection_head = SimCLRProjectionHead(
            features, settings.hidden, settings.output, batch_norm=settings.batch_norm
        )
        self.criterion = NTXentLoss(temperature=settings.temperature, gather_distributed=True)

    def forward(self, views: list[Tensor]) -> Outputs:
        """Views (B, 3, s, s) to projections (B, P)."""
        return tuple(self.projection_head(self.backbone(view)) for view in views)

    def loss(self, outputs: Outputs) -> Tensor:
        """Each view's partner against all others."""
        return cast(Tensor, self.criterion(*outputs))


class MoCoV2(WithSlowCopy):
    """A momentum encoder makes the keys; earlier keys wait in a queue as negatives."""

    def __init__(self, backbone: nn.Module, features: int, settings: recipe.MoCoV2Settings, plan: Plan) -> None:
        super().__init__(backbone)
        self.settings, self.steps = settings, plan.total_steps
        self.symmetric = settings.symmetric
        self.projection_head = MoCoProjectionHead(
            features, settings.hidden, settings.output, batch_norm=settings.batch_norm
        )
        self.add_slow_copy()
        self.criterion = NTXentLoss(
            temperature=settings.temperature,
            memory_bank_size=(settings.queue, settings.output),
            gather_distributed=True,
        )

    def forward(self, views: list[Tensor]) -> Outputs:
        """Views (B, 3, s, s) to pairs of queries and keys (B, P): one pair, or two."""
        pairs = [(views[0], views[1]), (views[1], views[0])][: 2 if self.symmetric else 1]
        found: list[Tensor] = []
        for view, partner in pairs:
            with torch.no_grad():
                key = self.projection_head_momentum(self.backbone_momentum(partner))
            found += [self.projection_head(self.backbone(view)), key]
        return tuple(found)

    def loss(self, outputs: Outputs) -> Tensor:
        """Each query's key against the queue; the keys join it."""
        pairs = [outputs[at : at + 2] for at in range(0, len(outputs), 2)]
        return torch.stack([self.criterion(query, key) for query, key in pairs]).mean()


class BYOL(WithSlowCopy):
    """Each view predicts what the momentum encoder makes of the other."""

    def __init__(self, backbone: nn.Module, features: int, settings: recipe.BYOLSettings, plan: Plan) -> None:
        super().__init__(backbone)
        self.settings, self.steps = settings, plan.total_steps
        self.projection_head = _mlp(features, settings)
        self.prediction_head = _mlp(settings.output, settings)
        self.add_slow_copy()
        self.criterion = NegativeCosineSimilarity()

    def forward(self, views: list[Tensor]) -> Outputs:
        """Views (B, 3, s, s) to two predictions and two targets (B, P)."""
        predicted = [self.prediction_head(self.projection_head(self.backbone(view))) for view in views]
        with torch.no_grad():
            targets = [self.projection_head_momentum(self.backbone_momentum(view)) for view in views]
        return (*predicted, *targets)

    def loss(self, outputs: Outputs) -> Tensor:
        """Minus the cosine of prediction and target; -1 is perfect."""
        p0, p1, z0, z1 = outputs
        return cast(Tensor, 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0)))


class SwAV(Learner):
    """Each view predicts the other's soft cluster; small views predict both."""

    def __init__(self, backbone: nn.Module, features: int, settings: recipe.SwAVSettings, plan: Plan) -> None:
        super().__init__(backbone)
        self.step, self.frozen, self.queue_from = 0, plan.steps(settings.frozen), plan.steps(settings.queue_from)
        self.projection_head = _mlp(features, settings)
        self.prototypes = SwaVPrototypes(settings.output, settings.prototypes)
        # Every process holds the same queue; in the clustering each brings its own part of it.
        self.queues = nn.ModuleList(
            MemoryBankModule((settings.queue, settings.output), gather_distributed=True, feature_dim_first=False)
            for _ in range(2 if settings.queue else 0)
        )
        self.criterion = SwaVLoss(
            temperature=settings.temperature,
            sinkhorn_iterations=settings.sinkhorn_iterations,
            sinkhorn_epsilon=settings.sinkhorn_epsilon,
            sinkhorn_gather_distributed=True,
        )

    def forward(self, views: list[Tensor]) -> Outputs:
        """Views (B, 3, s, s) to unit projections (B, P) of the first two, the large ones, then scores (B, K) of all."""
        projected = [normalize(self.projection_head(self.backbone(view)), dim=1) for view in views]
        return (*(p.detach() for p in projected[:2]), *(self.prototypes(p) for p in projected))

    def begin_step(self, step: int) -> None:
        """Prototypes lie on the unit sphere."""
        self.step = step
        self.prototypes.normalize()

    def loss(self, outputs: Outputs) -> Tensor:
        """Cross-entropy of scores and the other view's balanced assignment."""
        projected, scores = outputs[:2], outputs[2:]
        earlier = [self._earlier(queue, own) for queue, own in zip(self.queues, projected, strict=False)]
        use = bool(earlier) and self.step >= self.queue_from
        loss: Tensor = self.criterion(list(scores[:2]), list(scores[2:]), earlier if use else None)
        return loss.squeeze()

    @torch.no_grad()
    def _earlier(self, queue: nn.Module, projected: Tensor) -> Tensor:
        """This process's share of the queue as scores (Q / processes, K); then the queue moves on."""
        _, kept = queue(projected, update=True)
        return cast(Tensor, self.prototypes(kept[dist.rank() :: dist.world_size()]))

    def end_backward(self) -> None:
        """Prototypes that are still frozen have no gradient."""
        if self.step < self.frozen:
            for parameter in self.prototypes.parameters():
                parameter.grad = None


def _mlp(inputs: int, head: recipe.Head) -> nn.Module:
    """The two-layer head of BYOL and SwAV; lightly's own classes have batch norm always."""
    norm = nn.BatchNorm1d(head.hidden) if head.batch_norm else None
    made: nn.Module = ProjectionHead(
        [(inputs, head.hidden, norm, nn.ReLU()), (head.hidden, head.output, None, None)]
    )  # fmt: skip
    return made


# From a trunk, its number of features, the method's block of the recipe, and the plan.
METHODS: dict[str, Callable[[nn.Module, int, Any, Plan], Learner]] = {
    "simclr": SimCLR, "mocov2": MoCoV2, "byol": BYOL, "swav": SwAV,
}  # fmt: skip
