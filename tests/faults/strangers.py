"""What hostile checkpoints cost: each file is given to `finetune-mile weights check` in a process of its own.

    python -m tests.faults.strangers [FILE ...]

Without files it writes those of test_hostile_checkpoints.py. Prints megabytes above `import torch`, seconds of the
processor, and the end of the output; exit code 1 where a bound is broken: twice the file and 300 MB, 20 seconds, one
line of at most 500 printable characters.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOM, TIMES, SECONDS, LETTERS = 300, 2, 20, 500
REFUSED = 2


def run(command):
    """Exit code, megabytes, seconds of the processor, output; a process above 12 GB or 90 seconds is ended."""
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, 12 * 2**30))
        resource.setrlimit(resource.RLIMIT_CPU, (90, 91))

    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=limit)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().decode("utf-8", "replace")
    return process.returncode, used.ru_maxrss / 1024, used.ru_utime + used.ru_stime, text


def size_of(path):
    files = path.rglob("*") if path.is_dir() else [path] if path.is_file() else path.parent.glob(f"{path.name}.*")
    return sum(file.stat().st_size for file in files) / 2**20


def broken(size, code, more, seconds, text):
    """The bounds that one file breaks."""
    lines = text.splitlines()
    return [
        name
        for name, held in {
            "memory": more <= TIMES * size + ROOM, "time": seconds <= SECONDS, "code": code in (0, 1, REFUSED),
            "traceback": "Traceback" not in text, "one line": code != REFUSED or len(lines) == 1,
            "characters": all(len(line) <= LETTERS and line.isprintable() for line in lines),
        }.items()
        if not held
    ]  # fmt: skip


def main(files):
    with tempfile.TemporaryDirectory() as folder:
        if not files:
            sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/faults")]
            from test_hostile_checkpoints import FILES

            files = [write(Path(folder) / f"{name}.pth") for name, write in FILES.items()]
        base = run([sys.executable, "-c", "import torch"])[1]
        print(f"import torch: {base:.0f} MB\n\n| file | MB | code | MB above | seconds | broken | output |")
        print("|---|---|---|---|---|---|---|")
        bad = 0
        for path in map(Path, files):
            code, peak, seconds, text = run([sys.executable, "-m", "finetune_mile.cli", "weights", "check", str(path)])
            wrong = broken(size_of(path), code, peak - base, seconds, text)
            bad += bool(wrong)
            last = (text.strip().splitlines() or [""])[-1].replace("|", " ")[:100]
            name = path.parent.name if path.name == "m" else path.name
            row = (name, f"{size_of(path):.2f}", code, f"{peak - base:.0f}", f"{seconds:.1f}", ", ".join(wrong), last)
            print("|", " | ".join(map(str, row)), "|", flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
