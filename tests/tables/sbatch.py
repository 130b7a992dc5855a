"""A small fake of SLURM: `sbatch` runs the tasks of an array, one after another; `scontrol requeue` runs one again.

Its folder, FAKE_SLURM, gets a line per task in log.jsonl. FAKE_SIGNAL, such as `USR1 1_0`, is sent in the first attempt
of that task, when the file FAKE_SLURM/started appears: USR1 to the batch script alone (--signal=B:), TERM to every
process of the job, which is then run again (a preemption).
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PLACE = Path(os.environ["FAKE_SLURM"])


def install(folder):
    """Put both commands into a folder, for PATH."""
    folder.mkdir()
    for name in ("sbatch", "scontrol"):
        command = folder / name
        command.write_text(f'#!/bin/bash\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        command.chmod(0o755)


def read():
    log = PLACE / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def sbatch(words):
    parser = argparse.ArgumentParser()
    for flag in ("--parsable", "--requeue"):
        parser.add_argument(flag, action="store_true", required=True)
    for flag in ("--array", "--job-name", "--open-mode", "--signal", "--nodes", "--ntasks", "--gres"):
        parser.add_argument(flag, required=True)
    for flag in ("--dependency", "--kill-on-invalid-dep"):
        parser.add_argument(flag)
    options = parser.parse_args(words)
    script = PLACE / "script.sh"
    script.write_text(sys.stdin.read())
    job = 1 + max((line["job"] for line in read()), default=0)
    first, last = map(int, options.array.split("-"))
    ended = {line["task"]: line["code"] for line in read()}
    needs = (options.dependency or "afterok").split(":")[1:]
    for number in range(first, last + 1):
        task, restarts = f"{job}_{number}", 0
        while True:
            code = None if any(ended[need] != 0 for need in needs) else attempt(script, job, number, restarts)
            line = {"job": job, "task": task, "code": code, "restarts": restarts, "options": vars(options)}
            with (PLACE / "log.jsonl").open("a") as stream:
                stream.write(json.dumps(line) + "\n")
            if not (PLACE / f"requeue-{task}").exists():
                break
            (PLACE / f"requeue-{task}").unlink()
            restarts += 1
    print(job)


def attempt(script, job, number, restarts):
    """Run one task; returns its exit code."""
    task = {"SLURM_ARRAY_JOB_ID": str(job), "SLURM_ARRAY_TASK_ID": str(number), "SLURM_RESTART_COUNT": str(restarts)}
    process = subprocess.Popen(["bash", script], env=os.environ | task, stdout=sys.stderr, start_new_session=True)
    name, _, which = os.environ.get("FAKE_SIGNAL", "").partition(" ")
    if which == f"{job}_{number}" and not restarts:
        while not (PLACE / "started").exists() and process.poll() is None:
            time.sleep(0.05)
        if name == "USR1":
            process.send_signal(signal.SIGUSR1)
        else:
            listed = subprocess.run(["ps", "-o", "pid=", "-s", str(process.pid)], capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(ProcessLookupError):  # `ps` itself, or one that another's end has ended
                    os.kill(pid, signal.SIGTERM)
            (PLACE / f"requeue-{which}").touch()
    return process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "sbatch":
        sbatch(sys.argv[2:])
    else:
        assert sys.argv[2] == "requeue"
        (PLACE / f"requeue-{sys.argv[3]}").touch()
