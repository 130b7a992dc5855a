"""`finetune-mile quickstart DIR`: what works on these photos, in minutes, on one page (docs/own-photos.md)."""

from __future__ import annotations

import argparse
import copy
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.cards import Card, is_cached, list_cards, read_card
from finetune_mile.checkpoints.init import Init
from finetune_mile.config.flags import FORMAT, Parser, init_text
from finetune_mile.config.resolve import Resolved, resolve, to_yaml
from finetune_mile.core.console import progress
from finetune_mile.core.files import config, write_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.index import Data, allowed
from finetune_mile.images.sources import load_data, split_name
from finetune_mile.training.folder import RunFolder, next_folder
from finetune_mile.training.minutes import MOST_MINUTES, Clock, say_choice, train_in_time
from finetune_mile.verbs.embed import check_flags, features_of, stoppable

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

    from finetune_mile.compute.rows import Split, Store
    from finetune_mile.images.order import Indices
    from finetune_mile.training.processes import Signals

EPILOG = """examples:
  finetune-mile quickstart photos                         photos/CLASS/IMAGE.jpg, or photos/train/... and photos/val/...
  finetune-mile quickstart photos --init moco.pth.tar --minutes 30

Without --init: a checkpoint file in DIR, else a downloaded card, else dinov2-s if you agree to its download (asked
once, on a terminal; --download agrees), else the small network that comes with the package.
"""
SHIPPED, DOWNLOADED = "simclr-demo", "dinov2-s"
ENDINGS = (".pth", ".pt", ".pth.tar", ".ckpt", ".safetensors", ".npz")
SEEDS = 5
# Each method with settings of its own; auto needs imitations that are not short (docs/auto.md).
COMPARED: dict[str, list[str]] = {
    "softmax": [], "sigmoid": [], "wan": [], "mile": [], "auto": ["mile.k_t=50 %", "mile.k_s=50 %"],
}  # fmt: skip
NAMES = {
    "wan": "weak negatives", "mile": "multi-label iterated learning", "auto": "MILe, thresholds from held-out labels",
}  # fmt: skip
FEATURE_SHARE = 0.5  # of the minutes: features take this long at most
TIMED = 128  # images whose features are computed to see how fast it is
DOUBTS = 24  # labels that the page shows
MODEL = "model"  # the run folder that `predict` takes


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile quickstart", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compare methods on features of your photos, make a model in the time that you have, "
        "and write one page about it.",
    )  # fmt: skip
    parser.add_argument("data", metavar="DIR", help="a folder of photos, or any --data of `run`")
    parser.add_argument("--init", help="the checkpoint, as for `run`")
    parser.add_argument("--minutes", type=float, default=10.0, help="time to use (default: %(default)g)")
    parser.add_argument("--download", action="store_true", help=f"without --init: download {DOWNLOADED}, no question")
    parser.add_argument("--arch", help="network, where the checkpoint does not say it")
    parser.add_argument("--format", help=FORMAT)
    parser.add_argument("--size", type=int, help="image side (default: as the checkpoint says)")
    parser.add_argument("--workers", type=int, help="loader processes (default: from the cores)")
    parser.add_argument("--out", type=Path, help="a new folder (default: runs/quickstart-N)")
    parser.set_defaults(dtype="float16", verify=False, batch_size=128)
    return parser


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 it failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options = build_parser().parse_args(argv)
    if not 0 < options.minutes <= MOST_MINUTES:
        raise Problem(f"--minutes {options.minutes:g}: must be above 0 and at most {MOST_MINUTES:,}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Problem("quickstart is one process: start it without accelerate launch or torchrun")
    options.out = options.out or next_folder(Path("runs"), "quickstart")
    if os.path.lexists(options.out) and (not options.out.is_dir() or any(options.out.iterdir())):
        raise Problem(f"--out {options.out}: already exists; choose a new folder")
    split_name(options.data)  # before a question about the checkpoint
    text, reason = choose_init(options)
    (init,) = check_flags(options, [text])
    clock = Clock(options.minutes)  # features are float32, as those of runs: else they would be computed twice
    return stoppable(lambda accelerator, signals: Quickstart(options, init, reason, accelerator, signals, clock).work())


def choose_init(options: argparse.Namespace) -> tuple[str, str]:
    """The checkpoint to use, and why this one."""
    if options.init is not None or options.format is not None:
        return init_text(options.init, options.format), "--init"
    folder = Path(options.data.removeprefix("folder:"))
    files = sorted(p for p in folder.iterdir() if p.name.endswith(ENDINGS)) if folder.is_dir() else []
    if len(files) > 1:
        raise Problem(f"{folder} holds {len(files)} checkpoints; choose one with --init {shlex.quote(str(files[0]))}")
    if files:
        return str(files[0]), "it is beside the photos"
    cards = [read_card(path) for path in list_cards().values()]
    cached = [card for card in cards if is_cached(card) and card.name != SHIPPED]
    if cached:
        best: Card = max(cached, key=lambda card: (card.scores_on == "ImageNet-1k", card.linear_top1 or 0.0))
        return best.name, "it is on this machine"
    if options.download:
        return DOWNLOADED, "--download"
    memory = config() / "quickstart.json"
    if memory.is_file():
        return SHIPPED, f"it comes with the package; you declined {DOWNLOADED} before, --download downloads it"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return SHIPPED, "it comes with the package"
    card = read_card(list_cards()[DOWNLOADED])
    sys.stderr.write(
        f"No checkpoint was given. {card.name} is a good one for photos: {card.size_mb} MB, licence {card.licence}, "
        f"{card.knn_top1:g} % k-NN accuracy on {card.scores_on}. Download it? [Y/n] "
    )
    sys.stderr.flush()
    answer = sys.stdin.readline()  # empty: the end of the input
    if answer and answer.strip().lower() in ("", "y", "yes"):
        return DOWNLOADED, "you agreed to its download"
    if answer.strip().lower() in ("n", "no"):
        try:
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_json(memory, {"download": False})
            sys.stderr.write(f"Not downloaded. {memory} keeps this answer; --download downloads it later.\n")
        except OSError as error:
            sys.stderr.write(f"Not downloaded. This answer could not be kept ({error}).\n")
    return SHIPPED, "it comes with the package"


@dataclass(slots=True)
class Quickstart:
    """A first comparison on a folder of photos, from reading them to the page."""

    options: argparse.Namespace
    init: Init
    reason: str
    accelerator: Accelerator
    signals: Signals
    clock: Clock

    def work(self) -> None:
        import numpy as np

        from finetune_mile.images.splits import labelled_pools
        from finetune_mile.measures.advice import against, recommended, say_methods, say_several
        from finetune_mile.measures.probing import floor, measure_of

        options, out = self.options, self.options.out
        data = load_data(options.data)
        self.clock.say(f"{self.init.text}: the checkpoint ({self.reason})")
        facts: dict[str, Any] = {"data": options.data, "name": data.name, "init": self.init.text, "reason": self.reason}
        facts["weak"] = self.init.text == SHIPPED
        if facts["weak"]:
            self.warn(
                f"{SHIPPED} is a tiny network that has seen drawings, not photos: a real checkpoint is far better "
                f"(--init FILE, or --download for {DOWNLOADED})"
            )
        facts["findings"] = self.look(data)
        out.mkdir(parents=True, exist_ok=True)
        fraction = self.affordable(data)
        labelled = labelled_pools(data, fraction=fraction, seed=0).indices["labelled"]
        measure = measure_of(data.val.given)
        facts |= {
            "fraction": fraction, "labels": len(labelled), "images": len(data.val), "classes": len(data.classes),
            "measure": measure, "floor": dict(zip(("name", "mean"), floor(data), strict=True)),
        }  # fmt: skip
        split = None
        if fraction < 1:
            split = out / "labelled.txt"
            split.write_text("".join(f"{data.train.ids[i]}\n" for i in labelled), encoding="utf-8")
        self.clock.say(f"features of {len(labelled):,} labelled and {len(data.val):,} validation photos")
        store = self.features(data, {"train": labelled, "val": np.arange(len(data.val))})
        self.clock.say("nearest neighbours and linear probes")
        scores = probes(store, data, labelled)
        runs, verdicts, refused = self.compare(data, fraction, split)
        if not runs:
            raise Problem(f"--data {options.data}: no method can be trained on these labels", *refused.values())
        simplest = next(iter(runs))  # softmax, or sigmoid for sets of labels
        gaps = against(runs, simplest)
        best = recommended(gaps, simplest)
        bar = self.recipe("auto", 0, fraction, split, []).recipe.block.auto.g_min
        facts |= {
            "refused": refused, "gate": verdicts, "rows": summary(scores | runs, measure), "best": best,
            "verdicts": say_methods(gaps, simplest) + ([say_several(verdicts, bar)] if verdicts else []),
        }  # fmt: skip
        doubts, rows = self.doubts(data, store, labelled)
        facts |= doubts
        facts |= self.model(best, fraction, split)
        facts["seconds"] = self.clock.used
        write_json(out / "quickstart.json", facts)
        self.write_page(data, facts, rows[:DOUBTS])
        show(facts)
        sys.stdout.write(f"\n{out / 'quickstart.html'}\n")

    def doubts(self, data: Data, store: Store, labelled: Indices) -> tuple[dict[str, Any], list[int]]:
        """Labels that a probe of the other photos would not give, and their rows; none for sets of labels."""
        from finetune_mile.measures.probing import doubtful

        if data.train.given.ndim == 2:
            return {"doubts": []}, []
        self.clock.say("searching for doubtful labels")
        doubts, sure = doubtful(store.rows("train", labelled), data.train.given[labelled], len(data.classes))
        listed = {
            "held_out_accuracy": sure,
            "doubts": [
                {"id": data.train.ids[labelled[row]], "given": data.classes[given], "p_given": p_given,
                 "instead": data.classes[guess], "p_instead": p_guess}
                for row, given, p_given, guess, p_guess in doubts
            ],
        }  # fmt: skip
        return listed, [int(labelled[row]) for row, *_ in doubts]

    def write_page(self, data: Data, facts: dict[str, Any], shown: list[int]) -> None:
        from finetune_mile.pages.report import write_page
        from finetune_mile.training.display import duration

        highest = max(row["high"] for row in [*facts["rows"], *facts["model"]["steps"]])
        write_page(
            self.options.out / "quickstart.html", "quickstart.html", title=f"{data.name}: quickstart", names=NAMES,
            pictures=self.pictures(data, shown), duration=duration, folder=MODEL,
            top=min(10 * math.ceil(highest / 10 + 0.1), 100), **facts,
        )  # fmt: skip

    def warn(self, sentence: str) -> None:
        sys.stderr.write(f"warning: {sentence}\n")

    def look(self, data: Data) -> list[str]:
        """Read every image once; sentences about what was seen."""
        from finetune_mile.images.alike import SHOWN
        from finetune_mile.images.checks import examine, report
        from finetune_mile.images.index import BadImages, say_unreadable

        self.clock.say(f"reading {len(data.train) + len(data.val):,} photos")
        splits = {name: examine(images, name, self.options.workers)
                  for name, images in (("train", data.train), ("val", data.val))}  # fmt: skip
        for name, findings in splits.items():
            bad = {findings.images.ids[index]: reason for index, reason in sorted(findings.bad.items())}
            if len(bad) > allowed(len(findings.images)):
                raise Problem(
                    f"{self.options.data}: {len(bad):,} of {len(findings.images):,} {name} images cannot be "
                    f"read; `finetune-mile doctor --data {shlex.quote(self.options.data)}` lists them"
                )
            for image, reason in list(bad.items())[:SHOWN]:  # the page has the number of all
                self.warn(f"{name} image {image} is bad ({reason}) and is skipped")
            BadImages.told(self.options.data, name, bad)  # the runs of this command need not
        if data.unreadable:
            self.warn(f"{self.options.data}: {say_unreadable(data.unreadable)}")
        return list(report(data, splits))

    def features(self, data: Data, rows: dict[Split, Indices]) -> Store:
        """Features, of which only the `rows` are sure to be there."""
        return features_of(self.init, data, self.options, self.accelerator, self.signals, rows=rows)

    def affordable(self, data: Data) -> float:
        """The share of the labels whose features can be had in the time; a few are timed."""
        import numpy as np

        from finetune_mile.images.splits import one_label_each

        some = np.arange(min(len(data.val), 2 * TIMED))
        one = np.arange(1)
        self.features(data, {"train": one, "val": some[: len(some) // 2]})  # the first batch is slow
        began = time.monotonic()
        self.features(data, {"train": one, "val": some})
        pace = (time.monotonic() - began) / max(len(some) - len(some) // 2, 1)
        seconds = float(self.options.minutes) * 60 * FEATURE_SHARE
        labels = int((one_label_each(data.train.given) >= 0).sum())
        wanted = labels + len(data.val)
        if pace * wanted <= seconds:
            return 1.0
        share = min(max(seconds / pace - len(data.val), len(data.classes)) / labels, 1.0)
        self.warn(
            f"features of all {wanted:,} photos would take {pace * wanted / 60:.0f} minutes, so {share:.0%} of the "
            "labels are used; raise --minutes or lower --size to use more"
        )
        return max(share, 1e-6)

    def recipe(self, method: str, seed: int, fraction: float, split: Path | None, sets: Sequence[str]) -> Resolved:
        flags = {"init": self.init.text, "data": self.options.data, "method": method, "seed": seed,
                 "fraction": fraction, "arch": self.options.arch}  # fmt: skip
        flags["split"] = None if split is None else str(split)
        own = [f"size={self.options.size}"] if self.options.size else []
        own += [f"workers={self.options.workers}"] if self.options.workers is not None else []
        return resolve({key: value for key, value in flags.items() if value is not None}, [*own, *sets])

    def compare(
        self, data: Data, fraction: float, split: Path | None
    ) -> tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, str]]:
        """Train a classifier on the features with each method and several seeds.

        Returns:
            For each method its scores (seeds, units) on the validation images, as `scored` has them; what `auto`
            measured, once per seed; the methods that these labels cannot be trained with, and why.
        """
        import numpy as np
        import torch

        from finetune_mile.measures.probing import scored
        from finetune_mile.networks.heads import get_head, set_head
        from finetune_mile.training.setup import set_up
        from finetune_mile.training.start import start_head
        from finetune_mile.training.train import train_phases

        wanted = dict(COMPARED)
        refused: dict[str, str] = {}
        if data.train.given.ndim == 2:
            refused["softmax"] = "it is meant for one label per photo, and these photos have sets of labels."
            del wanted["softmax"]
        self.clock.say(f"{len(wanted)} methods on these features, {SEEDS} seeds each")
        fixed = ["trunk=frozen", "keep=last", "evaluate.images=0", "checkpoint_every=100000"]
        scores: dict[str, Tensor] = {}
        heads: dict[tuple[str, bytes], nn.Linear] = {}  # fitted on these labels
        verdicts: list[dict[str, Any]] = []
        everything = np.arange(len(data.val))
        with (
            progress("comparing methods", SEEDS * len(wanted)) as advance,
            tempfile.TemporaryDirectory(dir=self.options.out) as place,
        ):
            for method, sets in wanted.items():
                rows = []
                for seed in range(SEEDS):
                    path = Path(place) / f"{method}-{seed}"
                    recipe = self.recipe(method, seed, fraction, split, [*fixed, *sets]).recipe
                    try:
                        setup = set_up(recipe, self.init, None, path, self.signals)
                    except Problem as problem:
                        refused[method] = " ".join(problem.sentences)
                        break
                    folder = RunFolder.create(path, to_yaml(setup.recipe), overwrite=False)
                    setup.viewer.get_ready()
                    labels = recipe.activation, setup.pools.indices["labelled"].tobytes()
                    if labels in heads:
                        set_head(setup.network, copy.deepcopy(heads[labels]))
                    else:
                        start_head(setup, fit=True)
                        heads[labels] = copy.deepcopy(get_head(setup.network))
                    loop, _ = train_phases(setup, folder, visible=False)
                    logits = setup.viewer.outputs(loop.learner(), setup.data.val, everything)
                    rows.append(scored(logits, data.val.given, recipe.activation))
                    gates = [record for record in folder.metrics() if record["kind"] == "gate"]
                    verdicts += gates[-1:]
                    advance(1)
                if rows:
                    scores[method] = torch.stack(rows)
        return scores, verdicts, refused

    def model(self, method: str, fraction: float, split: Path | None) -> dict[str, Any]:
        """Make the model that `predict` takes, in the time that is left; and the commands to go on with."""
        path = self.options.out / MODEL
        made = train_in_time(
            self.clock, lambda sets: self.recipe(method, 0, fraction, split, sets), self.init, path, self.signals,
            brief=True, refit=True,
        )  # fmt: skip
        if made.code > 128:
            self.signals.raise_if_caught()
        if made.code:
            raise Problem(f"{path}: training failed; its folder says why")
        commands = {"predict": shlex.join(["finetune-mile", "predict", str(path), "PHOTOS"])}
        longer = made.facts["left_out"]
        if longer:
            words = ["finetune-mile", "run", "--init", self.init.text, "--data", self.options.data, "--method", method]
            words += ["--arch", self.options.arch] if self.options.arch else []
            words += ["--size", str(self.options.size)] if self.options.size else []
            commands["fine-tune"] = shlex.join(words)
        return {"model": made.facts, "choice": say_choice(made.facts), "commands": commands}

    def pictures(self, data: Data, rows: list[int]) -> list[str]:
        """Training photos as sources of HTML images."""
        from finetune_mile.core.types import Preprocess
        from finetune_mile.images.pipeline import centre_view
        from finetune_mile.pages.report import data_url, png_of

        shape = Preprocess(size=112, crop=1.0)
        return [data_url(png_of(centre_view(data.train.read(row), shape))) for row in rows]


def probes(store: Store, data: Data, labelled: Indices) -> dict[str, Tensor]:
    """Scores (1, units) of nearest neighbours and linear probes."""
    from finetune_mile.learning.probe import NEIGHBOURS
    from finetune_mile.measures.probing import probe

    found = probe(store, data, [labelled], k=NEIGHBOURS)
    return {kind if kind == "k-NN" else f"{kind} probe": scores for kind, scores in found.items()}


def summary(scores: dict[str, Tensor], measure: str) -> list[dict[str, Any]]:
    """Rows of the page's table: the score in per cent with its 95 % interval, and that of each seed."""
    from finetune_mile.measures.advice import interval

    edges = {name: interval(each.mean(0), measure) for name, each in scores.items()}
    return [
        {"name": name, "mean": float(each.mean(0).nanmean()), "low": edges[name][0], "high": edges[name][1],
         "seeds": each.nanmean(1).tolist()}
        for name, each in scores.items()
    ]  # fmt: skip


def show(facts: dict[str, Any]) -> None:
    """Print what the page says first."""
    from rich.table import Table

    from finetune_mile.training.display import duration, wide_console

    measure = "mAP" if facts["measure"] == "map" else "accuracy"
    title = f"{facts['name']}: {facts['labels']:,} labelled photos, {measure} on {facts['images']:,} validation photos"
    table = Table("on features of the checkpoint", measure, "95 % interval", title=title, title_justify="left")
    table.add_row(facts["floor"]["name"], f"{facts['floor']['mean']:.1f}", "")
    for row in facts["rows"]:
        table.add_row(row["name"], f"{row['mean']:.1f}", f"{row['low']:.1f} to {row['high']:.1f}")
    table.add_section()
    for step in facts["model"]["steps"]:
        name = f"{facts['best']}, {step['name']}" + (" (kept)" if step["name"] == facts["model"]["kept"] else "")
        table.add_row(name, f"{step['score']:.1f}", f"{step['low']:.1f} to {step['high']:.1f}")
    out = wide_console()
    out.print(table)
    left_out = [f"{method} was left out: {sentence}" for method, sentence in facts["refused"].items()]
    for sentence in [*facts["choice"], *facts["verdicts"], *left_out]:
        out.print(sentence, soft_wrap=True, markup=False)
    out.print(f"Next:  {facts['commands']['predict']}", soft_wrap=True, markup=False)
    if "fine-tune" in facts["commands"]:
        time_needed = duration(facts["model"]["left_out"][0]["seconds"])
        out.print(f"Or, in about {time_needed}:  {facts['commands']['fine-tune']}", soft_wrap=True, markup=False)
