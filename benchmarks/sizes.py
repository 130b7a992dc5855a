"""Image size, trained layers and minutes against accuracy, on photos: the second table of docs/own-photos.md.

python benchmarks/sizes.py --init model.pth --data clothing=folder:CLOTHING \
    --data 'grocery=folder:GROCERY?val=test&depth=2'

Every finished run becomes one line of --record, and is not run again. Minutes are processor time; kept features are
removed before a run with a frozen trunk, so that its minutes have them. `--table` only prints.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from own_photos import ROOT, facts, pair, recorded, run_cell

from finetune_mile.measures.intervals import wilson

KEYS = ("accuracy", "probe", "images")


def rows(options: argparse.Namespace) -> Iterator[str]:
    """The lines of the table: mean over the seeds that were run; the interval is of a mean over these test photos."""
    done = recorded(options.record)
    yield "| photos | pixels | trained layers | seeds | processor minutes | accuracy (95 %) | probe at this size |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for (data, _), size, trunk in product(options.data, options.sizes, options.trunks):
        cells = [done[name] for seed in range(options.seeds) if (name := f"{data}-{size}-{trunk}-{seed}") in done]
        if cells:
            minutes, accuracy, probe = (
                statistics.fmean(each[key] for each in cells) for key in ("minutes", "accuracy", "probe")
            )
            low, high = (100 * end for end in wilson(accuracy / 100, cells[0]["images"]))
            score = f"{accuracy:.1f} ({low:.1f} to {high:.1f})"
            yield f"| {data} | {size} | {trunk} | {len(cells)} | {minutes:.1f} | {score} | {probe:.1f} |\n"


def main() -> None:
    """Run the missing runs, the cheapest first, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--init", required=True)
    parser.add_argument("--data", action="append", type=pair, required=True)
    parser.add_argument("--fraction", default="0.1", help="share of the labels")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=(64, 128, 224))
    parser.add_argument("--trunks", nargs="+", default=("frozen", "last:1", "all"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks/records/sizes.jsonl")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    cells = list(product(range(options.seeds), options.trunks, options.sizes, options.data))
    for seed, trunk, size, (name, data) in () if options.table else cells:
        cell = f"{name}-{size}-{trunk}-{seed}"
        if cell in recorded(options.record):
            continue
        with tempfile.TemporaryDirectory() as place:
            os.environ["FINETUNE_MILE_CACHE"] = place  # nothing is kept from another run
            flags = ["--init", options.init, "--data", data, "--fraction", options.fraction, "--seed", str(seed)]
            flags += ["--size", str(size), "--set", f"trunk={trunk}", "--set", "evaluate.labels=false"]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run_cell(Path(place) / cell, flags, options.threads)
            found = facts(Path(place) / cell)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            shutil.rmtree(Path(place) / cell)
        line = {"cell": cell, "minutes": spent / 60, **{key: found[key] for key in KEYS}}
        with options.record.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print("".join(rows(options)))


if __name__ == "__main__":
    main()
