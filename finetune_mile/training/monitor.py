"""What happens around the steps: metrics, checkpoints, evaluation at the end of phases, guards, and stopping."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from finetune_mile.core.problems import Failed, Problem
from finetune_mile.learning.loop import StepRecord
from finetune_mile.learning.phases import Phase
from finetune_mile.learning.state import Decision
from finetune_mile.learning.targets import given_matrix
from finetune_mile.measures.guards import RATES, LabelReport, LossAlarm, guard, inspect_labels
from finetune_mile.methods import Method
from finetune_mile.training.display import Display
from finetune_mile.training.folder import RunFolder, alone
from finetune_mile.training.plan import Plan

SAME_SIGNAL = 1.0  # seconds
AGREE_EVERY = 8  # steps between two looks at whether another process was told to stop


class Stopped(Exception):
    """A signal asked for an end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Signals:
    """SIGTERM and SIGINT become a flag that is looked at between steps; a second Ctrl-C ends at once.

    Launchers repeat what they get: SLURM signals every process, and torchrun then signals its own once more. So a
    second SIGTERM, or a SIGINT within a second of the first, counts as the same.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._caught_at = 0.0
        self._before = {s: signal.signal(s, self._catch) for s in (signal.SIGTERM, signal.SIGINT)}

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():  # back to whoever had them
            signal.signal(signum, handler)

    def _catch(self, signum: int, _: FrameType | None) -> None:
        if self.caught is None:
            self.caught, self._caught_at = signum, time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - self._caught_at > SAME_SIGNAL:
            raise KeyboardInterrupt

    def raise_if_caught(self) -> None:
        """Stop in the middle of something that can be done again."""
        if self.caught is not None:
            raise Stopped(self.caught)


def stop_together(accelerator: Accelerator, signals: Signals, step: int) -> None:
    """Raise `Stopped` if a signal came: all processes at the same step, or none."""
    if accelerator.num_processes > 1:
        if step % AGREE_EVERY:
            return
        flag = torch.tensor([signals.caught or 0], device=accelerator.device)
        caught = int(accelerator.gather(flag).max())
        if not caught:
            return  # a signal since then waits for the next look
        signals.caught = caught
    signals.raise_if_caught()


def recorded(
    accelerator: Accelerator, folder: RunFolder, signals: Signals, work: Callable[[], dict[str, object]]
) -> int:
    """Do a run's work with its status kept in run.json; returns the exit code.

    Args:
        accelerator: for processes.
        folder: the run's.
        signals: whether it was asked to stop.
        work: trains what is left and finishes; returns facts for run.json.
    """
    if folder.info.get("status") == "finished" and (folder.path / "results.json").is_file():
        accelerator.print(f"{folder.path} is finished; its results are in results.json")
        return 0
    main = accelerator.is_main_process
    record = folder.update if main else _nobody
    with alone(folder.path) if main else contextlib.nullcontext():
        try:
            record(status="running")
            facts = work()
            record(status="finished", **facts)
        except Stopped as stopped:
            record(status="stopped", signal=str(stopped))
            accelerator.print(f"stopped; continue with --resume {folder.path}")
            return 128 + stopped.signum
        except BaseException as error:
            words = str(error) if isinstance(error, Problem) else repr(error)
            if signals.caught is None:
                record(status="failed", error=words)
                raise
            # Told to stop, and something broke on the way: another process left first, or a second Ctrl-C came.
            record(status="stopped", signal=signal.Signals(signals.caught).name, error=words)
            accelerator.print(f"stopped ({words}); continue from the last checkpoint with --resume {folder.path}")
            return 128 + signals.caught
    accelerator.end_training()
    return 0


def _nobody(**facts: object) -> None:
    """Other processes than the first record nothing."""
    del facts


class Watch:
    """The loop's `on_step`."""

    def __init__(
        self,
        accelerator: Accelerator,
        folder: RunFolder,
        display: Display,
        signals: Signals,
        plan: Plan,
        alarm: LossAlarm,
        method: Method,
        *,
        num_classes: int,
        log_every: int,
        checkpoint_every: int,
        evaluate_every: int | None,
        save: Callable[[int, dict[str, Any]], None],
        evaluate: Callable[[], dict[str, float]],
        probe: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        """Wire it up.

        Args:
            accelerator: for processes.
            folder: where records go.
            display: where the user looks.
            signals: whether to stop.
            plan: the phases.
            alarm: says that the loss is too high.
            method: whose labels are inspected.
            num_classes: C.
            log_every: steps between metrics.
            checkpoint_every: steps between checkpoints.
            evaluate_every: steps between evaluations inside a phase; None: at phase ends only.
            save: writes a checkpoint of (step, extra).
            evaluate: scores of the learner on validation images.
            probe: the learner's logits (n, C) on the probe images, and their given labels.
        """
        self.accelerator, self.folder, self.display, self.signals = (accelerator, folder, display, signals)
        self.plan, self.alarm, self.method, self.num_classes = plan, alarm, method, num_classes
        self.log_every, self.checkpoint_every, self.evaluate_every = (log_every, checkpoint_every, evaluate_every)
        self.save, self.evaluate, self.probe = save, evaluate, probe
        self.probe_labels: Tensor | None = None
        self.label_report: LabelReport | None = None
        self.saved_step = -1
        self.images_seen, self.busy_seconds = 0, 0.0
        self._window: list[StepRecord] = []
        self._mark = time.monotonic()
        self._images_since = 0

    def __call__(self, record: StepRecord) -> None:
        """After each step."""
        self._window.append(record)
        self._images_since += record.images * self.accelerator.num_processes
        evaluate = self._look_due(record.step, ended=record.ended)
        save = evaluate or record.step % self.checkpoint_every == 0
        if save or record.step % self.log_every == 0:
            self._flush(record)
        if save:
            self._save(record.step)
        self._stop_if_asked(record.step)
        if evaluate:
            self.look(record.step, record.phase, ended=record.ended)

    def resume(self, step: int, extra: dict[str, Any]) -> None:
        """Go on after a restart: what was measured right after the checkpoint is measured again."""
        self.probe_labels = extra["probe_labels"]
        report = extra["label_report"]
        self.label_report = None if report is None else LabelReport(**report)
        self.alarm.load_state_dict(extra.get("alarm", {}))
        self.saved_step = step
        phase, ended = self.plan.phase_of(step)
        if self._look_due(step, ended=ended):
            self.look(step, phase, ended=ended)

    def _look_due(self, step: int, *, ended: bool) -> bool:
        return ended or (self.evaluate_every is not None and step % self.evaluate_every == 0)

    def look(self, step: int, phase: Phase, *, ended: bool) -> None:
        """Evaluate the learner, and a new teacher's labels; both go into metrics.jsonl."""
        try:
            scores = self.evaluate()
            report = self._look_at_labels(phase) if ended else None
        except Stopped:
            self._finish_stopping(step)
            raise
        role = "teacher" if phase.name == "interaction" and "teacher" in phase.becomes else "student"
        record: dict[str, object] = {
            "step": step, "kind": "evaluation", "phase": phase.name, "generation": phase.generation,
            "role": role, "ended": ended, **scores,
        }  # fmt: skip
        if report is not None:
            record["labels"] = asdict(report)
        if self.accelerator.is_main_process:
            self.folder.append(record)
        self.accelerator.log({f"{role}/{k}": v for k, v in scores.items()}, step=step)
        self._mark = time.monotonic()

    def on_decision(self, step: int, decision: Decision) -> None:
        """Record and say what the method decided for the next phase."""
        if self.accelerator.is_main_process:
            self.folder.append({"step": step, "kind": "gate", **decision.record})
        numbers = {f"gate/{k}": float(v) for k, v in decision.record.items() if k != "generation"}
        self.accelerator.log(numbers, step=step)
        self.display.say(decision.sentence)
        if decision.warning is not None:
            self.display.warn(decision.warning)
        self._mark = time.monotonic()

    def _look_at_labels(self, phase: Phase) -> LabelReport | None:
        """Describe the labels that the learner, as the next teacher, will give."""
        imitation = next((p for p in self.plan.phases if p.name == "imitation"), None)
        if "teacher" not in phase.becomes or imitation is None or not self.method.guarded:
            return None
        logits, labels = self.probe()
        given = given_matrix(labels, self.num_classes)
        targets = self.method.targets(imitation, logits)
        targets = torch.maximum(targets, given) if imitation.union else targets
        report, labels = inspect_labels(targets, given, self.probe_labels)
        for sentence in guard(report, self.num_classes, self.label_report):
            self.display.warn(f"generation {phase.generation}: {sentence}")
        self.probe_labels, self.label_report = labels, report
        return report

    def _flush(self, record: StepRecord) -> None:
        """Average the window, over all processes, into one line."""
        window, self._window = self._window, []
        sums = torch.stack([torch.stack([r.loss for r in window]).sum(), torch.zeros_like(record.loss)])
        counted = [r for r in window if r.labels is not None]
        labels = (
            torch.stack([r.labels for r in counted if r.labels is not None]).sum(0) if counted else sums.new_zeros(3)
        )
        images = sum(r.images for r in counted)
        totals = self.accelerator.reduce(torch.cat([sums[:1], labels]), reduction="sum").tolist()
        loss = totals[0] / (len(window) * self.accelerator.num_processes)
        if not math.isfinite(loss):
            raise Failed(
                f"the loss is {loss} at step {record.step} ({record.phase.name} {record.phase.generation}). "
                f"Most likely {RATES}: lower --lr, for example {self.alarm.advice}, or limit the gradient with "
                "--set optimizer.clip=1."
            )
        now = time.monotonic()
        self.busy_seconds += now - self._mark
        self.images_seen += self._images_since
        speed = self._images_since / max(now - self._mark, 1e-9)
        self._mark, self._images_since = now, 0
        line: dict[str, object] = {
            "step": record.step, "kind": "train", "phase": record.phase.name,
            "generation": record.phase.generation, "loss": loss, "rate": record.share,
            "images_per_second": round(speed, 1),
        }  # fmt: skip
        if counted:
            everyone = images * self.accelerator.num_processes
            names = ("labels_per_image", "empty_share", "given_per_image")
            line |= {name: total / everyone for name, total in zip(names, totals[1:], strict=True)}
        if self.accelerator.is_main_process:
            self.folder.append(line)
        self.accelerator.log({"train/loss": loss, "train/rate": record.share}, step=record.step)
        self.display.step(record.step, record.phase.name, record.phase.generation, speed, loss)
        warning = self.alarm.see(
            record.phase, loss, step=record.step, done=record.done, steps=len(window),
            labels=totals[1] / (images * self.accelerator.num_processes) if counted else None,
        )  # fmt: skip
        if warning is not None:
            self.display.warn(warning)

    def _save(self, step: int) -> None:
        report = None if self.label_report is None else asdict(self.label_report)
        kept = {"probe_labels": self.probe_labels, "label_report": report, "alarm": self.alarm.state_dict()}
        self.save(step, kept)
        self.saved_step = step

    def _stop_if_asked(self, step: int) -> None:
        try:
            stop_together(self.accelerator, self.signals, step)
        except Stopped:
            self._finish_stopping(step)
            raise

    def _finish_stopping(self, step: int) -> None:
        if self.saved_step != step:
            self._save(step)
