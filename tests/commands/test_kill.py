"""Killed at any moment, a run goes on as if nothing had happened."""

import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stops
from safetensors.torch import load_file
from shortcuts import ROOT, SHORT_MILE
from stops import wait_for_steps

from finetune_mile.training.processes import Signals

FLAGS = [*SHORT_MILE, "--steps", "120", "--set", "checkpoint_every=3", "--set", "evaluate.images=200"]


def start(*flags):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "finetune_mile/run.py"), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "FINETUNE_MILE_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def whole(tmp_path):
    process = start(*FLAGS, "--out", str(tmp_path / "whole"))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return load_file(tmp_path / "whole/export/model.safetensors")


def kill_often(tmp_path, signum, times, seed):
    out, draws = tmp_path / "killed", random.Random(seed)
    flags = [*FLAGS, "--out", str(out)]
    for _ in range(times):
        process = start(*flags)
        wait_for_steps(process, out, draws.randint(1, 12))
        time.sleep(draws.uniform(0, 0.15))  # in a step, in an evaluation, while saving
        process.send_signal(signum)
        process.communicate(timeout=60)
        if signum == signal.SIGTERM and process.returncode == 143:
            assert json.loads((out / "run.json").read_text())["status"] == "stopped"
        flags = ["--resume", str(out)] if (out / "recipe.yaml").exists() else flags
    process = start(*flags)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    assert not list(out.rglob("*.part"))
    return load_file(out / "export/model.safetensors")


@pytest.mark.slow
def test_a_few_kills_change_nothing(tmp_path):
    expected = whole(tmp_path)
    found = kill_often(tmp_path, signal.SIGKILL, 2, seed=0)
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_sigterm_saves_and_says_so(tmp_path):
    out = tmp_path / "run"
    process = start(*FLAGS, "--out", str(out))
    wait_for_steps(process, out, 5)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in errors
    info = json.loads((out / "run.json").read_text())
    assert info["status"] == "stopped"
    assert info["signal"] == "SIGTERM"
    assert list((out / "checkpoints").glob("step-*.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_twenty_kills_change_nothing(tmp_path, signum):
    expected = whole(tmp_path)
    found = kill_often(tmp_path, signum, 20, seed=1)
    assert all(found[name].equal(expected[name]) for name in expected)


# ------------------------------------------------------------------------------------ launchers, groups, loaders


@pytest.fixture(scope="module")
def stopped_in(tmp_path_factory):
    """stopped_in(*case) stops a real run in one of 24 ways and continues it (tests/commands/stops.py)."""
    base = tmp_path_factory.mktemp("stops")

    def check(*case):
        facts = stops.stop(base, *case)
        assert stops.is_right(facts), facts
        assert facts["signal"] == case[1] or case[2] == "leader", "a lost launcher is a SIGTERM"
        if case[0] == "python":
            assert "Traceback" not in facts["errors"]

    return check


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in stops.CASES if c[1:3] == ("SIGTERM", "group")])
def test_f10_sigterm_to_the_group_with_every_launcher(stopped_in, case):
    """Loaders died first, the run ended as failed and saved nothing."""
    stopped_in(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in stops.CASES if c[1:3] != ("SIGTERM", "group")])
def test_every_other_way_to_stop(stopped_in, case):
    stopped_in(*case)


def status_of(out):
    return json.loads((out / "run.json").read_text())["status"]


@pytest.mark.parametrize(
    ("variables", "caught"),
    [
        ((), None),
        (("ACCELERATE_MIXED_PRECISION",), None),  # set by hand
        (("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"), signal.SIGTERM),
        (("TORCHELASTIC_RUN_ID",), signal.SIGTERM),
    ],
)
def test_only_a_run_that_was_launched_watches_its_launcher(monkeypatch, variables, caught):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "no")
    with Signals() as here, Signals(parent=os.getpid()) as lost:  # of the second, the parent is another one by now
        assert (here.caught, lost.caught) == (None, caught)


@pytest.mark.slow
def test_a_run_that_lost_its_launcher_stops_and_one_by_hand_goes_on(tmp_path):
    flags = [*stops.FLAGS, "--set", "workers=2"]
    launcher = stops.launch("accelerate", *flags, "--out", str(tmp_path / "launched"), mark="launched")
    stops.wait_for_steps(launcher, tmp_path / "launched", 13)
    launcher.kill()
    assert not stops.left_after("launched", 120)
    assert "the launcher" in launcher.communicate()[1]
    assert status_of(tmp_path / "launched") == "stopped"
    command = shlex.join(
        [sys.executable, str(ROOT / "finetune_mile/run.py"), *flags, "--out", str(tmp_path / "by-hand")]
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")} | {
        stops.MARK: "by-hand"
    }
    subprocess.run(
        ["bash", "-c", f"nohup {command} > /dev/null 2>&1 &"], env=env, check=True
    )  # this shell ends at once
    assert not stops.left_after("by-hand", 300)
    assert status_of(tmp_path / "by-hand") == "finished"


@pytest.mark.slow
def test_loaders_end_with_a_run_that_is_killed(tmp_path):
    process = stops.launch("python", *stops.FLAGS, "--set", "workers=2", "--out", str(tmp_path / "run"), mark="killed")
    stops.wait_for_steps(process, tmp_path / "run", 3)
    assert len(stops.alive("killed")) >= 3
    process.kill()
    process.communicate(timeout=60)
    assert not stops.left_after("killed", 60)


@pytest.mark.slow
def test_loaders_do_not_keep_a_run_that_failed(tmp_path):
    """Its folder was deleted: Python's own end waited for ever for loaders that ignore SIGTERM."""
    process = stops.launch("python", *stops.FLAGS, "--set", "workers=2", "--out", str(tmp_path / "run"), mark="failed")
    stops.wait_for_steps(process, tmp_path / "run", 3)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert "Exception ignored" not in errors
    assert not stops.left_after("failed", 60)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_ends_the_others(tmp_path, signum):
    out = tmp_path / "run"
    process = stops.launch("torchrun", *stops.FLAGS, "--steps", "100000", "--out", str(out), mark="hang",
                           FINETUNE_MILE_TIMEOUT="10")  # fmt: skip
    stops.wait_for_steps(process, out, 3)
    second = next(pid for pid in stops.alive("hang") if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(second, signum)
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert not stops.left_after("hang", 60)
    assert status_of(out) in ("failed", "stopped")


@pytest.mark.slow
def test_two_machines_on_loopback_are_two_processes(tmp_path):
    """Two agents of torchrun, as two nodes start them; stopped, continued, equal to two processes of one agent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    out = tmp_path / "nodes"

    def launch_both():
        return [
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1",
                 "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "nodes", "--local-addr",
                 "127.0.0.1", str(ROOT / "finetune_mile/run.py"), *stops.FLAGS, "--resume", "auto", "--out", str(out)],
                env=os.environ | {"OMP_NUM_THREADS": "1", "FINETUNE_MILE_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
            for _ in range(2)
        ]  # fmt: skip

    nodes = launch_both()
    stops.wait_for_steps(nodes[0], out, 13)
    for node in nodes:
        os.killpg(node.pid, signal.SIGTERM)
    errors = [node.communicate(timeout=300)[1] for node in nodes]
    assert status_of(out) == "stopped", errors
    nodes = launch_both()
    errors = [node.communicate(timeout=600)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert json.loads((out / "run.json").read_text())["world_size"] == 2
    assert stops.same_weights(out, stops.complete(tmp_path, "torchrun"))


@pytest.mark.slow
def test_two_sigterms_are_one(tmp_path):
    """torchrun repeats to its processes what SLURM has sent to all of them."""
    out = tmp_path / "run"
    process = start(*FLAGS, "--out", str(out))
    wait_for_steps(process, out, 5)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in errors
    assert status_of(out) == "stopped"
