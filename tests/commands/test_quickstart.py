"""`quickstart`: one command on a folder of photos, and the page that it writes."""

import json
import re

import pytest
from shortcuts import COLOURS, tinted, tinted_photos

from finetune_mile.checkpoints.cards import folder_of, list_cards, read_card
from finetune_mile.checkpoints.choosing import choose_init
from finetune_mile.cli import main
from finetune_mile.config.flags import parse
from finetune_mile.core.problems import Problem
from finetune_mile.training import plan as planning
from finetune_mile.training import quickstart
from finetune_mile.training.minutes import InTime

LITTLE = ["--size", "24", "--workers", "0"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Tinted noise: 20 training and 10 validation images a class; one blue photo is called red."""
    root = tmp_path_factory.mktemp("photos")
    draw = tinted_photos(root, noise=60)
    tinted(draw, COLOURS["blue"], 60).save(root / "train/red/7.png")
    return root


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """One seed, few steps, a cache of its own, and the run folder to write."""
    monkeypatch.setattr(quickstart, "SEEDS", 1)
    monkeypatch.setattr(planning, "LEAST_STEPS", 40)
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "out"


def facts_of(out):
    return json.loads((out / "quickstart.json").read_text())


def page_of(out):
    return (out / "quickstart.html").read_text()


def words_of(page):
    """What a reader sees, without pictures."""
    return re.sub(r"\s+", " ", re.sub(r"<style.*?</style>|<[^>]*>", " ", page, flags=re.S))


@pytest.mark.slow
def test_one_command_compares_methods_makes_a_model_and_finds_the_wrong_label(photos, quick, capsys):
    assert main(["quickstart", str(photos), "--out", str(quick), *LITTLE]) == 0
    facts, printed = facts_of(quick), capsys.readouterr()
    names = [row["name"] for row in facts["rows"]]
    assert names == ["k-NN", "softmax probe", "sigmoid probe", "softmax", "sigmoid", "wan", "mile", "auto"]
    assert all(row["low"] <= row["mean"] <= row["high"] for row in [*facts["rows"]])
    assert min(row["mean"] for row in facts["rows"][1:]) > 80 > 2 * facts["floor"]["mean"]
    assert facts["doubts"][0]["id"] == "red/7.png"
    assert (facts["doubts"][0]["given"], facts["doubts"][0]["instead"]) == ("red", "blue")
    assert [step["name"] for step in facts["model"]["steps"]] == ["frozen features at 24 px", "all layers at 24 px"]
    assert min(step["score"] for step in facts["model"]["steps"]) > 80
    assert sorted(path.name for path in quick.iterdir()) == ["model", "quickstart.html", "quickstart.json"]
    for folder in (quick / "model", quick / "model/not-kept"):
        assert (folder / "report.html").is_file()
    page = page_of(quick)
    assert "red/7.png" in words_of(page)
    assert 'href="model/report.html"' in page
    assert not re.search(r"\{\{|\{%|\bnan\b|None", re.sub(r'src="data:[^"]*"', "", page))
    assert "tiny network that has seen drawings" in printed.err
    assert "finetune-mile run" not in printed.out  # what was done is not said to be next


def test_without_time_fewer_labels_are_used_and_there_is_a_model(photos, quick, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "FEATURE_SHARE", 1e-9)
    assert main(["quickstart", str(photos), "--minutes", "0.001", "--out", str(quick), *LITTLE]) == 0
    facts, printed = facts_of(quick), capsys.readouterr()
    assert facts["labels"] == 3
    stores = list((quick.parent / "cache/features").iterdir())
    assert len(stores) == 2, "one, and its copy for the refit; with bfloat16 they were computed twice"
    assert "of 33 photos were computed before" in printed.err, "nothing is computed twice"
    assert len((quick / "labelled.txt").read_text().split()) == 3
    assert "of the labels are used; raise --minutes" in re.sub(r"\s+", " ", printed.err)
    assert facts["model"]["kept"] == "frozen features at 24 px"
    assert facts["model"]["left_out"][0]["name"] == "all layers"
    command = facts["commands"]["predict"].replace("PHOTOS", str(photos / "val/red")).split()
    assert main(command[1:]) == 0  # the first sentence of the page works
    assert f"Next:  {facts['commands']['predict']}" in printed.out
    options = parse(facts["commands"]["fine-tune"].split()[2:])  # the command can be pasted
    assert [options.settings[key] for key in ("init", "data", "method")] == ["simclr-demo", str(photos), facts["best"]]
    short = words_of(page_of(quick)).split(" In short ")[1].split(" What works on these photos ")[0]
    order = ["finetune-mile predict", "The model is", "no time for fine-tuning"]
    places = [short.index(each) for each in order]
    assert places == sorted(places)
    assert short.startswith("Your model is ready.")


def test_methods_are_compared_with_fewer_seeds_where_the_time_is_short(photos, quick, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "SEEDS", 3)
    assert main(["quickstart", str(photos), "--minutes", "0.05", "--out", str(quick), *LITTLE]) == 0
    assert "methods are compared with 1 of 3 seeds" in capsys.readouterr().err
    assert {len(row["seeds"]) for row in facts_of(quick)["rows"]} == {1}
    assert "methods with 1 seed." in words_of(page_of(quick))


def test_photos_with_sets_of_labels_are_compared_by_map(photos, quick, monkeypatch, capsys):
    """The run itself is another's work: here it is left out."""
    lines = ["file,labels,split"]
    for part, count in (("train", 20), ("val", 10)):
        for name, more in (("red", "red;warm"), ("green", "green"), ("blue", "blue;cold")):
            lines += [f"{part}/{name}/{i}.png,{more},{part}" for i in range(count)]
    table = photos / "sets.csv"
    table.write_text("\n".join(lines))
    step = {"name": "frozen features at 24 px", "seconds": 1.0, "score": 50.0, "low": 40.0, "high": 60.0}
    made = {"measure": "map", "method": "sigmoid", "counted": 5, "steps": [step], "kept": step["name"]}
    made |= {"difference": None, "left_out": []}
    monkeypatch.setattr(InTime, "train", lambda work, **_: work.facts.update(made) or 0)
    assert main(["quickstart", f"csv:{table}", "--out", str(quick), *LITTLE]) == 0
    facts = facts_of(quick)
    names = ["k-NN", "softmax probe", "sigmoid probe", "sigmoid", "wan", "mile"]
    assert [row["name"] for row in facts["rows"]] == names
    assert min(row["mean"] for row in facts["rows"][2:]) > 80 > 2 * facts["floor"]["mean"]
    assert set(facts["refused"]) == {"softmax", "auto"}
    assert facts["best"] == "sigmoid"
    assert "mAP" in capsys.readouterr().out
    assert "not searched where photos have sets of labels" in words_of(page_of(quick))


def test_the_checkpoint_is_chosen_in_this_order(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "photos"
    folder.mkdir()

    def chosen(*words):
        return choose_init(str(folder), download="--download" in words)

    assert chosen() == ("simclr-demo", "it comes with the package")
    assert chosen("--download") == ("dinov2-s", "--download")
    for name in ("mocov2", "swav"):
        card = read_card(list_cards()[name])
        folder_of(card).mkdir(parents=True)
        (folder_of(card) / card.file).write_bytes(b"")
    assert chosen() == ("swav", "it is on this machine")  # the better one of the two
    (folder / "own.pth").write_bytes(b"")
    assert chosen("--download") == (str(folder / "own.pth"), "it is beside the photos")
    (folder / "other.safetensors").write_bytes(b"")
    with pytest.raises(Problem, match="holds 2 checkpoints; choose one with --init"):
        chosen()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--minutes", "0"], "--minutes 0: must be above 0"),
        (["--init", "no-such-card"], "--init no-such-card: no such file, and no card of that name"),
        (["--out", "{photos}"], "already exists; give a folder that is new or empty"),
    ],
)
def test_what_cannot_work_is_one_sentence(photos, tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", str(photos), *(word.format(photos=photos) for word in words)]) == 2
    assert sentence in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not any(tmp_path.iterdir())
