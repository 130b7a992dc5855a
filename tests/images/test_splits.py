"""Published and saved lists of labelled images, at their full size where our own machines have them."""

import hashlib
import json
import lzma

import numpy as np
import pytest
import torch
from shortcuts import refused

from finetune_mile.core.problems import Problem
from finetune_mile.images import name_lists, splits
from finetune_mile.images.name_lists import locate
from finetune_mile.images.sets import ImageSet, Names
from finetune_mile.images.sources.imagenet import synsets
from finetune_mile.images.splits import make_pools


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))


def image_set(ids, given):
    return ImageSet(ids=ids, given=torch.as_tensor(given), truth=None, content=lambda _: None)


def small(per_class=20):
    ids = Names.of(f"{c}/{i:02d}.jpg" for c in "abc" for i in range(per_class))
    return image_set(ids, np.repeat(np.arange(3), per_class))


def test_the_cards_are_whole():
    cards = {card.fraction: card for card in splits.read_cards()}
    assert {f: card.count for f, card in cards.items()} == {0.01: 12811, 0.1: 128116}
    assert all(card.urls[0].startswith("https://") for card in cards.values())


@pytest.fixture(scope="session")
def whole_imagenet(shared):
    """Ids and labels of 1.28 million training images, without the images: the listed ones, and made-up others."""
    listed = set()
    for name in ("simclr_1percent", "simclr_10percent"):
        listed |= set(lzma.decompress((shared / f"data/imagenet/{name}.txt.xz").read_bytes()).decode().split())
    classes = synsets()
    ids = {f"{name.partition('_')[0]}/{name}" for name in listed}
    for synset in classes:
        ids |= {f"{synset}/{synset}_{10**6 + i}.JPEG" for i in range(1153)}
    ordered = sorted(ids)
    place = {name: i for i, name in enumerate(classes)}
    return image_set(Names.of(ordered), np.array([place[name[:9]] for name in ordered]))


@pytest.mark.slow
def test_the_published_lists_at_full_size(whole_imagenet, shared, tmp_path):
    pools = {}
    for fraction, percent in ((0.01, "1"), (0.1, "10")):
        text = lzma.decompress((shared / f"data/imagenet/simclr_{percent}percent.txt.xz").read_bytes())
        (card,) = (card for card in splits.read_cards() if card.fraction == fraction)
        assert hashlib.sha256(text).hexdigest() == card.sha256
        with refused(f"imagenet-{percent}percent.txt", "--split FILE"):
            splits.choose(whole_imagenet.ids, 1000, fraction, None)
        (tmp_path / "cache/splits").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"cache/splits/imagenet-{percent}percent.txt").write_bytes(text)
        chosen = splits.choose(whole_imagenet.ids, 1000, fraction, None)
        pools[fraction] = make_pools(whole_imagenet, fraction, 0, chosen)
        given = splits.choose(
            whole_imagenet.ids, 1000, fraction, str(shared / f"data/imagenet/simclr_{percent}percent.txt.xz")
        )
        assert given.indices.tolist() == chosen.indices.tolist()
    one, ten = (pools[f].indices["labelled"] for f in (0.01, 0.1))
    assert len(one) == 12811
    assert len(ten) == 128116
    assert set(one.tolist()) <= set(ten.tolist())
    counts = np.bincount(whole_imagenet.given.numpy()[one])
    assert set(counts.tolist()) == {12, 13}
    assert pools[0.01].to_json(0.01, 0)["source"] == "imagenet-1percent"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fetching ends as it does without a network."""

    def fail(files, folder):
        raise Problem("no network in tests")

    monkeypatch.setattr(name_lists, "fetch", fail)


def imagenet_like(tmp_path):
    return [f"n{c:08d}/n{c:08d}_{i}.JPEG" for c in range(1000) for i in range(2)]


def test_a_list_that_cannot_be_had_is_an_error_not_a_draw(tmp_path):
    with refused("--fraction 0.01", "published list", "no network"):
        splits.choose(imagenet_like(tmp_path), 1000, 0.01, None)
    place = tmp_path / "cache/splits/imagenet-1percent.txt"
    place.parent.mkdir(parents=True)
    place.write_text("n01440764_1.JPEG\n")
    with refused("not the published list", "imagenet-1percent"):
        splits.choose(imagenet_like(tmp_path), 1000, 0.01, None)
    assert splits.choose(imagenet_like(tmp_path), 1000, 0.05, None) is None, "5 % has no published list"
    assert splits.choose(small().ids, 3, 0.01, None) is None, "neither has other data"


def test_fetching_goes_through_the_cards(tmp_path, monkeypatch):
    card = splits.read_cards()[0]
    asked = []

    def fetch(files, folder):
        asked.extend(files)
        folder.mkdir(parents=True)
        (folder / files[0].name).write_text("a.JPEG\n")

    monkeypatch.setattr(name_lists, "fetch", fetch)
    digest = hashlib.sha256(b"a.JPEG\n").hexdigest()
    assert name_lists.fetch_list(card.model_copy(update={"sha256": digest, "count": 1})) == ["a.JPEG"]
    assert asked[0].urls == card.urls
    assert asked[0].sha256 == digest


def test_a_saved_split_comes_back(tmp_path):
    images = small()
    first = make_pools(images, 0.2, seed=7)
    (tmp_path / "split.json").write_text(json.dumps(first.to_json(0.2, 7)))
    chosen = splits.choose(images.ids, 3, 0.2, str(tmp_path / "split.json"))
    again = make_pools(images, 0.2, seed=99, chosen=chosen)
    assert again.indices["labelled"].tolist() == first.indices["labelled"].tolist()
    assert again.images.given.tolist() == first.images.given.tolist()
    assert again.to_json(0.2, 99)["sha256"] == first.to_json(0.2, 7)["sha256"]


def write(path, names):
    path.write_text("\n".join(names) + "\n\n")
    return str(path)


def test_lists_that_cannot_work(tmp_path):
    images = small()
    missing = write(tmp_path / "missing.txt", ["a/01.jpg", "b/99.jpg", "c/77.jpg"])
    with refused("missing.txt", "2 of 3 images", "b/99.jpg, c/77.jpg"):
        splits.choose(images.ids, 3, 1.0, missing)
    with pytest.raises(Problem, match="listed twice"):
        name_lists.read_list(tmp_path / write(tmp_path / "twice.txt", ["a/01.jpg", "a/01.jpg"]))
    with pytest.raises(Problem, match="the list is empty"):
        name_lists.read_list(tmp_path / write(tmp_path / "empty.txt", []))
    (tmp_path / "not.json").write_text("[1]")
    with pytest.raises(Problem, match=r"not the split.json of a run"):
        name_lists.read_list(tmp_path / "not.json")
    (tmp_path / "cut.txt.xz").write_bytes(lzma.compress(b"a/01.jpg\n")[:20])
    with pytest.raises(Problem, match="cannot be read as a list"):
        name_lists.read_list(tmp_path / "cut.txt.xz")
    one = write(tmp_path / "one.txt", ["a/01.jpg", "b/01.jpg"])
    with refused("one.txt", "3.33%", "--fraction", "50.00%"):
        make_pools(images, 0.5, 0, splits.choose(images.ids, 3, 0.5, one))
    with refused("1 classes", "class number 2"):
        make_pools(images, 1.0, 0, splits.choose(images.ids, 3, 1.0, one))


def test_names_are_found_by_their_end_or_by_their_file():
    ids = ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/n01440764_5_n01440764.JPEG"]
    assert locate(["test/cat/1.jpg", "dog/1.jpg", "2.jpg"], ids) == ([0, 2, 1], [])
    assert locate(["1.jpg"], ids) == ([-1], ["1.jpg"]), "two images have that file name"
    assert locate(["n01440764_5.JPEG"], ids) == ([3], []), "as the hub's copy calls it"


def test_the_flags_of_a_run(tmp_path, capsys):
    """--split takes a run's split.json back; with the same images labelled another seed changes the rest only."""
    from shortcuts import SHORT

    from finetune_mile.run import main

    flags = [*SHORT, "--method", "sigmoid", "--steps", "2"]
    assert main([*flags, "--fraction", "0.1", "--out", str(tmp_path / "a")]) == 0
    saved = tmp_path / "a/split.json"
    again = [*flags, "--seed", "3", "--split", str(saved), "--fraction", "0.1", "--out", str(tmp_path / "b")]
    assert main(again) == 0
    first, second = (json.loads((tmp_path / run / "split.json").read_text()) for run in "ab")
    assert first["ids"] == second["ids"]
    assert first["source"] == "stratified"
    assert second["source"] == "split.json"
    assert main([*flags, "--split", "nowhere.txt", "--out", str(tmp_path / "c")]) == 2
    assert "--split nowhere.txt: there is no such file" in capsys.readouterr().err
    assert main([*flags, "--truth", "csv:nowhere.csv", "--out", str(tmp_path / "c")]) == 2
    assert "there is no file nowhere.csv" in capsys.readouterr().err
    (tmp_path / "sets.csv").write_text("file,labels\nval-00001,3;4\nval-00002,5\n")
    assert main([*flags, "--truth", f"csv:{tmp_path / 'sets.csv'}", "--set", "evaluate.images=null",
                 "--out", str(tmp_path / "c")]) == 0  # fmt: skip
    assert json.loads((tmp_path / "c/results.json").read_text())["images_with_set"] == 2
