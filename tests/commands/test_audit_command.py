"""`audit`: from photos to lists and a page, and from ticks to corrected data. The page: pages/test_audit_page.py."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from shortcuts import COLOURS, ROOT, refused, tinted, tinted_photos
from snippets import run_shell

from finetune_mile.api import Run
from finetune_mile.cli import main
from finetune_mile.compute.passes import Outputs
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.sources import load_data
from finetune_mile.images.splits import label_names
from finetune_mile.training.auditing import quoted, say_audit, unquoted
from finetune_mile.training.cleaning import TICKED, apply_ticks
from finetune_mile.training.findings import Photos, find_all

LITTLE = ["--init", "simclr-demo", "--size", "24", "--workers", "0"]
HOSTILE = "<img src=x onerror=alert(1)>.png"
COLUMNS = ["path", "given", "suggested", "probability_given", "probability_suggested", "kind"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Tinted noise: 20 training and 10 validation photos a class. Nine have wrong labels, three in validation."""
    root = tmp_path_factory.mktemp("photos")
    draw = tinted_photos(root, noise=8)
    tinted(draw, COLOURS["blue"], 8).save(root / "train/red/7.png")
    tinted(draw, COLOURS["blue"], 8).save(root / "val/red/8.png")
    tinted(draw, COLOURS["red"], 8).save(root / "val/green/8.png")
    for name in ("val/red/3", "train/red/11", "train/red/12", "train/red/13", "train/red/14", "train/red/15"):
        tinted(draw, COLOURS["green"], 8).save(root / f"{name}.png")
    tinted(draw, COLOURS["green"], 8).save(root / "train/green" / HOSTILE)
    shutil.copy(root / "train/green/2.png", root / "train/blue/=2+3.png")
    Image.new("RGB", (32, 32), (255, 255, 0)).save(root / "train/green/yellow.png")
    return root


@pytest.fixture(scope="module")
def audited(photos, tmp_path_factory):
    """The folder of their audit."""
    out = tmp_path_factory.mktemp("audits") / "one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_MILE_CACHE", str(out.parent / "cache"))
        assert main(["audit", str(photos), *LITTLE, "--out", str(out)]) == 0
    return out


@pytest.fixture
def own_cache(audited, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(audited.parent / "cache"))


def lines_of(audited):
    with (audited / "audit.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_lists_name_what_is_wrong(photos, audited):
    lines, rows = lines_of(audited), pq.read_table(audited / "audit.parquet").to_pylist()
    assert list(lines[0])[:6] == COLUMNS == list(rows[0])[:6]
    assert len(lines) == len(rows)
    wrong = [row for row in rows if row["kind"] == "wrong"]
    assert {row["id"] for row in wrong[:9]} >= {"red/7.png", "red/3.png", "red/8.png", "red/11.png"}
    first = next(row for row in wrong if row["id"] == "red/7.png")
    assert (first["given"], first["suggested"], first["split"]) == ("red", "blue", "train")
    assert Path(first["path"]) == photos / "train/red/7.png"
    assert first["probability_given"] < first["probability_suggested"]
    assert [row["rank"] for row in wrong] == list(range(1, len(wrong) + 1))
    chances = [row["probability_wrong"] for row in wrong]
    assert chances == sorted(chances, reverse=True)
    copy = next(row for row in rows if row["kind"] == "duplicate")
    assert {Path(copy["path"]).name, Path(copy["other"]).name} == {"2.png", "=2+3.png"}
    assert {copy["given"], copy["suggested"]} == {"green", "blue"}


def test_validation_labels_count_and_accuracy_is_given_twice(audited):
    facts = json.loads((audited / "audit.json").read_text())
    assert facts["doubtful"]["val"] >= 1
    every, without = facts["accuracy"]["probe"]["all"], facts["accuracy"]["probe"]["without"]
    assert every["photos"] == 30
    assert without["photos"] == 30 - facts["doubtful"]["val"]
    assert every["accuracy"] < without["accuracy"]
    assert every["low"] < every["accuracy"] < every["high"]
    low, high = facts["shares"]["wrong"][1:]
    assert low <= 9 / 93 <= high
    assert any("Doubtful labels" in sentence for sentence in facts["sentences"])
    assert "Without the doubtful labels" in " ".join(facts["sentences"])
    facts["doubtful"]["val"] = 0
    assert "Without the doubtful labels" not in " ".join(say_audit(facts)), "nothing was left out"


def test_the_same_command_again_says_so_and_another_one_is_refused(photos, audited, own_cache, capsys, tmp_path):
    before = (audited / "audit.html").stat().st_mtime_ns
    assert main(["audit", str(photos), *LITTLE, "--out", str(audited)]) == 0
    assert "audit.html" in capsys.readouterr().out
    assert (audited / "audit.html").stat().st_mtime_ns == before
    assert main(["audit", str(photos), *LITTLE, "--size", "32", "--out", str(audited)]) == 2
    assert "--out" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["audit", str(photos), *LITTLE, "--out", str(tmp_path)]) == 2
    assert (audited / "audit.html").stat().st_mtime_ns == before


def test_noise_with_few_photos_a_class_says_nothing_about_several_classes():
    draw = torch.Generator().manual_seed(0)
    given = torch.randint(64, (56,), generator=draw)
    ids = [str(i) for i in range(28)]
    sides = [ImageSet(ids=ids, given=part, truth=None, content=lambda i: b"") for part in given.split(28)]
    data = Data(name="noise", classes=tuple(f"class {i}" for i in range(64)), train=sides[0], val=sides[1])
    features = Outputs(torch.randn(56, 30, generator=draw), torch.ones(56, dtype=torch.bool))
    _, rows, notes = find_all(Photos(data=data, features=features, copies=[]), (1.0, 0.5))
    assert notes[0].startswith("Cannot tell")
    assert sum(row.kind == "missing" for row in rows) <= 100


@pytest.mark.parametrize("text", ["=1+1", "+a", "-a", "@a", "'a", "\ta", "plain", "a=b", ""])
def test_no_cell_is_a_formula_and_names_come_back(text):
    assert not quoted(text).startswith(("=", "+", "-", "@", "\t"))
    assert unquoted(quoted(text)) == text


# ------------------------------------------------------------------------------------ ticks


def write_ticks(path, audited, *ticks):
    """ticks.csv as the page exports it: (kind, split, id, given, suggested, verdict, labels)."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(TICKED)
        for kind, split, name, given, suggested, verdict, labels in ticks:
            cells = [str(audited), kind, split, name, json.dumps(given), json.dumps(suggested), verdict]
            table.writerow([quoted(cell) for cell in (*cells, json.dumps(labels))])
    return path


FIXED = ("wrong", "train", "red/7.png", ["red"], ["blue"], "relabel", ["blue"])
KEPT = ("wrong", "train", "green/yellow.png", ["green"], ["red"], "right", [])
GONE = ("duplicate", "train", "blue/=2+3.png", ["blue"], ["green"], "wrong", [])
UNSURE = ("wrong", "val", "red/3.png", ["red"], ["green"], "unsure", [])


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_ticks_become_links_in_a_folder_and_the_originals_stay(photos, audited, tmp_path, capsys):
    before = contents(photos)
    ticks = write_ticks(tmp_path / "ticks.csv", audited, FIXED, KEPT, GONE, UNSURE)
    assert main(["audit", "--apply", str(ticks), "--out", str(tmp_path / "clean")]) == 0
    assert contents(photos) == before
    out = tmp_path / "clean"
    assert (out / "train/blue/7-2.png").resolve() == photos / "train/red/7.png", "a name that was there gets a number"
    assert (out / "train/blue/7-2.png").is_symlink()
    assert not (out / "train/blue/=2+3.png").exists()
    assert (out / "train/green" / HOSTILE).exists()
    data = load_data(str(out))
    assert (len(data.train), len(data.val)) == (62, 30)
    said = capsys.readouterr().out
    assert f"Next:  finetune-mile run --init simclr-demo --data folder:{out}\n" in said, "a command that runs"
    summary = json.loads((out / "clean.json").read_text())
    assert (summary["relabelled"], summary["left_out"], summary["judged"], summary["wrong"]) == (1, 1, 2, 1)
    assert summary["left_low"] <= summary["left"] <= summary["left_high"]


def test_ticks_become_a_csv_file(audited, tmp_path):
    ticks = write_ticks(tmp_path / "ticks.csv", audited, FIXED, GONE)
    summary = apply_ticks(ticks, tmp_path / "clean.csv")
    assert summary["data"] == f"csv:{tmp_path / 'clean.csv'}"
    data = load_data(summary["data"])
    assert (len(data.train), len(data.val)) == (62, 30)
    assert data.classes == ("blue", "green", "red")
    assert int(data.train.given.bincount()[0]) == 21
    assert data.train.read(0).shape == (3, 32, 32)


def test_a_second_class_makes_sets_of_labels(audited, tmp_path):
    both = ("missing", "train", "green/2.png", ["green"], ["blue"], "relabel", ["green", "blue"])
    summary = apply_ticks(write_ticks(tmp_path / "ticks.csv", audited, both, FIXED), tmp_path / "clean")
    assert summary["data"].startswith("csv:")
    data = load_data(summary["data"])
    pairs = zip(data.train.ids, label_names(data.train.given, data.classes), strict=True)
    found = {"/".join(name.split("/")[-2:]): names for name, names in pairs}
    assert found["green/2.png"] == ["blue", "green"]
    assert found["red/7.png"] == ["blue"]
    assert found["red/8.png"] == ["red"]


def test_what_cannot_be_applied_is_refused_in_a_sentence(photos, audited, tmp_path):
    def apply(*ticks, out=tmp_path / "clean"):
        apply_ticks(write_ticks(tmp_path / "ticks.csv", audited, *ticks), out)

    kind, split, name, given, suggested, verdict, labels = FIXED
    with refused("no train photo red/99.png"):
        apply((kind, split, "red/99.png", given, suggested, verdict, labels))
    with refused("purple"):
        apply((kind, split, name, given, suggested, verdict, ["purple"]))
    with refused("line 2", "maybe"):
        apply((kind, split, name, given, suggested, "maybe", labels))
    with refused("line 2", "relabel"):
        apply((kind, split, name, given, suggested, verdict, []))
    with refused("--out", "inside"):
        apply(FIXED, out=photos / "clean")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    with refused("--out", "already exists"):
        apply(FIXED, out=tmp_path / "full")
    with refused("no such file"):
        apply_ticks(tmp_path / "none.csv", tmp_path / "clean")
    assert main(["audit", "--apply", str(tmp_path / "ticks.csv")]) == 2
    assert not (tmp_path / "clean").exists()


def test_changed_photos_need_a_new_audit(photos, audited, tmp_path):
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    other = tmp_path / "audit"
    shutil.copytree(audited, other)
    facts = json.loads((other / "audit.json").read_text())
    facts["request"]["data"] = str(copy)
    (other / "audit.json").write_text(json.dumps(facts))
    ticks = write_ticks(tmp_path / "ticks.csv", other, FIXED)
    (copy / "train/red/1.png").rename(copy / "train/blue/new.png")
    with refused("changed since the audit"):
        apply_ticks(ticks, tmp_path / "clean")


# ------------------------------------------------------------------------------------ kinds of data


def listed(root, photos, several, unlabelled=0):
    """A CSV file of the photos: one label or two; some without."""
    rows = []
    for number, path in enumerate(sorted((photos / "train").rglob("[0-9]*.png"))):
        names = [path.parent.name] + (["bright"] if several and number % 2 else [])
        rows.append([str(path), "" if number < unlabelled else ";".join(names)])
    with (root / "list.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["file", "labels" if several else "label"], *rows])
    return f"csv:{root / 'list.csv'}"


@pytest.mark.parametrize(("several", "unlabelled"), [(True, 0), (True, 5), (False, 5)])
def test_lists_with_several_labels_and_without_some(photos, tmp_path, own_cache, several, unlabelled):
    data = listed(tmp_path, photos, several, unlabelled)
    assert main(["audit", data, *LITTLE, "--out", str(tmp_path / "out")]) == 0
    facts = json.loads((tmp_path / "out/audit.json").read_text())
    assert (facts["photos"], facts["labelled"], facts["several"]) == (60, 60 - unlabelled, several)
    assert all(np.isfinite(value) for share in facts["shares"].values() for value in share)
    rows = pq.read_table(tmp_path / "out/audit.parquet").to_pylist()
    assert not any(row["kind"] in ("wrong", "missing") and row["given"] == "" for row in rows)
    tick = ("outlier", "train", load_data(data).train.ids[0], [], [], "wrong", [])
    summary = apply_ticks(write_ticks(tmp_path / "ticks.csv", tmp_path / "out", tick), tmp_path / "clean")
    after = load_data(summary["data"])
    assert len(after.train) + len(after.val) == 59
    assert (after.train.given.ndim == 2) == several


def test_photos_in_no_files_are_copied(tmp_path, own_cache):
    assert main(["audit", "demo:60", *LITTLE, "--out", str(tmp_path / "out")]) == 0
    tick = ("outlier", "train", load_data("demo:60").train.ids[0], [], [], "wrong", [])
    ticks = write_ticks(tmp_path / "ticks.csv", tmp_path / "out", tick)
    with refused("give a folder"):
        apply_ticks(ticks, tmp_path / "clean.csv")
    summary = apply_ticks(ticks, tmp_path / "clean")
    assert len(load_data(summary["data"]).train) == 59


def test_a_run_is_audited_on_its_data_and_its_own_accuracy_is_given(photos, tmp_path, own_cache, capsys):
    out = tmp_path / "run"
    flags = [
        "--data",
        str(photos),
        "--init",
        "simclr-demo",
        "--trunk",
        "frozen",
        "--set",
        "size=24",
        "--set",
        "workers=0",
    ]
    assert main(["run", *flags, "--method", "softmax", "--steps", "4", "--out", str(out)]) == 0
    facts = Run.open(out).audit(workers=0)
    assert facts["folder"] == str(out / "audit")
    assert facts["accuracy"].keys() == {"probe", "run"}
    results = Run.open(out).results
    assert facts["accuracy"]["run"]["all"]["accuracy"] == pytest.approx(results["accuracy"], abs=0.01)
    assert main(["audit", str(out), "--workers", "0"]) == 0
    assert str(out / "audit/audit.html") in capsys.readouterr().out
    assert len(pq.read_table(out / "audit/audit.parquet")) > 0


@pytest.mark.slow
def test_the_document(photos, audited, own_cache, tmp_path, monkeypatch):
    (tmp_path / "photos").symlink_to(photos)
    write_ticks(tmp_path / "ticks.csv", audited, FIXED, GONE)
    monkeypatch.chdir(tmp_path)
    short = [*LITTLE[:4], "--set=workers=0", "--steps", "4", "--set=mile.k_t=1", "--set=mile.k_s=1"]
    assert main(["run", "--data", "folder:photos", *short, "--out", "runs/mine"]) == 0

    def shorter(words):
        return (
            short
            if words[1] == "run"
            else []
            if "--apply" in words
            else [*LITTLE[2:], *LITTLE[:2] * ("--init" in words)]
        )

    done = run_shell(ROOT / "docs/audit.md", monkeypatch, shorter)
    assert {line: code for line, (code, _) in done.items() if code} == {}
    assert len(done) == 5
