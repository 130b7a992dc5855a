"""`finetune-mile predict`: the labels of new images (docs/predict.md)."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from finetune_mile.checkpoints.init import parse_source
from finetune_mile.config.flags import Parser
from finetune_mile.core.console import progress
from finetune_mile.core.files import check_empty
from finetune_mile.core.problems import BadImage, Failed, Problem
from finetune_mile.core.types import LARGEST_BATCH, MOST_WORKERS
from finetune_mile.images.index import ENDINGS, Files, ImageSet, Names, count_endings, say_unreadable, scan_tree

if TYPE_CHECKING:
    from torch import Tensor

    from finetune_mile.checkpoints.loading import Opened

EPILOG = """examples:
  finetune-mile predict runs/demo-1 photo.jpg holiday/
  finetune-mile predict runs/demo-1 holiday/ --format jsonl > labels.jsonl
  find holiday -name '*.jpg' -newer last.txt | finetune-mile predict runs/demo-1 - --annotate seen/

exit code: 0 all images were read, 1 some could not be read (stderr names them), 2 the command was wrong
"""
OTHER_FORMS = {"model.onnx": "onnx", "model.pt2": "torch"}
WIDEST = 60  # column of names in a table
SMALLEST, MOST_DRAWN = 320, 6  # width of an annotated copy, and labels drawn on it
Labels = list[tuple[str, float, float]]  # class, probability and threshold, the most likely first


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile predict", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print the labels of images: the best one, and every other one above the threshold.",
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN_OR_EXPORT", help="a run folder, an export, or a checkpoint file")
    parser.add_argument("images", metavar="IMAGES", nargs="+", help="files, folders, or - for names on stdin")
    parser.add_argument("--format", choices=("table", "jsonl", "csv"), default="table", help="(default: %(default)s)")
    parser.add_argument(
        "--threshold", type=float, metavar="P", help="least probability of a label (default: the run's)"
    )
    parser.add_argument("--annotate", type=Path, metavar="DIR", help="write copies with the labels drawn on them")
    parser.add_argument("--batch-size", type=int, default=64, help="images of a forward pass (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="loader processes (default: from the cores)")
    return parser


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 some images could not be read, 2 the command or its input was wrong."""
    options = build_parser().parse_args(argv)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # the name of a file need not be UTF-8
    names = _check(options)
    from accelerate import PartialState

    from finetune_mile.checkpoints.classifier import open_with_head
    from finetune_mile.checkpoints.exporting import thresholds_of
    from finetune_mile.training.processes import use_threads

    use_threads()
    opened = open_with_head(options.run, "RUN")
    thresholds = thresholds_of(opened.config, opened.report.classifier, options.run)
    if options.threshold is not None:
        thresholds.fill_(options.threshold)
    began = time.monotonic()
    try:
        skipped = _predict(options, names, opened, str(PartialState().device), thresholds)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    seconds, read = time.monotonic() - began, len(names) - skipped
    bad = f", {skipped:,} skipped" if skipped else ""
    sys.stderr.write(f"{read:,} image{'' if read == 1 else 's'} in {seconds:.1f} s ({read / seconds:.1f}/s){bad}\n")
    return 1 if skipped else 0


# ------------------------------------------------------------------------------------ which images


def _check(options: argparse.Namespace) -> Sequence[str]:
    """The names of the images; all that cannot work is refused, before torch is imported."""
    problems = [
        f"--{name.replace('_', '-')} {value}: must be from {low} to {high:,}"
        for name, low, high in (("batch_size", 1, LARGEST_BATCH), ("workers", 0, MOST_WORKERS), ("threshold", 0, 1))
        if (value := getattr(options, name)) is not None and not low <= value <= high
    ]
    if os.environ.get("WORLD_SIZE", "1") != "1":
        problems.append("predict works in one process; start it without torchrun and accelerate launch")
    folder = Path(options.run)
    form = next((form for name, form in OTHER_FORMS.items() if (folder / name).is_file()), None)
    if form is not None:
        problems.append(f"RUN {folder}: predict does not read an export --to {form}; give the run, or --to timm or hf")
    names: list[str] = []
    try:
        parse_source(options.run, "RUN")
        if options.annotate is not None:
            check_empty(options.annotate, "--annotate")
        for word in options.images:
            names += _names_in(word)
    except Problem as problem:
        problems += problem.sentences
    if problems:
        raise Problem(*problems)
    return Names.of(names)


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
    scan = scan_tree(path, f"IMAGES {word}")
    if len(scan.unread):
        sys.stderr.write(f"warning: {word}: {say_unreadable(count_endings(scan.unread))}\n")
    if not len(scan.names):
        raise Problem(f"IMAGES {word}: no images in this folder or below it ({', '.join(ENDINGS)})")
    return [str(path / name) for name in scan.names]


# ------------------------------------------------------------------------------------ their labels


def _predict(options: argparse.Namespace, names: Sequence[str], opened: Opened, device: str, thresholds: Tensor) -> int:
    """Print the labels of every image as soon as its batch is done; returns how many images were skipped."""
    import torch

    from finetune_mile.images.pipeline import decode_from
    from finetune_mile.measures import say_threshold

    images = ImageSet(
        ids=names, given=torch.full((len(names),), -1), truth=None, read=partial(decode_from, Files(Path(), names))
    )
    same = bool((thresholds == thresholds[0]).all())
    one = float(f"{float(thresholds[0]):.6g}") if same else None  # 0.1 of float32 is 0.1
    out = sys.stdout  # the progress bar replaces it while it is shown
    width = min(max(map(len, names)), WIDEST)
    titles = {
        "csv": "image,label,probability\n",
        "table": f"{'image':<{width}}  labels above {say_threshold(thresholds)}, else (the best one)\n",
    }
    out.write(titles.get(options.format, ""))
    skipped, taken = 0, set[Path]()
    # On a terminal the results themselves are the progress.
    with progress("images", len(names), quiet=out.isatty()) as advance:
        for sample, labels in labelled(
            opened, images, thresholds, device=device, batch_size=options.batch_size, workers=options.workers
        ):
            advance(1)
            if labels is None:
                skipped += 1
                continue
            write_labels(out, options.format, names[sample], labels, one=one, width=width)
            if options.annotate is not None:
                target = target_of(options.annotate, names[sample], taken)
                try:
                    annotate(images.read(sample), labels, target)
                except (OSError, BadImage) as error:
                    raise Failed(f"--annotate: {target} cannot be written: {error}") from error
    return skipped


def labelled(
    opened: Opened, images: ImageSet, thresholds: Tensor, *, device: str = "cpu", batch_size: int = 64,
    workers: int | None = None,
) -> Iterator[tuple[int, Labels | None]]:  # fmt: skip
    """Each image's index and labels, in order; None where it cannot be read, which is told on stderr.

    Args:
        opened: a network with its classifier.
        images: read ahead by loader processes.
        thresholds: (C,) least probability of a label beside the best one.
        device: to compute on.
        batch_size: images of a forward pass.
        workers: loader processes; None: from the cores.
    """
    import numpy as np
    import torch

    from finetune_mile.compute.passes import keys_of, stream
    from finetune_mile.images.pipeline import Readers, Views, default_workers, normalise

    def tell(bad: Mapping[int, str]) -> None:
        for sample, reason in bad.items():
            sys.stderr.write(f"warning: {images.ids[sample]} is skipped: {reason}\n")

    layout, preprocess = torch.channels_last, opened.card.preprocess  # convolutions are faster with it
    network = opened.network.to(device).to(memory_format=layout)
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (preprocess.mean, preprocess.std))
    classes = opened.classes or tuple(map(str, range(opened.report.classifier)))
    views = Views(images, preprocess, None, 0, on_bad=tell)
    if workers is None:  # one batch is read sooner than a process starts
        workers = default_workers(1) if len(images) > batch_size else 0
    readers = Readers(workers=workers, pin=device != "cpu", batch_size=batch_size)

    def prepare(pixels: Tensor) -> Tensor:
        return normalise(pixels.to(device, non_blocking=True), mean, std).contiguous(memory_format=layout)

    for samples, (rows, readable) in stream(
        network, views, keys_of(np.arange(len(images)), batch_size), prepare, readers
    ):
        logits = rows.cpu()
        chances = logits.sigmoid() if opened.activation == "sigmoid" else logits.softmax(1)
        for sample, row, read in zip(samples.tolist(), chances, readable.tolist(), strict=True):
            yield sample, _above(row, classes, thresholds) if read else None


def _above(row: Tensor, classes: Sequence[str], thresholds: Tensor) -> Labels:
    """The classes of an image's probabilities (C,) above their thresholds, and always the most likely one."""
    order = row.argsort(descending=True, stable=True)
    above = row > thresholds
    above[order[0]] = True
    kept = order[above[order]]
    return [(classes[c], float(row[c]), float(thresholds[c])) for c in kept.tolist()]


# ------------------------------------------------------------------------------------ what comes out


def write_labels(out: TextIO, form: str, name: str, labels: Labels, *, one: float | None, width: int) -> None:
    """Write one image's labels: a line of a table, a line of JSON, or a line of CSV for each label.

    `one`: the threshold of all classes; None: each has its own.
    """
    if form == "jsonl":
        listed = [{"label": label, "probability": round(p, 6)} for label, p, _ in labels]
        if one is None:
            listed = [entry | {"threshold": round(t, 6)} for entry, (_, _, t) in zip(listed, labels, strict=True)]
        out.write(json.dumps({"image": name, "labels": listed, **({} if one is None else {"threshold": one})}) + "\n")
    elif form == "csv":
        csv.writer(out, lineterminator="\n").writerows((name, label, f"{p:.6f}") for label, p, _ in labels)
    else:
        shown = ", ".join(f"{label} {p:.2f}" if p > t else f"({label} {p:.2f})" for label, p, t in labels)
        out.write(f"{name:<{width}}  {shown}\n")
    out.flush()


def target_of(folder: Path, name: str, taken: set[Path]) -> Path:
    """A file for the annotated copy: the image's path below `folder`, with a number where two would be the same."""
    parts = [part for part in Path(name).parts if part not in ("..", Path(name).anchor)]
    path = folder.joinpath(*parts)
    ending = path.suffix if path.suffix.lower() in ENDINGS else f"{path.suffix}.jpg"
    numbered = (path.with_name(f"{path.stem}{f'-{n}' if n > 1 else ''}{ending}") for n in count(1))
    target = next(path for path in numbered if path not in taken)
    taken.add(target)
    return target


def annotate(image: Tensor, labels: Labels, path: Path) -> None:
    """Write a copy of an image (3, H, W) uint8 with its first labels in the upper left corner; small ones enlarged."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    if picture.width < SMALLEST:
        scale = -(-SMALLEST // picture.width)
        picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    size = max(picture.width // 32, 12)
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)  # no Path: Pillow 10.0
    draw = ImageDraw.Draw(picture)
    for row, (label, p, _) in enumerate(labels[:MOST_DRAWN]):
        left, top = size // 2, size // 2 + row * (size * 3 // 2)
        text = f"{label} {p:.2f}"
        draw.rectangle((left, top, left + draw.textlength(text, font) + size // 2, top + size * 4 // 3), fill="black")
        draw.text((left + size // 4, top), text, fill="white", font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, quality=92)
