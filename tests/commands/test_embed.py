"""`finetune-mile embed` and `probe`: features once, never those of something else, and what probes make of them."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shortcuts import ROOT

import finetune_mile
from finetune_mile.cli import main
from finetune_mile.compute.rows import BAD, DONE, MISSING, Store
from finetune_mile.images.sources import load_data
from finetune_mile.training import features
from finetune_mile.training.features import images_hash, stamper

INIT, SMALL = "simclr-demo", ["--workers", "0", "--batch-size", "4"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path):
    """20 training and 8 validation images of two classes."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 4)):
        for label, name in enumerate(("blue", "red")):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 120, (30, 40, 3), dtype=np.uint8)
                pixels[..., 2 * (1 - label)] += 100
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "photos"


def embed(data, *flags):
    return main(["embed", "--init", INIT, "--data", str(data), *SMALL, *map(str, flags)])


@pytest.fixture
def computed(monkeypatch):
    """The rows that were written since the start of the test, as (split, index)."""
    rows, write = [], features._write_rows

    def note(writer, members, outputs):
        rows.extend((writer.path.name.partition(".")[0], i) for i in members.tolist())
        write(writer, members, outputs)

    monkeypatch.setattr(features, "_write_rows", note)
    return rows


def test_features_are_those_of_the_network(photos, tmp_path, capsys):
    assert embed(photos, tmp_path / "out", "--dtype", "float32") == 0
    assert "20 training and 8 validation images, 128 features, float32" in capsys.readouterr().out
    network = finetune_mile.load(INIT)
    images = load_data(str(photos)).val
    with torch.no_grad():
        expected = network(torch.stack([network.preprocess(images.read(i)) for i in range(8)]))
    stored = np.load(tmp_path / "out/val.npy")
    assert np.abs(stored - expected.numpy()).max() <= 1e-6
    assert embed(photos, tmp_path / "half") == 0
    half = np.load(tmp_path / "half/val.npy")
    assert half.dtype == np.float16
    assert (half == stored.astype(np.float16)).all()


def test_the_page_reads_a_store_with_numpy_pandas_and_datasets(photos, tmp_path, monkeypatch):
    assert embed(photos, tmp_path / "features") == 0
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/features.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(snippet, names)
    assert names["features"].shape == (20, 128)
    assert list(names["table"]["labels"][:1][0]) == ["blue"]
    assert names["table"]["id"][0] == "blue/0.png"
    assert len(names["dataset"]) == 20
    assert np.allclose(names["dataset"][3]["features"], names["features"][3])


def test_views_are_other_crops_of_the_same_images(photos, tmp_path, computed):
    assert embed(photos, tmp_path / "out") == 0
    assert embed(photos, tmp_path / "out", "--views", "2") == 0
    assert len(computed) == 20 + 8 + 20 + 20, "the plain features stay"
    plain, one, two = (np.load(tmp_path / f"out/train{name}.npy").astype(float) for name in ("", ".view1", ".view2"))
    assert plain.shape == one.shape == two.shape
    assert not np.allclose(plain, one)
    assert not np.allclose(one, two)


def test_a_killed_embed_continues(photos, tmp_path, monkeypatch, computed):
    assert embed(photos, tmp_path / "whole") == 0
    monkeypatch.setattr(features, "FLUSH", 8)
    write, at = features._write_rows, len(computed)

    def killed(*arguments):
        write(*arguments)
        if len(computed) - at == 12:
            raise SystemExit(137)

    with monkeypatch.context() as patch:
        patch.setattr(features, "_write_rows", killed)
        with pytest.raises(SystemExit):
            embed(photos, tmp_path / "out")
    store = Store(tmp_path / "out")
    assert store.state("train").tolist() == [DONE] * 8 + [MISSING] * 12
    del computed[:]
    assert embed(photos, tmp_path / "out") == 0
    assert computed == [("train", i) for i in range(8, 20)] + [("val", i) for i in range(8)]
    for split in ("train", "val"):
        assert (store.features(split) == Store(tmp_path / "whole").features(split)).all()
    del computed[:]
    assert embed(photos, tmp_path / "out") == 0
    assert not computed


def refused(capsys, *words):
    assert embed(*words) == 2
    return capsys.readouterr().err


def test_features_of_something_else_are_neither_used_nor_overwritten(photos, tmp_path, capsys, computed):
    out = tmp_path / "out"
    assert embed(photos, out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    del computed[:]
    assert "out: holds features of another preprocessing; choose another folder" in refused(
        capsys, photos, out, "--size", "16"
    )
    assert "another --dtype" in refused(capsys, photos, out, "--dtype", "float32")
    other = tmp_path / "other.pth"
    torch.save({"state_dict": finetune_mile.load("none", arch="resnet-demo").state_dict()}, other)
    assert main(["embed", "--init", f"{other}::resnet-demo", "--data", str(photos), *SMALL, str(out)]) == 2
    assert "weights" in capsys.readouterr().err
    image = photos / "train/red/3.png"
    os.utime(image, ns=(1, 1))
    assert "other images, or images that changed" in refused(capsys, photos, out)
    assert not computed
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    assert "holds no features" in refused(capsys, photos, tmp_path / "mine")
    (out / "features.json").write_text("{")
    assert "has a damaged features.json" in refused(capsys, photos, out)


def test_verify_compares_contents(photos, tmp_path, capsys):
    out, image = tmp_path / "out", photos / "val/blue/1.png"
    assert embed(photos, out, "--verify") == 0
    os.utime(image, ns=(1, 1))
    assert embed(photos, out, "--verify") == 0, "the same bytes"
    content = bytearray(image.read_bytes())
    content[-20] ^= 1
    image.write_bytes(bytes(content))
    os.utime(image, ns=(1, 1))
    assert "images that changed" in refused(capsys, photos, out, "--verify")


def test_the_cache_has_a_place_for_each_key_and_finds_it_again(photos, tmp_path, computed):
    assert embed(photos) == 0
    assert len(computed) == 28
    assert embed(photos) == 0
    assert len(computed) == 28
    assert embed(photos, "--size", "16") == 0
    assert len(computed) == 56
    (photos / "train/red/3.png").touch()
    assert embed(photos) == 0
    assert len(computed) == 56, "another key, and no other photo"
    assert len(list((tmp_path / "cache/features").iterdir())) == 3


@pytest.fixture
def mixed(photos, tmp_path):
    """Photos of `photos` without labels, under other names, in another order, and three that are new."""
    draw, folder = np.random.default_rng(1), tmp_path / "mixed"
    folder.mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.png"), reverse=True)):
        (folder / f"{number:03}.png").write_bytes(path.read_bytes())
    for name in ("000-new", "010-new", "zzz-new"):
        Image.fromarray(draw.integers(0, 255, (30, 40, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return folder


def by_photo(store, data):
    """Features by the bytes of the photo."""
    return {
        images.content(i): row
        for split, images in (("train", data.train), ("val", data.val))
        for i, row in enumerate(store.features(split) if len(images) else ())
    }


def test_features_are_found_again_by_photo_in_another_folder(photos, mixed, tmp_path, computed, capsys):
    """1,000 photos were computed twice, since another list held them."""
    name = f"folder:{mixed}?labels=none"
    assert embed(photos) == 0
    del computed[:]
    assert embed(name, tmp_path / "out") == 0
    assert len(computed) == 3, "the new ones"
    assert "28 of 31 photos were computed before" in capsys.readouterr().err
    (cached,) = (tmp_path / "cache/features").iterdir()
    before = by_photo(Store(cached), load_data(str(photos)))
    after = by_photo(Store(tmp_path / "out"), load_data(name, need_labels=False))
    assert len(before) == 28
    assert all((after[photo] == row).all() for photo, row in before.items())
    assert (Store(tmp_path / "out").state("train") == DONE).all()
    with Image.open(mixed / "003.png") as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(mixed / "003.png")
    assert embed(name) == 0
    assert len(computed) == 3 + 4, "the changed one, and the new ones again: only the cache is searched"
    assert embed(name) == 0
    assert len(computed) == 3 + 4


def test_features_of_other_weights_or_half_written_ones_are_not_copied(photos, mixed, tmp_path, computed, capsys):
    name = f"folder:{mixed}?labels=none"
    other = tmp_path / "other.pth"
    torch.save({"state_dict": finetune_mile.load("none", arch="resnet-demo").state_dict()}, other)
    assert main(["embed", "--init", f"{other}::resnet-demo", "--data", str(photos), *SMALL]) == 0
    assert embed(photos, "--dtype", "float32") == 0
    assert embed(photos, "--size", "16") == 0
    del computed[:]
    assert embed(name, tmp_path / "one") == 0
    assert len(computed) == 31
    assert embed(photos) == 0
    store = next(
        Store(path.parent)
        for path in (tmp_path / "cache/features").glob("*/features.json")
        if (about := json.loads(path.read_text()))["init"] == INIT
        and about["depends_on"]["dtype"] == "float16"
        and about["depends_on"]["preprocess"]["size"] != 16
    )
    state = store.state("train")
    state[:15] = MISSING
    state.tofile(store.file("train", 0, "done"))
    del computed[:]
    assert embed(name, tmp_path / "two") == 0
    assert len(computed) == 3 + 15
    for split, damage in (("val", lambda path: path.write_bytes(path.read_bytes()[:200])), ("train", Path.unlink)):
        damage(store.file(split, 0, "npy"))
    del computed[:]
    assert embed(name, tmp_path / "three") == 0
    assert len(computed) == 31
    assert (Store(tmp_path / "three").features("train") == Store(tmp_path / "one").features("train")).all()


def test_a_store_without_marks_is_continued_and_not_searched(photos, mixed, tmp_path, computed):
    assert embed(photos) == 0
    (cached,) = (tmp_path / "cache/features").iterdir()
    for path in cached.glob("*.marks"):
        path.unlink()
    del computed[:]
    assert embed(photos) == 0
    assert not computed
    assert embed(f"folder:{mixed}?labels=none", tmp_path / "out") == 0
    assert len(computed) == 31
    (cached / "train.marks").write_bytes(b"cut off")
    assert embed(f"folder:{mixed}?labels=none", tmp_path / "out2") == 0
    assert len(computed) == 62


def test_an_exact_hit_reads_no_photo(photos, computed, monkeypatch):
    from finetune_mile.compute import rows

    assert embed(photos) == 0

    def never(*_):
        raise AssertionError("a photo is read for its mark")

    monkeypatch.setattr(rows, "_mark", never)
    assert embed(photos) == 0
    assert len(computed) == 28


def test_bad_images_are_nan_listed_and_tried_again(photos, tmp_path, capsys, computed):
    broken = photos / "train/blue/4.png"
    broken.write_bytes(b"not an image")
    assert embed(photos, tmp_path / "out") == 0
    assert "1 image could not be read and was skipped" in capsys.readouterr().err
    store = Store(tmp_path / "out")
    assert np.flatnonzero(np.isnan(store.features("train")).all(1)).tolist() == [4]
    assert store.state("train")[4] == BAD
    assert "train,blue/4.png" in (tmp_path / "out/bad_images.csv").read_text()
    del computed[:]
    assert embed(photos, tmp_path / "out", "--views", "1") == 0
    assert computed[0] == ("train", 4)
    assert np.flatnonzero(np.isnan(store.features("train", 1)).any(1)).tolist() == [4], "no stand-in"


def test_features_that_do_not_fit_float16_are_told(photos, tmp_path, capsys):
    network = finetune_mile.load(INIT)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    last = [name for name in state if name.startswith("layer") and name.endswith((".weight", ".bias"))]
    for name in last[-2:]:
        state[name] *= 1e7
    torch.save({"state_dict": state}, tmp_path / "large.pth")
    words = ["embed", "--init", f"{tmp_path / 'large.pth'}::resnet-demo", "--data", str(photos), *SMALL]
    assert main([*words, str(tmp_path / "out")]) == 2
    assert "do not fit float16: use --dtype float32" in capsys.readouterr().err
    assert main([*words, "--dtype", "float32", str(tmp_path / "wide")]) == 0


def test_stamps_need_no_content(photos, tmp_path):
    """Tars and tables of `datasets` are identified by the file that they are in; the demo by its pixels."""
    assert main(["pack", str(photos), str(tmp_path / "shards"), "--shard", "10"]) == 0
    sources = {
        str(photos): photos / "train/red/2.png",
        f"wds:{tmp_path / 'shards'}": tmp_path / "shards/train-000000.tar",
        f"hf:{photos}": photos / "train/red/3.png",
    }
    for data, file in sources.items():
        images = load_data(data).train
        assert stamper(images.content) is not None, data
        before = images_hash(images, contents=False)
        assert before == images_hash(load_data(data).train, contents=False), data
        os.utime(file, ns=(1, 1))
        assert before != images_hash(images, contents=False), data
        assert images_hash(images, contents=True) == images_hash(load_data(data).train, contents=True), data
    assert images_hash(load_data("demo:20").train, contents=False) != images_hash(
        load_data("demo:21").train, contents=False
    )


@pytest.mark.slow
def test_a_probe_puts_the_best_checkpoint_first(photos, tmp_path, capsys, computed):
    other = tmp_path / "other.pth"
    torch.manual_seed(0)
    torch.save({"state_dict": finetune_mile.load("none", arch="resnet-demo").state_dict()}, other)
    words = ["probe", "--init", f"{other}::resnet-demo", "--init", INIT, "--data", str(photos), *SMALL]
    words += [
        "--fraction",
        "0.5",
        "--seeds",
        "2",
        "--json",
        str(tmp_path / "p.json"),
        "--html",
        str(tmp_path / "p.html"),
    ]
    assert main(words) == 0
    assert "checkpoint" in capsys.readouterr().out
    result = json.loads((tmp_path / "p.json").read_text())
    assert (result["labels"], result["images"], result["seeds"], result["majority"]) == (10, 8, 2, 50.0)
    best = [row["accuracy"][row["best"]]["mean"] for row in result["probes"]]
    assert best == sorted(best, reverse=True)
    assert "behind" not in result["probes"][0]
    assert result["probes"][1]["behind"]["difference"] == pytest.approx(best[1] - best[0])
    for row in result["probes"]:
        for each in row["accuracy"].values():
            assert each["low"] <= each["mean"] <= each["high"]
            assert each["mean"] == pytest.approx(np.mean(each["draws"]))
    assert max(best) == 100, "red and blue are told apart"
    page = (tmp_path / "p.html").read_text()
    assert page.index(result["probes"][0]["init"]) < page.index(result["probes"][1]["init"])
    assert "http" not in page
    needed = len(computed)
    assert main(words) == 0
    assert len(computed) == needed, "the features are in the cache"
    assert embed(photos) == 0
    assert 0 < len(computed) - needed < 28, "only those that the probe did not need"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["embed", "--init", INIT, "--data", "demo", "--views", "-1"], "--views -1: must be from 0"),
        (["embed", "--init", INIT, "--data", "nowhere"], "there is no directory"),
        (["embed", "--init", "nothing.pth", "--data", "demo"], "--init nothing.pth"),
        (["probe", "--init", INIT, "--data", "demo", "--fraction", "0"], "--fraction 0: must be above 0"),
        (["probe", "--init", INIT, "--init", INIT, "--data", "demo"], "is given twice"),
        (["probe", "--init", INIT, "--data", "demo", "--json", "no/where.json"], "there is no folder no"),
    ],
)
def test_what_cannot_work_is_told_before_work(words, sentence, capsys):
    assert main(words) == 2
    assert sentence in capsys.readouterr().err
