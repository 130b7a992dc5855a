"""`finetune-mile pack SRC OUT`: images resized once, in WebDataset shards, for disks and cores that are the limit."""

from __future__ import annotations

import sys
from pathlib import Path

from finetune_mile.config.flags import Flags, check_all, outside, verb_parser
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import load_data, split_name

EPILOG = "example: finetune-mile pack folder:photos photos-256        then: --data wds:photos-256"
FLAGS: Flags = {
    "source": {"metavar": "SRC", "help": "as --data of `run`: folder:DIR, imagenet:DIR, hf:NAME, ..."},
    "out": {"metavar": "OUT", "type": Path, "help": "directory for the shards"},
    "--size": {"type": int, "default": 256, "help": "short side in pixels; smaller images stay (default 256)"},
    "--quality": {"type": int, "default": 95, "help": "JPEG quality of what is resized (default 95)"},
    "--shard": {"type": int, "default": 2000, "help": "images in a tar file (default 2000)"},
    "--workers": {"type": int, "help": "threads (default: the cores)"},
}


def main(argv: list[str]) -> int:
    """Exit codes: 0 fine, 2 the command or its input was wrong."""
    about = "Write resized images into WebDataset shards. Run the same command again to continue."
    options = verb_parser("pack", FLAGS, description=about, epilog=EPILOG).parse_args(argv)
    check_all(outside(options, size=(8, 8192), quality=(1, 100), shard=(1, 10**6)))
    if options.out.exists() and not options.out.is_dir():
        raise Problem(f"{options.out}: is a file; name a directory for the shards")
    split_name(options.source)
    data = load_data(options.source, need_labels=False)
    from finetune_mile.images.packing import Packing

    packing = Packing(
        out=options.out, size=options.size, quality=options.quality, shard=options.shard, workers=options.workers
    )
    sys.stdout.write(packing.pack(data) + "\n")
    return 0
