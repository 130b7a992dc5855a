"""Kept features that were damaged: computed again where they are in the cache, refused where they are the user's."""

import json
import shutil
import zlib

import numpy as np
import pytest
from shortcuts import tinted_photos

from finetune_mile.cli import main
from finetune_mile.training import features

WORDS = ["embed", "--init", "simclr-demo", "--size", "24", "--workers", "0", "--data"]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """Photos, and a cache with their features."""
    base = tmp_path_factory.mktemp("embedded")
    tinted_photos(base / "photos", 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_MILE_CACHE", str(base / "cache"))
        assert main([*WORDS, str(base / "photos")]) == 0
    return base


@pytest.fixture
def store(embedded, tmp_path, monkeypatch):
    """A copy of the kept features, in a cache of its own."""
    shutil.copytree(embedded / "cache", tmp_path / "cache")
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    (found,) = (tmp_path / "cache/features").iterdir()
    return found


def flip(path, at=-1001):
    content = bytearray(path.read_bytes())
    content[at] ^= 64
    path.write_bytes(bytes(content))


def other_dtype(store):
    np.save(store / "train.npy", np.load(store / "train.npy").astype(np.float64))


def other_width(store):
    np.save(store / "train.npy", np.load(store / "train.npy")[:, :100].copy())


def other_store(store):
    """Rows, sums and record of other weights, which fit each other."""
    rows = np.load(store / "train.npy")[::-1].copy()
    np.save(store / "train.npy", rows)
    np.array([zlib.crc32(row.tobytes()) for row in rows], dtype=np.uint32).tofile(store / "train.sums")


def other_facts(store):
    note = json.loads((store / "features.json").read_text())
    note["depends_on"]["weights"] = "of something else"
    (store / "features.json").write_text(json.dumps(note))


def zeros(store):
    np.save(store / "train.npy", np.zeros_like(np.load(store / "train.npy")))


def fortran(store):
    np.save(store / "train.npy", np.asfortranarray(np.load(store / "train.npy")))


DAMAGE = {
    "one flipped bit": lambda store: flip(store / "train.npy"),
    "a bit of a checksum": lambda store: flip(store / "val.sums", 9),
    "zeros": zeros,
    "float64": other_dtype,
    "another width": other_width,
    "another order in memory": fortran,
    "cut off": lambda store: (store / "train.npy").write_bytes((store / "train.npy").read_bytes()[:3000]),
    "empty": lambda store: (store / "train.npy").write_bytes(b""),
    "missing": lambda store: (store / "train.npy").unlink(),
    "not an array": lambda store: (store / "val.npy").write_bytes(b"PK\3\4 something else"),
    "a record cut off": lambda store: (store / "train.done").write_bytes(b"\1" * 7),
    "checksums missing": lambda store: (store / "train.sums").unlink(),
    "checksums cut off": lambda store: (store / "train.sums").write_bytes(b"\1" * 9),
    "rows of other weights": other_store,
    "a note cut off": lambda store: (store / "features.json").write_text('{"key": '),
    "a note of other weights": other_facts,
    "no note, as a kill left it": lambda store: (store / "features.json").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_n3_a_damaged_store_in_the_cache_is_computed_again(store, embedded, capsys, kind):
    """A flipped bit gave a frozen run other weights, in silence; the rest were tracebacks, or refused for ever."""
    expected = {name: (store / name).read_bytes() for name in ("train.npy", "val.npy")}
    DAMAGE[kind](store)
    assert main([*WORDS, str(embedded / "photos")]) == 0
    said = capsys.readouterr().err
    assert said.count("They are computed again") == 1, said
    assert str(store) in said
    assert {name: (store / name).read_bytes() for name in expected} == expected
    assert main([*WORDS, str(embedded / "photos")]) == 0
    assert "again" not in capsys.readouterr().err, "mended"


@pytest.mark.parametrize("kind", DAMAGE)
def test_n3_a_damaged_store_of_the_user_is_refused_and_stays(store, embedded, tmp_path, capsys, kind):
    out = tmp_path / "mine"
    store.rename(out)
    DAMAGE[kind](out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main([*WORDS, str(embedded / "photos"), str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {out}")
    assert "embed again" in said or "choose another folder" in said
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    parquet = {name for name in before if name.endswith(".parquet")}
    assert {name: after[name] for name in after.keys() - parquet} == {
        name: before[name] for name in before.keys() - parquet
    }


def test_a_damaged_row_is_not_copied_to_another_store(store, embedded, tmp_path, monkeypatch, capsys):
    flip(store / "train.npy")
    expected = np.load(embedded / next((embedded / "cache/features").iterdir()) / "train.npy")
    shutil.copytree(embedded / "photos", tmp_path / "copy")
    assert main([*WORDS, str(tmp_path / "copy"), str(tmp_path / "out")]) == 0
    assert "features of 89 of 90 photos" in capsys.readouterr().err
    assert (np.load(tmp_path / "out/train.npy") == expected).all()


def test_what_the_version_before_checksums_kept_is_read_and_gets_them_when_it_grows(store, embedded, monkeypatch):
    note = json.loads((store / "features.json").read_text())
    del note["sums"]
    (store / "features.json").write_text(json.dumps(note))
    for path in store.glob("*.sums"):
        path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(features, "_fill", None)
        assert main([*WORDS, str(embedded / "photos")]) == 0
    assert not list(store.glob("*.sums"))
    assert main([*WORDS, str(embedded / "photos"), "--views", "1"]) == 0
    assert {path.name for path in store.glob("*.sums")} == {"train.sums", "val.sums", "train.view1.sums"}
    flip(store / "train.npy")
    monkeypatch.setattr(features, "_fill", None)
    with pytest.raises(TypeError):  # the damaged row is to be computed
        main([*WORDS, str(embedded / "photos")])


def test_n1_what_an_earlier_version_left_after_a_kill_is_continued(embedded, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.train.parquet.part").touch()
    assert main([*WORDS, str(embedded / "photos"), str(tmp_path / "out")]) == 0
    assert not list((tmp_path / "out").glob(".*.part"))


@pytest.mark.parametrize("dtype", ["nonsense", 5, None, "float64"])
def test_n3_a_run_passes_over_kept_features_with_an_odd_note(store, embedded, tmp_path, dtype):
    """The start of a classifier asks all stores of the cache."""
    note = json.loads((store / "features.json").read_text())
    note["depends_on"] |= {"dtype": dtype}
    if dtype is None:
        del note["depends_on"]["dtype"]
    (store / "features.json").write_text(json.dumps(note))
    words = ["run", "--init", "simclr-demo", "--size", "24", "--data", str(embedded / "photos"), "--method", "softmax"]
    more = ["--head-init", "random", "--steps", "2", "--set", "workers=0", "--set", "evaluate.labels=false"]
    assert main([*words, *more, "--out", str(tmp_path / "run")]) == 0
