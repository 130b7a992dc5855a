"""How many threads little and much work get."""

import os
import sys

import pytest
import torch

from finetune_mile.core import cores
from finetune_mile.core.cores import chosen_threads, wait_quietly
from finetune_mile.core.problems import Problem
from finetune_mile.learning import probe
from finetune_mile.learning.probe import SMALL, threads_for


@pytest.fixture
def three():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three")
def test_little_work_gets_one_thread_and_much_gets_all():
    for work, threads in ((0, 1), (SMALL - 1, 1), (SMALL, 3)):
        with threads_for(work):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    with pytest.raises(ValueError, match="stop"), threads_for(0):
        raise ValueError("stop")
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three")
def test_a_small_probe_is_fitted_by_one_thread(monkeypatch):
    seen, fit = [], probe._fit
    monkeypatch.setattr(probe, "_fit", lambda *given: seen.append(torch.get_num_threads()) or fit(*given))
    draw = torch.Generator().manual_seed(0)
    features, targets = torch.randn(30, 8, generator=draw), torch.eye(3).repeat(10, 1)
    probe.fit_probe(features, targets, "softmax", seed=0)
    assert set(seen) == {1}


@pytest.mark.parametrize(
    ("environ", "command", "chosen"),
    [
        (b"HOME=/x\0", b"accelerate\0launch\0run.py\0", False),
        (b"HOME=/x\0OMP_NUM_THREADS=1\0", b"accelerate\0launch\0run.py\0", True),
        (b"", b"accelerate\0launch\0--num_cpu_threads_per_process\0001\0run.py\0", True),
        (b"", b"accelerate\0launch\0--num-cpu-threads-per-process=1\0run.py\0", True),
        (b"NOT_OMP_NUM_THREADS=1\0", b"torchrun\0", False),
    ],
)
def test_a_number_that_the_launcher_was_given_is_told_from_its_own(tmp_path, environ, command, chosen):
    """`accelerate launch` sets OMP_NUM_THREADS to 1 in the process that it starts, whatever the user wants."""
    (tmp_path / "environ").write_bytes(environ)
    (tmp_path / "cmdline").write_bytes(command)
    assert chosen_threads(tmp_path) is chosen
    assert not chosen_threads(tmp_path / "gone")


@pytest.mark.parametrize("given", ["0", "-1", "two", "", "9" * 5000])
def test_a_number_of_threads_that_is_none_is_told(monkeypatch, given):
    from finetune_mile.training.processes import use_threads

    monkeypatch.setenv("FINETUNE_MILE_THREADS", given)
    with pytest.raises(Problem, match=r"FINETUNE_MILE_THREADS is .* whole number"):
        use_threads()


@pytest.mark.parametrize(
    ("load", "machine", "ours", "own", "passive"),
    [
        (0.1, 2, 2, {}, False), (1.0, 2, 2, {}, True), (1.0, 4, 2, {}, False), (3.2, 4, 2, {}, True),
        (2.0, 2, 2, {"OMP_WAIT_POLICY": "active"}, False), (2.0, 2, 2, {"GOMP_SPINCOUNT": "10"}, False),
    ],
)  # fmt: skip
def test_threads_sleep_where_other_programs_use_the_cores(monkeypatch, load, machine, ours, own, passive):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(cores, "usable_cores", lambda: ours)
    wait_quietly()
    assert os.environ.get("OMP_WAIT_POLICY") == own.get("OMP_WAIT_POLICY"), "OpenMP has read it already"
    monkeypatch.delitem(sys.modules, "torch")
    wait_quietly()
    assert (os.environ.get("OMP_WAIT_POLICY") == "passive") is passive
