"""Several methods on one recipe, over seeds: a Markdown table with mean and standard deviation.

    python benchmarks/methods.py --recipe cifar10/cifar10h --runs runs/cifar10h -- --data folder:DIR --truth ...
    python benchmarks/methods.py ... --row 'sigmoid=--method sigmoid' --row 'semi=--semi all --unlabelled DIR' -- ...

A row is a name and the flags of its runs. Arguments after `--` are passed to every run. Finished runs are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
ROWS, SEEDS = {name: f"--method {name}" for name in ("softmax", "sigmoid", "mile")}, (0, 1, 2)
COLUMNS = ("accuracy", "real_acc", "f1@0.25", "f1@0.5", "f1@best", "lrap", "coverage@0.25", "recovery_map")
Results = dict[str, list[dict[str, Any]]]


def one(job: tuple[Path, list[str]]) -> dict[str, Any]:
    """One run, unless its results are there; on one thread, so that two fit beside each other."""
    out, flags = job
    if not (out / "results.json").is_file():
        done = subprocess.run(
            [sys.executable, str(ROOT / "finetune_mile/run.py"), *flags, "--out", str(out), "--overwrite"],
            capture_output=True, text=True, check=False, env=os.environ | {"FINETUNE_MILE_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr)
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


def run_all(runs: Path, common: list[str], rows: dict[str, str], *, jobs: int) -> Results:
    """Every row, a name with its flags, with every seed."""
    cells = [(name, seed) for name in rows for seed in SEEDS]
    work = [
        (runs / f"{name.replace(' ', '_')}-{s}", [*common, *shlex.split(rows[name]), "--seed", str(s)])
        for name, s in cells
    ]
    with ThreadPoolExecutor(jobs) as pool:
        done = list(track(pool.map(one, work), total=len(work), description=runs.name))
    return {row: [r for (name, _), r in zip(cells, done, strict=True) if name == row] for row in rows}


def table(results: Results) -> str:
    """Markdown: mean and standard deviation over seeds."""
    first = next(iter(results.values()))[0]
    columns = [c for c in COLUMNS if c in first]
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for method, runs in results.items():
        cells = []
        for column in columns:
            values = [run[column] for run in runs]
            digits = 3 if column == "recovery_map" else 2
            cells.append(f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    trivial = first.get("trivial_f1")
    note = "" if trivial is None else f"\nThe best constant prediction has F1 {trivial:.2f}.\n"
    return "\n".join(lines) + "\n" + note


def main() -> None:
    """Run the missing runs and print the table."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--row", action="append", metavar="NAME=FLAGS", help="default: softmax, sigmoid, mile")
    options = parser.parse_args(words[:cut])
    rows = dict(row.split("=", 1) for row in options.row) if options.row else ROWS
    common = ["--recipe", options.recipe, *words[cut + 1 :]]
    print(table(run_all(options.runs, common, rows, jobs=options.jobs)))


if __name__ == "__main__":
    main()
