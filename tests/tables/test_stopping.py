"""Ctrl-C: the runs save themselves, and the next call goes on with them."""

import json
import signal
import subprocess
import sys
import time

import pytest
from shortcuts import ROOT
from tiny import write_tiny


@pytest.fixture
def command(tmp_path):
    """A table with one run that takes a while."""

    def long(tree):
        tree["settings"]["steps"] = 600

    path = write_tiny(tmp_path, long)
    return [
        sys.executable, "-m", "finetune_mile.cli", "table", str(path), "--runs", str(tmp_path / "runs"),
        "--out", str(tmp_path / "ledger"), "--only", "fine-tuning/sigmoid", "--jobs", "1", "--no-prices",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_stopped_table_goes_on(tmp_path, command):
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun", ["logs/fine-tuning/sigmoid/10-pct/0.txt", "fine-tuning/sigmoid/10-pct/0/metrics.jsonl"]
)
def test_a_killed_table_takes_its_runs_with_it_and_goes_on(tmp_path, command, begun):
    """The run went on alone, and the same command met its folder: "holds a run", and a broken pipe."""
    said = tmp_path / "said"
    with said.open("w") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as process:
        while not (tmp_path / "runs" / begun).is_file():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.wait()
        again = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, check=False)
    assert again.returncode == 0, said.read_text()
    assert "Traceback" not in said.read_text()
    folder = tmp_path / "runs/fine-tuning/sigmoid/10-pct/0"
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
