"""Fixtures for all tests. Slow modules are imported inside them: the process that starts the others needs none."""

import os
import runpy
import sys
from pathlib import Path

import pytest
from shortcuts import SHARED

OFFLINE = str(Path(__file__).parent / "offline")
runpy.run_path(f"{OFFLINE}/sitecustomize.py")  # no import: the system may have another module of this name
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (OFFLINE, os.environ.get("PYTHONPATH"))))  # of other processes
os.environ["FINETUNE_MILE_THREADS"] = "1"
os.environ["FINETUNE_MILE_CONFIG"] = os.devnull  # cards of whoever runs the tests stay out of them


@pytest.fixture(scope="session")
def shared():
    """The folder of real data and checkpoints, or a skip."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared, the real data and checkpoints that only our own machines have")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The networks here are tiny; more threads only wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def render():
    """matplotlib takes a fifth of a short run. Figures are built all the same; `rendered` is for tests of them."""
    import torch

    from finetune_mile.pages import report

    real, one_pixel = report.png_of_figure, report.png_of(torch.zeros(3, 1, 1, dtype=torch.uint8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "png_of_figure", lambda figure: one_pixel)
        yield real


@pytest.fixture
def rendered(monkeypatch, render):
    """Figures are rendered in this test."""
    monkeypatch.setattr("finetune_mile.pages.report.png_of_figure", render)


@pytest.fixture(autouse=True)
def no_precision_of_an_earlier_run():
    """Accelerate keeps one precision per process, and `precision: auto` is bf16 on some processors."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()


@pytest.fixture
def run_demo(tmp_path):
    """Run the command in this process: run_demo("name", *flags) gives the run folder."""
    from finetune_mile.run import main

    def run(name, *flags):
        out = tmp_path / name
        assert main([*flags, "--out", str(out)]) == 0
        return out

    return run


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(step) sends SIGTERM to this process when that step is recorded, as a scheduler would; None: no more."""
    import signal

    from finetune_mile.training.folder import RunFolder

    append, wanted = RunFolder.append, []

    def append_and_stop(self, record):
        append(self, record)
        if record["kind"] == "train" and record["step"] in wanted:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, "append", append_and_stop)

    def choose(step):
        wanted[:] = [] if step is None else [step]

    return choose


@pytest.fixture
def bounded():
    """Fail instead of hanging or filling the memory: 20 seconds of the processor, 5 minutes, and 2 GB more than now."""
    import resource
    import signal

    def late(number, frame):
        pytest.fail("20 seconds of the processor, or 5 minutes, are over")  # no OSError, which may be caught

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = Path("/proc/self/statm")
    if used.exists():
        now = int(used.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + 2 * 2**30, hard))
    before = {number: signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(300)
    signal.setitimer(signal.ITIMER_PROF, 20)
    yield
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    for number, handler in before.items():
        signal.signal(number, handler)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
