"""Do photos without labels pay in the default run? The tables of docs/unlabelled.md.

python benchmarks/unlabelled.py --init model.pth --data clothing=folder:CLOTHING \
    --data 'grocery=folder:GROCERY?val=test&depth=2' --data cifar10=folder:CIFAR

One run for each data set and seed: --fraction of the labels, the other photos without theirs (--semi all). Its first
stage is the supervised default, so one run has both numbers. `--arm NAME=FLAGS` adds runs with other flags, for example
--arm half-foreign='--unlabelled folder:OTHER'; --only-arms leaves the default out. Without --keep best there is no
trial: the weights go all the way in both stages.
Every finished run becomes one line of --record, and is not run again. `--table` only prints.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
from pathlib import Path
from typing import Any

from own_photos import ROOT, interval, pair, recorded, run_cell

RECORD = Path(__file__).resolve().parent / "records/unlabelled.jsonl"


def facts(run: Path) -> dict[str, Any]:
    """What the tables need of a finished run; without a second stage both accuracies are the same."""
    results, split, info = (json.loads((run / name).read_text()) for name in ("results.json", "split.json", "run.json"))
    metrics = run / "then/metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    empty = [line["empty_share"] for line in lines if "empty_share" in line]
    decision = run / "trial/decision.json"
    return {
        "accuracy": results["accuracy"], "supervised": results.get("first_stage_accuracy", results["accuracy"]),
        "images": results["images"], "labelled": split["labelled"], "unlabelled": split["unlabelled"],
        "counted": 100 * (1 - statistics.fmean(empty)) if empty else None, "steps": len(lines) and lines[-1]["step"],
        "shares": [info.get("share"), info.get("then_share")], "seconds": round(info["seconds"]),
        "decision": json.loads(decision.read_text()) if decision.is_file() else None,
    }  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    """Run what is missing in the record."""
    for seed in options.seeds:
        for name, spec in options.data:
            for arm, flags in options.arm:
                cell, out = f"{name}-{options.fraction}-{seed}-{arm}", options.runs / f"{name}-{seed}-{arm}"
                if cell in recorded(options.record):
                    continue
                common = ["--data", spec, "--fraction", options.fraction, "--seed", str(seed), "--init", options.init]
                common += ["--size", str(options.size), "--keep", options.keep, "--set", "evaluate.labels=false"]
                run_cell(out, [*common, "--semi", "all", *shlex.split(flags)], options.threads)
                line = {"cell": cell, "size": options.size, "keep": options.keep, **facts(out)}
                options.record.parent.mkdir(parents=True, exist_ok=True)
                with options.record.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                if options.tidy:
                    shutil.rmtree(out)


def rows(options: argparse.Namespace) -> list[str]:
    """The lines of a table for each arm: means over seeds, and differences seed by seed."""
    lines = ["| run | photos | labelled, unlabelled, tested | seeds | supervised | with unlabelled photos | gain | "
             "photos that count | steps |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell, fact in recorded(options.record).items():
        photos, fraction, _, arm = cell.split("-", 3)
        cells.setdefault((arm, fraction, photos), []).append(fact)
    for (arm, fraction, photos), found in cells.items():
        one, mean = found[0], {key: statistics.fmean(fact[key] for fact in found) for key in ("supervised", "accuracy")}
        counted = [fact["counted"] for fact in found if fact["counted"] is not None]
        lines.append(
            f"| {arm}, {float(fraction):.0%} | {photos} | {one['labelled']:,}, {one['unlabelled']:,}, "
            f"{one['images']:,.0f} | {len(found)} | {mean['supervised']:.1f} | {mean['accuracy']:.1f} | "
            f"{interval([fact['accuracy'] - fact['supervised'] for fact in found])} | "
            f"{f'{statistics.fmean(counted):.0f} %' if counted else ''} | {one['steps']} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", help="a checkpoint")
    parser.add_argument("--data", action="append", default=[], type=pair, metavar="NAME=DATA")
    parser.add_argument("--arm", action="append", default=[], type=pair, metavar="NAME=FLAGS")
    parser.add_argument("--only-arms", action="store_true", help="leave the default out")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--fraction", default="0.1")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--keep", choices=("last", "best"), default="last")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/unlabelled")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--tidy", action="store_true", help="remove a run's folder when its line is written")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    options.arm = [*([] if options.only_arms else [("default", "")]), *options.arm]
    if not options.table:
        measure(options)
    print("\n".join(rows(options)))


if __name__ == "__main__":
    main()
