"""What happens around the steps: metrics, checkpoints, evaluation at the end of phases, guards, and stopping."""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from finetune_mile.compute.passes import Outputs
from finetune_mile.core.problems import Failed, Problem
from finetune_mile.learning.loop import Loop, StepRecord
from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.phases import Decision, Phase
from finetune_mile.learning.roles import copy_into, snapshot, tensors_of
from finetune_mile.measures.guards import RATES, LabelReport, LossAlarm, guard, inspect_labels
from finetune_mile.measures.predictions import pick_probe
from finetune_mile.training import resume
from finetune_mile.training.display import Display
from finetune_mile.training.folder import RunFolder, alone
from finetune_mile.training.plan import Plan, learner_role
from finetune_mile.training.processes import Device, Signals, Stopped, stop_together
from finetune_mile.training.task import Task, on_training_images

PROBE_IMAGES = 1000  # labelled images on which the labels of each teacher are compared with those of the one before
CHOSEN_BY = ("accuracy", "map", "f1@0.5")  # the score that `patience` watches: the first of these that there is


class Enough(Exception):
    """Raised by an evaluation to end the training early, after this many steps."""


@dataclass
class Ending:
    """How a run ended."""

    code: int = 0  # to exit with


@contextlib.contextmanager
def recorded(device: Device, folder: RunFolder, *, keep_checkpoints: bool, verb: str = "run") -> Iterator[Ending]:
    """Keep the status of a run in run.json while it works; one that was told to stop ends here.

    Without `keep_checkpoints` those of a finished run are removed, as the last thing. `verb` continues a stopped one.
    """
    accelerator, signals, ending = device.accelerator, device.signals, Ending()
    main, world = accelerator.is_main_process, accelerator.num_processes
    again = shlex.join(["finetune-mile", verb, "--resume", str(folder.path)]) + (
        f"   (with the same launcher, in {world} processes)" if world > 1 else ""
    )

    def record(**facts: object) -> None:
        if main:
            folder.update(**facts)

    def end(**facts: object) -> None:
        if main:
            folder.end(**facts)

    with alone(folder.path) if main else contextlib.nullcontext():
        try:
            record(status="running")
            yield ending
            record(status="finished")
        except Stopped as stopped:
            end(status="stopped", signal=str(stopped))
            accelerator.print(f"stopped; continue with: {again}")
            ending.code = 128 + stopped.signum
            return
        except BaseException as error:
            words = str(error) if isinstance(error, Problem) else repr(error)
            if signals.caught is None:
                end(status="failed", error=words)
                raise
            # Told to stop, and something broke on the way: another process left first, or a second Ctrl-C came.
            end(status="stopped", signal=signal.Signals(signals.caught).name, error=words)
            accelerator.print(f"stopped ({words}); continue from the last checkpoint with: {again}")
            ending.code = 128 + signals.caught
            return
        if main and not keep_checkpoints:
            folder.prune(0)
    accelerator.end_training()


@dataclass(kw_only=True)
class Monitor:
    """Records, saves and guards the steps of a loop, and stops it when it is asked to.

    It starts at the step that the loop was restored to.
    """

    loop: Loop
    plan: Plan
    folder: RunFolder  # where records and checkpoints go
    display: Display
    signals: Signals  # whether to stop
    log_every: int  # steps between metrics
    checkpoint_every: int  # steps between checkpoints
    advice: str  # what to type where the loss is not finite
    kept: Mapping[str, Any] = field(default_factory=dict)  # goes into every checkpoint
    curve: Collection[int] = ()  # further steps that `evaluate` is called after
    saved_step: int = field(default=-1, init=False)
    images_seen: int = field(default=0, init=False)
    steps_seen: int = field(default=0, init=False)
    busy_seconds: float = field(default=0.0, init=False)
    _window: list[StepRecord] = field(default_factory=list, init=False)
    _mark: float = field(default_factory=time.monotonic, init=False)

    def on_step(self, record: StepRecord) -> None:
        self._window.append(record)
        evaluate = self.evaluation_due(record.step, ended=record.ended)
        save = evaluate or record.step == self.plan.total_steps or record.step % self.checkpoint_every == 0
        if save or record.step % self.log_every == 0:
            self._flush(record)
        if save:
            self.save(record.step)
        try:
            stop_together(self.loop.accelerator, self.signals, record.step)
            if evaluate or record.step in self.curve:
                self._stop_if_not_finite(record)
                with self.folder.times.of("evaluation"):
                    self.evaluate(record.step, record.phase, ended=record.ended)
                self._mark = time.monotonic()
        except Stopped:
            if self.saved_step != record.step:
                if self._window:
                    self._flush(record)
                self.save(record.step)
            raise

    def _stop_if_not_finite(self, record: StepRecord) -> None:
        """Before an evaluation: a loss that is not finite ends the run with its own sentence."""
        if self._window:
            losses = torch.stack([each.loss for each in self._window]).sum()
            if not bool(self.loop.accelerator.reduce(losses, reduction="sum").isfinite()):
                self._flush(record)

    def evaluation_due(self, step: int, *, ended: bool) -> bool:
        del step
        return ended

    def evaluate(self, step: int, phase: Phase, *, ended: bool) -> None:
        """Look at the learner after a step; nothing here."""

    def extra(self) -> Mapping[str, Any]:
        """What a checkpoint keeps beside the loop."""
        return self.kept

    def save(self, step: int) -> None:
        with self.folder.times.of("saving"):
            resume.write(self.folder, self.loop.accelerator, step, self.loop.state_dict() | {"extra": self.extra()})
        self.saved_step = step

    def on_decision(self, step: int, decision: Decision) -> None:
        """Record and say what the method decided for the next phase."""
        if self.loop.accelerator.is_main_process:
            self.folder.append({"step": step, "kind": "gate", **decision.record})
        numbers = {f"gate/{k}": float(v) for k, v in decision.record.items() if k != "generation"}
        self.loop.accelerator.log(numbers, step=step)
        self.display.say(decision.sentence)
        if decision.warning is not None:
            self.display.warn(decision.warning)
        self._mark = time.monotonic()

    def _flush(self, record: StepRecord) -> None:
        """Average the window, over all processes, into one line."""
        window, self._window = self._window, []
        world = self.loop.accelerator.num_processes
        counted = [r for r in window if r.phase.name == "imitation"]
        sums = torch.stack([r.loss for r in window]).sum().unsqueeze(0), torch.stack([r.labels for r in window]).sum(0)
        totals = self.loop.accelerator.reduce(torch.cat(sums), reduction="sum").tolist()
        loss = totals[0] / (len(window) * world)
        if not math.isfinite(loss):
            raise Failed(
                f"the loss is {loss} at step {record.step} ({record.phase.name} {record.phase.generation}). "
                f"Most likely {RATES}: lower --lr, for example {self.advice}, or limit the gradient with "
                "--set optimizer.clip=1."
            )
        images, now = sum(r.images for r in window) * world, time.monotonic()
        seconds, self._mark = now - self._mark, now
        self.busy_seconds += seconds
        self.images_seen += images
        self.steps_seen += len(window)
        speed = images / max(seconds, 1e-9)
        line: dict[str, object] = {
            "step": record.step, "kind": "train", "phase": record.phase.name,
            "generation": record.phase.generation, "loss": loss, "rate": record.share,
            "images_per_second": round(speed, 1),
        }  # fmt: skip
        everyone, labels = sum(r.images for r in counted) * world, None
        if counted:
            names = ("labels_per_image", "empty_share", "given_per_image")
            line |= {name: total / everyone for name, total in zip(names, totals[1:], strict=True)}
            labels = totals[1] / everyone
        if self.loop.accelerator.is_main_process:
            self.folder.append(line)
        tracked = {key: line[key] for key in ("loss", "rate", "generation", "labels_per_image") if key in line}
        self.loop.accelerator.log({f"train/{key}": value for key, value in tracked.items()}, step=record.step)
        self.display.step(record.step, record.phase.name, record.phase.generation, speed, loss)
        self.judge(record, loss, steps=len(window), labels=labels)

    def judge(self, record: StepRecord, loss: float, *, steps: int, labels: float | None) -> None:
        """Look at the mean loss of the last steps; nothing here."""


@dataclass(kw_only=True)
class LabelMonitor(Monitor):
    """Also evaluates the learner at the end of phases, and inspects the labels that a new teacher gives."""

    task: Task
    device: Device
    alarm: LossAlarm
    curve_images: int = 0  # of each point of the curve; 0: there are evaluations enough
    probe_labels: Tensor | None = field(default=None, init=False)
    label_report: LabelReport | None = field(default=None, init=False)
    # With `patience`: score, step, weights, evaluations since then.
    best: dict[str, Any] | None = field(default=None, init=False)
    chosen: dict[str, float] = field(default_factory=dict, init=False)  # for results.json

    def extra(self) -> dict[str, Any]:
        report = None if self.label_report is None else asdict(self.label_report)
        kept = {"probe_labels": self.probe_labels, "label_report": report, "alarm": self.alarm.state_dict()}
        return kept if self.best is None else kept | {"best": self.best}

    def resume(self, step: int, extra: dict[str, Any]) -> None:
        """Go on after a restart: what was measured right after the checkpoint is measured again."""
        self.probe_labels = extra["probe_labels"]
        report = extra["label_report"]
        self.label_report = None if report is None else LabelReport(**report)
        self.alarm.load_state_dict(extra.get("alarm", {}))
        self.best = extra.get("best")
        self.saved_step = step
        phase, ended = self.plan.phase_of(step)
        if self.evaluation_due(step, ended=ended) or step in self.curve:
            self.evaluate(step, phase, ended=ended)

    def evaluation_due(self, step: int, *, ended: bool) -> bool:
        settings = self.task.recipe.evaluate
        if settings.images == 0:
            return False
        if step == self.plan.total_steps or (ended and settings.phases):
            return True
        return settings.every is not None and step % self.plan.steps(settings.every) == 0

    def evaluate(self, step: int, phase: Phase, *, ended: bool) -> None:
        """Scores of the learner, and a new teacher's labels; both go into metrics.jsonl."""
        self.loop.agree()
        picked, complete = self.task.evaluated, self.evaluation_due(step, ended=ended)
        part = pick_probe(len(picked), self.curve_images)  # the same images in every point of the curve
        seen, part = (picked, part) if complete else (picked[part], torch.arange(len(part)))
        with torch.random.fork_rng(devices=[], enabled=not complete):  # loaders draw a seed
            try:
                outputs = self.device.outputs(self.loop.roles.learner, self.task.views("val"), seen.numpy())
            except Failed:  # outputs that are not numbers: the loss of the next step says what to do
                if complete:
                    raise
                return
        if self.curve_images and self.loop.accelerator.is_main_process:
            few = Outputs(outputs.rows[part], outputs.readable[part])
            point = {"step": step, "kind": "curve", "phase": phase.name, "role": learner_role(phase)}
            self.folder.append(point | self.task.score(few, seen[part]))
        if not complete:
            return
        scores = self.task.scores(outputs, picked)[0]
        report = self._inspect_labels(phase) if ended else None
        role = learner_role(phase)
        record: dict[str, object] = {
            "step": step, "kind": "evaluation", "phase": phase.name, "generation": phase.generation,
            "role": role, "ended": ended, **scores,
        }  # fmt: skip
        if report is not None:
            record["labels"] = asdict(report)
        if self.loop.accelerator.is_main_process:
            self.folder.append(record)
        self.loop.accelerator.log({f"{role}/{k}": v for k, v in scores.items()}, step=step)
        if self.task.recipe.patience is not None and role == learner_role(self.plan.phases[-1]):
            self._judge_progress(step, scores, self.task.recipe.patience)

    def _judge_progress(self, step: int, scores: dict[str, float], patience: int) -> None:
        """Remember the best weights; stop the loop where there were no better ones for `patience` evaluations."""
        key = next(key for key in CHOSEN_BY if key in scores)
        score = [scores[key]]
        broadcast_object_list(score)  # all processes go on, or none
        if self.best is None or score[0] > self.best["score"]:
            self.best = {"score": score[0], "step": step, "waited": 0, "weights": snapshot(self.loop.roles.learner)}
            return
        self.best["waited"] += 1
        if self.best["waited"] >= patience and step < self.plan.total_steps:
            self.display.say(
                f"stopped early at step {step:,} of {self.plan.total_steps:,}: {key} on the validation images was not "
                f"above {self.best['score']:.2f} in {patience} evaluations. The weights of step {self.best['step']:,} "
                "are kept"
            )
            raise Enough(step)

    def take_best(self, last_step: int) -> None:
        """With `patience`: give the learner its best weights."""
        if self.best is not None:
            copy_into(tensors_of(self.loop.roles.learner), self.best["weights"])
            self.chosen = {"chosen_step": self.best["step"], "last_step": last_step}

    def _inspect_labels(self, phase: Phase) -> LabelReport | None:
        """Describe the labels that the learner, as the next teacher, will give."""
        method, num_classes = self.task.recipe.method_value, self.task.num_classes
        imitation = next((p for p in self.plan.phases if p.name == "imitation"), None)
        if "teacher" not in phase.becomes or imitation is None or not method.guarded:
            return None
        labelled = self.task.pools.indices["labelled"]
        compared = labelled[pick_probe(len(labelled), PROBE_IMAGES).numpy()]  # the same in every generation
        logits, labels = on_training_images(self.task, self.device, self.loop.roles.learner, compared)
        given = given_matrix(labels, num_classes)
        targets = method.targets(imitation, logits)
        targets = torch.maximum(targets, given) if imitation.union else targets
        report, labels = inspect_labels(targets, given, self.probe_labels)
        for sentence in guard(report, num_classes, self.label_report, new_head=self.task.recipe.new_head):
            self.display.warn(f"generation {phase.generation}: {sentence}")
        self.probe_labels, self.label_report = labels, report
        return report

    def judge(self, record: StepRecord, loss: float, *, steps: int, labels: float | None) -> None:
        warning = self.alarm.see(
            record.phase, loss, step=record.step, done=record.done, steps=steps, labels=labels
        )  # fmt: skip
        if warning is not None:
            self.display.warn(warning)
