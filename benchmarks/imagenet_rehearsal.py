"""The main command on a fake ImageNet: 1,281,167 names, hard links to a few JPEGs. Times and peak memory of each part.

    python benchmarks/imagenet_rehearsal.py PLACE --init CHECKPOINT --list 1percent.txt

CHECKPOINT is any SimCLR-v2 file. 1percent.txt is SimCLR's list of labelled images, whose names the tree has. The
command scans, splits and explains; then it trains 12 steps at 64 pixels, is stopped, continued and asked again.
PLACE is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
IMAGES, VALIDATION = 1_281_167, 500
MOST_LINKS = 60_000  # ext4 takes 65,000 names of one file


def make_tree(root: Path, listed: list[str]) -> int:
    """1,000 class folders below train/ with the listed names and others, and 500 names below val/."""
    names: dict[str, list[str]] = {}
    for name in listed:
        names.setdefault(name.partition("_")[0], []).append(name)
    classes = sorted(names)
    assert len(classes) == 1000, f"the list has {len(classes)} classes"
    sources = [root / f"{number}.jpg" for number in range(IMAGES // MOST_LINKS + 1)]
    root.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for source in sources:
        coarse = Image.fromarray(draw.integers(0, 256, (47, 63, 3), dtype=np.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(source, quality=95)
    made = 0
    for number, name in enumerate(classes):
        folder = root / "train" / name
        folder.mkdir(parents=True)
        count = IMAGES // 1000 + (number < IMAGES % 1000)
        others = (f"{name}_{10**6 + other}.JPEG" for other in range(count - len(names[name])))
        for file in (*names[name], *others):
            os.link(sources[made // MOST_LINKS], folder / file)
            made += 1
    for number in range(VALIDATION):
        folder = root / "val" / classes[2 * number]
        folder.mkdir(parents=True)
        shutil.copy(sources[number % len(sources)], folder / f"ILSVRC2012_val_{number + 1:08}.JPEG")
    return made


def measured(title: str, work: Callable[[], str]) -> None:
    """Do some work and print its seconds, with the largest memory of a process that it waited for so far."""
    began = time.monotonic()
    outcome = work()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"| {title} | {time.monotonic() - began:.0f} s | {peak:.2f} GB | {outcome} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path, help="a folder that is made, and removed")
    parser.add_argument("--init", required=True)
    parser.add_argument("--list", type=Path, required=True)
    options = parser.parse_args()
    if options.place.exists():
        parser.error(f"{options.place} exists")
    place = options.place.resolve()
    out, log = place / "run", place / "log.txt"
    env = os.environ | {"IMAGENET_DIR": str(place / "imagenet"), "FINETUNE_MILE_CACHE": str(place / "cache")}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    command = [
        *launch, str(ROOT / "finetune_mile/run.py"), "--init", options.init, "--fraction", "0.01", "--batch-size", "16",
        "--steps", "12", "--set", "size=64", "--set", "log_every=1", "--set", "evaluate.phases=false",
        "--set", "evaluate.labels=false", "--out", str(out), "--resume", "auto",
    ]  # fmt: skip

    def run(*flags: str, stop_after: int | None = None) -> str:
        with log.open("a") as stream:
            process = subprocess.Popen(
                [*command, *flags], env=env, stdout=stream, stderr=stream, start_new_session=True, cwd=ROOT
            )
            while stop_after is not None and process.poll() is None:
                lines = (out / "metrics.jsonl").read_bytes().count(b"\n") if (out / "metrics.jsonl").exists() else 0
                if lines >= stop_after:
                    os.killpg(process.pid, signal.SIGTERM)
                    break
                time.sleep(0.1)
            code = process.wait()
        while stop_after is not None and '"status": "running"' in (out / "run.json").read_text():
            time.sleep(0.1)  # one process: Accelerate's launcher ends before its run
        status = (out / "run.json").read_text().split('"status": "')[1].split('"')[0] if out.exists() else "explained"
        if code and status != "stopped":
            raise SystemExit(log.read_text()[-3000:])
        return f"exit code {code}, {status}"

    try:
        names = options.list.read_text().split()
        place.mkdir(parents=True)
        (place / "cache/splits").mkdir(parents=True)
        shutil.copy(options.list, place / "cache/splits/imagenet-1percent.txt")
        print("| part | time | peak memory so far | |\n|---|---|---|---|")
        measured("make the tree", lambda: f"{make_tree(place / 'imagenet', names):,} names")
        measured("--explain: scan, split, load", lambda: run("--explain"))
        measured("start, stop after 4 steps", lambda: run(stop_after=4))
        measured("the same command: continue to the end", run)
        measured("the same command: finished", run)
        shutil.copy(log, f"{options.place.name}.log")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
