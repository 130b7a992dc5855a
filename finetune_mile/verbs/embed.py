"""`finetune-mile embed`: the features of a checkpoint for every image of --data, computed once (docs/features.md)."""

from __future__ import annotations

import sys
from pathlib import Path

from finetune_mile.config.flags import Flags, Parser, init_text, verb_parser
from finetune_mile.images.bad_images import say_skipped
from finetune_mile.training.embedding import FLAGS, Embedding

EPILOG = """examples:
  finetune-mile embed --init moco.pth.tar --data folder:photos features/photos
  finetune-mile embed --init simclr-demo --data demo                       into the cache, for probes and runs
  ACCELERATE_USE_CPU=1 torchrun --nproc_per_node 2 -m finetune_mile.cli embed ...          two processes

in OUT: train.npy and val.npy (numpy.load), train.parquet and val.parquet (id, labels), features.json
"""
OWN_FLAGS: Flags = {
    "out": {"metavar": "OUT", "type": Path, "nargs": "?", "help": "folder (default: a place in the cache)"},
    "--init": {"required": True, "help": "as for `run`: card name, file, directory or timm:NAME"},
    "--views": {"type": int, "default": 0, "help": "augmented views of each training image (default: 0)"},
}


def build_parser() -> Parser:
    text = "Compute the features of a checkpoint for all images once. Run again to continue after a stop."
    return verb_parser("embed", OWN_FLAGS | FLAGS, description=text, epilog=EPILOG)


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 it failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options = build_parser().parse_args(argv)
    how = Embedding.of_flags(options, [init_text(options.init, options.format)])
    from accelerate import Accelerator

    from finetune_mile.training.processes import Signals, stoppable

    def work(accelerator: Accelerator, signals: Signals) -> None:
        store, _ = how.everything(accelerator, signals, path=options.out, views=options.views)
        if not accelerator.is_main_process:
            return
        train, val = store.features("train"), store.state("val")
        skipped = int((store.state("train") == 2).sum() + (val == 2).sum())
        if skipped:
            sys.stderr.write(say_skipped(skipped, store.path / "bad_images.csv") + " (their features are NaN)\n")
        counts = f"{len(train):,} training and {len(val):,} validation images"
        sys.stdout.write(f"{store.path}: {counts}, {train.shape[1]:,} features, {train.dtype}\n")

    return stoppable(work)
