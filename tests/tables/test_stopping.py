"""Ctrl-C: the runs save themselves, and the next call goes on with them."""

import json
import signal
import subprocess
import sys
import time

import pytest
from shortcuts import ROOT
from tiny import write_tiny


@pytest.mark.slow
def test_a_stopped_table_goes_on(tmp_path):
    def long(tree):
        tree["settings"]["steps"] = 600

    path = write_tiny(tmp_path, long)
    command = [
        sys.executable, "-m", "finetune_mile.cli", "table", str(path), "--runs", str(tmp_path / "runs"),
        "--out", str(tmp_path / "ledger"), "--only", "fine-tuning/sigmoid", "--jobs", "1", "--no-prices",
    ]  # fmt: skip
    folder = tmp_path / "runs/fine-tuning/sigmoid/10-pct/0"
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "metrics.jsonl").is_file():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130, said
    assert "run the same command again to continue it" in said
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"
    assert list((folder / "checkpoints").glob("step-*.pt"))
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
