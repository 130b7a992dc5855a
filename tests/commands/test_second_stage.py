"""The second stage of a run: it learns from photos without a label, where there are some."""

import json

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file
from shortcuts import ROOT, refused, tinted, tinted_photos

from finetune_mile.config.resolve import resolve, second_stage
from finetune_mile.core.files import load_yaml_file
from finetune_mile.training import plan as planning
from finetune_mile.training import trial
from finetune_mile.training.folder import LOCK, WRITTEN, remove_written
from finetune_mile.training.plan import MOST_COST, auto_epochs, computing, second_steps

TINY = ["--init", "simclr-demo", "--size", "24", "--steps", "20", "--set", "checkpoint_every=5", "--set", "log_every=1"]


@pytest.fixture
def run_photos(tmp_path, run_demo):
    """Run on 60 labelled photos of three classes; `more` holds 40 without a label."""
    draw = tinted_photos(tmp_path / "photos", 60)
    (tmp_path / "more").mkdir()
    for number in range(40):
        tinted(draw, ((160, 90, 90), (90, 160, 90))[number % 2], 60).save(tmp_path / f"more/{number}.png")

    def run(name, *flags, more=True):
        unlabelled = ["--unlabelled", str(tmp_path / "more")] if more else []
        return run_demo(name, "--data", f"folder:{tmp_path / 'photos'}", *TINY, *unlabelled, *flags)

    return run


def weights(folder):
    return load_file(folder / "export/model.safetensors")


def same(a, b):
    return all(tensor.equal(weights(b)[name]) for name, tensor in weights(a).items())


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_two_stages_are_the_two_commands_of_the_docs(run_photos, capsys):
    one = run_photos("one", "--keep", "last", "--set", "then.steps=8")
    said = capsys.readouterr()
    first = run_photos("first", "--keep", "last", more=False)
    second = run_photos("second", "--recipe", "unlabelled", "--init", str(first), "--steps", "8")
    assert same(one, second)
    assert not same(one, first)
    assert results(one)["accuracy"] == results(second)["accuracy"]
    assert results(one)["first_stage_accuracy"] == results(first)["accuracy"]
    gap = results(one)["accuracy"] - results(first)["accuracy"]
    assert results(one)["over_first_stage"] == pytest.approx(gap)
    assert "8 steps, each with 32 labelled images and 64 of the 40 without a label" in said.err
    assert "8 steps with 40 images without a label" in said.out
    assert not [*one.glob("**/*.pt")]  # no checkpoint is left
    guesses = pq.read_table(one / "unlabelled.parquet").to_pydict()
    assert len(guesses["id"]) == 40
    assert guesses["probability"] == sorted(guesses["probability"])
    sure = sum(probability >= 0.5 for probability in guesses["probability"])
    assert results(one)["unlabelled_confident"] == pytest.approx(100 * sure / 40)
    assert 0 < results(one)["confident"] <= 100
    page = (one / "report.html").read_text()
    said, found = page[page.index('<h2 id="unlabelled"') :], [guesses["label"][i] for i in range(40 - sure, 40)]
    assert f"<strong>{sure} of 40</strong>" in said
    for name in {*found}:
        assert f'<tr><td>{name}</td><td class="number">20</td><td class="number">{found.count(name)}</td>' in said
    assert 'id="unlabelled"' not in (first / "report.html").read_text()
    remove_written(one, (*WRITTEN, "run.json", LOCK))
    assert not [path for path in one.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_stop_in_the_second_stage_changes_nothing(run_photos, stop_at, tmp_path):
    from finetune_mile.run import main

    straight = run_photos("straight", "--set", "then.steps=26")
    stop_at(23)  # the first stage has 20 steps
    stopped = ["--data", f"folder:{tmp_path / 'photos'}", *TINY, "--unlabelled", str(tmp_path / "more")]
    assert main([*stopped, "--set", "then.steps=26", "--out", str(tmp_path / "stopped")]) == 143
    stop_at(None)
    assert main(["--resume", str(tmp_path / "stopped")]) == 0
    assert same(straight, tmp_path / "stopped")
    assert results(straight) == results(tmp_path / "stopped")


@pytest.mark.parametrize("share", [0.0, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.5, 1.0))])
def test_held_out_labels_decide_whether_the_second_stage_is_kept(run_photos, monkeypatch, capsys, share):
    monkeypatch.setattr(planning, "FEW_LABELS", 10)
    decide = trial.decide
    monkeypatch.setattr(
        trial,
        "decide",
        lambda task, *rest: (share, decide(task, *rest)[1]) if task.recipe.then is None else decide(task, *rest),
    )
    run = run_photos("run", "--set", "then.steps=4")
    decision = json.loads((run / "trial/decision.json").read_text())
    assert decision["then_share"] == share
    assert {*decision["then_losses"]} == {"1", "0.5", "0"}
    assert (run / "then").is_dir() == (share > 0)
    assert ("are not used" in capsys.readouterr().out) == (share == 0)
    assert ("over_first_stage" in results(run)) == (share > 0)


def test_few_labels_go_half_the_way(run_photos, capsys):
    run = run_photos("run", "--set", "then.steps=4")
    assert json.loads((run / "run.json").read_text())["then_share"] == 0.5
    assert "halfway between those before and after it" in capsys.readouterr().out


@pytest.mark.slow
def test_hidden_labels_are_used_only_when_asked_for(run_photos):
    half = ["--fraction", "0.5", "--set", "then.steps=4", "--keep", "last"]
    assert not (run_photos("hidden", *half, more=False) / "then").exists()
    assert (run_photos("asked", *half, "--semi", "all", more=False) / "then").is_dir()


def test_a_frozen_trunk_has_no_second_stage_and_says_what_to_do(tmp_path):
    with refused("--unlabelled", "--semi all"):
        resolve({"data": "folder:x", "init": "simclr-demo", "unlabelled": "more", "trunk": "frozen"}, [])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--method", "softmax"], ["--method", "sigmoid", "--refit"]])
def test_other_methods_and_a_refit_have_it_too(run_photos, flags):
    run = run_photos("run", *flags, "--set", "then.steps=4", "--keep", "last")
    assert (run / "then").is_dir()
    if "--refit" in flags:
        assert (run / "refit/then").is_dir()
    first = yaml.safe_load((run / "recipe.yaml").read_text())["method"]
    loss = yaml.safe_load((run / "then/recipe.yaml").read_text())["averaged_teacher"]["loss"]
    assert (first, loss) in (("softmax", "cross_entropy"), ("sigmoid", "bce"))


@pytest.mark.slow
def test_a_teacher_is_of_the_first_stage_alone(run_photos):
    teacher = run_photos("teacher", "--recipe", "scratch", "--init", "none", "--arch", "resnet-mini", more=False)
    distill = ["--method", "distill", "--teacher", str(teacher), "--keep", "last"]
    one = run_photos("one", *distill, "--set", "then.steps=4")
    first = run_photos("first", *distill, more=False)
    method = ["--set", "averaged_teacher.loss=cross_entropy"]
    assert same(one, run_photos("second", "--recipe", "unlabelled", "--init", str(first), "--steps", "4", *method))


@pytest.mark.parametrize(("method", "teacher"), [("averaged-teacher", None), ("distill", "runs/t")])
def test_a_teacher_from_outside_stays_where_the_second_method_takes_one(method, teacher):
    flags = {"data": "folder:x", "init": "simclr-demo", "unlabelled": "more", "method": "distill", "teacher": "runs/t"}
    second = second_stage(resolve(flags, [f"then.method={method}"]).recipe)
    assert second.teacher == teacher


def test_what_is_wrong_with_it_is_told_before_any_work():
    flags = {"data": "folder:x", "init": "simclr-demo"}
    with refused("then: ", "averaged_teacher.confidence 2"):
        resolve(flags, ["then.averaged_teacher.confidence=2"])
    with refused("then: ", "nonsense", "unknown key"):
        resolve(flags, ["then.nonsense=1"])
    with refused("then: ", "needs labelled_share"):
        resolve(flags, ["then.labelled_share=null"])


def test_its_settings_are_those_of_the_recipe_that_continues_a_run():
    alone = load_yaml_file(ROOT / "recipes/unlabelled.yaml")
    then = load_yaml_file(ROOT / "recipes/finetune.yaml")["then"]
    alone["averaged_teacher"].pop("loss")  # as the first stage reads its outputs
    for key in ("base", "steps", "keep", "then"):
        alone.pop(key)
    assert then == alone | {"epochs": "auto", "patience": None}


@pytest.mark.parametrize("unlabelled", [40, 2_000, 9_000, 1_000_000])
def test_its_length_by_rule(unlabelled):
    recipe = second_stage(resolve({"data": "folder:x", "init": "simclr-demo"}, []).recipe)
    steps = second_steps(recipe, 300 * 32, unlabelled)
    assert steps * computing(recipe) <= MOST_COST * 300 * 32
    assert steps * 64 <= auto_epochs(unlabelled) * unlabelled + 64
    assert steps == 245 or unlabelled < 3_000
