"""One recipe's estimate: look at data and network, time what is needed, add up. Timings are kept within a call."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_mile.checkpoints.init import parse_source
from finetune_mile.config.schema import Recipe
from finetune_mile.pricing.estimate import Counts, Estimate, count, estimate, warnings
from finetune_mile.pricing.scene import NetworkFacts, Scene, look_at_data, look_at_network

MOST_AT_ONCE = 64  # images of a timed step; more are hardly faster each


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An estimate with all that it rests on."""

    recipe: Recipe
    scene: Scene
    network: NetworkFacts
    teacher: NetworkFacts | None
    estimate: Estimate
    warnings: tuple[str, ...]
    reading_timed: bool

    @property
    def counts(self) -> Counts:
        """What the run does."""
        return self.estimate.counts


def make_offer(recipe: Recipe, *, network: NetworkFacts | None = None, teacher: NetworkFacts | None = None) -> Offer:
    """What a run of this recipe would take here.

    Args:
        recipe: the run.
        network: what it trains, where --init is not there yet.
        teacher: of a distillation, where --teacher is not there yet.
    """
    scene = look_at_data(recipe)
    counts = count(recipe, scene)
    network = network or look_at_network(recipe.init, recipe.arch, recipe.size)
    if recipe.teacher is not None and teacher is None:
        teacher = look_at_network(parse_source(recipe.teacher, "--teacher"), None, network.size)
    from finetune_mile.pricing.timing import time_network, time_optimizer, time_reading

    share = max(min(recipe.batch_size // recipe.accumulate, MOST_AT_ONCE), 2)
    learner = time_network(network, classes=scene.classes, share=share, precision=recipe.precision)
    optimise = time_optimizer(network, recipe.optimizer.name, classes=scene.classes)
    other = None
    if teacher is not None and teacher != network:
        other = time_network(teacher, classes=scene.classes, share=share, precision=recipe.precision)
    reading = None
    if scene.here:
        reading = time_reading(recipe.data, network.size, recipe.augment.crop, recipe.augment.scale)
        workers = _workers(recipe, scene)
        if workers:  # read ahead; it shows only where it is slower than the steps
            per_image = reading * (1 / workers)
            late = max(per_image.middle - learner.learn.middle, 0.0) / max(per_image.middle, 1e-12)
            reading = per_image * late
    return Offer(
        recipe=recipe, scene=scene, network=network, teacher=teacher, reading_timed=reading is not None,
        estimate=estimate(recipe, counts, learner, optimise, other, reading), warnings=tuple(warnings(recipe, counts)),
    )  # fmt: skip


def _workers(recipe: Recipe, scene: Scene) -> int:
    if recipe.workers is not None:
        return recipe.workers
    if scene.in_memory:
        return 0
    from finetune_mile.images.pipeline import default_workers

    return default_workers(1)
