"""`finetune-mile eval`: every score of any classifier on any data, or of logits that were saved before."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.init import Init
from finetune_mile.config.flags import Parser
from finetune_mile.core.problems import Problem, tell
from finetune_mile.core.types import LARGEST_BATCH
from finetune_mile.images.checks import check_truth
from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.sources import split_name
from finetune_mile.training.folder import next_folder
from finetune_mile.verbs.classifiers import parse_model, run_folder
from finetune_mile.verbs.predicting import predict_with, recipe_of

if TYPE_CHECKING:
    from finetune_mile.measures.predictions import Predictions

EPILOG = """examples:
  finetune-mile eval --model run:runs/demo-1                        a run, on the data it was trained for
  finetune-mile eval --model timm:resnet50.a1_in1k --data imagenet:DIR --truth real
  finetune-mile eval --model run:A --compare run:B --data photos    which one is better, and how sure is that
  finetune-mile eval --logits runs/eval-1/logits.parquet            the same numbers again, without the model
  accelerate launch -m finetune_mile.cli eval ...                   on all devices

in DIR: results.json, per_class.csv, logits.parquet, eval.json and, with --compare, comparison.json
"""


def build_parser() -> Parser:
    """Every flag of eval."""
    parser = Parser(
        prog="finetune-mile eval", allow_abbrev=False, epilog=EPILOG, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    what = parser.add_argument_group("what")
    what.add_argument("--model", help="run:DIR, timm:NAME, hf:NAME, or a checkpoint file with a head")
    what.add_argument("--logits", type=Path, metavar="FILE", help="instead of a model: logits that eval saved")
    what.add_argument("--data", help="as for run.py; a run knows its own")
    what.add_argument("--part", choices=("val", "train", "all"),
                      help="which images (default: val; all of a folder that has no train/)")  # fmt: skip
    what.add_argument("--truth", help="true label sets: real, csv:FILE, counts:FILE.npy,INDEX.csv,0.1")
    what.add_argument("--compare", metavar="OTHER", help="a second model, or a file of its logits")
    what.add_argument("--weights", metavar="FILE", help="for timm:NAME: a file of weights; none: random ones")
    how = parser.add_argument_group("how")
    how.add_argument("--activation", choices=("softmax", "sigmoid"), help="default: what the model was trained with")
    how.add_argument("--rule", choices=("threshold", "argmax_or_threshold"),
                     help="set that the plain f1@... means (default: the run's, else threshold)")  # fmt: skip
    how.add_argument("--batch-size", type=_positive, default=128, help="over all processes (default: %(default)s)")
    how.add_argument("--workers", type=_whole, help="loader processes (default: from the cores)")
    how.add_argument(
        "--draws", type=_whole, default=1000, help="of the bootstrap; 0: no intervals (default: %(default)s)"
    )
    how.add_argument("--seed", type=_seed, default=0, help="of the bootstrap and of random weights")
    where = parser.add_argument_group("where")
    where.add_argument("--out", type=Path, metavar="DIR", help="default: runs/eval-<number>")
    where.add_argument("--overwrite", action="store_true", help="replace an evaluation that is in --out")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:20]) <= LARGEST_BATCH:
        raise argparse.ArgumentTypeError(f"{text[:80]} is not a number of images from 1 to {LARGEST_BATCH:,}")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text[:80]} is not a whole number from 0 to 999,999")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or not int(text[:20]) < 2**32:
        raise argparse.ArgumentTypeError(f"{text[:80]} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags and refuse, all at once, what cannot work; no torch yet."""
    parser = build_parser()
    options: argparse.Namespace
    options, rest = parser.parse_known_args(argv)
    problems = parser.strangers(rest)
    if (options.model is None) == (options.logits is None):
        problems.append("give --model (run:DIR, timm:NAME, hf:NAME, a file) or --logits FILE, one of them")
    for check in (_check_sources, _check_data, _check_out):
        try:
            check(options)
        except Problem as problem:
            problems += problem.sentences
    if problems:
        raise Problem(*problems)
    return options


def _check_sources(options: argparse.Namespace) -> None:
    if options.logits is not None and not options.logits.is_file():
        raise Problem(f"--logits {options.logits}: no such file")
    if options.model is not None:
        options.model = parse_model(options.model, "--model")
    if options.compare is not None:
        options.compare = parse_model(options.compare, "--compare")
    if options.weights not in (None, "none") and not Path(options.weights).is_file():
        raise Problem(f"--weights {options.weights}: no such file (none: random weights)")


def _check_data(options: argparse.Namespace) -> None:
    if options.data is None:
        folder = run_folder(options.model) if isinstance(options.model, Init) else None
        recipe = recipe_of(folder) if folder else {}
        options.data, options.truth = recipe.get("data"), options.truth or recipe.get("truth")
    needed = options.model is not None or (options.compare is not None and not _is_logits(options.compare))
    if needed and options.data is None:
        raise Problem("--data is missing: on which images? (demo, folder:DIR, ...)")
    if needed:
        split_name(options.data)
    if options.truth is not None:
        check_truth(options.truth)


def _check_out(options: argparse.Namespace) -> None:
    out = options.out = options.out or next_folder(Path("runs"), "eval")
    if out.exists() and not out.is_dir():
        raise Problem(f"--out {out}: is a file; choose another name")
    if out.is_dir() and any(out.iterdir()):
        if not (out / "eval.json").is_file():
            raise Problem(f"--out {out}: exists and is not an evaluation; choose another name")
        if not options.overwrite:
            raise Problem(f"--out {out}: holds an evaluation; choose another name, or say --overwrite")


def _is_logits(source: Init | str) -> bool:
    return isinstance(source, Init) and source.kind == "file" and source.name.endswith(".parquet")


def main(argv: list[str] | None = None) -> int:
    """The command: 0 fine, 1 the evaluation failed, 2 the command or its input was wrong."""
    try:
        return run(parse(sys.argv[1:] if argv is None else argv))
    except Problem as problem:
        return tell(problem)
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace) -> int:
    """The evaluation itself; from here on torch is needed."""
    from finetune_mile.measures.intervals import compare
    from finetune_mile.measures.predictions import read_predictions
    from finetune_mile.measures.scoring import measure
    from finetune_mile.training import devices
    from finetune_mile.verbs.evaluate_page import show, write_comparison, write_evaluation

    precision = devices.wanted_precision("no")
    accelerator = devices.start(precision=precision, seed=options.seed, track="none", project=str(options.out))
    if options.logits is not None:
        first = read_predictions(options.logits)
    else:
        first = predict_with(options.model, options, accelerator)
    if options.truth is not None:
        first = _with_truth(first, options.truth)
    how: dict[str, Any] = {key: first.about.get(key) for key in ("prediction_set", "rho")}
    how["prediction_set"] = options.rule or how["prediction_set"] or "threshold"
    other = None
    if options.compare is not None:
        if _is_logits(options.compare):
            other = read_predictions(Path(options.compare.name))
        else:
            other = predict_with(options.compare, options, accelerator)
        other = _matched(other, first, options.compare)
    if not accelerator.is_main_process:
        return 0
    for found in (first, other):
        bad = 0 if found is None else int((~found.logits.isfinite().all(1)).sum())
        if found is not None and bad:
            sys.stderr.write(f"error: {found.about['model']} gives NaN or infinity for {bad} images\n")
            return 1
    activation = options.activation or first.activation
    measured = measure(first.logits, first.given, first.truth, activation=activation, main=first.main, **how)
    facts = how | {"truth": options.truth, "world_size": accelerator.num_processes}
    results = write_evaluation(options.out, first, measured, facts, options, activation=activation)
    show(results, first, options.out)
    if other is not None:
        activation = options.activation or other.activation
        theirs = measure(other.logits, first.given, first.truth, activation=activation, main=first.main, **how)
        pairs = ((measured.samples, theirs.samples), (measured.by_class, theirs.by_class))
        differences = [compare(a, b, draws=max(options.draws, 1), seed=options.seed) for a, b in pairs]
        write_comparison(options.out, first, other, differences[0] | differences[1])
    return 0


def _with_truth(found: Predictions, spec: str) -> Predictions:
    """Predictions with label sets from elsewhere, joined by id."""
    from finetune_mile.images.truth import with_truth

    images = ImageSet(ids=list(found.ids), given=found.given, truth=None, read=_no_images)
    data = with_truth(Data(name="", classes=found.classes, train=images, val=images), spec)
    return dataclasses.replace(found, truth=data.val.truth)


def _no_images(index: int) -> Any:
    raise RuntimeError(f"image {index} was asked for, but only its label was wanted")


def _matched(other: Predictions, first: Predictions, spec: Init) -> Predictions:
    """The other model's predictions in the order of the first one's images and classes."""
    place = {name: i for i, name in enumerate(other.ids)}
    missing = [name for name in first.ids if name not in place]
    if missing or len(place) != len(first.ids):
        some = f"{len(missing)} of the images are missing, first {missing[0]}" if missing else "it has more images"
        raise Problem(f"--compare {spec}: both models must have seen the same images; {some}")
    if set(other.classes) != set(first.classes):
        odd = sorted(set(other.classes) ^ set(first.classes))
        raise Problem(f"--compare {spec}: its classes are others, such as {odd[0]!r}")
    rows = [place[name] for name in first.ids]
    columns = [other.classes.index(name) for name in first.classes]
    return dataclasses.replace(
        other, ids=first.ids, classes=first.classes, logits=other.logits[rows][:, columns], given=first.given,
        truth=first.truth,
    )  # fmt: skip
