"""`finetune-mile pack SRC OUT`: images resized once, in WebDataset shards, for disks and cores that are the limit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from finetune_mile.config.flags import Parser
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import load_data, split_name


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 fine, 2 the command or its input was wrong."""
    parser = Parser(
        prog="finetune-mile pack", allow_abbrev=False,
        description="Write resized images into WebDataset shards. Run the same command again to continue.",
        epilog="example: finetune-mile pack folder:photos photos-256        then: --data wds:photos-256",
    )  # fmt: skip
    parser.add_argument("source", metavar="SRC", help="as --data of `run`: folder:DIR, imagenet:DIR, hf:NAME, ...")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory for the shards")
    parser.add_argument("--size", type=int, default=256, help="short side in pixels; smaller images stay (default 256)")
    parser.add_argument("--quality", type=int, default=95, help="JPEG quality of what is resized (default 95)")
    parser.add_argument("--shard", type=int, default=2000, help="images in a tar file (default 2000)")
    parser.add_argument("--workers", type=int, help="threads (default: the cores)")
    options = parser.parse_args(argv)
    for name, low, high in (("size", 8, 8192), ("quality", 1, 100), ("shard", 1, 10**6)):
        if not low <= getattr(options, name) <= high:
            raise Problem(f"--{name} {getattr(options, name)}: must be from {low} to {high}")
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
