"""Do photos without labels pay in the default run? The tables and bars of docs/unlabelled.md.

python benchmarks/unlabelled.py --init imgsim=model.pth --data clothing=folder:CLOTHING \
    --data 'grocery=folder:GROCERY?val=test&depth=2' --data cifar10=folder:CIFAR

One run for each checkpoint, data set, fraction of the labels and seed; the other photos are without theirs
(--semi all). Its first stage is the supervised default, so one run has both numbers. `--arm NAME=FLAGS` adds runs with
other flags, for example --arm half-foreign='--unlabelled folder:OTHER'; --only-arms leaves the default out. With --keep
last there is no trial: the weights go all the way in both stages.
Every finished run becomes one line of --record, and is not run again. `--table` only prints. Below the table each bar
says what it is met or missed by. Which part of the second stage carries the gain: finetune-mile table mini-semi.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from own_photos import ROOT, interval, pair, recorded, run_cell

ROW = ("init", "photos", "fraction", "arm", "size", "keep")  # what the runs of a line share
RECORD = Path(__file__).resolve().parent / "records/unlabelled.jsonl"


def facts(run: Path) -> dict[str, Any]:
    """What the tables need of a finished run."""
    results, split, info = (json.loads((run / name).read_text()) for name in ("results.json", "split.json", "run.json"))
    metrics, times = run / "then/metrics.jsonl", info.get("times", {})
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    empty = [line["empty_share"] for line in lines if "empty_share" in line]
    steps = max((line["step"] for line in lines), default=0)
    decision = run / "trial/decision.json"
    return {
        "accuracy": results["accuracy"], "supervised": results.get("first_stage_accuracy", results["accuracy"]),
        "images": results["images"], "labelled": split["labelled"], "unlabelled": split["unlabelled"],
        "counted": 100 * (1 - statistics.fmean(empty)) if empty else None, "steps": steps,
        "probe": results.get("probe_accuracy"), "own_size_probe": results.get("own_size_probe_accuracy"),
        "shares": [info.get("share"), info.get("then_share")], "seconds": round(info["seconds"]),
        "times": {name: round(times[name]) for name in ("train", "then", "trial") if name in times},
        "decision": json.loads(decision.read_text()) if decision.is_file() else None,
    }  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    """Run what is missing in the record."""
    every = product(options.seeds, options.fractions, options.init, options.data, options.arm)
    for seed, fraction, init, data, arm in every:
        about = {"init": init[0], "photos": data[0], "fraction": fraction, "seed": seed, "arm": arm[0]}
        about |= {"size": options.size, "keep": options.keep}
        cell = "-".join(map(str, about.values()))
        if cell in recorded(options.record):
            continue
        common = ["--data", data[1], "--fraction", fraction, "--seed", str(seed), "--size", str(options.size)]
        common += ["--set", "evaluate.labels=false"]
        own = ["--init", init[1], "--semi", "all", "--keep", options.keep]
        run_cell(options.runs / cell, [*common, *own, *shlex.split(arm[1])], options.threads)
        options.record.parent.mkdir(parents=True, exist_ok=True)
        with options.record.open("a") as file:
            file.write(json.dumps({"cell": cell, **about, **facts(options.runs / cell)}) + "\n")
        if options.tidy:
            shutil.rmtree(options.runs / cell)


def gains(found: list[dict[str, Any]]) -> list[float]:
    """What the second stage of each run gave, in points."""
    return [fact["accuracy"] - fact["supervised"] for fact in found]


def rows(done: list[dict[str, Any]]) -> list[str]:
    """The lines of the table: means over seeds, and differences seed by seed."""
    lines = [
        "| checkpoint | photos | labelled, unlabelled, tested | run | seeds | supervised | with unlabelled photos "
        "| gain | photos that count | steps |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys(tuple(fact[name] for name in ROW) for fact in done):
        found = [fact for fact in done if tuple(fact[name] for name in ROW) == key]
        one, mean = found[0], {key: statistics.fmean(fact[key] for fact in found) for key in ("supervised", "accuracy")}
        counted = [fact["counted"] for fact in found if fact["counted"] is not None]
        lines.append(
            f"| {one['init']}, {one['size']} px | {one['photos']}, {float(one['fraction']):.0%} | {one['labelled']:,}, "
            f"{one['unlabelled']:,}, {one['images']:,.0f} | {one['arm']}, keep {one['keep']} | {len(found)} | "
            f"{mean['supervised']:.1f} | {mean['accuracy']:.1f} | {interval(gains(found))} | "
            f"{f'{statistics.fmean(counted):.0f} %' if counted else ''} | {one['steps']} |"
        )
    return lines


def bars(done: list[dict[str, Any]]) -> list[str]:
    """Each bar of docs/unlabelled.md, what was measured, and on how many runs."""

    def picked(**wanted: object) -> list[dict[str, Any]]:
        """The runs of these values; of two that differ in their trial alone the one that has it, as the default has."""
        found = [fact for fact in done if all(fact[name] == value for name, value in wanted.items())]
        found.sort(key=lambda fact: bool(fact["keep"] == "best"))
        return [*{tuple(fact[name] for name in (*ROW[:-1], "seed")): fact for fact in found}.values()]

    ten, one = (picked(init="imgsim", fraction=share, arm="default", size=64) for share in ("0.1", "0.01"))
    vit, foreign = picked(init="vit", arm="default"), picked(arm="half-foreign")
    same = [
        fact for each in foreign for fact in ten if all(fact[name] == each[name] for name in ("photos", "seed"))
    ]  # fmt: skip
    cost = [1 + fact["times"]["then"] / fact["times"]["train"] for fact in ten if {"then", "train"} <= {*fact["times"]}]
    measured: tuple[tuple[str, list[float], Callable[[list[float]], float], Callable[[float], bool]], ...] = (
        ("10 %: mean gain at least 3.0", gains(ten), statistics.fmean, lambda x: x >= 3),
        ("10 %: gain of the lowest run at least -1.0", gains(ten), min, lambda x: x >= -1),
        ("1 %: mean gain at least 0", gains(one), statistics.fmean, lambda x: x >= 0),
        ("vision transformer: mean gain at least 0", gains(vit), statistics.fmean, lambda x: x >= 0),
        ("half of the photos foreign: at least half of the gain of the same runs stays", gains(foreign),
         statistics.fmean, lambda x: x >= statistics.fmean(gains(same)) / 2),
        ("10 %: at most 4.0 times the training time of the supervised run", cost, max, lambda x: x <= 4),
        ("10 %: above a probe at the checkpoint's own size, where there is one",
         [fact["accuracy"] - fact["own_size_probe"] for fact in ten if fact["own_size_probe"] is not None], min,
         lambda x: x > 0),
    )  # fmt: skip
    return [
        f"- {name}: " + (f"{value(found):+.1f}, {'met' if ok(value(found)) else 'missed'} ({len(found)} runs)"
                         if found else "not measured")
        for name, found, value, ok in measured
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", action="append", default=[], type=pair, metavar="NAME=CHECKPOINT")
    parser.add_argument("--data", action="append", default=[], type=pair, metavar="NAME=DATA")
    parser.add_argument("--arm", action="append", default=[], type=pair, metavar="NAME=FLAGS")
    parser.add_argument("--only-arms", action="store_true", help="leave the default out")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--fractions", nargs="+", default=["0.1"])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--keep", choices=("last", "best"), default="best")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/unlabelled")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--tidy", action="store_true", help="remove a run's folder when its line is written")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    options.arm = [*([] if options.only_arms else [("default", "")]), *options.arm]
    if not options.table:
        measure(options)
    done = [*recorded(options.record).values()]
    print("\n".join([*rows(done), "", *bars(done)]))


if __name__ == "__main__":
    main()
