"""The default on photos against the linear probe of the same checkpoint on the same labels: docs/own-photos.md.

python benchmarks/own_photos.py --init imgsim=model.pth --init demo=simclr-demo --init none=none@resnet-demo \
    --data clothing=folder:CLOTHING --data 'grocery=folder:GROCERY?val=test&depth=2' --data cifar10=folder:CIFAR

Every run is a run folder below --runs; those that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FRACTIONS = ("0.01", "0.1")
METHODS = ("sigmoid", "mile")
# Student's t for a two-sided 95 % interval of so many values
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31}


def run_cell(out: Path, flags: list[str], threads: int) -> None:
    """Run what is not there yet."""
    if (out / "results.json").is_file():
        return
    words = ["--resume", str(out)] if (out / "recipe.yaml").is_file() else [*flags, "--out", str(out)]
    environment = os.environ | {"FINETUNE_MILE_THREADS": str(threads)}
    print(out.name, flush=True)
    subprocess.run([sys.executable, str(ROOT / "finetune_mile/run.py"), *words], check=True, env=environment)


def facts(run: Path) -> dict[str, float]:
    """What a finished run shows: accuracy, that of its probe, how far the weights went, and its pseudo-labels."""
    results = json.loads((run / "results.json").read_text())
    decision = run / "trial/decision.json"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    imitations = [line for line in steps if line["phase"] == "imitation"]
    return {
        "accuracy": results["accuracy"],
        "probe": results.get("probe_accuracy", math.nan),
        "share": json.loads(decision.read_text())["share"] if decision.is_file() else 0.5,
        "moved": moved(run),
        "imitation": 100 * len(imitations) / len(steps),
        "labels": statistics.fmean(line["labels_per_image"] for line in imitations) if imitations else 1.0,
    }


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
    method not more than a point below the first one on the same labels.
    """
    yield "| checkpoint | photos | labels | method | seeds | probe | fine-tuned | over the probe | over "
    yield f"{options.methods[0]} | share of the way | moved | imitation steps | labels per image |\n"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    for init in options.init:
        for data in options.data:
            for fraction in options.fractions:
                first: dict[str, float] = {}  # accuracy of the first method by seed
                for method in options.methods:
                    names = [f"{init[0]}-{data[0]}-{fraction}-{method}-{seed}" for seed in range(options.seeds)]
                    runs = [options.runs / name for name in names if (options.runs / name / "results.json").is_file()]
                    if not runs:
                        continue
                    cells = [facts(run) for run in runs]
                    mean = {key: statistics.fmean(each[key] for each in cells) for key in cells[0]}
                    seeds = [run.name.rpartition("-")[2] for run in runs]
                    accuracies = dict(zip(seeds, (each["accuracy"] for each in cells), strict=True))
                    first = first or accuracies
                    over = [each["accuracy"] - each["probe"] for each in cells]
                    paired = [accuracies[seed] - first[seed] for seed in seeds if seed in first]
                    marks = [
                        " **below**"
                        if statistics.fmean(over) < -1 or statistics.fmean(over) + margin(over) < 0
                        else "",
                        " **below**" if paired and statistics.fmean(paired) < -1 else "",
                    ]
                    versus = "" if first is accuracies or not paired else interval(paired) + marks[1]
                    yield (
                        f"| {init[0]} | {data[0]} | {float(fraction):.0%} | {method} | {len(runs)} "
                        f"| {mean['probe']:.1f} | "
                        f"{mean['accuracy']:.1f} | {interval(over)}{marks[0]} | {versus} | {mean['share']:.2f} | "
                        f"{mean['moved']:.1f} % | {mean['imitation']:.0f} % | {mean['labels']:.2f} |\n"
                    )


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
    options = parser.parse_args()
    for seed in range(options.seeds):
        for fraction in options.fractions:
            for data in options.data:
                for init in options.init:
                    for method in options.methods:
                        name, _, arch = init[1].partition("@")
                        flags = [
                            "--init",
                            name,
                            *(["--arch", arch] if arch else []),
                            "--data",
                            data[1],
                            "--fraction",
                            fraction,
                            "--method",
                            method,
                        ]
                        flags += [
                            "--seed",
                            str(seed),
                            "--set",
                            f"size={options.size}",
                            "--set",
                            "evaluate.labels=false",
                        ]
                        out = options.runs / f"{init[0]}-{data[0]}-{fraction}-{method}-{seed}"
                        run_cell(out, flags, options.threads)
    print("".join(rows(options)))


if __name__ == "__main__":
    main()
