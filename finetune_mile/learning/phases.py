"""A learning method is a list of phases; a phase is a value; one loop plays any list. No torch here.

Interaction = learn from the given labels, imitation = learn from the teacher's labels (the paper, Sec. 3). Which phase
a run is in follows from its step alone, so a saved run stores one integer and no flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool

Role = Literal["init", "teacher", "student"]
Loss = Literal["bce", "cross_entropy"]
MOST_GENERATIONS = 100_000  # every phase is an object in a list


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The labels that came with the images, one or several per image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The teacher's sigmoids above `rho` (Alg. 1, l. 11): a multi-hot pseudo-label."""

    rho: float
    union: bool = False  # OR in the given label, where there is one
    empty: Literal["negative", "argmax"] = "negative"  # no class above rho: nothing, or the best one


@dataclass(frozen=True, slots=True, kw_only=True)
class Soften:
    """The teacher's probabilities at a temperature: softmax for cross-entropy, sigmoids for BCE."""

    temperature: float
    union: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Argmax:
    """The teacher's best class alone: the control that tells hard labels from multi-labels."""

    union: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Labels above thresholds that held-out images decide, if there is anything to find (learning/auto.py)."""

    beta: float  # the least target of a label that was found
    ce: float  # weight of the softmax term that keeps the order of the labels
    teacher: float  # the teacher's share in that term's target; the rest is the given label
    gate: Literal["auto", "off"]
    v_min: float
    g_min: float
    thresholds: tuple[float, ...] = ()  # (C,) on the teacher's logits; known when the imitation begins
    union: bool = True


Targets = Given | Threshold | Soften | Argmax | Auto


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """What is added to the mean risk of the environments: IRMv1's or V-REx's penalty, times `weight`."""

    kind: Literal["irm", "rex"]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`steps` optimiser steps of one learner on one kind of target."""

    name: Literal["interaction", "imitation"]
    generation: int  # tau in Algorithm 1, from 0
    steps: int  # at least 1
    start: Role  # the weights that the learner begins with; the first student is the init
    becomes: tuple[Role, ...]  # the roles that the learner's weights take at the end
    targets: Targets
    loss: Loss
    pool: Pool = "labelled"
    penalty: Penalty | None = None  # the loss is then taken over environments


def after(step: int, phases: Iterable[Phase]) -> Iterator[tuple[Phase, int]]:
    """What is left after `step` optimiser steps: each phase with the steps already done in it."""
    for phase in phases:
        if step < phase.steps:
            yield phase, max(step, 0)
        step -= phase.steps


def trace(phases: Iterable[Phase]) -> str:
    """One letter a step: T while the teacher learns (interaction), S while the student does (imitation)."""
    return "".join(("T" if p.name == "interaction" else "S") * p.steps for p in phases)


def drawn(step: int, phases: Iterable[Phase]) -> dict[Pool, int]:
    """How many of the first `step` steps drew from each pool: where each pool's order goes on."""
    counts: dict[Pool, int] = {"labelled": 0, "unlabelled": 0, "all": 0}
    for phase in phases:
        here = min(max(step, 0), phase.steps)
        counts[phase.pool] += here
        step -= phase.steps
    return counts


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|epochs?|steps?)?", re.IGNORECASE)


def check_amount(amount: int | str) -> int | str:
    """`200`, `200 steps`, `2 epochs` or `5 %`, above zero; anything else raises ValueError."""
    found = _AMOUNT.fullmatch(str(amount).strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"{str(amount)[:40]!r} is not an amount above zero: write 200 (steps), '2 epochs' or '5 %'")
    unit = (found[2] or "steps").lower()
    if unit.startswith("step") and not float(found[1]).is_integer():
        raise ValueError(f"{str(amount)[:40]!r}: steps are whole numbers; a share of the budget is '5 %'")
    return amount


def in_steps(amount: int | str, *, total_steps: int, steps_per_epoch: float) -> int:
    """An amount in optimiser steps, rounded to the nearest and at least 1."""
    found = _AMOUNT.fullmatch(str(check_amount(amount)).strip())
    assert found is not None
    value, unit = float(found[1]), (found[2] or "steps").lower()
    if unit == "%":
        value *= total_steps / 100
    elif unit.startswith("epoch"):
        value *= steps_per_epoch
    return max(round(value), 1)


# ----------------------------------------------------------------------------------------- schedules


def supervised(total_steps: int, *, loss: Loss) -> list[Phase]:
    """Softmax (cross-entropy) and sigmoid (BCE) training: one long interaction."""
    return [
        Phase(
            name="interaction", generation=0, steps=total_steps, start="init", becomes=("student",),
            targets=Given(), loss=loss,
        )
    ]  # fmt: skip


def invariant(
    total_steps: int, *, kind: Literal["irm", "rex"], weight: float, anneal: int, anneal_weight: float
) -> list[Phase]:
    """IRM and REx: softmax training over environments, with a penalty that weighs in after `anneal` steps.

    The weight changes where a phase ends, so it follows from the step as everything else does.

    Args:
        total_steps: the budget.
        kind: which penalty.
        weight: of the penalty, from step `anneal` on.
        anneal: steps before that; 0: none.
        anneal_weight: of the penalty until then.
    """
    if anneal >= total_steps:
        raise Problem(f"{kind}.anneal: {anneal} of {total_steps} steps leave none for the penalty; lower it")
    parts = [(anneal, anneal_weight), (total_steps - anneal, weight)]
    return [
        Phase(
            name="interaction", generation=0, steps=steps, start="student", becomes=("student",),
            targets=Given(), loss="cross_entropy", penalty=Penalty(kind=kind, weight=part_weight),
        )
        for steps, part_weight in parts if steps
    ]  # fmt: skip


def mile(
    total_steps: int,
    *,
    k_t: int,
    k_s: int,
    warmup: int,
    minus_one: bool,
    imitate_from: Literal["student", "teacher"],
    targets: Targets,
    pool: Pool,
    last: int | None = None,
) -> list[Phase]:
    """Algorithm 1: k_t steps on the given labels, k_s on the teacher's, until the budget is spent.

    Args:
        total_steps: the budget, teacher's and student's steps together; it is filled exactly. What does not fill a
            whole generation goes to the first phase, so that the run ends on an imitation; what a step or two would
            fill, because shares of a budget were rounded, is taken from the warm-up.
        k_t: steps of an interaction.
        k_s: steps of an imitation.
        warmup: interaction before the first generation; teacher and student both start from its weights. Without it
            the first teacher's outputs sit at the prior 1 / C, and a rho near that makes its labels junk.
        minus_one: the published code switches one step early: k_t - 1 and k_s - 1.
        imitate_from: the student's own previous weights (the paper) or the teacher's (the published code, in which
            one network goes on).
        targets: how the teacher's outputs become labels.
        pool: the images that the student imitates on.
        last: steps of the last imitation; None: k_s.
    """
    if minus_one:
        k_t, k_s = k_t - 1, k_s - 1
    if min(k_t, k_s) < 1:
        raise Problem("k_t and k_s must be at least 1 (2 in the published variant, which takes one step off each)")
    last = last or k_s
    generations, rest = divmod(total_steps - warmup - last + k_s, k_t + k_s)
    short = k_t + k_s - rest
    if warmup > short and short <= min(generations + 2, (k_t + k_s) // 10):  # shares of a budget, rounded
        generations, rest = generations + 1, -short
    if generations < 1:
        raise Problem(
            f"steps: {total_steps} do not hold one generation: warm-up {warmup} + k_t {k_t} + k_s {last}; "
            "raise --steps or lower k_t and k_s"
        )
    _check_generations(generations, total_steps)
    lead = warmup + rest if warmup else 0
    phases = []
    if lead:
        phases.append(
            Phase(
                name="interaction", generation=0, steps=lead, start="student", becomes=("teacher", "student"),
                targets=Given(), loss="bce",
            )
        )  # fmt: skip
    for generation in range(generations):
        interaction = Phase(
            name="interaction", generation=generation,
            steps=k_t + (rest if generation == 0 and not lead else 0),
            start="student", becomes=("teacher",), targets=Given(), loss="bce",
        )  # fmt: skip
        imitation = Phase(
            name="imitation", generation=generation, start=imitate_from,
            steps=last if generation == generations - 1 else k_s, becomes=("student",),
            targets=targets, loss="bce", pool=pool,
        )  # fmt: skip
        phases += [interaction, imitation]
    return phases


def noisy_student(
    total_steps: int,
    *,
    interaction: int,
    generations: int,
    targets: Targets,
    loss: Loss,
    pool: Pool,
) -> list[Phase]:
    """One interaction, then long imitations from fresh weights, each student the next teacher."""
    if total_steps - interaction < generations:
        raise Problem(
            f"steps: {total_steps} do not hold an interaction of {interaction} and {generations} imitation"
            f"{'s' if generations > 1 else ''}; raise --steps or lower interaction"
        )
    _check_generations(generations, total_steps)
    lengths = _equal_parts(total_steps - interaction, generations)
    phases = [
        Phase(
            name="interaction", generation=0, steps=interaction, start="init", becomes=("teacher",),
            targets=Given(), loss=loss,
        )
    ]  # fmt: skip
    phases += [
        Phase(
            name="imitation", generation=g, steps=length, start="init", becomes=("teacher", "student"),
            targets=targets, loss=loss, pool=pool,
        )
        for g, length in enumerate(lengths)
    ]  # fmt: skip
    return phases


def self_distill(total_steps: int, *, interaction: int, targets: Targets, loss: Loss, pool: Pool) -> list[Phase]:
    """One interaction, then one imitation of its soft labels from fresh weights."""
    return noisy_student(total_steps, interaction=interaction, generations=1, targets=targets, loss=loss, pool=pool)


def distill(total_steps: int, *, targets: Targets, loss: Loss, pool: Pool) -> list[Phase]:
    """Imitation of a teacher that is brought along and never learns."""
    return [
        Phase(
            name="imitation", generation=0, steps=total_steps, start="init", becomes=("student",),
            targets=targets, loss=loss, pool=pool,
        )
    ]  # fmt: skip


def _check_generations(generations: int, total_steps: int) -> None:
    if generations > MOST_GENERATIONS:
        raise Problem(
            f"steps: {total_steps:,} steps make {generations:,} generations (at most {MOST_GENERATIONS:,}); "
            "lower --steps or raise --k-t and --k-s"
        )


def _equal_parts(steps: int, parts: int) -> list[int]:
    return [steps // parts + (1 if i < steps % parts else 0) for i in range(parts)]


Schedule = Callable[..., list[Phase]]
SCHEDULES: dict[str, Schedule] = {
    "softmax": supervised,
    "sigmoid": supervised,
    "mile": mile,
    "noisy-student": noisy_student,
    "self-distill": self_distill,
    "distill": distill,
    "irm": invariant,
    "rex": invariant,
}
