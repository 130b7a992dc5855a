"""`finetune-mile embed`: the features of a checkpoint for every image of --data, computed once (docs/features.md)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_mile.checkpoints.init import Init
from finetune_mile.config.flags import Parser, init_text
from finetune_mile.images.bad_images import say_skipped
from finetune_mile.training.embedding import Embedding, add_flags, check_flags

if TYPE_CHECKING:
    from finetune_mile.compute.rows import Store

EPILOG = """examples:
  finetune-mile embed --init moco.pth.tar --data folder:photos features/photos
  finetune-mile embed --init simclr-demo --data demo                       into the cache, for probes and runs
  ACCELERATE_USE_CPU=1 torchrun --nproc_per_node 2 -m finetune_mile.cli embed ...          two processes

in OUT: train.npy and val.npy (numpy.load), train.parquet and val.parquet (id, labels), features.json
"""


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


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 it failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options, init = check(build_parser().parse_args(argv))
    from finetune_mile.training.processes import stoppable

    how = Embedding.of_flags(options)
    return stoppable(
        lambda *processes: show(
            how.everything(init, *processes, path=options.out, views=options.views),
            visible=processes[0].is_main_process,
        )
    )


def check(options: argparse.Namespace) -> tuple[argparse.Namespace, Init]:
    """Refuse what cannot work; the checkpoint of --init."""
    (init,) = check_flags(options, [init_text(options.init, options.format)])
    return options, init


def show(store: Store, *, visible: bool) -> None:
    if not visible:
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
