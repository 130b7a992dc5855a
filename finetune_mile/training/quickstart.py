"""What works on a folder of photos: methods compared on features, a model for the time that there is, one page."""

from __future__ import annotations

import copy
import math
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune_mile.checkpoints.choosing import DOWNLOADED, SHIPPED
from finetune_mile.checkpoints.init import Init
from finetune_mile.compute.rows import Split, Store
from finetune_mile.config.resolve import Resolved, resolve, to_yaml
from finetune_mile.core.console import progress
from finetune_mile.core.files import begun, write_json, write_whole
from finetune_mile.core.problems import Problem, warn
from finetune_mile.core.types import Preprocess
from finetune_mile.images.alike import SHOWN
from finetune_mile.images.bad_images import BadImages, allowed, say_unreadable
from finetune_mile.images.checks import examine, find_copies, report
from finetune_mile.images.order import Indices
from finetune_mile.images.pipeline import centre_view
from finetune_mile.images.sets import Data
from finetune_mile.images.sources import load_data
from finetune_mile.images.splits import labelled_pools, one_label_each
from finetune_mile.learning.probe import NEIGHBOURS
from finetune_mile.measures.advice import against, interval, recommended, say_methods, say_several
from finetune_mile.measures.audit import judge_labels, suggested, suspects
from finetune_mile.measures.probing import floor, measure_of, probe, scored
from finetune_mile.networks.heads import get_head, set_head
from finetune_mile.pages.report import data_url, png_of, write_page
from finetune_mile.training.display import duration
from finetune_mile.training.embedding import Embedding
from finetune_mile.training.features import on_features
from finetune_mile.training.folder import RunFolder
from finetune_mile.training.minutes import Clock, InTime, say_choice
from finetune_mile.training.processes import Device, Signals
from finetune_mile.training.start import start_head
from finetune_mile.training.steps import train_phases
from finetune_mile.training.task import Model, Task, set_up

SEEDS = 5
# Each method with settings of its own; auto needs imitations that are not short (docs/auto.md).
COMPARED: dict[str, list[str]] = {
    "softmax": [], "sigmoid": [], "wan": [], "mile": [], "auto": ["mile.k_t=50 %", "mile.k_s=50 %"],
}  # fmt: skip
FIXED = ("trunk=frozen", "keep=last", "evaluate.images=0", "checkpoint_every=100000")
NAMES = {
    "wan": "weak negatives", "mile": "multi-label iterated learning", "auto": "MILe, thresholds from held-out labels",
}  # fmt: skip
FEATURE_SHARE = 0.5  # of the minutes: features take this long at most
MODEL_SHARE = 0.3  # and so much is kept for the model
TIMED = 128  # images whose features are computed to see how fast it is
DOUBTS = 24  # labels that the page shows
PICTURE = Preprocess(size=112, crop=1.0)  # of a photo on the page
MODEL = "model"  # the run folder that `predict` takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Quickstart:
    """A first comparison, from reading the photos to the page."""

    how: Embedding  # checkpoint, data and features
    reason: str  # for this checkpoint
    out: Path
    clock: Clock
    accelerator: Accelerator
    signals: Signals

    def work(self) -> dict[str, Any]:
        """Compare methods, make a model, write the page; returns the content of quickstart.json.

        The same command after a kill begins again; the features are kept.
        """
        with begun(self.out, self.split.name, "quickstart.json", "quickstart.html", MODEL) as part:
            return self.compared(part)

    def compared(self, part: Path) -> dict[str, Any]:
        """The work; `part` is a folder for what is not kept."""
        data = load_data(self.how.data)
        self.clock.say(f"{self.init.text}: the checkpoint ({self.reason})")
        weak, measure = self.init.text == SHIPPED, measure_of(data.val.given)
        if weak:
            warn(
                f"{SHIPPED} is a tiny network that has seen drawings, not photos: a real checkpoint is far better "
                f"(--init FILE, or --download for {DOWNLOADED})"
            )
        findings = self.look(data)
        fraction = self.affordable(data)
        labelled = labelled_pools(data, fraction=fraction, seed=0).indices["labelled"]
        if fraction < 1:
            write_whole(self.split, "".join(f"{data.train.ids[i]}\n" for i in labelled))
        self.clock.say(f"features of {len(labelled):,} labelled and {len(data.val):,} validation photos")
        store = self.features(data, {"train": labelled, "val": np.arange(len(data.val))})
        self.clock.say("nearest neighbours and linear probes")
        probed = probe(store, data, [labelled], k=NEIGHBOURS)
        probes = {kind if kind == "k-NN" else f"{kind} probe": scores for kind, scores in probed.items()}
        runs, verdicts, refused = self.compare(data, fraction, part)
        if not runs:
            raise Problem(f"--data {self.how.data}: no method can be trained on these labels", *refused.values())
        simplest = next(iter(runs))  # softmax, or sigmoid for sets of labels
        gaps = against(runs, simplest)
        best = recommended(gaps, simplest)
        bar = self.recipe("auto", 0, fraction, []).recipe.block.auto.g_min
        rows, doubts = self.doubts(data, store, labelled)
        facts = {
            "data": self.how.data, "name": data.name, "init": self.init.text, "reason": self.reason, "weak": weak,
            "findings": findings, "fraction": fraction, "labels": len(labelled), "images": len(data.val),
            "classes": len(data.classes), "measure": measure,
            "floor": dict(zip(("name", "mean"), floor(data), strict=True)), "refused": refused, "gate": verdicts,
            "rows": [_row(name, scores, measure) for name, scores in (probes | runs).items()], "best": best,
            "verdicts": say_methods(gaps, simplest) + ([say_several(verdicts, bar)] if verdicts else []),
            **doubts, **self.model(best, fraction), "seconds": self.clock.used,
        }  # fmt: skip
        write_json(self.out / "quickstart.json", facts)
        self.write_page(data, facts, rows[:DOUBTS])
        return facts

    @property
    def init(self) -> Init:
        return self.how.inits[0]

    @property
    def split(self) -> Path:
        """The list of labelled photos, where not all labels are used."""
        return self.out / "labelled.txt"

    def look(self, data: Data) -> list[str]:
        """Read every image once; sentences about what was seen."""
        self.clock.say(f"reading {len(data.train) + len(data.val):,} photos")
        sets = {"train": data.train, "val": data.val}
        splits = {name: examine(images, name, self.how.workers) for name, images in sets.items()}
        for name, findings in splits.items():
            bad = {findings.images.ids[index]: reason for index, reason in sorted(findings.bad.items())}
            if len(bad) > allowed(len(findings.images)):
                raise Problem(
                    f"{self.how.data}: {len(bad):,} of {len(findings.images):,} {name} images cannot be "
                    f"read; `finetune-mile check --data {shlex.quote(self.how.data)}` lists them"
                )
            for image, reason in list(bad.items())[:SHOWN]:  # the page has the number of all
                warn(f"{name} image {image} is bad ({reason}) and is skipped")
            BadImages.told(self.how.data, name, bad)  # the runs of this command need not
        if data.unreadable:
            warn(f"{self.how.data}: {say_unreadable(data.unreadable)}")
        return list(report(data, splits, find_copies(data, splits)))

    def features(self, data: Data, rows: dict[Split, Indices]) -> Store:
        """Features, of which only the `rows` are sure to be there."""
        return self.how.features(self.init, data, self.accelerator, self.signals, rows=rows)

    def affordable(self, data: Data) -> float:
        """The share of the labels whose features can be had in the time; a few are timed."""
        some = np.arange(min(len(data.val), 2 * TIMED))
        one = np.arange(1)
        self.features(data, {"train": one, "val": some[: len(some) // 2]})  # the first batch is slow
        began = time.monotonic()
        self.features(data, {"train": one, "val": some})
        pace = (time.monotonic() - began) / max(len(some) - len(some) // 2, 1)
        seconds = self.clock.minutes * 60 * FEATURE_SHARE
        labels = int((one_label_each(data.train.given) >= 0).sum())
        wanted = labels + len(data.val)
        if pace * wanted <= seconds:
            return 1.0
        share = min(max(seconds / pace - len(data.val), len(data.classes)) / labels, 1.0)
        warn(
            f"features of all {wanted:,} photos would take {pace * wanted / 60:.0f} minutes, so {share:.0%} of the "
            "labels are used; raise --minutes or lower --size to use more"
        )
        return max(share, 1e-6)

    def recipe(self, method: str, seed: int, fraction: float, sets: Sequence[str]) -> Resolved:
        how = self.how
        flags = {
            "init": self.init.text, "data": how.data, "method": method, "seed": seed, "fraction": fraction,
            "arch": how.arch, "split": str(self.split) if fraction < 1 else None,
        }  # fmt: skip
        own = [f"size={how.size}"] if how.size else []
        own += [f"workers={how.workers}"] if how.workers is not None else []
        return resolve({key: value for key, value in flags.items() if value is not None}, [*own, *sets])

    def compare(
        self, data: Data, fraction: float, part: Path
    ) -> tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, str]]:
        """Train a classifier on the features with each method and several seeds.

        Returns:
            For each method its scores (seeds, units) on the validation images, as `scored` has them; what `auto`
            measured, once per seed; the methods that these labels cannot be trained with, and why.
        """
        wanted, refused = dict(COMPARED), dict[str, str]()
        if data.train.given.ndim == 2:
            for method in ("softmax", "auto"):
                refused[method] = "it is compared for one label per photo, and these photos have sets of labels."
                del wanted[method]
        self.clock.say(f"{len(wanted)} methods on these features, up to {SEEDS} seeds each")
        scores: dict[str, list[Tensor]] = {}
        heads: dict[tuple[str, bytes], nn.Linear] = {}  # fitted on these labels
        verdicts: list[dict[str, Any]] = []
        with (
            progress("comparing methods", SEEDS * len(wanted)) as advance,
            tempfile.TemporaryDirectory(dir=part) as place,
        ):
            for seed in range(SEEDS):
                began = self.clock.used
                for method in [each for each in wanted if each not in refused]:
                    path = Path(place) / f"{method}-{seed}"
                    recipe = self.recipe(method, seed, fraction, [*FIXED, *wanted[method]]).recipe
                    try:
                        ready = set_up(recipe, self.init, None, path, self.signals)
                    except Problem as problem:
                        refused[method] = " ".join(problem.sentences)
                        continue
                    score, gates = _train(*ready, path, heads)
                    scores.setdefault(method, []).append(score)
                    verdicts += gates[-1:]
                    advance(1)
                if (
                    seed + 1 < SEEDS
                    and self.clock.left - (self.clock.used - began) < MODEL_SHARE * 60 * self.clock.minutes
                ):
                    self.clock.say(f"the time is short: methods are compared with {seed + 1} of {SEEDS} seeds")
                    break
        return {method: torch.stack(rows) for method, rows in scores.items()}, verdicts, refused

    def doubts(self, data: Data, store: Store, labelled: Indices) -> tuple[list[int], dict[str, Any]]:
        """Labels that a classifier of the other photos disputes: their rows, and a list; none for sets of labels."""
        if data.train.given.ndim == 2:
            return [], {"doubts": []}
        self.clock.say("searching for doubtful labels")
        rows, readable = store.rows("train", labelled)
        read = labelled[readable.numpy()]
        given = data.train.given[torch.from_numpy(read)]
        judged = judge_labels(rows[readable], given, len(data.classes))
        chances, guess, order = judged.logits.softmax(1), suggested(judged, given), suspects(judged)
        listed = [
            {"id": data.train.ids[read[row]], "given": data.classes[given[row]], "instead": data.classes[guess[row]],
             "p_given": float(chances[row, given[row]]), "p_instead": float(chances[row, guess[row]]),
             "p_wrong": float(judged.wrong[row])}
            for row in order
        ]  # fmt: skip
        facts = {"wrong_share": list(judged.shares["wrong"]), "wrong_listed": sum(each["p_wrong"] for each in listed)}
        return [int(read[row]) for row in order], {**facts, "doubts": listed}

    def model(self, method: str, fraction: float) -> dict[str, Any]:
        """Make the model that `predict` takes, in the time that is left; and the commands to go on with."""
        path, how = self.out / MODEL, self.how
        made = InTime(
            clock=self.clock, make=lambda sets: self.recipe(method, 0, fraction, sets), init=self.init, path=path,
            signals=self.signals, brief=True,
        )  # fmt: skip
        if made.train(refit=True):
            self.signals.raise_if_caught()
            raise Problem(f"{path}: training failed; its folder says why")
        commands = {"audit": shlex.join(["finetune-mile", "audit", how.data, "--init", self.init.text])}
        commands |= {"predict": shlex.join(["finetune-mile", "predict", str(path), "PHOTOS"])}
        if made.facts["left_out"]:
            words = ["finetune-mile", "run", "--init", self.init.text, "--data", how.data, "--method", method]
            words += ["--arch", how.arch] if how.arch else []
            words += ["--size", str(how.size)] if how.size else []
            commands["fine-tune"] = shlex.join(words)
        return {"model": made.facts, "choice": say_choice(made.facts), "commands": commands}

    def write_page(self, data: Data, facts: dict[str, Any], shown: list[int]) -> None:
        highest = max(row["high"] for row in [*facts["rows"], *facts["model"]["steps"]])
        pictures = [data_url(png_of(centre_view(data.train.read(row), PICTURE))) for row in shown]
        write_page(
            self.out / "quickstart.html", "quickstart.html", title=f"{data.name}: quickstart", names=NAMES,
            pictures=pictures, duration=duration, folder=MODEL,
            top=min(10 * math.ceil(highest / 10 + 0.1), 100), **facts,
        )  # fmt: skip


def _train(
    task: Task, model: Model, device: Device, path: Path, heads: dict[tuple[str, bytes], nn.Linear]
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Train a classifier on features, from a head that fits its labels: its scores, and what `auto` measured."""
    folder = RunFolder.create(path, to_yaml(task.recipe), overwrite=False)
    task, device = on_features(task, model, device)
    labels = task.recipe.activation, task.pools.indices["labelled"].tobytes()
    if labels in heads:
        set_head(model.learner, copy.deepcopy(heads[labels]))
    else:
        start_head(task, device, model.learner, fit=True)
        heads[labels] = copy.deepcopy(get_head(model.learner))
    loop, _ = train_phases(task, model, device, folder, visible=False)
    val = task.data.val
    logits = device.outputs(loop.learner(), task.views("val"), np.arange(len(val)))
    gates = [record for record in folder.metrics() if record["kind"] == "gate"]
    return scored(logits, val.given, task.recipe.activation), gates


def _row(name: str, scores: Tensor, measure: str) -> dict[str, Any]:
    """A row of the page's table: the score in per cent with its 95 % interval, and that of each seed."""
    low, high = interval(scores.mean(0), measure)
    mean = float(scores.mean(0).nanmean())
    return {"name": name, "mean": mean, "low": low, "high": high, "seeds": scores.nanmean(1).tolist()}
