"""Does a checkpoint help? `--init FILE` against `--init none`, interleaved by seed, on a folder of photos.

    python benchmarks/initialisation.py --init model.pth --data folder:photos --fraction 0.1

Both get the same network, budget, images and views; only the trunk's weights differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent


def accuracy(out: Path, init: str, arch: str, options: argparse.Namespace, seed: int) -> tuple[float, str]:
    """One run's accuracy in percent, and the architecture that it trained."""
    flags = ["--init", init, "--data", options.data, "--fraction", str(options.fraction), "--method", "softmax",
             "--steps", str(options.steps), "--batch-size", str(options.batch_size), "--seed", str(seed),
             "--set", f"size={options.size}", "--set", "evaluate.labels=false", "--out", str(out)]  # fmt: skip
    flags += ["--arch", arch] if init == "none" else []
    for setting in options.sets:
        flags += ["--set", setting]
    done = subprocess.run(
        [sys.executable, str(ROOT / "finetune_mile/run.py"), *flags], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    network = json.loads((out / "init.json").read_text())["arch"]
    return float(json.loads((out / "results.json").read_text())["accuracy"]), network


def main() -> None:
    """Run both, print the margin."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--init", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE", help="as in run.py")
    options = parser.parse_args()
    margins = []
    with tempfile.TemporaryDirectory() as place:
        for seed in track(range(options.seeds), description="seeds"):
            ours, arch = accuracy(Path(place, f"init-{seed}"), options.init, "", options, seed)
            none, _ = accuracy(Path(place, f"none-{seed}"), "none", arch, options, seed)
            margins.append(ours - none)
            line = f"seed {seed}: {arch}  --init FILE {ours:.2f} %  --init none {none:.2f} %"
            print(f"{line}  margin {margins[-1]:+.2f}", flush=True)
    spread = f" ± {statistics.stdev(margins):.2f}" if len(margins) > 1 else ""
    print(f"margin {statistics.mean(margins):+.2f}{spread} points over {len(margins)} seeds")


if __name__ == "__main__":
    main()
