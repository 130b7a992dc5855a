"""Stop real runs in 24 ways and continue them: `python tests/commands/stops.py` prints a table of docs/reliability.md.

3 launchers x SIGTERM, SIGINT x to the leader alone or to its process group x 0, 2 loader processes. `--record FILE`
keeps one line per case; with the same file an interrupted script continues.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from itertools import product
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "python": [sys.executable],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
CASES = list(product(LAUNCHERS, SIGNALS, ("leader", "group"), (0, 2)))
MARK = "FINETUNE_MILE_CASE"  # in the environment of every process of a case, loaders too
STEPS = 160
FLAGS = [
    "--data", "demo:400", "--init", "none", "--arch", "resnet-demo", "--steps", str(STEPS), "--batch-size", "8",
    "--k-t", "40", "--k-s", "40", "--set", "mile.warmup=0", "--set", "size=24", "--set", "evaluate.images=40",
    "--set", "evaluate.labels=false", "--set", "log_every=1", "--set", "checkpoint_every=1000",
]  # fmt: skip


def launch(launcher, *flags, mark="", **variables):
    """Start a run in a session and process group of its own, as SLURM, systemd and docker do."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; children would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE", "PYTEST"))}
    env |= {"OMP_NUM_THREADS": "1", "FINETUNE_MILE_THREADS": "1", "ACCELERATE_USE_CPU": "1", MARK: mark, **variables}
    return subprocess.Popen(
        [*LAUNCHERS[launcher], str(ROOT / "finetune_mile/run.py"), *flags], env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_steps(process, out, more):
    """Until the run has done `more` steps since now, or has ended."""
    metrics = out / "metrics.jsonl"

    def lines():
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    goal = lines() + more
    while process.poll() is None and lines() < goal:
        time.sleep(0.002)


def alive(mark):
    """Processes of a case, by the mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def left_after(mark, seconds):
    """The processes of a case that are still there after some time; returns as soon as there are none."""
    end = time.monotonic() + seconds
    while (found := alive(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def saved_step(out):
    return max((int(path.stem.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*.pt")), default=0)


def same_weights(one, two):
    found, expected = (load_file(folder / "export/model.safetensors") for folder in (one, two))
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


def complete(base, launcher):
    """The weights of a run that nobody stopped, made once for each number of processes."""
    launcher = "torchrun" if launcher == "torchrun" else "python"
    out = base / launcher
    if not (out / "results.json").is_file():
        process = launch(launcher, *FLAGS, "--resume", "auto", "--out", str(out))
        _, errors = process.communicate(timeout=1200)
        assert process.returncode == 0, errors
    return out


def stop(base, launcher, signal_name, target, workers, after=13):
    """Stop one run and continue it; returns what happened."""
    mark = uuid.uuid4().hex
    out = base / f"{launcher}-{signal_name}-{target}-{workers}"
    flags = [*FLAGS, "--set", f"workers={workers}", "--resume", "auto", "--out", str(out)]
    process = launch(launcher, *flags, mark=mark)
    wait_for_steps(process, out, after)
    (os.killpg if target == "group" else os.kill)(process.pid, SIGNALS[signal_name])
    left = left_after(mark, 120)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    info = json.loads((out / "run.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    facts = {
        "status": info["status"], "signal": info.get("signal"), "saved": saved_step(out), "left": len(left),
        "steps": max(line["step"] for line in lines if line["kind"] == "train"), "errors": errors,
    }  # fmt: skip
    again = launch(launcher, *flags)
    _, errors = again.communicate(timeout=1200)
    assert again.returncode == 0, errors
    return facts | {"equal": same_weights(out, complete(base, launcher))}


def is_right(facts):
    return (
        facts["status"] == "stopped"
        and facts["saved"] == facts["steps"] < STEPS
        and not facts["left"]
        and facts["equal"]
    )


def table(results):
    """Markdown: a line for each launcher and number of loaders, a column for each signal and target."""
    columns = list(product(SIGNALS, ("leader", "group")))
    lines = ["| launcher, loaders | " + " | ".join(f"{name} to {target}" for name, target in columns) + " |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for launcher, workers in product(LAUNCHERS, (0, 2)):
        cells = []
        for name, target in columns:
            facts = results.get((launcher, name, target, workers))
            words = "not run"
            if facts is not None:
                words = f"{facts['status']}, step {facts['saved']}" + (
                    "" if is_right(facts) else f" **wrong: {facts}**"
                )
            cells.append(words)
        lines.append(f"| {launcher}, {workers} | " + " | ".join(cells) + " |")
    right = sum(is_right(facts) for facts in results.values())
    return "\n".join(
        [*lines, "", f"{right} of {len(CASES)} cases: stopped, saved, no process left, resumed bit for bit."]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("runs/stops.jsonl"))
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    record = options.record
    record.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    results = {tuple(line.pop("case")): line for line in lines}
    with tempfile.TemporaryDirectory() as base:
        for case in CASES:
            if case not in results and case[0] in (options.launcher or LAUNCHERS):
                results[case] = stop(Path(base), *case)
                with record.open("a") as stream:
                    stream.write(json.dumps({"case": case, **results[case]}) + "\n")
    print(table(results))
    return 0 if len(results) == len(CASES) and all(map(is_right, results.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
