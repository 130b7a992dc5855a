"""The tests are offline; what is published names nobody; files are as private as the user's umask."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from PIL import Image
from shortcuts import ROOT

from finetune_mile.checkpoints.converting import convert
from finetune_mile.cli import main as command
from finetune_mile.pages.exported import PROGRAMS
from finetune_mile.run import main

CODE = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"


def test_the_tests_reach_this_machine_only():
    with pytest.raises(OSError, match=r"the tests are offline: 192\.0\.2\.1"):
        socket.create_connection(("192.0.2.1", 80), timeout=5)
    with pytest.raises(socket.gaierror, match=r"the tests are offline: example\.org"):
        socket.getaddrinfo("example.org", 443)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        socket.create_connection(server.getsockname()).close()


def test_other_processes_of_the_tests_reach_this_machine_only():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert "the tests are offline: 192.0.2.1" in done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of somebody with secrets in the environment, whose umask keeps everything private."""
    home = tmp_path_factory.mktemp("home") / "somebody-at-home"
    for name in ("cat", "dog"):
        (home / "photos" / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.random.default_rng(i).integers(0, 255, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(home / "photos" / name / f"{i}.png")
    before = os.umask(0o077)
    words = ["--data", f"folder:{home / 'photos'}", "--init", "none", "--arch", "resnet-demo", "--method", "softmax"]
    words += ["--steps", "2", "--set", "size=24", "--set", "workers=0", "--batch-size", "4"]
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("HF_TOKEN", "WANDB_API_KEY", "USER", "LOGNAME", "HOSTNAME"):
                patch.setenv(name, f"secret-{name}")
            patch.setenv("HOME", str(home))
            patch.setenv("FINETUNE_MILE_CACHE", str(home / "cache"))
            assert main([*words, "--out", str(home / "first")]) == 0
            words[3] = str(home / "first")
            assert main([*words, "--trunk", "frozen", "--out", str(home / "run")]) == 0
            convert(str(home / "run"), home / "converted", called="run")
            for form in PROGRAMS:
                assert export(["run", "--to", form, "--out", form], home) == 0
    finally:
        os.umask(before)
    return home


def export(words, home):
    """As a user would: in the folder of the run."""
    with contextlib.chdir(home):
        return command(["export", *words])


@pytest.mark.parametrize("folder", ["first/export", "run/export", "converted", *PROGRAMS])
def test_what_is_published_names_nobody(run, folder):
    files = [path for path in (run / folder).rglob("*") if path.is_file()]
    assert {"config.json", PROGRAMS.get(folder, "model.safetensors")} <= {path.name for path in files}
    host = socket.gethostname()
    for path in files:
        content = path.read_bytes()
        if zipfile.is_zipfile(path):  # of torch: its members may be compressed
            with zipfile.ZipFile(path) as members:
                content += b"".join(members.read(name) for name in members.namelist())
        for word in ("secret-", "somebody-at-home", str(run.parent), str(ROOT), *([host] if len(host) > 8 else [])):
            assert word.encode() not in content, f"{path.name} holds {word}"


def test_files_are_as_private_as_the_umask(run):
    made = [path for name in ("first", "run", "converted", "cache", *PROGRAMS) for path in (run / name).rglob("*")]
    assert any(path.name == "run.json" for path in made)
    assert any("cache" in path.parts for path in made), "a frozen trunk keeps its features"
    open_to_others = {str(path.relative_to(run)) for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077}
    assert not open_to_others
