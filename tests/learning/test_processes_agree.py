"""Work that the first process does for all: every process gets its value, or its `Problem`."""

import json
import os
import socket
import subprocess
import sys

from shortcuts import ROOT


def test_a_problem_of_the_first_process_reaches_the_other_one(tmp_path):
    """Two processes of gloo, without a launcher: a process that did not hear of it would wait for ever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FINETUNE_MILE_TIMEOUT": "60"}
    command = [sys.executable, str(ROOT / "tests/learning/first_process.py"), str(tmp_path)]
    started = [
        subprocess.Popen(command, env=env | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    expected = {"value": {"rank": "0"}, "kind": "Failed", "code": 1, "sentences": ["one", "two"], "after": "0"}
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [expected, expected]
