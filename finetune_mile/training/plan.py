"""From a recipe and the number of images to steps and phases. No torch here."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from finetune_mile.config.schema import Recipe
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool
from finetune_mile.learning.phases import Budget, Phase

LEAST_STEPS, FEW_STEPS = 300, 100  # of `epochs: auto`, the second below FEW_LABELS
FEW_LABELS = 200  # below, a hold-out is noise
MOST_LABELS = 20_000  # above, a trial would cost more than it can save
RATE, FEW_RATE = 0.006, 0.003  # of `optimizer.lr: auto`, the second below FEW_LABELS
MOST_COST = 3  # of the second stage of `epochs: auto`, in computing of the first one
HELD_OUT = 0.2  # share of the labels that a trial holds out
CURVE_SHARE, LEAST_CURVE_IMAGES = 20, 32  # one part in so many of a run's time is for points of the curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Budget):
    """What a run will do, in steps."""

    phases: tuple[Phase, ...]

    @property
    def generations(self) -> int:
        return len({phase.generation for phase in self.phases if phase.name == "imitation"})

    def phase_of(self, step: int) -> tuple[Phase, bool]:
        """The phase that step `step` (from 1) belongs to, and whether it ends there."""
        for phase in self.phases:
            step -= phase.steps
            if step <= 0:
                break
        return phase, step == 0

    def evaluated(self, recipe: Recipe) -> set[int]:
        """The steps after which `every`, `phases` and the end of the run evaluate."""
        settings = recipe.evaluate
        if settings.images == 0:
            return set()
        ends = set(itertools.accumulate(phase.steps for phase in self.phases)) if settings.phases else set()
        every = self.total_steps if settings.every is None else self.steps(settings.every)
        return ends | set(range(every, self.total_steps + 1, every)) | {self.total_steps}

    def curve(self, recipe: Recipe) -> tuple[set[int], int]:
        """Further steps that get a point of the curve, and how many validation images each point is of.

        An image that is only scored takes no more time than one that is learned from. So all these points take a
        twentieth of the time of training and trial at most; of a very short run more, because few images say nothing.
        """
        due, points = self.evaluated(recipe), recipe.evaluate.points
        if not due or len(due) >= points:
            return set(), 0
        more = {round(self.total_steps * point / points) for point in range(1, points)} - due - {0}
        labelled, steps = round(self.steps_per_epoch * recipe.batch_size), self.total_steps
        steps += trial_steps(steps, 1 - HELD_OUT) if has_trial(recipe, labelled) else 0
        images = steps * recipe.batch_size / (CURVE_SHARE * max(len(more), 1))
        return more, max(round(images), LEAST_CURVE_IMAGES)

    def counted_evaluations(self, recipe: Recipe) -> int:
        """How many evaluations are of the role that the run ends with, which `patience` counts."""
        every = None if recipe.evaluate.every is None else self.steps(recipe.evaluate.every)
        step, count = 0, 0
        for phase in self.phases:
            begin, step = step, step + phase.steps
            if learner_role(phase) != learner_role(self.phases[-1]):
                continue
            count += 0 if every is None else step // every - begin // every
            at_end = recipe.evaluate.phases or step == self.total_steps
            count += at_end and (every is None or step % every != 0)
        return count


def learner_role(phase: Phase) -> Literal["teacher", "student"]:
    """Whose scores an evaluation in this phase gives."""
    return "teacher" if phase.name == "interaction" and "teacher" in phase.becomes else "student"


def make_plan(recipe: Recipe, pool_sizes: dict[Pool, int]) -> Plan:
    """Turn epochs and shares into steps and lay out the phases.

    Args:
        recipe: what is wanted.
        pool_sizes: images in each pool.
    """
    labelled = pool_sizes["labelled"]
    per_epoch = labelled / recipe.batch_size
    epochs = auto_epochs(labelled) if recipe.epochs == "auto" else recipe.epochs or 0
    least = least_steps(labelled) if recipe.epochs == "auto" else 1
    total = recipe.steps or max(steps_of_epochs(epochs, labelled, recipe.batch_size, recipe.steps_of_epochs), least)
    pool: Pool = "labelled" if recipe.semi == "none" or recipe.staged else recipe.semi
    if pool_sizes[pool] == 0:
        raise Problem(f"--semi {pool}: there are no such images at --fraction {recipe.fraction:g}; lower the fraction, "
                      "or add images with --unlabelled DIR")  # fmt: skip
    if recipe.labelled_share is not None:
        pool = "all"  # labelled and unlabelled images, in their shares
        if pool_sizes["unlabelled"] == 0:
            raise Problem(
                f"labelled_share {recipe.labelled_share:g}: there are no unlabelled images to share a batch with at "
                f"--fraction {recipe.fraction:g}; lower the fraction, or add images with --unlabelled DIR"
            )
        if not 0 < labelled_per_batch(recipe) < recipe.batch_size:
            raise Problem(
                f"labelled_share {recipe.labelled_share:g}: of a batch of {recipe.batch_size} that leaves no labelled "
                "or no unlabelled image; take a share nearer to 0.5 or a larger --batch-size"
            )
    share = None if recipe.labelled_share is None else labelled_per_batch(recipe) / recipe.batch_size
    budget = Budget(total_steps=total, steps_per_epoch=per_epoch, pool=pool, labelled_share=share)
    phases = tuple(recipe.method_value.phases(recipe.block, budget))
    plan = Plan(total_steps=total, steps_per_epoch=per_epoch, pool=pool, labelled_share=share, phases=phases)
    if recipe.patience is not None:
        counted = plan.counted_evaluations(recipe)
        if counted <= recipe.patience + 1:
            raise Problem(
                f"--patience {recipe.patience}: the run has {counted} evaluations of its "
                f"{learner_role(phases[-1])}, so it would never stop early. Evaluate more often, for example "
                f"with --set 'evaluate.every=5 %' or --set evaluate.phases=true"
            )
    return plan


def unintended(recipe: Recipe, plan: Plan, labelled: int, num_classes: int) -> list[str]:
    """Sentences about what is likely not meant so."""
    sentences: list[str] = recipe.method_value.warnings(
        recipe.block, plan, plan.generations, num_classes, recipe.new_head
    )
    if plan.steps_per_epoch < 1:
        sentences = [f"a batch of {recipe.batch_size} is more than the {labelled:,} labelled images", *sentences]
    return sentences


def steps_of_epochs(epochs: float, images: int, batch_size: int, rule: Literal["next"] | None) -> int:
    """Optimiser steps of so many passes over the images: to the nearest, at least 1, or as SimCLR counts (`next`)."""
    if rule == "next":
        return int(images * epochs // batch_size) + 1
    return max(round(epochs * (images / batch_size)), 1)


def least_steps(labelled: int) -> int:
    """What `epochs: auto` takes at least: fewer where no held-out labels can judge how far the weights go."""
    return FEW_STEPS if labelled < FEW_LABELS else LEAST_STEPS


def auto_epochs(labelled: int) -> float:
    """Passes over so many labelled images: 10 of a thousand or fewer, 3 of ten thousand or more."""
    return min(max(10 * math.sqrt(1000 / labelled), 3.0), 10.0)


def second_steps(recipe: Recipe, first_images: int, unlabelled: int) -> int:
    """Steps of a second stage by rule: `auto_epochs` passes over its unlabelled images, within MOST_COST.

    Args:
        recipe: of the second stage.
        first_images: that the steps of the first stage show.
        unlabelled: images without a label.
    """
    drawn = recipe.batch_size - labelled_per_batch(recipe)
    passes = steps_of_epochs(auto_epochs(unlabelled), unlabelled, drawn, None)
    return max(min(passes, int(MOST_COST * first_images / computing(recipe))), 1)


def computing(recipe: Recipe) -> float:
    """What a step of a second stage computes, in images that are learned from; a teacher's pass is a third of one."""
    return recipe.batch_size + (recipe.batch_size - labelled_per_batch(recipe)) / 3


def auto_rate(labelled: int, *, frozen: bool) -> float:
    """The share of `optimizer.lr: auto`, for so many labelled images: less where no held-out labels can judge it."""
    return FEW_RATE if labelled < FEW_LABELS or frozen else RATE


def has_trial(recipe: Recipe, labelled: int) -> bool:
    """Does a run of so many labels hold some of them out first, to decide how far the weights go?"""
    return recipe.keep == "best" and FEW_LABELS <= labelled <= MOST_LABELS


def trial_steps(total: int, share: float) -> int:
    """Steps of a trial with that share of the labels of a run of `total` steps."""
    return max(round(total * share), min(total, FEW_STEPS))


def labelled_per_batch(recipe: Recipe) -> int:
    """Labelled images in each batch of an imitation that has a labelled share."""
    assert recipe.labelled_share is not None
    return round(recipe.labelled_share * recipe.batch_size)
