"""Real processes that are killed, or whose disk breaks, at the n-th event of their files (events.c).

`with Lab(folder) as lab` starts one process that has imported all we need; `lab.run(words, ...)` forks it, so that a
try costs what the command itself costs. Needs Linux and a C compiler.
"""

import ctypes
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KILL = int(signal.SIGKILL)
COMPILER = shutil.which("cc") if sys.platform == "linux" else None
CRASHED = 99  # exit code of a command that ended in a traceback


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (minus a signal), what it said, and what it did to files."""

    code: int
    out: str
    err: str
    events: int
    seconds: float

    @property
    def calm(self):
        """Neither a traceback nor an abort."""
        return self.code not in (CRASHED, -int(signal.SIGABRT), -int(signal.SIGSEGV), -int(signal.SIGBUS)) and (
            "Traceback" not in self.err and "Exception ignored" not in self.err
        )


class Lab:
    """Runs commands of finetune-mile in forks of one process."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def __enter__(self):
        library = self.folder / "events.so"
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, HERE / "events.c", "-ldl"], check=True)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE", "PYTEST"))}
        env |= {
            "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "FINETUNE_MILE_THREADS": "1", "COLUMNS": "400",
            "PYTHONPATH": str(ROOT), "FINETUNE_MILE_CACHE": str(self.folder / "cache"), "MALLOC_ARENA_MAX": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "lab.py"), str(library)], env=env, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=self.folder,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()

    def run(self, words, *, below=(), at=0, do=KILL, after=None, send=KILL, seconds=300, cwd=None, values=None, **env):
        """One command in a process of its own.

        Args:
            words: of the command, without finetune-mile.
            below: the folders whose events count.
            at: the event at which it breaks; 0: none.
            do: KILL, or the errno of the call.
            after: send the signal `send` after so many seconds.
            seconds: it may take; more is an error.
            cwd: the folder that it works in.
            values: module.NAME to a value that it has in this process, to make a command shorter.
            env: variables of the process.
        """
        what = {
            "words": list(map(str, words)), "below": [str(Path(path).resolve()) for path in below], "at": at, "do": do,
            "after": after, "send": int(send), "seconds": seconds, "values": values or {},
            "cwd": str(cwd or self.folder),
            "env": {key: str(value) for key, value in env.items()},
        }  # fmt: skip
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert answer.pop("in_time"), f"{words}: not ended after {seconds} s"
        return Ended(**answer)


def _child(what, out, err):
    """The command, in a fork; never returns."""
    code = CRASHED
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0, closefd=False)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(what["env"])
        os.chdir(what["cwd"])
        from finetune_mile.cli import main

        for name, value in what["values"].items():
            module, _, key = name.rpartition(".")
            setattr(importlib.import_module(f"finetune_mile.{module}"), key, value)
        LIBRARY.faults_arm("\n".join(what["below"]).encode(), what["at"], what["do"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code = main(what["words"])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve():
    ours = (
        "run api cli training.train training.quickstart training.embedding training.evaluation paper.pretraining.run "
        "paper.table paper.pretrain pages.exported pages.annotated verbs.predict checkpoints.classifier images.packing"
    )
    others = (
        "timm pyarrow.parquet matplotlib.font_manager safetensors.torch filelock rich.progress torch.export datasets "
        "sklearn.linear_model"
    )
    for name in [*(f"finetune_mile.{name}" for name in ours.split()), *others.split()]:
        importlib.import_module(name)
    LIBRARY.faults_arm(b"", 0, 0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    out, err = Path("stdout"), Path("stderr")
    for line in sys.stdin:
        what = json.loads(line)
        began = time.monotonic()
        child = os.fork()
        if not child:
            _child(what, out.resolve(), err.resolve())
        sent, status = what["after"] is None, 0
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            gone = time.monotonic() - began
            if not sent and gone >= what["after"]:
                os.kill(child, what["send"])
                sent = True
            if gone > what["seconds"]:
                os.kill(child, signal.SIGKILL)
                done = os.waitpid(child, 0)
                break
            time.sleep(0.005)
        status, gone = done[1], time.monotonic() - began
        answer = {
            "code": os.waitstatus_to_exitcode(status), "out": out.read_text(errors="replace"),
            "err": err.read_text(errors="replace"), "events": LIBRARY.faults_count(), "seconds": gone,
            "in_time": gone <= what["seconds"],
        }  # fmt: skip
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    LIBRARY = ctypes.CDLL(sys.argv[1])
    LIBRARY.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    LIBRARY.faults_count.restype = ctypes.c_long
    sys.exit(_serve())
