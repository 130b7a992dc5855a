"""Commands that are killed, or whose disk breaks: a few tries here, all of them by `python tests/faults/attacks.py`."""

import errno
import json
import random
import subprocess

import pytest
from attacks import COMMANDS, RUN, Place, read_record, table, tries
from lab import COMPILER, ROOT, Lab

from finetune_mile.core.files import is_finished

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs Linux and a C compiler, to break calls of the system")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def attack(lab, tmp_path, name, count):
    place = Place(lab, tmp_path, name)
    faults = [fault for each in tries(place.whole, count, random.Random(0)).values() for fault in each]
    wrong = {json.dumps(fault): found for fault in faults if (found := place.attack(**fault)[1])}
    assert not wrong, json.dumps(wrong, indent=1)


def test_n1_features(lab, tmp_path):
    attack(lab, tmp_path, "embed OUT --views 1", 3)


def test_n4_a_run_on_a_full_disk_fails_in_a_sentence_and_continues_to_the_same_weights(lab, tmp_path):
    place = Place(lab, tmp_path, "run, mile")
    at = place.whole.events // 2
    broken, wrong = place.attack(at=at, do=errno.ENOSPC)
    assert broken.code == 1
    assert not wrong, wrong


def test_the_table_of_the_page_is_that_of_the_record():
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    assert table(read_record()) in page, "python tests/faults/attacks.py --table"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command(lab, tmp_path, name):
    attack(lab, tmp_path, name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["600k", "1200k", "2500k"])
def test_n4_a_small_disk(lab, tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        words = ["run", *RUN, "--init", "none", "--arch", "resnet-demo", "--method", "softmax", "--resume", "auto"]
        ended = lab.run([*words, "--out", disk / "r"])
        assert ended.calm, ended.err
        assert ended.code == 1
        assert "the disk is full" in ended.err
        info = disk / "r/run.json"
        assert not info.exists() or json.loads(info.read_text())["status"] == "failed"
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        assert lab.run([*words, "--out", disk / "r"]).code == 0
        assert is_finished(disk / "r")
    finally:
        subprocess.run(["umount", disk], check=False)
