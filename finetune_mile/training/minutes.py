"""A model for the minutes that there are: of frozen features always, then the largest step that fits, if it is better.

`run --minutes N` and `quickstart` choose here. The run of the kept model ends in the folder that was asked for, the
other one in `not-kept` inside it. Until then the first model is in that folder: after Ctrl-C there is a model.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.config.flags import RunOptions
from finetune_mile.config.resolve import Resolved, resolve, resolve_tree
from finetune_mile.config.schema import FullRecipe
from finetune_mile.core.files import read_json, write_json
from finetune_mile.core.problems import Problem, inert
from finetune_mile.training.folder import REFIT, RunFolder, resumed_recipe

if TYPE_CHECKING:
    from torch import Tensor

    from finetune_mile.checkpoints.init import Init
    from finetune_mile.training.processes import Signals
    from finetune_mile.training.task import Model, Task

MOST_MINUTES = 10_000
SUMMARY = "minutes.json"
LARGER, NOT_KEPT = "larger", "not-kept"  # run folders inside the run folder
FROZEN = "frozen features"
SMALLER = (160, 128, 96, 64)  # sizes that cost less; below half of the checkpoint's own size too much is lost
REFIT_SHARE = 1.25  # of the seconds of a run: it has no trial, and a quarter more labels
LEAST_SECONDS = 15.0  # a step takes at least this long, so there is no use in timing one


@dataclass(frozen=True, slots=True)
class Clock:
    """The minutes that there are."""

    minutes: float
    began: float = field(default_factory=time.monotonic)

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds; below zero when the minutes are over."""
        return 60 * self.minutes - self.used

    def say(self, sentence: str) -> None:
        from finetune_mile.training.display import duration

        sys.stderr.write(f"{duration(self.used):>6} of {self.minutes:g} min  {inert(sentence)}\n")


def wrong_minutes(minutes: float) -> list[str]:
    fine = 0 < minutes <= MOST_MINUTES
    return [] if fine else [f"--minutes {minutes:g}: must be above 0 and at most {MOST_MINUTES:,}"]


def run_minutes(
    options: RunOptions, prepare: Callable[[RunOptions], tuple[RunOptions, Resolved, Path, Init, Init | None]]
) -> int:
    """`run --minutes N`: the command; `prepare` is that of run.py."""
    minutes = options.minutes or 0.0
    problems = wrong_minutes(minutes)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        problems.append("--minutes runs in one process: start it without accelerate launch or torchrun")
    keys = {text.partition("=")[0].strip() for text in options.sets} | options.settings.keys()
    chosen = [f"--{key}" for key in ("steps", "epochs", "trunk", "size") if key in keys]
    if chosen:
        problems.append(f"--minutes chooses what is trained, at which size and how long: leave out {', '.join(chosen)}")
    others = ("resume", "seeds", "overwrite", "explain", "keep_checkpoints")
    chosen = [f"--{key.replace('_', '-')}" for key in others if getattr(options, key)]
    if chosen:
        problems.append(f"--minutes makes new runs, more than one: leave out {', '.join(chosen)}")
    if problems:
        raise Problem(*problems)
    clock, (_, resolved, path, init, teacher), parent = Clock(minutes), prepare(options), os.getppid()
    if resolved.recipe.init == "none":
        raise Problem("--minutes begins with the features of a checkpoint: add --init CHECKPOINT")
    from finetune_mile.training.processes import Signals

    with Signals(parent) as signals:
        work = InTime(
            clock=clock, make=lambda sets: resolve(options.given, [*options.sets, *sets]), init=init, teacher=teacher,
            path=path, signals=signals,
        )  # fmt: skip
        code = work.train(refit=options.refit)
    if not code:
        sys.stdout.write(work.text + "".join(f"{sentence}\n" for sentence in say_choice(work.facts)))
    return code


def ladder(own: int) -> dict[str, list[str]]:
    """Steps beyond frozen features, with their settings, in the order in which they are tried.

    All layers at a smaller size come before the last block: they gained 6 to 11 points over their probe, the last block
    at most 2, in more time (docs/own-photos.md).
    """
    smaller = [size for size in SMALLER if own / 2 <= size < own]
    return {
        "all layers": ["trunk=all"],
        **{f"all layers at {size} px": ["trunk=all", f"size={size}"] for size in smaller},
        "the last block": ["trunk=last:1"],
    }


@dataclass(slots=True, kw_only=True)
class InTime:
    """A model for the minutes that there are: how it is made, and what came out."""

    clock: Clock
    make: Callable[[list[str]], Resolved]  # KEY=VALUE settings to the recipe with them
    init: Init
    teacher: Init | None = None  # --teacher
    path: Path  # a new run folder
    signals: Signals
    brief: bool = False  # say nothing about the recipe and the checkpoint
    facts: dict[str, Any] = field(default_factory=dict)  # of minutes.json
    text: str = ""  # that the run of the kept model has printed

    def train(self, *, refit: bool) -> int:
        """Train a classifier of frozen features, then the largest step that fits; keep the better one.

        With `refit` train the kept model's recipe on all labels at the end, if there is time. Returns the exit code.
        """
        code = self._keep_the_better()
        if not refit or code:
            return code
        kept = next(step for step in self.facts["steps"] if step["name"] == self.facts["kept"])
        if FROZEN not in kept["name"] and self.clock.left < REFIT_SHARE * kept["seconds"]:
            self.facts["refit_later"] = shlex.join(["finetune-mile", "run", "--resume", str(self.path), "--refit"])
        else:
            self.clock.say("training on all labels, also those of the validation photos")
            file, tree = resumed_recipe(self.path)
            resolved = resolve_tree(FullRecipe, tree, file, "--resume")
            code, text, *_ = self._run(resolved, self.path, brief=True, only_refit=True)
            if code:
                sys.stdout.write(self.text + text)
                return code
            split = read_json(self.path / REFIT / "split.json")
            self.facts["refit_labels"] = split["labelled"]
            self.text += text
        write_json(self.path / SUMMARY, self.facts)
        return 0

    def _keep_the_better(self) -> int:
        """`train` without the refit."""
        from finetune_mile.measures.probing import measure_of

        resolved, path, clock = self.make(["trunk=frozen"]), self.path, self.clock
        clock.say(f"{resolved.recipe.method} on {FROZEN}")
        code, text, task, model, scores = self._run(resolved, path, brief=self.brief)
        if code:
            sys.stderr.write(text)
            return code
        size, measure, self.text = task.preprocess.size, measure_of(task.data.val.given), text
        first = _about(f"{FROZEN} at {size} px", path, measure)
        self.facts = facts = {
            "minutes": clock.minutes, "measure": measure, "method": resolved.recipe.method,
            "counted": int((~scores.isnan()).sum()), "steps": [first], "kept": first["name"], "difference": None,
            "left_out": [],
        }  # fmt: skip
        if model.own_size is not None and size < model.own_size:
            facts["own_size"] = model.own_size
        if not facts["counted"]:
            clock.say("no validation photo has a label, so nothing could show that a larger step is better")
            return 0
        chosen = self._largest_that_fits(size)
        write_json(path / SUMMARY, facts)
        if chosen is None:
            return 0
        name, resolved = chosen
        clock.say(f"{name}: the model of {FROZEN} is ready in {path}, Ctrl-C keeps it")
        place = path / LARGER / path.name  # its report has the folder's name
        try:
            code, text, _, _, others = self._run(resolved, place, brief=True)
        except Problem as problem:
            facts["failed"] = " ".join(problem.sentences)
            clock.say(f"{name} failed, {FROZEN} are kept: {facts['failed']}")
            write_json(path / SUMMARY, facts)
            return 0
        if code:
            sys.stderr.write(
                f"stopped; the model in {path} is complete ({FROZEN}); continue {name} with: "
                f"finetune-mile run --resume {shlex.quote(str(place))}\n"
            )
            return code
        second = _about(name if " px" in name else f"{name} at {size} px", place, measure)
        facts["steps"].append(second)
        if _is_better(facts, others, scores):
            facts["kept"], self.text = second["name"], text.replace(str(place), str(path))
            _swap(path, place)
        else:
            place.rename(path / NOT_KEPT)
            (path / LARGER).rmdir()
        write_json(path / SUMMARY, facts)
        return 0

    def _run(
        self, resolved: Resolved, path: Path, *, brief: bool, only_refit: bool = False
    ) -> tuple[int, str, Task, Model, Tensor]:
        """One run: its exit code, what it printed, task and model, and the model's scores on the validation images."""
        import torch

        from finetune_mile.measures.verdicts import compared
        from finetune_mile.training.explain import explain
        from finetune_mile.training.task import set_up
        from finetune_mile.training.train import open_folder, train

        task, model, device = set_up(resolved.recipe, self.init, self.teacher, path, self.signals)
        if not brief:
            explain(resolved, task, model, device, full=False)
        folder = open_folder(task, model, device, path, resume=only_refit, overwrite=False)
        folder.info[REFIT] = only_refit
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code, measured = train(task, model, device, folder)
        return code, printed.getvalue(), task, model, torch.zeros(0) if measured is None else compared(measured)

    def _largest_that_fits(self, size: int) -> tuple[str, Resolved] | None:
        """The first step of the ladder that fits into the time that is left; `left_out` gets those before it."""
        from finetune_mile.training.pricing import estimate

        clock, left_out = self.clock, self.facts["left_out"]
        clock.say("estimating how long fine-tuning takes")
        for name, sets in ladder(size).items():
            if left_out and clock.left < LEAST_SECONDS:
                break
            try:
                resolved = self.make(sets)
                seconds = float(estimate(resolved.recipe, self.signals).seconds[2])
            except Problem as problem:  # such as a network without blocks
                clock.say(f"{name} is left out: {' '.join(problem.sentences)}")
                continue
            if seconds <= clock.left:
                clock.say(f"{name} takes about {seconds / 60:.1f} min, {clock.left / 60:.1f} min are left")
                return name, resolved
            left_out.append({"name": name, "seconds": seconds})
            clock.say(f"{name} is left out: about {seconds / 60:.1f} min, {max(clock.left, 0) / 60:.1f} min are left")
        return None


def _about(name: str, path: Path, measure: str) -> dict[str, Any]:
    results = read_json(path / "results.json")
    score, low, high = (results.get(measure + end, 0.0) for end in ("", "_low", "_high"))
    return {
        "name": name, "seconds": RunFolder.reopen(path).info["seconds"], "score": score, "low": low, "high": high,
        "second": [results[f"over_first_stage{end}"] for end in ("", "_low", "_high")]
        if "over_first_stage" in results else None,
    }  # fmt: skip


def _is_better(facts: dict[str, Any], second: Tensor, first: Tensor) -> bool:
    from finetune_mile.measures.intervals import compare

    gap = compare({"score": second}, {"score": first}).get("score")
    if gap is None:  # no validation image has a label
        return False
    facts["difference"] = {"mean": gap.difference, "low": gap.low, "high": gap.high}
    return gap.difference > 0


def _swap(path: Path, place: Path) -> None:
    """Put the run of `place`, inside of `path`, in the place of the run there, which becomes its NOT_KEPT."""
    new, old = (path.with_name(f".{path.name}.{word}") for word in ("new", "old"))
    place.rename(new)
    (path / LARGER).rmdir()
    path.rename(old)
    new.rename(path)
    (old / SUMMARY).unlink()
    old.rename(path / NOT_KEPT)


def say_choice(facts: dict[str, Any]) -> list[str]:
    """What was kept and how good it is, then what else was tried, in sentences."""
    from finetune_mile.training.display import duration

    def score(step: dict[str, Any]) -> str:
        return f"{step['score']:.1f} % (95 % interval {step['low']:.1f} to {step['high']:.1f})"

    measure, of = ("mAP", "classes") if facts["measure"] == "map" else ("accuracy", "validation photos")
    kept = next(step for step in facts["steps"] if step["name"] == facts["kept"])
    sentences = [
        f"The model is {facts['method']} with {kept['name']}: {measure} {score(kept)} over {facts['counted']:,} {of}. "
        f"It took {duration(kept['seconds'])}."
    ]
    if kept.get("second"):
        gain, low, high = kept["second"]
        sentences.append(
            f"Photos without a label made a difference of {gain:+.1f} points ({low:+.1f} to {high:+.1f}) in it."
        )
    if "own_size" in facts:
        sentences.append(
            f"The checkpoint's own image size is {facts['own_size']} pixels. A smaller one may cost accuracy: try "
            "without --size."
        )
    if "refit_labels" in facts:
        sentences.append(
            f"At the end it was trained on all {facts['refit_labels']:,} labelled photos, those for validation "
            "included. The score is of the model before that."
        )
    if "refit_later" in facts:
        sentences.append(f"No time was left to train it on the validation photos, too: {facts['refit_later']}")
    gap = facts["difference"]
    if gap is not None:
        (other,) = (step for step in facts["steps"] if step is not kept)
        chance = "" if gap["low"] > 0 or gap["high"] < 0 else ", which may be chance"
        sentences.append(
            f"Not kept, in the folder {NOT_KEPT}: {other['name']}, {score(other)}, {duration(other['seconds'])}. "
            f"Fine-tuning made a difference of {gap['mean']:+.1f} points ({gap['low']:+.1f} to {gap['high']:+.1f})"
            f"{chance}. The choice was made on the validation photos, so the score of the kept model is a little too "
            "good."
        )
    elif "failed" in facts:
        sentences.append(f"Fine-tuning failed, so frozen features were kept: {facts['failed']}")
    elif facts["left_out"]:
        steps = ", ".join(f"{step['name']} (about {duration(step['seconds'])})" for step in facts["left_out"])
        sentences.append(f"There was no time for fine-tuning: {steps}.")
    return sentences
