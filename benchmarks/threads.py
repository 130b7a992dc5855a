"""Threads on a machine that is busy, and `accelerate launch` beside the plain command: medians of interleaved rounds.

    python benchmarks/threads.py --busy 1                 # training steps of the demo's network, by waiting policy
    python benchmarks/threads.py --launch --rounds 3      # the demo by both commands, also with OMP_NUM_THREADS=1

"spin" is OpenMP's default, "sleep" is OMP_WAIT_POLICY=passive, which finetune_mile chooses where other programs use the
cores when a command starts. Images a second, and images per second of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = """
import sys, time, torch
from finetune_mile.networks.heads import build, new_head
threads, steps = map(int, sys.argv[1:])
torch.set_num_threads(threads)
torch.manual_seed(0)
network = build("resnet-demo")
new_head(network, 10, "zero")
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
images, labels = torch.randn(64, 3, 24, 24), torch.randint(10, (64,))
for step in range(steps + 3):
    if step == 3:
        began, used = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
print(64 * steps / (time.perf_counter() - began), 64 * steps / (time.process_time() - used))
"""
DEMO = "run --data demo:500 --init none --arch resnet-demo --method sigmoid --steps 60 --set size=24 --set workers=0"


def steps(threads: int, count: int, policy: str) -> list[float]:
    """Images a second, and per second of the processor, of one process."""
    own = {"spin": {}, "sleep": {"OMP_WAIT_POLICY": "passive"}}[policy]
    command = [sys.executable, "-c", STEPS, str(threads), str(count)]
    done = subprocess.run(command, env=environment(own), capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def demo(launcher: list[str], own: Mapping[str, str]) -> list[float]:
    """Images a second and the number of threads of a run, from its run.json."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*launcher, str(ROOT / "finetune_mile/run.py"), *DEMO.split()[1:], "--out", f"{folder}/run"]
        subprocess.run(words, env=environment(own), capture_output=True, check=True)
        info = json.loads(Path(folder, "run/run.json").read_text(encoding="utf-8"))
    return [info["images_per_second"], info["threads"]]


def environment(own: Mapping[str, str]) -> dict[str, str]:
    left_out = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "FINETUNE_MILE_THREADS")
    return {k: v for k, v in os.environ.items() if k not in left_out} | {"PYTHONPATH": str(ROOT)} | dict(own)


def main() -> None:
    """Measure in turns, print medians and all values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--launch", action="store_true")
    given = parser.parse_args()
    if given.launch:
        one, accelerate = {"OMP_NUM_THREADS": "1"}, [str(Path(sys.executable).with_name("accelerate")), "launch"]
        work = {
            "python": lambda: demo([sys.executable], {}), "accelerate launch": lambda: demo(accelerate, {}),
            "python, OMP_NUM_THREADS=1": lambda: demo([sys.executable], one),
            "accelerate launch, OMP_NUM_THREADS=1": lambda: demo(accelerate, one),
        }  # fmt: skip
    else:
        cores = len(os.sched_getaffinity(0))
        work = {
            f"{cores} threads, spin": lambda: steps(cores, given.steps, "spin"),
            f"{cores} threads, sleep": lambda: steps(cores, given.steps, "sleep"),
            "1 thread": lambda: steps(1, given.steps, "spin"),
        }
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.busy)]
    found: dict[str, list[list[float]]] = {name: [] for name in work}
    try:
        for number in range(given.rounds):
            for name in list(work)[number % len(work) :] + list(work)[: number % len(work)]:
                found[name].append(work[name]())
    finally:
        for loop in loops:
            loop.kill()
    second = "threads" if given.launch else "per second of the processor"
    print(
        f"load {os.getloadavg()[0]:.1f}, {given.busy} busy loops, {given.rounds} rounds; images a second, and {second}"
    )
    for name, values in found.items():
        medians = ", ".join(f"{statistics.median(column):.0f}" for column in zip(*values, strict=True))
        print(f"{name:<40}{medians:<14}({', '.join(f'{value[0]:.0f}' for value in values)})")


if __name__ == "__main__":
    main()
