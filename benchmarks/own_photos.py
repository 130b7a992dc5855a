"""The default on photos against the linear probe of the same checkpoint on the same labels: docs/own-photos.md.

python benchmarks/own_photos.py --init imgsim=model.pth --init demo=simclr-demo --init none=none@resnet-demo \
    --data clothing=folder:CLOTHING --data 'grocery=folder:GROCERY?val=test&depth=2' --data cifar10=folder:CIFAR

Every finished run becomes one line of --record, and is not run again; its folder below --runs is removed with --tidy.
`--table` only prints. CLOTHING has train/ and val/ (validation and test photos together), CIFAR train/ and val/
(the first 100 test images of each class by name).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune_mile.training.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
FRACTIONS = ("0.01", "0.1")
METHODS = ("sigmoid", "mile")
MEANS = ("accuracy", "probe", "share", "moved", "imitation", "labels")  # columns that are means over seeds
# Student's t for a two-sided 95 % interval of so many values
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31}


def run_cell(out: Path, flags: list[str], threads: int) -> None:
    """Run or continue one cell, unless it is finished."""
    if not (out / "results.json").is_file():
        words = ["--resume", str(out)] if (out / "recipe.yaml").is_file() else [*flags, "--out", str(out)]
        environment = os.environ | {"FINETUNE_MILE_THREADS": str(threads)}
        print(time.strftime("%H:%M:%S"), out.name, flush=True)
        subprocess.run([sys.executable, str(ROOT / "finetune_mile/run.py"), *words], check=True, env=environment)


def facts(run: Path) -> dict[str, Any]:
    """What a finished run shows: accuracy, that of its probe, how far the weights went, and its pseudo-labels."""
    import yaml

    results, split = (json.loads((run / name).read_text()) for name in ("results.json", "split.json"))
    decision = run / "trial/decision.json"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    labels = [line["labels_per_image"] for line in lines if "labels_per_image" in line]
    plan = planned(run, split["labelled"])
    recipes = [yaml.safe_load(file.read_text()) for file in (run / "recipe.yaml", run / "trial/recipe.yaml")
               if file.is_file()]  # fmt: skip
    share = 1.0 if recipes[0]["keep"] == "last" else 0.5
    return {
        "accuracy": results["accuracy"],
        "probe": results.get("probe_accuracy", math.nan),
        "share": json.loads(decision.read_text())["share"] if decision.is_file() else share,
        "moved": moved(run),
        "imitation": 100 * sum(each.steps for each in plan.phases if each.name == "imitation") / plan.total_steps,
        "labels": statistics.fmean(labels) if labels else 1.0,
        "images": results["images"],
        "split": split["sha256"],
        "steps": [recipe["steps"] for recipe in recipes],
    }


def planned(run: Path, labelled: int) -> Plan:
    """The phases of a run with so many labelled images."""
    from finetune_mile.run import resumed_settings
    from finetune_mile.training.plan import make_plan

    return make_plan(resumed_settings(run).recipe, {"labelled": labelled, "unlabelled": 0, "all": labelled})


def recorded(file: Path) -> dict[str, dict[str, Any]]:
    """Facts of finished runs by the name of their cell."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {fact["cell"]: fact for fact in map(json.loads, lines)}


def moved(run: Path) -> float:
    """The distance of the exported weights from the checkpoint's, in per cent of the length of those."""
    import yaml
    from safetensors.torch import load_file

    import finetune_mile

    init = yaml.safe_load((run / "recipe.yaml").read_text())["init"]
    if init == "none":
        return math.nan
    network = finetune_mile.load(init)
    before = {name: parameter.detach().double() for name, parameter in network.named_parameters()}
    after = load_file(run / "export/model.safetensors")
    change = sum(float((after[name] - tensor).square().sum()) for name, tensor in before.items())
    return 100 * math.sqrt(change / sum(float(tensor.square().sum()) for tensor in before.values()))


def margin(values: list[float]) -> float:
    """Half the 95 % interval of a mean over seeds; infinite for one seed."""
    if len(values) < 2:
        return math.inf
    return T95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))


def interval(values: list[float]) -> str:
    """Mean and 95 % interval over seeds."""
    mean = f"{statistics.fmean(values):+.1f}"
    return mean if len(values) < 2 else f"{mean} ± {margin(values):.1f}"


def rows(options: argparse.Namespace) -> Iterator[str]:
    """The lines of the table; a cell that misses a bar is marked.

    The bars: not more than a point below the probe in the mean over seeds, nor the paired interval wholly below it; a
    method not more than a point below the first one on the same labels. Random weights have no bar.
    """
    done = recorded(options.record)
    yield "| checkpoint | photos | labels | method | seeds | probe | fine-tuned | over the probe | over "
    yield f"{options.methods[0]} | share of the way | moved | imitation steps | labels per image |\n"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    for init in options.init:
        for data in options.data:
            for fraction in options.fractions:
                first: dict[str, float] = {}  # accuracy of the first method by seed
                for method in options.methods:
                    names = {
                        str(seed): f"{init[0]}-{data[0]}-{fraction}-{method}-{seed}" for seed in range(options.seeds)
                    }
                    by_seed = {seed: done[name] for seed, name in names.items() if name in done}
                    if not by_seed:
                        continue
                    cells = list(by_seed.values())
                    mean = {key: statistics.fmean(each[key] for each in cells) for key in MEANS}
                    accuracies = {seed: each["accuracy"] for seed, each in by_seed.items()}
                    first = first or accuracies
                    over = [each["accuracy"] - each["probe"] for each in cells]
                    paired = [accuracies[seed] - first[seed] for seed in by_seed if seed in first]
                    marks = [
                        " **below**"
                        if statistics.fmean(over) < -1 or statistics.fmean(over) + margin(over) < 0
                        else "",
                        " **below**" if paired and statistics.fmean(paired) < -1 else "",
                    ]
                    versus = "" if first is accuracies or not paired else interval(paired) + marks[1]
                    columns = [
                        f"{init[0]} | {data[0]} | {float(fraction):.0%} | {method} | {len(cells)}",
                        f"{mean['probe']:.1f} | {mean['accuracy']:.1f} | {interval(over)}{marks[0]} | {versus}",
                        f"{mean['share']:.2f} | {mean['moved']:.1f} %",
                        f"{mean['imitation']:.0f} % | {mean['labels']:.2f}",
                    ]
                    if init[1].startswith("none"):  # no checkpoint: no probe, no way to go, no bar
                        columns[1:3] = [f" | {mean['accuracy']:.1f} |  | {interval(paired) if versus else ''}", " | "]
                    yield f"| {' | '.join(columns)} |\n"


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, _, value = text.partition("=")
    return name, value


def main() -> None:
    """Run the missing runs, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--init", action="append", type=pair, required=True)
    parser.add_argument("--data", action="append", type=pair, required=True)
    parser.add_argument("--fractions", nargs="+", default=FRACTIONS)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/own-photos")
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks/records/own_photos.jsonl")
    parser.add_argument("--tidy", action="store_true", help="remove a run's folder when its line is written")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    options.record.parent.mkdir(parents=True, exist_ok=True)
    every = product(range(options.seeds), options.fractions, options.data, options.init, options.methods)
    for seed, fraction, data, init, method in () if options.table else every:
        cell = f"{init[0]}-{data[0]}-{fraction}-{method}-{seed}"
        if cell in recorded(options.record):
            continue
        name, _, arch = init[1].partition("@")
        flags = ["--init", name, *(["--arch", arch] if arch else []), "--data", data[1], "--fraction", fraction]
        flags += [
            "--method",
            method,
            "--seed",
            str(seed),
            "--set",
            f"size={options.size}",
            "--set",
            "evaluate.labels=false",
        ]
        out = options.runs / cell
        run_cell(out, flags, options.threads)
        line = json.dumps({"cell": cell, **facts(out)})
        with options.record.open("a") as file:
            file.write(line + "\n")
        if options.tidy:
            shutil.rmtree(out)
    print("".join(rows(options)))


if __name__ == "__main__":
    main()
