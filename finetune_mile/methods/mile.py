"""MILe, multi-label iterated learning (Algorithm 1 of the paper).

    warm-up:      the student learns from the given labels
    generation:   interaction  the teacher starts from the student and learns from the given labels for k_t steps
                  imitation    the student learns from the teacher's labels for k_s steps

A run ends on an imitation: the student is what is evaluated and exported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Amount, Section
from finetune_mile.learning.phases import Budget, Phase
from finetune_mile.methods import Method, Traits
from finetune_mile.methods.pseudo_labels import Argmax, Rule, Soften, Threshold, as_phase, check_generations

LONG_PHASE_EPOCHS = 5.0  # an interaction of more epochs than this has memorised its labels

# Where the paper and its published code disagree.
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {
        "imitate_from": "student", "phase_steps": "exact", "rho": 0.25, "pseudo_labels": "batch", "union": False,
        "optimizer_state": "keep",
    },
    "published": {
        "imitate_from": "teacher", "phase_steps": "minus_one", "rho": 0.5, "pseudo_labels": "batch", "union": False,
        "optimizer_state": "keep",
    },
}  # fmt: skip


def _rho_or_auto(value: float | str) -> float | str:
    if value != "auto" and not (isinstance(value, float) and 0 < value < 1):
        raise ValueError("must be a number between 0 and 1, or auto")
    return value


class Block(Section):
    """MILe (Algorithm 1)."""

    k_t: Amount = Field(description="interaction: 200 (steps), '2 epochs' or '5 %' of the budget")
    k_s: Amount = Field(description="imitation, in the same units")
    warmup: Amount | Literal[0] = Field(description="interaction before the first generation; 0: none")
    last: Amount | Literal["rest"] | None = Field(
        default=None,
        description="length of the last imitation; rest: k_s and the steps that fill no generation; null: k_s",
    )
    rho: Annotated[float | str, AfterValidator(_rho_or_auto)] = Field(
        description="threshold on the teacher's sigmoids; auto: --method auto"
    )
    imitate_from: Literal["student", "teacher"] = Field(description="weights an imitation starts from")
    phase_steps: Literal["exact", "minus_one"] = Field(description="k steps a phase, or k - 1")
    pseudo_labels: Literal["batch", "cycle"] = Field(
        description="label each augmented batch, or the plain images once per generation"
    )
    targets: Literal["threshold", "argmax", "soft"] = Field(
        default="threshold", description="MILe is `threshold`; the others are controls"
    )
    union: bool = Field(description="add the given label to the teacher's")
    empty: Literal["negative", "argmax"] = Field(description="what an empty label set trains towards")
    optimizer_state: Literal["keep", "reset"] = Field(description="momentum when weights are swapped")

    @property
    def rule(self) -> Rule:
        """How the teacher's logits become labels."""
        if self.targets == "threshold":
            assert isinstance(self.rho, float)
            return Threshold(rho=self.rho, empty=self.empty)
        return Argmax() if self.targets == "argmax" else Soften(temperature=1.0)


def phases(block: Block, budget: Budget) -> list[Phase]:
    """Interactions and imitations in turn, by the block's rule."""
    return in_turn(block, budget, as_phase(block.rule, union=block.union))


def in_turn(block: Block, budget: Budget, imitation: dict[str, Any]) -> list[Phase]:
    """Algorithm 1: k_t steps on the given labels, k_s on the teacher's, until the budget is spent.

    The budget, teacher's and student's steps together, is filled exactly. Steps that do not fill a generation go to the
    first phase (to the last one with `last: rest`), so that the run ends on an imitation. A step or two that are
    missing to a generation, because shares of a budget were rounded, are taken from the warm-up.

    Without a warm-up the first teacher's outputs sit at the prior 1 / C, and a rho near that makes its labels random.

    Args:
        block: of a recipe.
        budget: in steps.
        imitation: fields of the imitations' phases that say how the teacher's outputs become labels.
    """
    k_t, k_s, warmup = (budget.steps(amount) for amount in (block.k_t, block.k_s, block.warmup))
    if block.phase_steps == "minus_one":  # the published code switches one step early
        k_t, k_s = k_t - 1, k_s - 1
    if min(k_t, k_s) < 1:
        raise Problem("k_t and k_s must be at least 1 (2 in the published variant, which takes one step off each)")
    last = k_s if block.last is None or block.last == "rest" else budget.steps(block.last)
    generations, rest = divmod(budget.total_steps - warmup - last + k_s, k_t + k_s)
    if block.last == "rest":
        last, rest = last + rest, 0
    short = k_t + k_s - rest
    if warmup > short and short <= min(generations + 2, (k_t + k_s) // 10):  # shares of a budget, rounded
        generations, rest = generations + 1, -short
    if generations < 1:
        raise Problem(
            f"steps: {budget.total_steps} are too few for one generation: warm-up {warmup} + k_t {k_t} + k_s {last}; "
            "raise --steps, or lower mile.warmup, k_t and k_s"
        )
    check_generations(generations, budget)
    lead = warmup + rest if warmup else 0
    run: list[Phase] = []
    if lead:
        run.append(
            Phase(
                name="interaction", generation=0, steps=lead, start="student", becomes=("teacher", "student"),
                loss="bce",
            )
        )  # fmt: skip
    for generation in range(generations):
        run.append(
            Phase(
                name="interaction", generation=generation, start="student", becomes=("teacher",), loss="bce",
                steps=k_t + (rest if generation == 0 and not lead else 0),
            )
        )  # fmt: skip
        run.append(
            Phase(
                name="imitation", generation=generation, start=block.imitate_from, becomes=("student",), loss="bce",
                steps=last if generation == generations - 1 else k_s, pool=budget.pool, **imitation,
            )
        )  # fmt: skip
    return run


def warnings(block: Block, budget: Budget, generations: int, num_classes: int, new_head: bool) -> list[str]:
    """What is likely not intended."""
    sentences = []
    k_t, k_s, warmup = (budget.steps(amount) for amount in (block.k_t, block.k_s, block.warmup))
    epochs = k_t / budget.steps_per_epoch
    if epochs > LONG_PHASE_EPOCHS:
        sentences.append(
            f"k_t is {epochs:.0f} epochs of your labelled images: the teacher may memorise their labels; lower --k-t"
        )
    if k_s > k_t:
        sentences.append(f"k_s ({k_s}) is larger than k_t ({k_t}); the paper asks for k_s <= k_t")
    if warmup > budget.total_steps / 2:
        sentences.append(f"warm-up is most of the budget: {warmup:,} of {budget.total_steps:,} steps")
    if generations == 1:
        sentences.append("the budget is enough for one generation only; raise --steps, or lower k_t and k_s")
    prior = 1 / num_classes
    if new_head and isinstance(block.rho, float) and block.rho <= 2 * prior:
        random = "there is no warm-up, so the first teacher's labels are random: set mile.warmup or raise --rho"
        rest = random if warmup == 0 else "keep the warm-up"
        sentences.append(f"rho {block.rho:g} is near the prior 1/C = {prior:g}; {rest}")
    return sentences


def traits(block: Block) -> Traits:
    """What a run must know of its settings."""
    rho = block.rho if isinstance(block.rho, float) else None
    return Traits(optimizer_state=block.optimizer_state, pseudo_labels=block.pseudo_labels, rho=rho)


METHOD = Method(
    name="mile", phases=phases, Block=Block, traits=traits, needs=frozenset({"teacher"}), variants=VARIANTS,
    flags={"k_t": "mile.k_t", "k_s": "mile.k_s", "rho": "mile.rho"}, warnings=warnings,
)  # fmt: skip
