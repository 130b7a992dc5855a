"""The parts of a run that belong together: data, network and device, and what the loop asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune_mile.checkpoints.cards import Card
from finetune_mile.config.schema import Recipe
from finetune_mile.core.problems import Failed
from finetune_mile.core.types import Batch, Pool, Preprocess
from finetune_mile.images.index import BadImages, Data, ImageSet
from finetune_mile.images.order import Indices, Mixture, Order, micro_batches
from finetune_mile.images.pipeline import Augmentation, Views, batches, default_workers, normalise
from finetune_mile.images.splits import Pools, balanced_weights
from finetune_mile.learning.loop import Loop
from finetune_mile.learning.phases import Phase
from finetune_mile.learning.roles import Roles
from finetune_mile.learning.state import RunView, State
from finetune_mile.learning.stores import LabelStore
from finetune_mile.measures.guards import LossAlarm, lower_rates
from finetune_mile.measures.metrics import measure
from finetune_mile.measures.predictions import pick_probe, predict
from finetune_mile.training.plan import Plan, labelled_per_batch

PROBE_IMAGES = 1000
POOLS: tuple[Pool, ...] = ("labelled", "unlabelled", "all")


@dataclass(slots=True, kw_only=True)
class Session:
    """One run's data and device; every method is a pure view of them."""

    recipe: Recipe
    accelerator: Accelerator
    data: Data
    pools: Pools
    card: Card
    how: Preprocess
    bad: BadImages
    tick: Callable[[], None]  # called between batches outside of training; it may raise to stop
    stop: Callable[[], None]  # called by all processes at the same place; raises on all of them, or on none

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.data.classes)

    @property
    def workers(self) -> int:
        """Loader processes for this one."""
        if self.recipe.workers is not None:
            return self.recipe.workers
        return 0 if self.data.train.in_memory else default_workers(self.accelerator.num_processes)

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, H, W) to the network's input, on the device."""
        device = self.accelerator.device
        mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (self.how.mean, self.how.std))
        return normalise(images.to(device, non_blocking=True), mean, std)

    def order(self, pool: Pool) -> Order | Mixture:
        """The walk over a pool; over all images with a labelled share it is two walks, woven."""
        recipe = self.recipe

        def walk(members: Pool, number: Pool) -> Order:
            return Order(self.pools.indices[members], len(POOLS) * recipe.seed + POOLS.index(number))

        if pool != "all" or recipe.labelled_share is None:
            return walk(pool, pool)
        return Mixture(
            walk("labelled", "all"), walk("unlabelled", "unlabelled"),
            some=labelled_per_batch(recipe), of=recipe.batch_size,
        )  # fmt: skip

    def feed(self, pool: Pool, first_step: int) -> Iterator[Batch]:
        """This process's parts of the batches of a pool, from a step of that pool on, without end."""
        recipe, augment = self.recipe, self.recipe.augment
        augmentation = Augmentation(crop=augment.crop, scale=augment.scale, shift=augment.shift, flip=augment.flip)
        members = self.pools.indices[pool]
        views = Views(
            self.pools.images, self.how, augmentation, recipe.seed, pool=members,
            on_bad=partial(self.bad.add, "train", self.pools.images.ids),
        )  # fmt: skip
        order = self.order(pool)
        keys = micro_batches(
            order, first_step=first_step, batch_size=recipe.batch_size, accumulate=recipe.accumulate,
            rank=self.accelerator.process_index, world=self.accelerator.num_processes,
        )  # fmt: skip
        return batches(views, keys, workers=self.workers, pin=self.accelerator.device.type == "cuda")

    def logits(
        self, network: nn.Module, images: ImageSet, indices: Indices, tick: Callable[[], None] | None = None
    ) -> Tensor:
        """A bare network's logits (n, C) on the plain view of some images; NaN for those that cannot be read."""
        split = "val" if images is self.data.val else "train"
        views = Views(images, self.how, None, self.recipe.seed, on_bad=partial(self.bad.add, split, images.ids))
        share = max(self.recipe.batch_size // self.accelerator.num_processes, 1)
        logits = predict(
            self.accelerator, network, views, indices, self.prepare,
            batch_size=share, workers=self.workers, tick=tick or self.tick,
        )  # fmt: skip
        self.stop()
        bad = torch.from_numpy(np.isin(indices, list(views.bad))).to(self.accelerator.device)
        bad = self.accelerator.reduce(bad.int(), reduction="sum").cpu() > 0  # each process knows its own
        if bool((logits.isnan().all(1) & ~bad).any()):  # must not pass for bad images
            raise Failed("the network's outputs are not numbers any more; lower --lr, or set optimizer.clip")
        return logits.masked_fill_(bad.unsqueeze(1), torch.nan)

    def evaluate(self, network: nn.Module, limit: int | None) -> dict[str, float]:
        """Scores on the validation images, or on `limit` of them."""
        val = self.data.val
        picked = pick_probe(len(val), limit or len(val))
        logits = self.logits(network, val, picked.numpy())
        good = ~logits.isnan().all(1)  # bad images do not count, and are counted
        logits, picked = logits[good], picked[good]
        found = measure(
            logits, val.given[picked],
            None if val.truth is None else val.truth[picked], activation=self.recipe.activation,
            prediction_set=self.recipe.evaluate.prediction_set, rho=self.recipe.rho,
            main=None if val.main is None else val.main[picked], thresholds=self.recipe.evaluate.thresholds,
        ).results()  # fmt: skip
        if self.data.extra_scores is not None:
            chances = logits.sigmoid() if self.recipe.activation == "sigmoid" else logits.softmax(1)
            found |= self.data.extra_scores(chances, picked)
        return found if bool(good.all()) else found | {"bad_images": float((~good).sum())}

    def probe(self, network: nn.Module) -> tuple[Tensor, Tensor]:
        """Logits and given labels of the labelled training images that every generation is looked at on."""
        labelled = self.pools.indices["labelled"]
        return self._training_logits(network, labelled[pick_probe(len(labelled), PROBE_IMAGES).numpy()])

    def calibrate(self, network: nn.Module) -> tuple[Tensor, Tensor]:
        """Logits and given labels of the held-out images that `rho: auto` decides on."""
        return self._training_logits(network, self.pools.calibration)

    def _training_logits(self, network: nn.Module, picked: Indices) -> tuple[Tensor, Tensor]:
        """Logits and given labels of some training images, without those that cannot be read."""
        logits = self.logits(network, self.pools.images, picked)
        good = ~logits.isnan().all(1)
        return logits[good], self.pools.images.given[torch.from_numpy(picked)][good]

    def alarm(self) -> LossAlarm:
        """What watches the training loss."""
        given, recipe = self.pools.images.given, self.recipe
        labels = 1.0
        if given.ndim == 2:
            counts = (given > 0).sum(1).double()
            labels = float(counts[given[:, 0] >= 0].mean())
        return LossAlarm(
            untrained_loss=recipe.playing.untrained_loss, num_classes=self.num_classes, given_labels=labels,
            head_bias=recipe.head_bias,
            advice=lower_rates(recipe.optimizer.lr, recipe.optimizer.head_lr),
        )  # fmt: skip

    def method_state(self, roles: Roles) -> State:
        """What the method remembers, at the start."""
        view = RunView(
            roles=roles, num_classes=self.num_classes, given=self.pools.images.given, held_out=self.calibrate
        )
        return self.recipe.playing.State(view)

    def loop(self, plan: Plan, state: State, label_pool: Callable[[Phase], LabelStore] | None) -> Loop:
        """Everything that the loop is told once.

        Args:
            plan: the phases.
            state: of the method.
            label_pool: lets the teacher label the pool of a phase; None: it labels batch by batch.
        """
        recipe = self.recipe
        weights = None
        if recipe.class_weights == "balanced":
            weights = balanced_weights(self.pools.images.given, self.num_classes).to(self.accelerator.device)
        environment = self.pools.images.environment
        return Loop(
            method=recipe.playing, state=state, total_steps=plan.total_steps,
            num_classes=self.num_classes, accumulate=recipe.accumulate, clip=recipe.optimizer.clip,
            reset_optimizer=recipe.optimizer_state == "reset",
            class_weights=weights, prepare=self.prepare, feed=self.feed,
            label_pool=label_pool,
            environment=environment, environments=0 if environment is None else int(environment.max()) + 1,
        )  # fmt: skip
