"""`finetune-mile eval`: every score of any classifier on any data, or of logits that were saved before."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune_mile.checkpoints.init import Init
from finetune_mile.config.flags import Parser
from finetune_mile.config.resolve import read_yaml
from finetune_mile.core.files import whole_file, write_json
from finetune_mile.core.problems import Failed, Problem
from finetune_mile.core.types import LARGEST_BATCH
from finetune_mile.images.index import Data, ImageSet, write_list
from finetune_mile.images.sources import anchored, check_truth, load_data, scheme_and_place, split_name
from finetune_mile.measures import CLOSING
from finetune_mile.measures.classifiers import columns_for, logits_of, open_classifier, parse_model, run_folder
from finetune_mile.training.folder import REFIT, environment, next_folder, read_info

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from finetune_mile.measures.intervals import Comparison
    from finetune_mile.measures.metrics import Measured
    from finetune_mile.measures.predictions import Predictions

EPILOG = """examples:
  finetune-mile eval --model run:runs/demo-1                        a run, on the data it was trained for
  finetune-mile eval --model timm:resnet50.a1_in1k --data imagenet:DIR --truth real
  finetune-mile eval --model run:A --compare run:B --data photos    compare two models, with intervals
  finetune-mile eval --logits runs/eval-1/logits.parquet            the same numbers again, without the model
  accelerate launch -m finetune_mile.cli eval ...                   on all devices

in DIR: results.json, per_class.csv, logits.parquet, eval.json and, with --compare, comparison.json
"""
MEANING = {key: (meaning, unit) for key, meaning, unit in CLOSING} | {
    "top5": ("given label among the best five", "%"),
    "map": ("mean average precision over classes", "%"),
    "recovery_map": ("mean average precision of true labels that were not given (0-1)", ""),
}
SHOWN = (
    "accuracy", "top5", "real_acc", "f1@0.25", "f1@0.5", "f1@rho", "f1@best", "trivial_f1", "lrap", "map",
    "recovery_map", "coverage@0.25",
)  # fmt: skip


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
    scoring.add_argument(
        "--batch-size",
        type=partial(_number, 1, LARGEST_BATCH, "number of images"),
        default=128,
        help="over all processes (default: %(default)s)",
    )
    whole = partial(_number, 0, 999_999, "whole number")
    scoring.add_argument("--workers", type=whole, help="loader processes (default: from the cores)")
    scoring.add_argument(
        "--draws", type=whole, default=1000, help="of the bootstrap; 0: no intervals (default: %(default)s)"
    )
    scoring.add_argument(
        "--seed",
        type=partial(_number, 0, 2**32 - 1, "whole number"),
        default=0,
        help="of the bootstrap and of random weights",
    )
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
    if options.data is None and isinstance(options.model, Init):
        recipe = recipe_of(options.model)
        options.data, options.truth = recipe.get("data"), options.truth or recipe.get("truth")
    if options.model is not None or (options.compare is not None and not _is_logits(options.compare)):
        if options.data is None:
            raise Problem("--data is required: which images to evaluate on (demo, folder:DIR, ...)")
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
            raise Problem(f"--out {out}: holds an evaluation; choose another name, or use --overwrite")


def _is_logits(source: Init | str) -> bool:
    return isinstance(source, Init) and source.kind == "file" and source.name.endswith(".parquet")


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 the evaluation failed, 2 the command or its input was wrong."""
    try:
        return run(parse(argv))
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace) -> int:
    scored = score(options)
    if scored is not None:
        results, measured, models, facts, differences = scored
        write_evaluation(options.out, results, models[0], measured, facts, options)
        show(results, models[0], options.out)
        if differences:
            write_comparison(options.out, models[0], models[1], differences)
    return 0


def score(
    options: argparse.Namespace,
) -> tuple[dict[str, float], Measured, list[Predictions], dict[str, Any], dict[str, Comparison]] | None:
    """The evaluation itself; from here on torch is needed. None in other processes than the first.

    Returns:
        The content of results.json; the measures of every image; the predictions of --model, and of --compare; facts
        for eval.json; the differences to --compare.
    """
    from finetune_mile.measures.intervals import compare
    from finetune_mile.measures.metrics import measure
    from finetune_mile.measures.predictions import read_predictions
    from finetune_mile.training import processes

    precision = processes.wanted_precision("no")
    accelerator = processes.start(precision=precision, seed=options.seed, track="none", project=str(options.out))
    first = read_predictions(options.logits) if options.logits else predict_with(options.model, options, accelerator)
    if options.truth is not None:
        first = _with_truth(first, options.truth)
    models = [first]
    if options.compare is not None:
        saved = _is_logits(options.compare)
        other = (
            read_predictions(Path(options.compare.name)) if saved
            else predict_with(options.compare, options, accelerator)
        )  # fmt: skip
        models.append(_matched(other, first, options.compare))
    if not accelerator.is_main_process:
        return None
    for model in models:
        bad = int((~model.logits.isfinite().all(1)).sum())
        if bad:
            raise Failed(f"{model.about['model']} gives NaN or infinity for {bad} images")
    rho: float | None = first.about.get("rho")
    rule: Any = options.rule or first.about.get("prediction_set") or "threshold"
    activations = [options.activation or model.activation for model in models]
    measured = [
        measure(
            model.logits, first.given, first.truth, activation=activation, main=first.main, prediction_set=rule, rho=rho
        )
        for model, activation in zip(models, activations, strict=True)
    ]
    facts = {
        "prediction_set": rule, "rho": rho, "truth": options.truth, "world_size": accelerator.num_processes,
        "activation": activations[0],
    }  # fmt: skip
    differences: dict[str, Comparison] = {}
    if options.compare is not None:
        ours, theirs = measured
        for a, b in ((ours.samples, theirs.samples), (ours.by_class, theirs.by_class)):
            differences |= compare(a, b, draws=max(options.draws, 1), seed=options.seed)
    return results_of(measured[0], first, options), measured[0], models, facts, differences


def _with_truth(predictions: Predictions, spec: str) -> Predictions:
    """Predictions with label sets from elsewhere, joined by id."""
    from finetune_mile.images.truth import with_truth

    images = ImageSet(ids=list(predictions.ids), given=predictions.given, truth=None, read=_no_images)
    data = with_truth(Data(name="", classes=predictions.classes, train=images, val=images), spec)
    return dataclasses.replace(predictions, truth=data.val.truth)


def _no_images(index: int) -> Any:
    raise RuntimeError(f"image {index} was read, but only its label is known")


def _matched(other: Predictions, first: Predictions, spec: Init) -> Predictions:
    """The other model's predictions in the order of the first one's images and classes."""
    place = {name: i for i, name in enumerate(other.ids)}
    missing = [name for name in first.ids if name not in place]
    if missing or len(place) != len(first.ids):
        some = f"{len(missing)} of the images are missing, first {missing[0]}" if missing else "it has more images"
        raise Problem(f"--compare {spec}: both models must have seen the same images; {some}")
    if set(other.classes) != set(first.classes):
        odd = sorted(set(other.classes) ^ set(first.classes))
        raise Problem(f"--compare {spec}: its classes differ, for example {odd[0]!r}")
    rows = [place[name] for name in first.ids]
    columns = [other.classes.index(name) for name in first.classes]
    return dataclasses.replace(
        other, ids=first.ids, classes=first.classes, logits=other.logits[rows][:, columns], given=first.given,
        truth=first.truth,
    )  # fmt: skip


# ---------------------------------------------------------------------------------- a model over images


def predict_with(source: Init, options: argparse.Namespace, accelerator: Accelerator) -> Predictions:
    """Show the images to a model, on all processes; images that cannot be read are left out, and listed in `about`."""
    import torch

    from finetune_mile.measures.predictions import Predictions

    data = load_data(options.data)
    part = options.part or default_part(options.data, source)
    images = pick_images(data, part)
    if (part == "all" or _file_of_run(source, REFITTED)) and accelerator.is_main_process:
        warn_of_training_images(images, source)
    weights = options.weights if source.flag == "--model" else None
    model = open_classifier(source, weights=weights, num_classes=len(data.classes), seed=options.seed)
    columns = columns_for(model, data.classes, source.flag)
    began = time.monotonic()
    logits, bad = logits_of(
        model, images, accelerator, data=options.data, batch_size=options.batch_size, workers=options.workers
    )
    seconds = time.monotonic() - began
    recipe = recipe_of(source)  # the set rule and rho of a run, so that eval gives the numbers of its results.json
    block = recipe.get(str(recipe.get("method")).replace("-", "_"))
    rho = block.get("rho") if isinstance(block, dict) else None
    about = {
        "model": source.text, "data": options.data, "part": part,
        "prediction_set": (recipe.get("evaluate") or {}).get("prediction_set", "threshold"),
        "rho": rho if isinstance(rho, int | float) else None,
        "preprocess": model.preprocess.model_dump(mode="json"), "seconds": round(seconds, 3),
        "images_per_second": round(len(images) / max(seconds, 1e-9), 1),
        "bad_images": {images.ids[i]: reason for i, reason in bad.items()},
    }  # fmt: skip
    good = torch.tensor([i for i in range(len(images)) if i not in bad], dtype=torch.long)
    return Predictions(
        ids=[images.ids[i] for i in good.tolist()], classes=data.classes,
        logits=logits[good] if columns is None else logits[good][:, columns],
        given=images.given[good], truth=None if images.truth is None else images.truth[good],
        main=None if images.main is None else images.main[good], activation=model.activation, about=about,
    )  # fmt: skip


def _file_of_run(model: Init, name: str) -> Path | None:
    """A file of a run folder, or of the run that an export folder is in; None for a model that is no run."""
    folder = run_folder(model)
    places = (folder / name, folder.parent / name) if folder else ()
    return next((path for path in places if path.is_file()), None)


def recipe_of(model: Init) -> dict[str, Any]:
    """The recipe of a run; empty for another model."""
    path = _file_of_run(model, "recipe.yaml")
    if path is None:
        return {}
    recipe, base = read_yaml(path), read_info(path.parent).get("started_in")
    if isinstance(base, str) and isinstance(recipe.get("data"), str):
        recipe["data"] = anchored(recipe["data"], base)
    return recipe


def default_part(data: str, model: Init) -> Literal["val", "all"]:
    """The validation images; all images of a folder without train/, unless the model was trained on that folder."""
    scheme, where = split_name(data)
    one_tree = scheme == "folder" and not (Path(where.partition("?")[0]) / "train").is_dir()
    trained_on = str(recipe_of(model).get("data", ""))
    return "val" if not one_tree or (trained_on and _place(trained_on) == _place(data)) else "all"


def _place(data: str) -> tuple[str, Path, str]:
    """--data with an absolute path."""
    scheme, where = scheme_and_place(data)
    path, _, options = where.partition("?")
    return scheme, Path(path).resolve(), options


REFITTED = f"{REFIT}/split.json"


def warn_of_training_images(images: ImageSet, model: Init) -> None:
    """Warn where a run is scored on images that it was trained on: the number would be too good."""
    refitted = _file_of_run(model, REFITTED)
    split = refitted or _file_of_run(model, "split.json")
    if split is None:
        return
    lists = json.loads(split.read_text(encoding="utf-8"))
    trained = {*lists.get("ids", ()), *lists.get("val_ids", ())}
    seen = sum(each in trained for each in images.ids)
    if seen and refitted:
        sys.stderr.write(
            f"warning: {seen:,} of these {len(images):,} images have the names of images that {model.text} was trained "
            "on by --refit. If they are the same photos, the scores are too good; results.json of the run has those "
            "before\n"
        )
    elif seen:
        sys.stderr.write(
            f"warning: {seen:,} of these {len(images):,} images have the names of images that {model.text} was trained "
            "on, so the scores are too good; --part val evaluates the others\n"
        )


def pick_images(data: Data, part: Literal["val", "train", "all"]) -> ImageSet:
    """The images of a part; all of them are sorted by id again."""
    if part != "all":
        return data.val if part == "val" else data.train
    import torch

    sets = (data.train, data.val)
    ids = [*data.train.ids, *data.val.ids]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    truth = None
    if any(images.truth is not None for images in sets):
        unknown = torch.zeros(len(ids), len(data.classes), dtype=torch.bool).split([len(images) for images in sets])
        truths = [rows if images.truth is None else images.truth for images, rows in zip(sets, unknown, strict=True)]
        truth = torch.cat(truths)[order]
    mains = [images.main for images in sets if images.main is not None]
    return ImageSet(
        ids=[ids[i] for i in order], given=torch.cat([images.given for images in sets])[order], truth=truth,
        main=torch.cat(mains)[order] if len(mains) == len(sets) else None,
        read=partial(_read_one, data, order), in_memory=all(images.in_memory for images in sets),
    )  # fmt: skip


def _read_one(data: Data, order: list[int], index: int) -> Tensor:
    at = order[index]
    return data.train.read(at) if at < len(data.train) else data.val.read(at - len(data.train))


# --------------------------------------------------------------------------------------- files and tables


def results_of(measured: Measured, predictions: Predictions, options: argparse.Namespace) -> dict[str, float]:
    """The content of results.json.

    An interval is two more keys, `accuracy_low` and `accuracy_high`: 95 %, Wilson's for accuracies, else drawn over
    images; for means over classes (recovery_map, map of images with one given label) over classes. The
    threshold of f1@best is held fixed in it.
    """
    from finetune_mile.measures.intervals import intervals
    from finetune_mile.measures.verdicts import edges, map_edges, sets_of

    results = measured.results()
    bad = predictions.about.get("bad_images") or {}
    if bad:
        results["bad_images"] = float(len(bad))
    for values in (measured.samples, measured.by_class):
        present = {key: value for key, value in values.items() if key in results}
        drawn = intervals(present, draws=options.draws, seed=options.seed) if options.draws > 0 else {}
        for key, (low, high) in drawn.items():
            results |= {f"{key}_low": low, f"{key}_high": high}
    if options.draws > 0:  # shares have Wilson's interval, as in runs: no resample of 40 right answers has a wrong one
        softmax = (options.activation or predictions.activation) == "softmax"
        ranked = predictions.logits.log_softmax(1) if softmax else predictions.logits
        labels = sets_of(predictions.given, predictions.truth)
        results |= edges(results, measured.table) | map_edges(ranked, labels)
    return results


def write_evaluation(
    out: Path, results: Mapping[str, float], predictions: Predictions, measured: Measured, facts: dict[str, Any],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """Write results.json, per_class.csv, eval.json, and logits.parquet if a model made them."""
    from finetune_mile.measures.predictions import PER_CLASS, write_per_class, write_predictions

    bad = predictions.about.get("bad_images") or {}
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("eval.json", "comparison.json", "bad_images.csv"):
        (out / stale).unlink(missing_ok=True)
    write_json(out / "results.json", results)
    write_per_class(out / PER_CLASS, predictions.classes, measured.table)
    if bad:
        split = str(predictions.about.get("part", ""))
        write_list(out / "bad_images.csv", [(split, name, reason) for name, reason in bad.items()])
    if options.logits is None:
        with whole_file(out / "logits.parquet") as part:
            write_predictions(part, predictions)
    about = predictions.about | facts | {
        "bad_images": len(bad), "images": len(predictions.ids), "classes": len(predictions.classes),
        "logits": str(options.logits or out / "logits.parquet"), "logits_sha256": predictions.digest(),
        "draws": options.draws, "seed": options.seed, **environment(),
    }  # fmt: skip
    write_json(out / "eval.json", about)


def _digits(key: str) -> int:
    return 4 if key == "recovery_map" else 2


def show(results: Mapping[str, float], predictions: Predictions, out: Path) -> None:
    """Print the main scores, their intervals and what they mean."""
    from rich.console import Console
    from rich.table import Table

    title = f"{predictions.about['model']} on {int(results['images']):,} images of {predictions.about['data']}"
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for key in (key for key in SHOWN if key in results):
        meaning, unit = MEANING.get(key, ("F1 at the run's rho", "%"))
        digits = _digits(key)
        low, high = results.get(f"{key}_low"), results.get(f"{key}_high")
        between = "" if low is None or high is None else f"[dim]{low:.{digits}f} - {high:.{digits}f}"
        table.add_row(f"[bold]{key}", f"{results[key]:.{digits}f}{unit and ' ' + unit}", between, meaning)
    left_out = int(results["images"] - results.get("images_with_set", results["images"]))
    note = f"{left_out:,} images without a true set are left out of set measures\n" if left_out else ""
    if "bad_images" in results:
        note += f"{int(results['bad_images'])} images could not be read and do not count: {out / 'bad_images.csv'}\n"
    Console().print(table, f"{note}{out}", sep="\n", highlight=False, soft_wrap=True)


def write_comparison(out: Path, first: Predictions, other: Predictions, differences: Mapping[str, Comparison]) -> None:
    """Write comparison.json and show it; positive: the first model is ahead."""
    from rich.console import Console
    from rich.table import Table

    names = {"a": first.about["model"], "b": other.about["model"]}
    measures = {key: dataclasses.asdict(difference) for key, difference in differences.items()}
    write_json(out / "comparison.json", names | {"measures": measures})
    table = Table(title=f"A {names['a']} - B {names['b']}, paired", title_justify="left", box=None, pad_edge=False)
    for column in ("", "A", "B", "A - B", "95 %", "A ahead", "B ahead", "p (signs)"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for key in (key for key in SHOWN if key in differences):
        d, digits = differences[key], _digits(key)
        table.add_row(
            f"[bold]{key}", *(f"{v:.{digits}f}" for v in (d.a, d.b)), f"{d.difference:+.{digits}f}",
            f"{d.low:+.{digits}f} .. {d.high:+.{digits}f}", str(d.wins), str(d.losses), f"{d.p_value:.2g}",
        )  # fmt: skip
    Console().print(table, highlight=False, soft_wrap=True)
