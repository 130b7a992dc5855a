"""What all commands write with, at every event of its files: killed, or with a disk that is full, read-only or broken.

These are forks of a process without torch, so that every event of every kind is tried in a second.
"""

import errno
import json
import os
import stat
import subprocess
import sys

import pytest
from lab import COMPILER, HERE, ROOT

from finetune_mile.core.files import write_whole

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs Linux and a C compiler, to break calls of the system")

SCRIPT = """
import ctypes, os, shutil, sys
from pathlib import Path
from finetune_mile.core import files
from finetune_mile.core.problems import Failed

library, base, what, fault = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])

def new_output(out):
    files.check_empty(out, "--out")
    with files.begun(out) as part:
        (part / "sub").mkdir()
        files.write_whole(part / "sub/a.txt", "a" * 5000)
        files.write_json(part / "b.json", [1, 2])
        with files.whole_stream(part / "README.md") as stream:
            stream.write(b"x" * 3000)
            stream.write(b"y")

def written_into(out):
    files.check_empty(out, "--out")
    with files.begun(out, "model", "page.html") as part:
        (part / "tmp").mkdir()
        (out / "model").mkdir()
        files.write_whole(out / "model/weights", bytes(9000))
        files.write_whole(out / "page.html", "page")
        shutil.rmtree(part / "tmp")

def replaced(out):
    out.mkdir(exist_ok=True)
    files.write_json(out / "run.json", {"status": "finished"})

work = globals()[what]

def content(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}

def begin(out):
    if what == "replaced":
        out.mkdir()
        (out / "run.json").write_text("before")

library.faults_arm(b"", 0, 0)
work(base / "whole")
expected, events = content(base / "whole"), 0
for at in range(1, 10_000):
    out = base / str(at)
    begin(out)
    child = os.fork()
    if not child:
        code = 99
        library.faults_arm(str(base).encode(), ctypes.c_long(at), fault)
        try:
            work(out)
            code = 0
        except (Failed, OSError) as problem:
            if isinstance(problem, OSError):  # as `told` has it, at the entry of a command
                problem = files.unwritable(problem.filename, problem)
            code = 1 if str(base) in str(problem) else 98
            print(problem)
        except BaseException as error:
            print(at, repr(error))
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1, -9), (at, code)
    if what == "replaced":
        assert (out / "run.json").read_text() == "before" or content(out)["run.json"] == expected["run.json"], at
    if code == 0:
        assert content(out) == expected, (at, sorted(content(out)))
    elif code == 1 and fault == 28 and what != "replaced":
        assert what == "written_into" or not out.exists(), "a full disk is not kept full"
    complete = content(out) == expected  # killed after its last step, or the step after it failed
    if code and not complete or what == "replaced":
        work(out)
        assert content(out) == expected, (at, sorted(content(out)))
        assert not list(out.rglob("*.part"))
    if library.faults_count() < at:
        print("events", at - 1)
        break
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "events.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", path, HERE / "events.c", "-ldl"], check=True)
    return path


@pytest.mark.parametrize("fault", ["SIGKILL", "ENOSPC", "EACCES", "EIO"])
@pytest.mark.parametrize("what", ["new_output", "written_into", "replaced"])
def test_at_every_event(library, tmp_path, what, fault):
    code = 9 if fault == "SIGKILL" else getattr(errno, fault)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(library), str(tmp_path), what, str(code)], capture_output=True, text=True,
        env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert int(lines[-1].split()[1]) >= (4 if what == "replaced" else 20), lines
    said = lines[:-1]
    assert fault in ("SIGKILL", "EACCES", "EIO") or all("the disk is full" in line for line in said)
    assert fault == "SIGKILL" or said


def test_a_full_disk_says_what_is_needed_and_what_is_free(tmp_path):
    from finetune_mile.core.files import unwritable

    said = str(unwritable(tmp_path / "x.pt", OSError(errno.ENOSPC, "No space left on device"), 5 * 2**20))
    assert said.startswith(f"{tmp_path / 'x.pt'}: the disk is full, 5 MB are needed, ")
    assert "are free; make room, then run the same command again" in said
    said = str(unwritable(tmp_path / "x.pt", PermissionError(errno.EACCES, "Permission denied")))
    assert said.startswith(f"{tmp_path / 'x.pt'}: cannot be written (Permission denied)")


def test_a_folder_with_something_else_in_it_is_refused_and_stays(tmp_path):
    from finetune_mile.core.files import check_empty
    from finetune_mile.core.problems import Problem

    (tmp_path / ".part").mkdir()
    (tmp_path / ".begun").write_text(json.dumps(["mine.txt", "../x", 5, "sub/y"]))
    check_empty(tmp_path, "--out")
    (tmp_path / "theirs.txt").touch()
    with pytest.raises(Problem, match="already exists"):
        check_empty(tmp_path, "--out")


def test_a_device_is_written_into_and_not_replaced(tmp_path):
    """As root `--json /dev/null` made a regular file of it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert [*tmp_path.iterdir()] == [pipe]
