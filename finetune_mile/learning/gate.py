"""The gate of `rho: auto`: each imitation is played as the held-out images decide, and the decisions are kept.

Open, the student learns the given labels and those that were found. Closed, the generation goes on as plain training on
the given labels: one network, one optimiser, the same batches, exactly as if there were no teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from finetune_mile.learning.auto import Verdict, judge
from finetune_mile.learning.phases import Auto, Given, Phase
from finetune_mile.learning.roles import Roles
from finetune_mile.networks.heads import get_head

Look = Callable[[nn.Module], tuple[Tensor, Tensor]]


class Gate:
    """Decisions so far, and how far the student's output bias was moved."""

    def __init__(self, roles: Roles, look: Look, prior: Tensor, tell: Callable[[int, Verdict], None]) -> None:
        """Nothing is decided yet.

        Args:
            roles: whose teacher is judged, and whose learner is moved.
            look: a network to its logits (N, C) on the held-out images, and their given labels (N,).
            prior: (C,) how often each class is given in training.
            tell: called with the step and a new verdict.
        """
        self.roles, self.look, self.prior, self.tell = roles, look, prior, tell
        self.verdicts: list[Verdict] = []
        self.shift: Tensor | None = None  # (C,) that the student's bias lies below the teacher's

    def decide(self, phase: Phase, step: int) -> None:
        """Judge the teacher before an imitation."""
        if not isinstance(phase.targets, Auto):
            return
        assert self.roles.teacher is not None
        logits, labels = self.look(self.roles.teacher)
        was_open = bool(self.verdicts) and self.verdicts[-1].open
        verdict = judge(phase.targets, phase.generation, logits, labels, self.prior, was_open=was_open)
        self.verdicts.append(verdict)
        self.tell(step, verdict)

    def played(self, phase: Phase) -> Phase:
        """A phase as it was decided to be played; as it was planned where nothing is decided."""
        verdict = next((v for v in self.verdicts if v.generation == phase.generation), None)
        if verdict is None or not isinstance(phase.targets, Auto):
            return phase
        if verdict.open:
            return replace(phase, targets=replace(phase.targets, thresholds=verdict.thresholds))
        return replace(phase, targets=Given(), start="teacher", pool="labelled")

    def goes_on(self, phase: Phase) -> bool:
        """Does a phase, as it is played, go on with the network of the phase before, as plain training would?"""
        before = phase.generation - (phase.name == "interaction")
        return any(v.generation == before and not v.open for v in self.verdicts)

    @torch.no_grad()
    def hop(self, phase: Phase) -> None:
        """Move the learner's output bias where its weights change roles, once it has those that `phase` starts from.

        A teacher's sigmoids estimate how often a label is given, a student's whether it is there; the thresholds lie
        between the two, so a student starts with them at one half.
        """
        bias = get_head(self.roles.learner).bias
        if phase.name == "interaction":
            if self.shift is not None and phase.start == "student":
                bias.add_(self.shift.to(bias))
        elif not isinstance(phase.targets, Auto):
            self.shift = None
        elif self.shift is None or phase.start == "teacher":
            thresholds = torch.tensor(phase.targets.thresholds)
            self.shift = torch.where(thresholds.isfinite(), thresholds, 0.0)
            bias.sub_(self.shift.to(bias))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"verdicts": [asdict(v) for v in self.verdicts], "shift": self.shift}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.verdicts = [Verdict(**{**v, "thresholds": tuple(v["thresholds"])}) for v in saved["verdicts"]]
        self.shift = saved["shift"]


def as_played(gate: Gate | None, phases: Sequence[Phase]) -> Sequence[Phase]:
    """All phases, those that are decided as they were decided."""
    return phases if gate is None else [gate.played(phase) for phase in phases]
