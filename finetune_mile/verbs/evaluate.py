"""`finetune-mile eval`: every score of any classifier on any data, or of logits that were saved before."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from finetune_mile.checkpoints.init import Init
from finetune_mile.config.flags import Parser, check_all
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import LARGEST_BATCH
from finetune_mile.images.sources import check_truth, split_name
from finetune_mile.training.folder import claim_folder
from finetune_mile.training.origin import is_logits, parse_model, recipe_of

EPILOG = """examples:
  finetune-mile eval --model run:runs/demo-1                        a run, on the data it was trained for
  finetune-mile eval --model timm:resnet50.a1_in1k --data imagenet:DIR --truth real
  finetune-mile eval --model run:A --compare run:B --data photos    compare two models, with intervals
  finetune-mile eval --logits runs/eval-1/logits.parquet            the same numbers again, without the model
  accelerate launch -m finetune_mile.cli eval ...                   on all devices

in DIR: results.json, per_class.csv, logits.parquet, eval.json and, with --compare, comparison.json
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile eval", allow_abbrev=False, epilog=EPILOG, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    inputs = parser.add_argument_group("what to evaluate")
    inputs.add_argument("--model", help="run:DIR, timm:NAME, hf:NAME, or a checkpoint file with a head")
    inputs.add_argument("--logits", type=Path, metavar="FILE", help="instead of a model: logits that eval saved")
    inputs.add_argument("--data", help="as for `run`; default: the run's own data")
    inputs.add_argument(
        "--part",
        choices=("val", "train", "all"),
        help="which images (default: val; all of a folder that has no train/)",
    )
    inputs.add_argument("--truth", help="true label sets: real, csv:FILE, counts:FILE.npy,INDEX.csv,0.1")
    inputs.add_argument("--compare", metavar="OTHER", help="a second model, or a file of its logits")
    inputs.add_argument("--weights", metavar="FILE", help="for timm:NAME: a file of weights; none: random ones")
    scoring = parser.add_argument_group("how")
    scoring.add_argument(
        "--activation", choices=("softmax", "sigmoid"), help="default: what the model was trained with"
    )
    scoring.add_argument(
        "--rule",
        choices=("threshold", "argmax_or_threshold", "argmax"),
        help="set that the plain f1@... means (default: the run's, else threshold)",
    )
    size, whole = partial(_number, 1, LARGEST_BATCH, "number of images"), partial(_number, 0, 999_999, "whole number")
    scoring.add_argument("--batch-size", type=size, default=128, help="over all processes (default: %(default)s)")
    scoring.add_argument("--workers", type=whole, help="loader processes (default: from the cores)")
    scoring.add_argument(
        "--draws", type=whole, default=1000, help="of the bootstrap; 0: no intervals (default: %(default)s)"
    )
    seed = partial(_number, 0, 2**32 - 1, "whole number")
    scoring.add_argument("--seed", type=seed, default=0, help="of the bootstrap and of random weights")
    output = parser.add_argument_group("where")
    output.add_argument("--out", type=Path, metavar="DIR", help="default: runs/eval-<number>")
    output.add_argument("--overwrite", action="store_true", help="replace an evaluation that is in --out")
    return parser


def _number(low: int, high: int, kind: str, text: str) -> int:
    if not text.isdecimal() or not low <= int(text[:20]) <= high:
        raise argparse.ArgumentTypeError(f"{text[:80]} is not a {kind} from {low} to {high:,}")
    return int(text)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags and refuse, all at once, what cannot work; no torch yet."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    return check(options, *parser.strangers(rest))


def check(options: argparse.Namespace, *unknown: str) -> argparse.Namespace:
    """Refuse, all at once, what cannot work, after sentences about `unknown` flags."""
    problems = [*unknown]
    if (options.model is None) == (options.logits is None):
        problems.append("give either --model (run:DIR, timm:NAME, hf:NAME, a file) or --logits FILE")
    check_all(problems, *(partial(each, options) for each in (_check_sources, _check_data, _check_out)))
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
    if options.data is None and isinstance(options.model, Init):
        recipe = recipe_of(options.model)
        options.data, options.truth = recipe.get("data"), options.truth or recipe.get("truth")
    if options.model is not None or (options.compare is not None and not is_logits(options.compare)):
        if options.data is None:
            raise Problem("--data is required: which images to evaluate on (demo, folder:DIR, ...)")
        split_name(options.data)
    if options.truth is not None:
        check_truth(options.truth)


def _check_out(options: argparse.Namespace) -> None:
    out = options.out
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise Problem(f"--out {out}: is a file; choose another name")
    if out.is_dir() and any(out.iterdir()):
        if not (out / "eval.json").is_file():
            raise Problem(f"--out {out}: exists and is not an evaluation; choose another name")
        if not options.overwrite:
            raise Problem(f"--out {out}: holds an evaluation; choose another name, or use --overwrite")


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 the evaluation failed, 2 the command or its input was wrong."""
    try:
        return run(parse(argv))
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace) -> int:
    """The evaluation; from here on torch is needed."""
    from finetune_mile.training.display import comparison_table, scores_table, wide_console
    from finetune_mile.training.evaluation import Evaluation

    evaluation = Evaluation.of_flags(options)
    scored = evaluation.score()
    if scored is not None:
        out = options.out or claim_folder(Path("runs"), "eval")
        evaluation.write(scored, out)
        console = wide_console()
        console.print(scores_table(scored.results, scored.models[0].about))
        console.print(*scored.notes(out), sep="\n", soft_wrap=True, markup=False)
        if scored.differences:
            console.print(comparison_table([model.about["model"] for model in scored.models], scored.differences))
    return 0
