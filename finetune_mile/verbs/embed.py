"""`finetune-mile embed`: the features of a checkpoint for every image of --data, computed once (docs/features.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finetune_mile.checkpoints.cards import fetch_card, find_card
from finetune_mile.checkpoints.init import Init, parse_init
from finetune_mile.config.flags import FORMAT, Parser
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import LARGEST_BATCH, MOST_WORKERS
from finetune_mile.images.index import Data, say_skipped
from finetune_mile.images.sources import load_data, split_name

if TYPE_CHECKING:
    from accelerate import Accelerator

    from finetune_mile.images.order import Indices
    from finetune_mile.training.features import Split, Store
    from finetune_mile.training.processes import Signals

EPILOG = """examples:
  finetune-mile embed --init moco.pth.tar --data folder:photos features/photos
  finetune-mile embed --init simclr-demo --data demo                       into the cache, for probes and runs
  ACCELERATE_USE_CPU=1 torchrun --nproc_per_node 2 -m finetune_mile.cli embed ...          two processes

in OUT: train.npy and val.npy (numpy.load), train.parquet and val.parquet (id, labels), features.json
"""
MOST_VIEWS = 1000


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile embed", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compute the features of a checkpoint for all images once. Run again to continue after a stop.",
    )  # fmt: skip
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="folder (default: a place in the cache)")
    parser.add_argument("--init", required=True, help="as for `run`: card name, file, directory or timm:NAME")
    parser.add_argument("--views", type=int, default=0, help="augmented views of each training image (default: 0)")
    add_flags(parser)
    return parser


def add_flags(parser: Parser) -> None:
    """What `embed` and `probe` have in common."""
    parser.add_argument("--data", required=True, help="as for `run`: demo, folder:DIR, hf:NAME, csv:FILE, ...")
    parser.add_argument("--arch", help="network, where the checkpoint does not say it")
    parser.add_argument("--format", help=FORMAT)
    parser.add_argument("--size", type=int, help="image side (default: as the checkpoint says)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="on disk (default: float16)")
    parser.add_argument(
        "--verify", action="store_true",
        help="identify images by their contents, instead of path, size and modification time",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=128, help="over all processes (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="loader processes (default: from the cores)")


def check_flags(options: argparse.Namespace, texts: list[str]) -> list[Init]:
    """The checkpoints of --init; all that cannot work is refused, before torch is imported."""
    problems = [
        f"--{name.replace('_', '-')} {getattr(options, name)}: must be from {low} to {high:,}"
        for name, low, high in (
            ("size", 1, 8192), ("batch_size", 1, LARGEST_BATCH), ("workers", 0, MOST_WORKERS), ("views", 0, MOST_VIEWS)
        )
        if getattr(options, name, None) is not None and not low <= getattr(options, name) <= high
    ]  # fmt: skip
    inits = []
    try:
        split_name(options.data)
        for text in texts:
            inits.append(parse_init(text))
            if inits[-1].kind == "card":
                fetch_card(find_card(inits[-1].name))
    except Problem as problem:
        problems += problem.sentences
    if problems:
        raise Problem(*problems)
    return inits


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 it failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options, init = parse(argv)
    return stoppable(lambda accelerator, signals: _embed(options, init, accelerator, signals))


def parse(argv: list[str]) -> tuple[argparse.Namespace, Init]:
    """The flags, and the checkpoint of --init."""
    options: argparse.Namespace = build_parser().parse_args(argv)
    (init,) = check_flags(options, [options.init])
    return options, init


def stoppable(work: Callable[[Accelerator, Signals], None], precision: Literal["no", "auto"] = "no") -> int:
    """Start the processes and work; a signal stops it at a moment that the same command continues from."""
    from finetune_mile.training.processes import Signals, Stopped, start, wanted_precision

    with Signals() as signals:
        accelerator = start(precision=wanted_precision(precision), seed=0, track="none", project=".")
        try:
            work(accelerator, signals)
        except Stopped as stopped:
            accelerator.print("stopped; run the same command again to continue", file=sys.stderr)
            return 128 + stopped.signum
    return 0


def compute(options: argparse.Namespace, init: Init, accelerator: Accelerator, signals: Signals) -> Store:
    """The features of all images of --data."""
    data = load_data(options.data, need_labels=False)
    return features_of(init, data, options, accelerator, signals, path=options.out, views=options.views)


def _embed(options: argparse.Namespace, init: Init, accelerator: Accelerator, signals: Signals) -> None:
    store = compute(options, init, accelerator, signals)
    if not accelerator.is_main_process:
        return
    train = store.features("train")
    skipped = int((store.state("train") == 2).sum() + (store.state("val") == 2).sum())
    if skipped:
        sys.stderr.write(say_skipped(skipped, store.path / "bad_images.csv") + " (their features are NaN)\n")
    sys.stdout.write(
        f"{store.path}: {len(train):,} training and {len(store.state('val')):,} validation images, "
        f"{train.shape[1]:,} features, "
        f"{train.dtype}\n"
    )


def features_of(
    init: Init, data: Data, options: argparse.Namespace, accelerator: Accelerator, signals: Signals, *,
    path: Path | None = None, rows: dict[Split, Indices] | None = None, views: int = 0,
) -> Store:  # fmt: skip
    """The features of one checkpoint, computed where they are not on disk; arguments as in `training.features`."""
    from finetune_mile.checkpoints.loading import open_trunk
    from finetune_mile.training.device import Device
    from finetune_mile.training.features import embed, full_name
    from finetune_mile.training.task import wanted_workers

    opened = open_trunk(init, arch=options.arch)
    own = {} if options.size is None else {"size": options.size}
    device = Device(
        accelerator=accelerator, signals=signals, batch_size=options.batch_size,
        workers=wanted_workers(options.workers, data, accelerator),
    )  # fmt: skip
    return embed(
        device, data, opened.card.preprocess.model_copy(update=own), opened.network, arch=full_name(opened.report),
        dtype=options.dtype,
        about={"init": init.text, "data": options.data}, contents=options.verify, path=path, rows=rows, views=views,
    )  # fmt: skip
