"""`finetune-mile predict`: the labels of new images (docs/predict.md)."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from pathlib import Path

from finetune_mile.checkpoints.init import parse_source
from finetune_mile.config.flags import Flags, attempt, check_all, outside, verb_parser
from finetune_mile.core.console import progress
from finetune_mile.core.files import begun, check_empty
from finetune_mile.core.problems import Problem, inert, warn
from finetune_mile.core.types import LARGEST_BATCH, MOST_WORKERS
from finetune_mile.images.bad_images import say_unreadable

EPILOG = """examples:
  finetune-mile predict runs/demo-1 photo.jpg holiday/
  finetune-mile predict runs/demo-1 holiday/ --format jsonl > labels.jsonl
  find holiday -name '*.jpg' -newer last.txt | finetune-mile predict runs/demo-1 - --annotate seen/

exit code: 0 all images were read, 1 some could not be read (stderr names them), 2 the command was wrong
"""
OTHER_FORMS = {"model.onnx": "onnx", "model.pt2": "torch"}
WIDEST = 60  # column of names in a table
FLAGS: Flags = {
    "run": {"metavar": "RUN_OR_EXPORT", "help": "a run folder, an export, or a checkpoint file"},
    "images": {"metavar": "IMAGES", "nargs": "+", "help": "files, folders, or - for names on stdin"},
    "--format": {"choices": ("table", "jsonl", "csv"), "default": "table", "help": "(default: %(default)s)"},
    "--threshold": {"type": float, "metavar": "P", "help": "least probability of a label (default: the run's)"},
    "--annotate": {"type": Path, "metavar": "DIR", "help": "write copies with the labels drawn on them"},
    "--batch-size": {"type": int, "default": 64, "help": "images of a forward pass (default: %(default)s)"},
    "--workers": {"type": int, "help": "loader processes (default: from the cores)"},
}


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 some images could not be read, 2 the command or its input was wrong."""
    about = "Print the labels of images: the best one, and every other one above the threshold."
    options = verb_parser("predict", FLAGS, description=about, epilog=EPILOG).parse_args(argv)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # the name of a file need not be UTF-8
    problems = outside(options, batch_size=(1, LARGEST_BATCH), workers=(0, MOST_WORKERS), threshold=(0, 1))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        problems.append("predict works in one process; start it without torchrun and accelerate launch")
    problems += [
        f"RUN {Path(options.run)}: predict does not read an export --to {form}; give the run, or --to timm or hf"
        for file, form in OTHER_FORMS.items()
        if Path(options.run, file).is_file()
    ]
    attempt(problems, parse_source, options.run, "RUN")
    if options.annotate is not None:
        attempt(problems, check_empty, options.annotate, "--annotate")
    names = [name for word in options.images for name in attempt(problems, _names_in, word) or ()]
    check_all(problems)
    return _predict(options, names)


def _names_in(word: str) -> list[str]:
    if word == "-":
        text = sys.stdin.read()
        names = [name for name in text.split("\0" if "\0" in text else "\n") if name.strip()]
        if not names:
            raise Problem("IMAGES -: no names on stdin; write one to a line")
        return names
    path = Path(word)
    if not path.is_dir():
        if not path.exists():
            raise Problem(f"IMAGES {word}: there is no such file or folder")
        return [word]
    from finetune_mile.images.scans import ENDINGS, count_endings, scan_tree  # not for --help: numpy

    scan = scan_tree(path, f"IMAGES {word}")
    if len(scan.unread):
        warn(f"{word}: {say_unreadable(count_endings(scan.unread))}")
    if not len(scan.names):
        raise Problem(f"IMAGES {word}: no images in this folder or below it ({', '.join(ENDINGS)})")
    return [str(path / name) for name in scan.names]


def _predict(options: argparse.Namespace, names: list[str]) -> int:
    """Print the labels of every image as soon as its batch is done."""
    from accelerate import PartialState

    from finetune_mile.checkpoints.loading import open_with_head
    from finetune_mile.measures.labels import labelled, photos, say_labels, say_threshold
    from finetune_mile.pages.annotated import write_copy
    from finetune_mile.training.processes import use_threads

    use_threads()
    opened = open_with_head(options.run, "RUN")
    thresholds = opened.thresholds(options.run)
    if options.threshold is not None:
        thresholds.fill_(options.threshold)
    began, skipped, taken = time.monotonic(), 0, set[Path]()
    images, out = photos(names), sys.stdout  # the progress bar replaces it while it is shown
    one = float(f"{thresholds[0]:.6g}") if bool((thresholds == thresholds[0]).all()) else None  # 0.1 of float32 is 0.1
    width = min(max(map(len, names)), WIDEST)
    if options.format == "csv":
        out.write("image,label,probability\n")
    elif options.format == "table":
        out.write(f"{'image':<{width}}  labels above {say_threshold(thresholds)}, else (the best one)\n")
    found = labelled(
        opened, images, thresholds, device=str(PartialState().device), batch_size=options.batch_size,
        workers=options.workers,
    )  # fmt: skip
    copies: contextlib.AbstractContextManager[Path | None] = contextlib.nullcontext()
    if options.annotate is not None:
        copies = begun(options.annotate)
    quiet = out.isatty()  # on a terminal the results are the progress
    with copies as folder, progress("images", len(names), quiet=quiet) as advance:
        for sample, labels in found:
            advance(1)
            if isinstance(labels, str):
                warn(f"{inert(names[sample])} is skipped: {labels}")
                skipped += 1
                continue
            out.write(say_labels(options.format, names[sample], labels, one=one, width=width))
            out.flush()
            if folder is not None:
                write_copy(images, sample, labels, folder, taken)
    out.flush()
    seconds, read = time.monotonic() - began, len(names) - skipped
    bad = f", {skipped:,} skipped" if skipped else ""
    sys.stderr.write(f"{read:,} image{'' if read == 1 else 's'} in {seconds:.1f} s ({read / seconds:.1f}/s){bad}\n")
    return 1 if skipped else 0
