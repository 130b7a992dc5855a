"""`finetune-mile eval`: every score of any classifier on any data, or of logits that were saved before."""

from __future__ import annotations

import argparse
from pathlib import Path

from finetune_mile.config.flags import Flags, Parser, attempt, check_all, outside, verb_parser
from finetune_mile.core.files import leftovers
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import LARGEST_BATCH, MOST_WORKERS
from finetune_mile.images.sources import check_truth, split_name
from finetune_mile.training.folder import claim_folder
from finetune_mile.training.origin import Evaluation, is_logits, parse_model, recipe_of

EPILOG = """examples:
  finetune-mile eval --model run:runs/demo-1                        a run, on the data it was trained for
  finetune-mile eval --model timm:resnet50.a1_in1k --data imagenet:DIR --truth real
  finetune-mile eval --model run:A --compare run:B --data photos    compare two models, with intervals
  finetune-mile eval --logits runs/eval-1/logits.parquet            the same numbers again, without the model
  accelerate launch -m finetune_mile.cli eval ...                   on all devices

in DIR: results.json, per_class.csv, logits.parquet, eval.json and, with --compare, comparison.json
"""
FLAGS: dict[str, Flags] = {
    "what to evaluate": {
        "--model": {"help": "run:DIR, timm:NAME, hf:NAME, or a checkpoint file with a head"},
        "--logits": {"type": Path, "metavar": "FILE", "help": "instead of a model: logits that eval saved"},
        "--data": {"help": "as for `run`; default: the run's own data"},
        "--part": {
            "choices": ("val", "train", "all"),
            "help": "which images (default: val; all of a folder that has no train/)",
        },
        "--truth": {"help": "true label sets: real, csv:FILE, counts:FILE.npy,INDEX.csv,0.1"},
        "--compare": {"metavar": "OTHER", "help": "a second model, or a file of its logits"},
        "--weights": {"metavar": "FILE", "help": "for timm:NAME: a file of weights; none: random ones"},
    },
    "how": {
        "--activation": {"choices": ("softmax", "sigmoid"), "help": "default: what the model was trained with"},
        "--rule": {
            "choices": ("threshold", "argmax_or_threshold", "argmax"),
            "help": "which labels count as predicted, for f1@... and coverage@... (default: the run's, else threshold)",
        },
        "--batch-size": {"type": int, "default": 128, "help": "over all processes (default: %(default)s)"},
        "--workers": {"type": int, "help": "loader processes (default: from the cores)"},
        "--draws": {"type": int, "default": 1000, "help": "of the bootstrap; 0: no intervals (default: %(default)s)"},
        "--seed": {"type": int, "default": 0, "help": "of the bootstrap and of random weights"},
    },
    "where": {
        "--out": {"type": Path, "metavar": "DIR", "help": "default: runs/eval-<number>"},
        "--overwrite": {"action": "store_true", "help": "replace an evaluation that is in --out"},
    },
}
RANGES = {"batch_size": (1, LARGEST_BATCH), "workers": (0, MOST_WORKERS), "draws": (0, 999_999), "seed": (0, 2**32 - 1)}


def build_parser() -> Parser:
    parser = verb_parser("eval", {}, description=__doc__, epilog=EPILOG)
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, how in flags.items():
            group.add_argument(name, **how)
    return parser


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 the evaluation failed, 2 the command or its input was wrong."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    evaluation = check(options, *parser.strangers(rest))
    from finetune_mile.training.display import comparison_table, scores_table, wide_console
    from finetune_mile.training.evaluation import evaluate, write

    scored = evaluate(evaluation)
    if scored is None:
        return 0
    out = options.out or claim_folder(Path("runs"), "eval")
    write(evaluation, scored, out)
    console = wide_console()
    console.print(scores_table(scored.results, scored.models[0].about))
    console.print(*scored.notes(out), sep="\n", soft_wrap=True, markup=False)
    if scored.differences:
        console.print(comparison_table([model.about["model"] for model in scored.models], scored.differences))
    return 0


def check(options: argparse.Namespace, *unknown: str) -> Evaluation:
    """The flags as a value; all that cannot work is refused at once, after sentences about `unknown` flags."""
    problems = [*unknown, *outside(options, **RANGES)]
    if (options.model is None) == (options.logits is None):
        problems.append("give either --model (run:DIR, timm:NAME, hf:NAME, a file) or --logits FILE")
    if options.logits is not None and not options.logits.is_file():
        problems.append(f"--logits {options.logits}: no such file")
    if options.weights not in (None, "none") and not Path(options.weights).is_file():
        problems.append(f"--weights {options.weights}: no such file (none: random weights)")
    model, compare = (
        None if text is None else attempt(problems, parse_model, text, flag)
        for text, flag in ((options.model, "--model"), (options.compare, "--compare"))
    )
    recipe = attempt(problems, recipe_of, model) if model is not None and options.data is None else None
    recipe = recipe or {}
    data, truth = options.data or recipe.get("data"), options.truth or recipe.get("truth")
    if options.model is not None or (compare and not is_logits(compare)):
        if data is None:
            problems.append("--data is required: which images to evaluate on (demo, folder:DIR, ...)")
        else:
            attempt(problems, split_name, data)
    if truth is not None:
        attempt(problems, check_truth, truth)
    if options.out is not None:
        attempt(problems, _check_out, options.out, options.overwrite)
    check_all(problems)
    as_given = ("logits", "part", "weights", "activation", "rule", "batch_size", "workers", "draws", "seed")
    return Evaluation(
        model=model, compare=compare, data=data, truth=truth, **{name: getattr(options, name) for name in as_given}
    )


def _check_out(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise Problem(f"--out {out}: is a file; choose another name")
    names = {entry.name for entry in out.iterdir()} - leftovers(out) if out.is_dir() else set()
    if names:
        if "eval.json" not in names:
            raise Problem(f"--out {out}: exists and is not an evaluation; choose another name")
        if not overwrite:
            raise Problem(f"--out {out}: holds an evaluation; choose another name, or use --overwrite")
