"""Phases, images and timings added up: steps, forwards, disk, memory, hours, and what a reader should be warned of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_mile.config.schema import Recipe
from finetune_mile.learning.phases import Phase
from finetune_mile.pricing.scene import Scene
from finetune_mile.training.folder import KEPT_CHECKPOINTS
from finetune_mile.training.plan import Plan, make_plan

if TYPE_CHECKING:
    from finetune_mile.pricing.timing import NetworkTimes, Seconds

PROBE_IMAGES = 1000  # as in a session
FLOAT = 4
START_SECONDS = 8.0  # imports, opening data, the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a run does, without any timing."""

    plan: Plan
    scene: Scene
    interaction_steps: int
    imitation_steps: int
    generations: int
    teacher_images: int  # forwards of the teacher for pseudo-labels
    evaluation_images: int  # forwards at phase ends, at the end, and for labels.parquet

    @property
    def epochs(self) -> float:
        """Of the labelled images."""
        return self.plan.total_steps / self.plan.steps_per_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What it would take."""

    counts: Counts
    seconds: Seconds
    checkpoint_bytes: int
    export_bytes: int
    label_bytes: int
    memory_bytes: int
    parameters: int

    @property
    def disk_bytes(self) -> int:
        """Everything that a run folder may hold at once."""
        return self.checkpoint_bytes + self.export_bytes + self.label_bytes


def count(recipe: Recipe, scene: Scene) -> Counts:
    """Lay out the phases and count what they look at."""
    plan = make_plan(recipe, labelled=scene.labelled, pool_sizes=scene.pools)
    imitations = [p for p in plan.phases if p.name == "imitation"]
    interactions = [p for p in plan.phases if p.name == "interaction"]
    steps = sum(p.steps for p in imitations)
    teacher = steps * recipe.batch_size
    if imitations and recipe.labels_once_per_cycle:
        teacher = sum(scene.pools[p.pool] for p in imitations)
    return Counts(
        plan=plan, scene=scene, interaction_steps=sum(p.steps for p in interactions), imitation_steps=steps,
        generations=len({p.generation for p in imitations}), teacher_images=teacher,
        evaluation_images=_evaluated(recipe, scene, plan),
    )  # fmt: skip


def _evaluated(recipe: Recipe, scene: Scene, plan: Plan) -> int:
    looks = len(plan.phases)
    if recipe.evaluate.every is not None:
        looks += plan.total_steps // plan.steps(recipe.evaluate.every)
    each = min(recipe.evaluate.images or scene.val, scene.val)
    probes = sum(_becomes_teacher(p) for p in plan.phases) * min(PROBE_IMAGES, scene.labelled)
    labels = scene.labelled if recipe.evaluate.labels else 0
    return looks * each + probes + scene.val + labels


def _becomes_teacher(phase: Phase) -> bool:
    return "teacher" in phase.becomes


def estimate(
    recipe: Recipe,
    counts: Counts,
    learner: NetworkTimes,
    optimise: Seconds,
    teacher: NetworkTimes | None,
    reading: Seconds | None,
) -> Estimate:
    """Add it up.

    Args:
        recipe: the run.
        counts: what it does.
        learner: the network that learns, timed.
        optimise: one step of its optimiser.
        teacher: a teacher of another build, timed; None: the learner's.
        reading: one image read in as many processes as there will be; None: not known, or hidden behind the steps.
    """
    teacher = teacher or learner
    trained = counts.plan.total_steps * recipe.batch_size
    seconds = learner.learn * trained + optimise * counts.plan.total_steps
    seconds += teacher.forward * counts.teacher_images + learner.forward * counts.evaluation_images
    if reading is not None:
        labelled = counts.teacher_images if recipe.labels_once_per_cycle else 0  # per batch it looks at what is there
        seconds += reading * (trained + labelled + counts.evaluation_images)
    seconds += type(seconds)(low=START_SECONDS / 2, middle=START_SECONDS, high=2 * START_SECONDS)
    moments = {"sgd": 1, "lars": 1, "adamw": 2}[recipe.optimizer.name]
    copies = _copies(counts, brought=recipe.teacher is not None)
    tensors = learner.parameters * FLOAT
    saved = tensors * (1 + copies + moments + (recipe.optimizer.ema is not None))
    return Estimate(
        counts=counts, seconds=seconds, parameters=learner.parameters,
        checkpoint_bytes=saved * (KEPT_CHECKPOINTS + 1),  # one more while the next is written
        export_bytes=tensors, label_bytes=_label_bytes(recipe, counts),
        memory_bytes=saved + tensors + (teacher.parameters * FLOAT if recipe.teacher else 0)
        + learner.activation_bytes * (recipe.batch_size // recipe.accumulate) + _label_bytes(recipe, counts),
    )  # fmt: skip


def _copies(counts: Counts, *, brought: bool) -> int:
    """Copies of the learner's weights that the roles keep."""
    used = {"student"} | {role for p in counts.plan.phases for role in (p.start, *p.becomes)}
    imitates = counts.imitation_steps > 0 and not brought
    return len(used & {"init", "student"}) + imitates


def _label_bytes(recipe: Recipe, counts: Counts) -> int:
    """Pseudo-labels that are kept for a pool, at most: a bit a class, or 32 soft values (`learning/stores.py`)."""
    if not counts.imitation_steps or not recipe.labels_once_per_cycle:
        return 0
    pools = [counts.scene.pools[p.pool] for p in counts.plan.phases if p.name == "imitation"]
    soft = any(p.soft for p in counts.plan.phases)
    return max(pools) * (4 + 4 * min(32, counts.scene.classes) if soft else -(-counts.scene.classes // 8))


# ------------------------------------------------------------------------------------------- warnings


def warnings(recipe: Recipe, counts: Counts) -> list[str]:
    """What is likely not meant."""
    plan, scene, found = counts.plan, counts.scene, []
    if plan.steps_per_epoch < 1:
        found.append(f"a batch of {recipe.batch_size} is more than the {scene.labelled:,} labelled images")
    return found + recipe.playing.warnings(recipe.block, plan, counts.generations, scene.classes)
