"""Long work in one process: memory, open files, threads and time must stay flat, and what is written bounded.

A short form here. `python tests/faults/test_soak.py` makes 50,000 steps on kept features, 5,000 on images and 2,000
calls of predict, and prints a table.
"""

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from shortcuts import tinted_photos  # noqa: E402

MOST_GROWTH, MOST_SLOWER = 30, 1.3  # MB, and times, from the second tenth to the last one
TENTHS = 10
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


@dataclass(frozen=True)
class Tenth:
    """The state of the process after a tenth of the work."""

    done: int
    memory: float  # MB
    files: int
    threads: int
    milliseconds: float  # of the processor, for one step or call of this tenth
    written: int  # bytes, to the run folder and the terminal


class Watch:
    """Calls `at(n)` after each piece of work note ten states."""

    def __init__(self, total, size):
        self.total, self.size, self.tenths, self.began, self.before = total, size, [], time.process_time(), 0

    def at(self, done):
        if done < (len(self.tenths) + 1) * self.total // TENTHS:
            return
        now = time.process_time()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory, files = pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len([*Path("/proc/self/fd").iterdir()])
        each = 1000 * (now - self.began) / (done - self.before)
        self.tenths.append(Tenth(done, memory, files, threading.active_count(), each, self.size()))
        self.began, self.before = now, done

    def wrong(self):
        """What is not flat, in words. The first tenth is left out: it starts things."""
        assert len(self.tenths) == TENTHS, self.tenths
        first, last = self.tenths[1], self.tenths[-1]
        pace = statistics.median(tenth.milliseconds for tenth in self.tenths[-3:])
        before = statistics.median(tenth.milliseconds for tenth in self.tenths[1:4])
        parts = {
            f"memory {first.memory:.0f} to {last.memory:.0f} MB": last.memory - first.memory > MOST_GROWTH,
            f"files {first.files} to {last.files}": last.files > first.files,
            f"threads {first.threads} to {last.threads}": last.threads > first.threads,
            f"time {before:.1f} to {pace:.1f} ms": pace > MOST_SLOWER * before,
        }
        return [name for name, bad in parts.items() if bad]

    def table(self, what):
        rows = [
            f"| {t.done:,} {what} | {t.memory:.0f} | {t.files} | {t.threads} | {t.milliseconds:.1f} | {t.written:,} |"
            for t in self.tenths
        ]
        return "\n".join(["| after | MB | open files | threads | ms of the processor each | bytes written |",
                          "|---" * 6 + "|", *rows])  # fmt: skip


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def train_long(folder, steps, trunk):
    """A run of so many tiny steps; its watch. A tenth is a hundred logged steps."""
    from finetune_mile.cli import main
    from finetune_mile.training.folder import RunFolder

    said, every = io.StringIO(), max(steps // 1000, 1)
    watch, append = Watch(steps, lambda: size_of(folder) + len(said.getvalue())), RunFolder.append

    def watched(self, record):
        append(self, record)
        if record["kind"] == "train":
            watch.at(record["step"])

    words = {
        "data": "demo:60", "init": "simclr-demo", "trunk": trunk, "method": "mile", "batch-size": 4, "steps": steps,
        "k-t": "20 %", "k-s": "5 %", "out": folder,
    }  # fmt: skip
    sets = {
        "size": 16, "workers": 0, "log_every": every, "checkpoint_every": max(steps // 50, 1), "mile.warmup": 0,
        "evaluate.images": 10, "evaluate.labels": False,
    }  # fmt: skip
    flags = [str(part) for key, value in words.items() for part in (f"--{key}", value)]
    flags += [part for key, value in sets.items() for part in ("--set", f"{key}={str(value).lower()}")]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        patch.setattr(RunFolder, "append", watched)
        assert main(["run", *flags]) == 0, said.getvalue()[-2000:]
    return watch


def predict_often(run, photos, calls):
    """`finetune-mile predict` so many times in this process; its watch."""
    from finetune_mile.cli import main

    said = io.StringIO()
    watch, answers = Watch(calls, lambda: len(said.getvalue())), set()
    for call in range(1, calls + 1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            assert main(["predict", str(run), str(photos), "--workers", "0", "--format", "csv"]) == 0
        answers.add(out.getvalue())
        watch.at(call)
    assert len(answers) == 1, "the same photos have the same labels"
    return watch


def soak(folder, steps, calls):
    tinted_photos(folder / "photos", 40, train=1, val=1)
    yield "steps on images", train_long(folder / "images", max(steps // 10, 100), "all")
    yield "steps on features", train_long(folder / "run", steps, "frozen")
    yield "calls", predict_often(folder / "run", folder / "photos/val", calls)


def test_memory_files_and_time_stay_flat(tmp_path):
    for what, watch in soak(tmp_path, 200, 30):
        wrong = [part for part in watch.wrong() if not part.startswith("time")]  # too short to tell
        assert not wrong, watch.table(what)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--calls", type=int, default=2000)
    options, bad = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as base:
        for what, watch in soak(Path(base), options.steps, options.calls):
            print(watch.table(what), "\n\nnot flat: " + (", ".join(watch.wrong()) or "nothing"), "\n", flush=True)
            bad += watch.wrong()
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
