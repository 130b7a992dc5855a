"""`finetune-mile quickstart DIR`: what works on these photos, in minutes, on one page (docs/own-photos.md)."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
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
from finetune_mile.config.flags import FORMAT, Parser
from finetune_mile.config.resolve import Resolved, resolve, to_yaml
from finetune_mile.core.console import progress
from finetune_mile.core.files import write_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.index import Data, allowed
from finetune_mile.images.sources import load_data
from finetune_mile.training.folder import RunFolder, next_folder
from finetune_mile.verbs.embed import check_flags, features_of, stoppable

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

    from finetune_mile.images.order import Indices
    from finetune_mile.training.features import Split
    from finetune_mile.training.processes import Signals

EPILOG = """examples:
  finetune-mile quickstart photos                         photos/CLASS/IMAGE.jpg, or photos/train/... and photos/val/...
  finetune-mile quickstart photos --init moco.pth.tar --minutes 30

Without --init: a checkpoint file in DIR, else a downloaded card, else the small network that comes with the package.
"""
SHIPPED, DOWNLOADED = "simclr-demo", "swav"
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


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile quickstart", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compare methods on features of your photos, fine-tune the best one "
        "if there is time, and write one page about it.",
    )  # fmt: skip
    parser.add_argument("data", metavar="DIR", help="a folder of photos, or any --data of `run`")
    parser.add_argument("--init", help="the checkpoint, as for `run`")
    parser.add_argument("--minutes", type=float, default=10.0, help="time to use (default: %(default)g)")
    parser.add_argument("--download", action="store_true", help=f"without --init: may download one ({DOWNLOADED})")
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
    if not 0 < options.minutes <= 10_000:
        raise Problem(f"--minutes {options.minutes:g}: must be above 0 and at most 10,000")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Problem("quickstart is one process: start it without accelerate launch or torchrun")
    options.out = options.out or next_folder(Path("runs"), "quickstart")
    if os.path.lexists(options.out) and (not options.out.is_dir() or any(options.out.iterdir())):
        raise Problem(f"--out {options.out}: already exists; choose a new folder")
    text, reason = choose_init(options)
    (init,) = check_flags(options, [text])
    return stoppable(lambda accelerator, signals: Quickstart(options, init, reason, accelerator, signals).work(),
                     precision="auto")  # fmt: skip


def choose_init(options: argparse.Namespace) -> tuple[str, str]:
    """The checkpoint to use, and why this one."""
    if options.init is not None:
        return options.init, "--init"
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
    return SHIPPED, "it comes with the package"


@dataclass(slots=True)
class Quickstart:
    """A first comparison on a folder of photos, from reading them to the page."""

    options: argparse.Namespace
    init: Init
    reason: str
    accelerator: Accelerator
    signals: Signals
    began: float = 0.0

    def work(self) -> None:
        import numpy as np

        from finetune_mile.images.splits import labelled_pools, one_label_each
        from finetune_mile.learning.probe import NEIGHBOURS
        from finetune_mile.measures.probing import doubtful, majority, probe
        from finetune_mile.pages.report import write_page

        self.began = time.monotonic()
        options, out = self.options, self.options.out
        data = load_data(options.data)
        self.say(f"{self.init.text}: the checkpoint ({self.reason})")
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
        facts |= {
            "fraction": fraction, "labels": len(labelled), "images": len(data.val), "classes": len(data.classes),
            "majority": majority(data),
        }  # fmt: skip
        split = None
        if fraction < 1:
            split = out / "labelled.txt"
            split.write_text("".join(f"{data.train.ids[i]}\n" for i in labelled), encoding="utf-8")
        self.say(f"features of {len(labelled):,} labelled and {len(data.val):,} validation photos")
        train, val = self.features(data, {"train": labelled, "val": np.arange(len(data.val))})
        self.say("nearest neighbours and linear probes")
        right = {f"{kind} probe" if kind != "k-NN" else kind: hits
                 for kind, hits in probe(train, val, data, [labelled], k=NEIGHBOURS).items()}  # fmt: skip
        runs, verdicts, refused = self.compare(data, fraction, split)
        right |= runs
        facts |= {
            "refused": refused,
            "gate": verdicts,
            "rows": summary(right),
            "verdicts": conclusions(right, verdicts),
        }
        self.say("searching for doubtful labels")
        doubts, sure = doubtful(train[labelled], one_label_each(data.train.given)[labelled], len(data.classes))
        facts["held_out_accuracy"] = sure
        facts["doubts"] = [
            {"id": data.train.ids[labelled[row]], "given": data.classes[given], "p_given": p_given,
             "instead": data.classes[guess], "p_instead": p_guess}
            for row, given, p_given, guess, p_guess in doubts
        ]  # fmt: skip
        best = max((row for row in facts["rows"] if row["name"] in COMPARED), key=lambda row: row["mean"])["name"]
        facts |= self.fine_tune(best, fraction, split)
        facts["seconds"] = time.monotonic() - self.began
        write_json(out / "quickstart.json", facts)
        pictures = self.pictures(data, [int(labelled[row]) for row, *_ in doubts[:DOUBTS]])
        highest = max(facts.get("results", {}).get("accuracy", 0.0), *(row["high"] for row in facts["rows"]))
        top = min(10 * math.ceil(highest / 10 + 0.1), 100)  # of the page's scale
        page = {"title": f"{data.name}: quickstart", "pictures": pictures, "names": NAMES, "top": top}
        write_page(out / "quickstart.html", "quickstart.html", **page, **facts)
        show(facts)
        sys.stdout.write(f"\n{out / 'quickstart.html'}\n")

    def say(self, sentence: str) -> None:
        from finetune_mile.training.display import duration

        used = time.monotonic() - self.began
        sys.stderr.write(f"{duration(used):>6} of {self.options.minutes:g} min  {sentence}\n")

    def warn(self, sentence: str) -> None:
        sys.stderr.write(f"warning: {sentence}\n")

    def look(self, data: Data) -> list[str]:
        """Read every image once; sentences about what was seen."""
        from finetune_mile.verbs.doctor import examine, report

        self.say(f"reading {len(data.train) + len(data.val):,} photos")
        splits = {name: examine(images, name, self.options.workers)
                  for name, images in (("train", data.train), ("val", data.val))}  # fmt: skip
        for name, findings in splits.items():
            if len(findings.bad) > allowed(len(findings.images)):
                raise Problem(
                    f"{self.options.data}: {len(findings.bad):,} of {len(findings.images):,} {name} images cannot be "
                    f"read; `finetune-mile doctor --data {shlex.quote(self.options.data)}` lists them"
                )
        return list(report(data, splits))

    def features(self, data: Data, rows: dict[Split, Indices]) -> tuple[Any, Any]:
        """Training and validation features (N, D), where only the `rows` are sure to be there."""
        store = features_of(self.init, data, self.options, self.accelerator, self.signals, rows=rows)
        return store.features("train"), store.features("val")

    def affordable(self, data: Data) -> float:
        """The share of the labels whose features can be had in the time; a few are timed."""
        import numpy as np

        some = np.arange(min(len(data.val), 2 * TIMED))
        one = np.arange(1)
        self.features(data, {"train": one, "val": some[: len(some) // 2]})  # the first batch is slow
        began = time.monotonic()
        self.features(data, {"train": one, "val": some})
        pace = (time.monotonic() - began) / max(len(some) - len(some) // 2, 1)
        seconds = float(self.options.minutes) * 60 * FEATURE_SHARE
        wanted = len(data.train) + len(data.val)
        if pace * wanted <= seconds:
            return 1.0
        share = max(seconds / pace - len(data.val), len(data.classes)) / len(data.train)
        self.warn(
            f"features of all {wanted:,} photos would take {pace * wanted / 60:.0f} minutes, so {share:.0%} of the "
            "labels are used; raise --minutes or lower --size to use more"
        )
        return min(max(share, 1e-6), 1.0)

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
            For each method which validation images it gets right, (seeds, n); what `auto` measured, once per seed; the
            methods that these labels cannot be trained with, and why.
        """
        import numpy as np
        import torch

        from finetune_mile.measures.probing import hits
        from finetune_mile.networks.heads import get_head, set_head
        from finetune_mile.training.setup import set_up
        from finetune_mile.training.start import start_head
        from finetune_mile.training.train import train_phases

        self.say(f"{len(COMPARED)} methods on these features, {SEEDS} seeds each")
        fixed = ["trunk=frozen", "keep=last", "evaluate.images=0", "checkpoint_every=100000"]
        right: dict[str, Tensor] = {}
        heads: dict[tuple[str, bytes], nn.Linear] = {}  # fitted on these labels
        verdicts, refused = [], {}
        everything = np.arange(len(data.val))
        with (
            progress("comparing methods", SEEDS * len(COMPARED)) as advance,
            tempfile.TemporaryDirectory(dir=self.options.out) as place,
        ):
            for method, sets in COMPARED.items():
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
                    guesses = logits.nan_to_num().argmax(1)
                    rows.append(hits(guesses, data.val.given).masked_fill_(logits.isnan().all(1), torch.nan))
                    gates = [record for record in folder.metrics() if record["kind"] == "gate"]
                    verdicts += gates[-1:]
                    advance(1)
                if rows:
                    right[method] = torch.stack(rows)
        return right, verdicts, refused

    def fine_tune(self, method: str, fraction: float, split: Path | None) -> dict[str, Any]:
        """Fine-tune the whole network if there is time: its results, or how long it would take; and the command."""
        from finetune_mile.training.pricing import estimate
        from finetune_mile.training.setup import set_up
        from finetune_mile.training.train import open_folder, train

        resolved = self.recipe(method, 0, fraction, split, [])
        words = ["finetune-mile", "run", "--init", self.init.text, "--data", self.options.data, "--method", method]
        words += ["--arch", self.options.arch] if self.options.arch else []
        words += ["--size", str(self.options.size)] if self.options.size else []
        left = self.options.minutes * 60 - (time.monotonic() - self.began)
        self.say(f"estimating how long fine-tuning with {method} takes")
        seconds = float(estimate(resolved.recipe).seconds[2])
        facts: dict[str, Any] = {"best": method, "command": shlex.join(words), "fine_tuning_seconds": seconds}
        if seconds > left:
            self.say(f"fine-tuning is left out: about {max(seconds / 60, 1):.0f} min; the page has the command")
            return facts
        self.say(f"fine-tuning takes about {max(seconds / 60, 1):.0f} min")
        setup = set_up(resolved.recipe, self.init, None, self.options.out / "finetune", self.signals)
        folder = open_folder(setup, self.options.out / "finetune", resume=False, overwrite=False)
        with contextlib.redirect_stdout(sys.stderr):
            code = train(setup, folder)
        if code > 128:
            self.signals.raise_if_caught()
        if code:
            raise Problem(f"{folder.path}: fine-tuning failed; run it alone: {shlex.join(words)}")
        return facts | {
            "results": json.loads((folder.path / "results.json").read_text(encoding="utf-8")),
            "run": folder.path.name,
        }

    def pictures(self, data: Data, rows: list[int]) -> list[str]:
        """Training photos as sources of HTML images."""
        from finetune_mile.core.types import Preprocess
        from finetune_mile.images.pipeline import centre_view
        from finetune_mile.pages.report import data_url, png_of

        shape = Preprocess(size=112, crop=1.0)
        return [data_url(png_of(centre_view(data.train.read(row), shape))) for row in rows]


def summary(right: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Rows of the page's table: accuracy in per cent with its 95 % interval over images, and of each seed."""
    from finetune_mile.measures.intervals import intervals

    edges = intervals({name: hits.mean(0) for name, hits in right.items()})
    return [
        {"name": name, "mean": float(hits.mean(0).nanmean()), "low": edges[name][0], "high": edges[name][1],
         "seeds": hits.nanmean(1).tolist()}
        for name, hits in right.items()
    ]  # fmt: skip


def conclusions(right: dict[str, Tensor], verdicts: list[dict[str, Any]]) -> list[str]:
    """Does multi-label training help, and do the photos seem to hold several classes?"""
    from finetune_mile.measures.intervals import compare

    sentences = []
    for method, name in (("mile", "MILe"), ("auto", "MILe with thresholds from held-out labels (auto)")):
        if method not in right or "sigmoid" not in right:
            continue
        gap = compare({"accuracy": right[method].mean(0)}, {"accuracy": right["sigmoid"].mean(0)})["accuracy"]
        words = "is better than" if gap.low > 0 else "is worse than" if gap.high < 0 else "is level with"
        sentences.append(
            f"{name} {words} plain sigmoid training here: {gap.difference:+.1f} points ({gap.low:+.1f} to "
            f"{gap.high:+.1f})."
        )
    if verdicts:
        opened = sum(bool(verdict["open"]) for verdict in verdicts)
        labels = sum(verdict["labels_found"] for verdict in verdicts) / len(verdicts)
        if opened > len(verdicts) / 2:
            sentences.append(
                f"Many photos seem to hold more than one of the classes: method auto found this for {opened} of "
                f"{len(verdicts)} seeds, with {labels:.1f} labels per photo. Try --method auto on the complete network."
            )
        else:
            sentences.append(
                f"No evidence that photos hold more than one of the classes: method auto found some for {opened} of "
                f"{len(verdicts)} seeds."
            )
    return sentences


def show(facts: dict[str, Any]) -> None:
    """Print what the page says first."""
    from rich.table import Table

    from finetune_mile.training.display import wide_console

    title = f"{facts['name']}: {facts['labels']:,} labels, accuracy on {facts['images']:,} validation photos"
    table = Table("on features of the checkpoint", "accuracy", "95 % interval", title=title, title_justify="left")
    table.add_row("the most frequent class", f"{facts['majority']:.1f}", "")
    for row in facts["rows"]:
        table.add_row(row["name"], f"{row['mean']:.1f}", f"{row['low']:.1f} to {row['high']:.1f}")
    if "results" in facts:
        table.add_section()
        table.add_row(f"{facts['best']}, all layers", f"{facts['results']['accuracy']:.1f}", "")
    out = wide_console()
    out.print(table)
    for sentence in facts["verdicts"]:
        out.print(sentence, soft_wrap=True, markup=False)
    out.print(f"Next:  {facts['command']}", soft_wrap=True, markup=False)
