"""MILe without a threshold to tune: held-out images decide which labels a teacher may add, if any (docs/auto.md).

Each imitation has a gate. Open, the student learns the given labels and those that were found. Closed, the generation
is plain training on the given labels: one network, one optimiser, the same batches, exactly as if there were no
teacher. The schedule is MILe's, from the block `mile`; `--rho auto` is another name for this method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from finetune_mile.core.types import OFF, Section
from finetune_mile.learning.phases import Budget, Decision, MethodState, Phase, RunView, StepView
from finetune_mile.methods import Method, Traits, loss_of_new_head, mile

if TYPE_CHECKING:
    from torch import Tensor

    from finetune_mile.learning.evidence import Verdict

SHORT_IMITATION = 50  # steps; shorter ones lost accuracy


class Block(Section):
    """`--method auto`: thresholds and a gate from held-out images with given labels (docs/auto.md)."""

    calibration: Annotated[float, Field(gt=0, le=0.5)] = Field(
        description="share of the labelled images that is held out; at least 500 where that is a fifth of them or less"
    )
    held_out: Literal["auto", "always"] = Field(
        description="always: also in runs that do not look at them, so that methods train on the same images"
    )
    gate: Annotated[Literal["auto", "off"], OFF] = Field(
        description="off: labels are added whatever the held-out images say"
    )
    v_min: float = Field(ge=0, description="the gate needs v (hits of given labels, 1 = chance) two errors above this")
    g_min: float = Field(ge=0, description="and g (misses where the teacher is surest against all) one above this")
    beta: float = Field(ge=0, le=1, description="the least target of a label that was found")
    ce: float = Field(ge=0, description="weight of the softmax term, which keeps the order of the labels")
    teacher: float = Field(ge=0, le=1, description="the teacher's share in that term; the rest is the given label")


class Settings(NamedTuple):
    """Its own settings and MILe's schedule."""

    auto: Block
    mile: mile.Block


def check(block: Settings, _recipe: Any) -> list[str]:
    """Labels are made batch by batch."""
    return [
        f"--rho auto needs mile.{key}: {value}, and it is {found}"
        for key, value, found in (
            ("targets", "threshold", block.mile.targets),
            ("pseudo_labels", "batch", block.mile.pseudo_labels),
        )
        if found != value
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationValues:
    """What an imitation needs to know."""

    beta: float
    ce: float
    teacher: float
    gate: Literal["auto", "off"]
    v_min: float
    g_min: float
    thresholds: tuple[float, ...] = ()  # (C,) on the teacher's logits; known when the imitation begins


def phases(block: Settings, budget: Budget) -> list[Phase]:
    """MILe's, with imitations whose thresholds are not known yet."""
    values = ImitationValues(**block.auto.model_dump(include={"beta", "ce", "teacher", "gate", "v_min", "g_min"}))
    return mile.in_turn(block.mile, budget, {"given": False, "values": values, "union": True})


def warnings(block: Settings, budget: Budget, generations: int, num_classes: int, new_head: bool) -> list[str]:
    """MILe's, for its schedule."""
    return mile.warnings(block.mile.model_copy(update={"rho": "auto"}), budget, generations, num_classes, new_head)


def targets(phase: Phase, teacher_logits: Tensor) -> Tensor:
    """Labels (B, C): between beta and 1, in the order of the teacher's outputs; 0 below the thresholds."""
    from finetune_mile.learning.evidence import labels_above

    return labels_above(phase.values.thresholds, phase.values.beta, teacher_logits)


def loss(phase: Phase, logits: Tensor, targets: Tensor, step: StepView) -> Tensor:
    """BCE, and on found labels a softmax term on top.

    That term does not change when all logits of an image move together, so it keeps the order of the labels and leaves
    their level to BCE. Its target is the given label and a share of the teacher's softmax: the given label is one draw
    among the objects of an image, the softmax is what many draws would say. An image without a given label has the
    teacher's part alone.
    """
    from finetune_mile.learning.losses import bce, cross_entropy

    if phase.given:
        return bce(logits, targets, step.class_weights)
    assert step.teacher_logits is not None
    values: ImitationValues = phase.values
    ranks = (1 - values.teacher) * step.given + values.teacher * step.teacher_logits.float().softmax(1)
    return bce(logits, targets, step.class_weights) + values.ce * cross_entropy(logits, ranks, step.class_weights)


def untrained_loss(phase: Phase, num_classes: int, labels: float, head_bias: Literal["zero", "prior"]) -> float | None:
    """BCE's, and the softmax term's where there is one."""
    base = loss_of_new_head(phase, num_classes, labels, head_bias)
    softmax = loss_of_new_head(replace(phase, loss="cross_entropy"), num_classes, labels, head_bias)
    if base is None or softmax is None or phase.given:
        return base
    return base + float(phase.values.ce) * softmax


class State(MethodState):
    """The decisions so far, and how far the student's output bias was moved."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        self.verdicts: list[Verdict] = []
        self.shift: Tensor | None = None  # (C,) that the student's bias lies below the teacher's

    def decide(self, phase: Phase) -> Decision | None:
        """Judge the teacher before an imitation."""
        import torch

        from finetune_mile.learning.evidence import judge

        if phase.given:
            return None
        assert self.run.roles.teacher is not None
        logits, labels = self.run.held_out(self.run.roles.teacher)
        given = self.run.given
        prior = torch.bincount(given[given >= 0], minlength=self.run.num_classes)
        was_open = bool(self.verdicts) and self.verdicts[-1].open
        values: ImitationValues = phase.values
        bars = None if values.gate == "off" else (values.v_min, values.g_min)
        verdict = judge(logits, labels, prior, generation=phase.generation, bars=bars, was_open=was_open)
        self.verdicts.append(verdict)
        return Decision(
            record={key: value for key, value in asdict(verdict).items() if key != "thresholds"},
            sentence=_in_words(verdict, values),
            warning=None if not verdict.open or phase.steps >= SHORT_IMITATION else
            f"an imitation of {phase.steps} steps is short for labels that were found, and may cost accuracy: "
            "raise --steps, or make it one long imitation (docs/auto.md)",
        )  # fmt: skip

    def as_decided(self, phase: Phase) -> Phase:
        """An open imitation gets its thresholds; a closed one, and the interaction after it, is plain training."""
        before = phase.generation - (phase.name == "interaction")
        verdict = next((v for v in self.verdicts if v.generation == before), None)
        if verdict is None or (verdict.open and phase.given):
            return phase
        if verdict.open:
            return replace(phase, values=replace(phase.values, thresholds=verdict.thresholds))
        if phase.given:
            return replace(phase, continues=True)
        return replace(phase, given=True, union=False, values=None, start="teacher", pool="labelled", continues=True)

    def entered(self, phase: Phase) -> None:
        """Move the learner's output bias where its weights change roles.

        A teacher's sigmoids estimate how often a label is given, a student's whether it is there; the thresholds lie
        between the two, so a student starts with them at one half.
        """
        import torch

        from finetune_mile.networks.heads import get_head

        bias = get_head(self.run.roles.learner).bias
        with torch.no_grad():
            if phase.name == "interaction":
                if self.shift is not None and phase.start == "student":
                    bias.add_(self.shift.to(bias))
            elif phase.given:
                self.shift = None
            elif self.shift is None or phase.start == "teacher":
                thresholds = torch.tensor(phase.values.thresholds)
                self.shift = torch.where(thresholds.isfinite(), thresholds, 0.0)
                bias.sub_(self.shift.to(bias))

    def state_dict(self) -> dict[str, Any]:
        """Verdicts and shift."""
        return {"verdicts": [asdict(v) for v in self.verdicts], "shift": self.shift}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        from finetune_mile.learning.evidence import Verdict

        self.verdicts = [Verdict(**{**v, "thresholds": tuple(v["thresholds"])}) for v in saved["verdicts"]]
        self.shift = saved["shift"]


def _in_words(verdict: Verdict, values: ImitationValues) -> str:
    evidence = f"v {verdict.v:.2f} ± {verdict.v * verdict.v_error:.2f}, g {verdict.g:.2f} ± {verdict.g_error:.2f}"
    if verdict.open:
        return f"generation {verdict.generation}: {verdict.labels_found:.1f} labels per image ({evidence})"
    return (
        f"generation {verdict.generation}: no labels added; training continues on the given labels. Evidence for more "
        f"labels is too weak ({evidence}; needs v ≥ {values.v_min:g} and g ≥ {values.g_min:g}, docs/auto.md)."
    )


METHOD = Method(
    name="auto", phases=phases, Block=Block, more_blocks=("mile",), settings=Settings,
    traits=lambda block: Traits(optimizer_state=block.mile.optimizer_state),
    needs=frozenset({"teacher", "held_out"}), flags={"k_t": "mile.k_t", "k_s": "mile.k_s"}, guarded=False,
    check=check, warnings=warnings, targets=targets, loss=loss, untrained_loss=untrained_loss, State=State,
)  # fmt: skip
