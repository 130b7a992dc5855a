"""Do photos without labels pay after fine-tuning? The table of docs/unlabelled.md.

python benchmarks/unlabelled.py --init model.pth --data clothing=CLOTHING/train --data 'grocery=GROCERY/train?depth=2'

Each DIR is one tree of class folders. A fifth of its photos is held out for validation, by the rule of `folder:`; of
the others --fraction keep their label. Three runs for each data set and seed: `first`, the default; `unlabelled`, the
recipe of that name from there; `control`, as many further steps on the labelled photos alone, at the same rate. Every
finished run becomes one line of --record, and is not run again. `--table` only prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from own_photos import interval, recorded, run_cell

RECORD = Path(__file__).resolve().parent / "records/unlabelled.jsonl"
WEAK = "augment={crop: random-resized, scale: [0.35, 1.0], flip: true}"
SECOND = ["--recipe", "unlabelled"]
CONTROL = [
    *SECOND, "--method", "sigmoid", "--semi", "none", "--batch-size", "32",
    *("--set", "labelled_share=null", "--set", "views=same", "--set", WEAK),
]  # fmt: skip
ROWS = {"unlabelled": SECOND, "control": CONTROL}


def facts(run: Path, seconds: float) -> dict[str, Any]:
    """What the table needs of a finished run."""
    results, split = (json.loads((run / name).read_text()) for name in ("results.json", "split.json"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    empty = [line["empty_share"] for line in lines if "empty_share" in line]
    return {
        "accuracy": results["accuracy"], "images": results["images"], "labelled": split["labelled"],
        "unlabelled": split["unlabelled"], "counted": 100 * (1 - statistics.fmean(empty)) if empty else None,
        "seconds": round(seconds),
    }  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    """Run what is missing in the record."""
    for name, place in options.data:
        for seed in options.seeds:
            common = ["--data", f"folder:{place}", "--fraction", options.fraction, "--seed", str(seed)]
            common += ["--size", str(options.size), "--set", "evaluate.labels=false"]
            first = options.runs / f"{name}-{options.fraction}-{seed}-first"
            cells = {"first": [*common, "--init", options.init]}
            cells |= {row: [*flags, *common, "--init", str(first)] for row, flags in ROWS.items()}
            for row, flags in cells.items():
                cell = f"{name}-{options.fraction}-{seed}-{row}"
                if cell in recorded(options.record):
                    continue
                out = options.runs / cell
                run_cell(out, flags, options.threads)
                seconds = json.loads((out / "run.json").read_text())["seconds"]
                options.record.parent.mkdir(parents=True, exist_ok=True)
                with options.record.open("a") as file:
                    file.write(json.dumps({"cell": cell, **facts(out, seconds)}) + "\n")


def rows(options: argparse.Namespace) -> list[str]:
    """The lines of the table: means over seeds, and differences seed by seed."""
    done = recorded(options.record)
    lines = ["| photos | labelled, unlabelled, validation | seeds | first run | control | unlabelled | over the first "
             "run | over the control | photos that count |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name in dict.fromkeys(cell.split("-")[0] for cell in done):
        cells: dict[str, dict[str, dict[str, Any]]] = {row: {} for row in ("first", *ROWS)}
        for cell, fact in done.items():
            photos, fraction, seed, row = cell.split("-")
            if (photos, fraction) == (name, options.fraction):
                cells[row][seed] = fact
        seeds = [seed for seed in cells["first"] if all(seed in cells[row] for row in ROWS)]
        if not seeds:
            continue
        one = cells["first"][seeds[0]]
        shown = ("first", "control", "unlabelled")
        means = [statistics.fmean(cells[row][seed]["accuracy"] for seed in seeds) for row in shown]
        over = [
            interval([cells["unlabelled"][s]["accuracy"] - cells[row][s]["accuracy"] for s in seeds])
            for row in ("first", "control")
        ]
        counted = statistics.fmean(cells["unlabelled"][seed]["counted"] for seed in seeds)
        lines.append(
            f"| {name} | {one['labelled']:,}, {one['unlabelled']:,}, {one['images']:.0f} | {len(seeds)} | "
            f"{' | '.join(f'{mean:.1f}' for mean in means)} | {' | '.join(over)} | {counted:.0f} % |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", help="a checkpoint")
    parser.add_argument("--data", action="append", default=[], type=lambda text: text.split("=", 1), metavar="NAME=DIR")
    parser.add_argument("--seeds", nargs="+", type=int, default=[10])
    parser.add_argument("--fraction", default="0.1")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/unlabelled"))
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        measure(options)
    print("\n".join(rows(options)))


if __name__ == "__main__":
    main()
