"""`finetune-mile pack`: shards that we, `datasets` and WebDataset readers open; whole or not at all."""

import json
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image
from shortcuts import ROOT

from finetune_mile.cli import main
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import load_data


@pytest.fixture
def folder(tmp_path):
    y, x = np.mgrid[0:90, 0:120]
    for split, count in (("train", 5), ("val", 2)):
        for k, name in enumerate(("cat.v2", "dog")):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.fromarray(np.stack([x + 9 * i, y + 40 * k, (x + y) // 2], -1).astype(np.uint8))
                small = image.resize((40, 30)) if i == 1 else image
                small.save(tmp_path / "photos" / split / name / f"{i}.x.{'png' if i == 2 else 'jpg'}")
    return tmp_path / "photos"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache/hf")


PACK = ["--size", "48", "--shard", "4", "--workers", "1"]


def test_there_and_back(folder, tmp_path, capsys):
    out = tmp_path / "packed"
    assert main(["pack", str(folder), str(out), *PACK]) == 0
    assert f"--data wds:{out}" in capsys.readouterr().out
    assert sorted(p.name for p in out.glob("*.tar")) == [f"train-00000{i}.tar" for i in range(3)] + ["val-000000.tar"]
    before = load_data(str(folder))
    for data in (load_data(f"wds:{out}"), load_data(f"hf:{out}")):
        assert data.classes == before.classes
        for ours, theirs in ((before.train, data.train), (before.val, data.val)):
            assert list(ours.ids) == list(theirs.ids)
            assert ours.given.equal(theirs.given)
        assert data.train.read(0).shape == (3, 48, 64)
        small = before.train.ids.index("cat.v2/1.x.jpg")
        assert data.train.read(small).equal(before.train.read(small)), "a small JPEG stays as it is"
        shrunk = Image.fromarray(before.train.read(0).permute(1, 2, 0).numpy()).resize((64, 48))
        error = np.abs(np.array(shrunk).astype(int) - data.train.read(0).permute(1, 2, 0).numpy()).mean()
        assert error < 2
    with tarfile.open(out / "train-000000.tar") as archive:
        names = archive.getnames()
    assert names[:3] == ["000000000.jpg", "000000000.cls", "000000000.json"]
    assert main(["pack", str(folder), str(out), *PACK]) == 0
    assert "complete already" in capsys.readouterr().out


def test_it_goes_on_after_a_stop(folder, tmp_path, monkeypatch, capsys):
    from finetune_mile.images import packing as pack

    whole, out = tmp_path / "whole", tmp_path / "packed"
    assert main(["pack", str(folder), str(whole), *PACK]) == 0
    real, done = pack.pack_image, []

    def breaks(images, index, *settings):
        done.append(index)
        if len(done) == 7:
            raise KeyboardInterrupt
        return real(images, index, *settings)

    monkeypatch.setattr(pack, "pack_image", breaks)
    assert main(["pack", str(folder), str(out), *PACK]) == 130, "it was a traceback"
    monkeypatch.setattr(pack, "pack_image", real)
    assert [p.name for p in out.glob("*.tar")] == ["train-000000.tar"], "half a shard has no name"
    with pytest.raises(Problem, match="packing is incomplete"):
        load_data(f"wds:{out}")
    assert main(["pack", str(folder), str(out), "--size", "32", "--shard", "4"]) == 2
    assert "shards of other images or settings" in capsys.readouterr().err
    first = (out / "train-000000.tar").stat().st_mtime_ns
    assert main(["pack", str(folder), str(out), *PACK]) == 0
    assert (out / "train-000000.tar").stat().st_mtime_ns == first
    for path in whole.glob("*.tar"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert not list(out.glob(".*"))


def test_bad_images_are_left_out_and_listed(folder, tmp_path, capsys):
    (folder / "train/dog/3.x.jpg").write_bytes(b"broken")
    out = tmp_path / "packed"
    assert main(["pack", str(folder), str(out), *PACK]) == 0
    assert "1 could not be read: bad_images.csv" in capsys.readouterr().out
    assert "train,dog/3.x.jpg," in (out / "bad_images.csv").read_text()
    assert len(load_data(f"wds:{out}").train) == 9


def test_several_labels(tmp_path):
    for i in range(4):
        Image.new("RGB", (60, 60), (40 * i, 9, 9)).save(tmp_path / f"{i}.jpg")
    (tmp_path / "l.csv").write_text("file,labels,split\n0.jpg,a;b,train\n1.jpg,b,train\n2.jpg,c,val\n3.jpg,a;c,val\n")
    assert main(["pack", f"csv:{tmp_path / 'l.csv'}", str(tmp_path / "out"), *PACK]) == 0
    data = load_data(f"wds:{tmp_path / 'out'}")
    assert data.classes == ("a", "b", "c")
    assert data.train.given.tolist() == [[1, 1, 0], [0, 1, 0]]
    state = json.loads((tmp_path / "out/pack.json").read_text())
    assert state["complete"] is True


def test_wrong_input(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("x")
    for words, sentence in (
        ([str(folder), str(tmp_path / "file")], "is a file; name a directory"),
        ([str(folder), str(tmp_path / "full")], "is not empty and has no shards of finetune-mile"),
        (["nowhere", str(tmp_path / "out")], "no directory 'nowhere'"),
        ([str(folder), str(tmp_path / "out"), "--quality", "101"], "--quality 101: must be from 1 to 100"),
        ([str(folder)], "OUT"),
    ):
        assert main(["pack", *words]) == 2
        assert sentence in capsys.readouterr().err


# Packs in forked children, each killed just before its n-th change of OUT, and packs again; prints what differs.
KILLS = """
import contextlib, io, os, shutil, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # packing here, too, starts no threads that a child would miss
import finetune_mile.images.pipeline, torchvision.transforms.v2, rich.progress
from finetune_mile.cli import main

source, base = sys.argv[1], Path(sys.argv[2])

def pack(out):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(["pack", source, str(out), "--size", "48", "--shard", "6", "--workers", "1"])

def killed(out, kill, torn):
    child = os.fork()
    if child == 0:
        seen, last = [0], [None]
        def hook(event, args):
            if event not in ("open", "os.rename", "os.remove", "os.mkdir") or str(out) not in str(args[0]):
                return
            if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            seen[0] += 1
            if seen[0] == kill:
                written = last[0] is not None and last[0].exists()
                if torn:
                    os.truncate(last[0], last[0].stat().st_size // 2)  # it was being written
                os._exit(78 if written else 77)
            last[0] = Path(os.fsdecode(args[0])) if event == "open" else None
        sys.addaudithook(hook)
        os._exit(pack(out))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def content(out):
    return {p.name: p.read_bytes() for p in out.iterdir()}

assert pack(base / "whole") == 0
whole = content(base / "whole")
kill = 1
while True:
    for torn in (False, True):
        out = base / "out"
        ended = killed(out, kill, torn)
        again = pack(out)
        found = content(out)
        if again != 0 or found != whole:
            wrong = sorted(n for n in whole.keys() | found.keys() if whole.get(n) != found.get(n))
            print(f"killed before change {kill}, torn {torn}: exit code {again}, differs in {wrong}")
        if ended not in (77, 78):
            print("kills:", kill - 1)
            sys.exit()
        shutil.rmtree(out, ignore_errors=True)
        if ended == 77:
            break
    kill += 1
"""


@pytest.mark.slow
def test_f8_whatever_a_kill_leaves_behind_the_next_call_completes(folder, tmp_path):
    for name in ("train/cat.v2/0.x.jpg", "train/dog/3.x.jpg", "val/dog/1.x.jpg"):
        (folder / name).write_bytes(b"broken")
    command = [sys.executable, "-c", KILLS, str(folder), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    *wrong, last = done.stdout.splitlines()
    assert not wrong
    assert int(last.removeprefix("kills: ")) >= 15
    assert (tmp_path / "whole/bad_images.csv").read_text().count("\n") == 4


def test_f8_two_packs_at_once_are_one_sentence_for_the_second(folder, tmp_path, capsys):
    from finetune_mile.images import packing as pack

    out = tmp_path / "packed"
    with pack.alone(out):
        assert main(["pack", str(folder), str(out), *PACK]) == 2
        assert capsys.readouterr().err == f"error: {out}: another finetune-mile pack is writing there; wait for it\n"
    assert main(["pack", str(folder), str(out), *PACK]) == 0
    assert not list(out.glob(".*"))


def test_f8_a_foreign_folder_stays_as_it_is(folder, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/.pack.json.part").write_text("")
    (tmp_path / "full/thesis.tex").write_text("x")
    assert main(["pack", str(folder), str(tmp_path / "full"), *PACK]) == 2
    assert "is not empty and has no shards of finetune-mile" in capsys.readouterr().err
    assert len(list((tmp_path / "full").iterdir())) == 2


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_f13_a_damaged_pack_json_is_one_sentence(folder, tmp_path, capsys, text):
    out = tmp_path / "packed"
    assert main(["pack", str(folder), str(out), *PACK]) == 0
    (out / "pack.json").write_text(text)
    assert main(["pack", str(folder), str(out), *PACK]) == 2
    assert "pack.json is damaged" in capsys.readouterr().err
    with pytest.raises(Problem, match=r"pack\.json is damaged"):
        load_data(f"wds:{out}")
