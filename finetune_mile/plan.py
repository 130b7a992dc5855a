"""From a recipe and the number of images to steps and phases. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool
from finetune_mile.learning.phases import SCHEDULES, Argmax, Auto, Phase, Soften, Targets, Threshold, in_steps
from finetune_mile.recipe import LABELS_ALONE, Imitation, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will do, in steps."""

    total_steps: int
    steps_per_epoch: float  # of the labelled images
    phases: tuple[Phase, ...]

    def steps(self, amount: int | str) -> int:
        """An amount of the recipe in steps; 0 stays 0."""
        if amount == 0:
            return 0
        return in_steps(amount, total_steps=self.total_steps, steps_per_epoch=self.steps_per_epoch)

    def phase_of(self, step: int) -> tuple[Phase, bool]:
        """The phase that step `step` (from 1) belongs to, and whether it ends there."""
        for phase in self.phases:
            step -= phase.steps
            if step <= 0:
                break
        return phase, step == 0


def make_plan(recipe: Recipe, *, labelled: int, pool_sizes: dict[Pool, int]) -> Plan:
    """Turn epochs and shares into steps and lay out the phases.

    Args:
        recipe: what is wanted.
        labelled: how many images keep their label.
        pool_sizes: images in each pool.
    """
    per_epoch = labelled / recipe.batch_size
    total = recipe.steps or max(round((recipe.epochs or 0) * per_epoch), 1)
    bare = Plan(total_steps=total, steps_per_epoch=per_epoch, phases=())
    pool: Pool = "labelled" if recipe.semi == "none" else recipe.semi
    if pool_sizes[pool] == 0:
        raise Problem(f"--semi {pool}: there are no such images at --fraction {recipe.fraction:g}; lower the fraction")
    if recipe.labelled_share is not None:
        pool = "all"  # labelled and unlabelled images, in their shares
        if pool_sizes["unlabelled"] == 0:
            raise Problem(
                f"labelled_share {recipe.labelled_share:g}: there are no unlabelled images to share a batch with at "
                f"--fraction {recipe.fraction:g}; lower the fraction"
            )
        if not 0 < labelled_per_batch(recipe) < recipe.batch_size:
            raise Problem(
                f"labelled_share {recipe.labelled_share:g}: of a batch of {recipe.batch_size} that leaves no labelled "
                "or no unlabelled image; take a share nearer to 0.5 or a larger --batch-size"
            )
    knobs: dict[str, object] = {}
    match recipe.method:
        case "softmax":
            knobs = {"loss": "cross_entropy"}
        case "sigmoid":
            knobs = {"loss": "bce"}
        case "mile":
            knobs = _mile_knobs(recipe, bare, pool)
        case "irm" | "rex":
            penalty = recipe.irm if recipe.method == "irm" else recipe.rex
            assert penalty is not None
            knobs = {"kind": recipe.method, "weight": penalty.weight, "anneal": bare.steps(penalty.anneal)}
            knobs["anneal_weight"] = penalty.anneal_weight
        case "noisy-student" | "self-distill" | "distill":
            block = recipe.imitation
            knobs = {"targets": _targets(block), "loss": block.loss, "pool": pool}
            if recipe.noisy_student is not None and recipe.method == "noisy-student":
                knobs["interaction"] = bare.steps(recipe.noisy_student.interaction)
                knobs["generations"] = recipe.noisy_student.generations
            if recipe.self_distill is not None and recipe.method == "self-distill":
                knobs["interaction"] = bare.steps(recipe.self_distill.interaction)
    phases = SCHEDULES[recipe.method](total, **knobs)
    return Plan(total_steps=total, steps_per_epoch=per_epoch, phases=tuple(phases))


def _mile_knobs(recipe: Recipe, bare: Plan, pool: Pool) -> dict[str, object]:
    mile = recipe.mile
    assert mile is not None
    targets: Targets
    if isinstance(mile.rho, str):
        assert recipe.auto is not None
        how = recipe.auto
        targets = Auto(**how.model_dump(include={"beta", "ce", "teacher", "gate", "v_min", "g_min"}))
    elif mile.targets == "threshold":
        targets = Threshold(rho=mile.rho, union=mile.union, empty=mile.empty)
    else:
        soft = mile.targets == "soft"
        targets = Soften(temperature=1.0, union=mile.union) if soft else Argmax(union=mile.union)
    return {
        "k_t": bare.steps(mile.k_t),
        "k_s": bare.steps(mile.k_s),
        "warmup": bare.steps(mile.warmup),
        "minus_one": mile.phase_steps == "minus_one",
        "imitate_from": mile.imitate_from,
        "targets": targets,
        "pool": pool,
        "last": None if mile.last is None else bare.steps(mile.last),
    }


def _targets(block: Imitation) -> Targets:
    if block.targets == "threshold":
        return Threshold(rho=block.rho, union=block.union)
    return Argmax(union=block.union) if block.targets == "argmax" else Soften(
        temperature=block.temperature, union=block.union
    )  # fmt: skip


def labels_once_per_cycle(recipe: Recipe) -> bool:
    """Are pseudo-labels made once per generation on the plain images, instead of per batch?"""
    if recipe.method in LABELS_ALONE:
        return False
    block = recipe.mile if recipe.method == "mile" else recipe.imitation
    assert block is not None
    return block.pseudo_labels == "cycle"


def labelled_per_batch(recipe: Recipe) -> int:
    """Labelled images in each batch of an imitation that has a labelled share."""
    assert recipe.labelled_share is not None
    return round(recipe.labelled_share * recipe.batch_size)
