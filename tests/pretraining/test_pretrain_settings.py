"""What is wrong is said at once, in words, before any work."""

import pytest
from short_runs import SHORT

from finetune_mile.cli import main
from finetune_mile.config.flags import parse
from finetune_mile.core.problems import Problem
from finetune_mile.paper.pretrain import SETTINGS, build_parser, prepare
from finetune_mile.paper.pretraining.recipe import resolve


def wrong(*words):
    with pytest.raises(Problem) as caught:
        prepare(parse(list(words), build_parser(), SETTINGS))
    return "\n".join(caught.value.sentences)


def test_all_errors_at_once():
    said = wrong("--method", "simsiam", "--lr", "-1", "--set", "views.flipp=1", "--set", "steps")
    assert "--method simsiam" in said
    assert "--lr -1" in said
    assert "views.flipp: unknown key; did you mean flip?" in said
    assert "--set steps: write KEY=VALUE" in said


def test_what_is_wrong_with_a_setting_is_said():
    assert "did you mean temperature?" in wrong("--set", "simclr.temperatur=1")
    assert "[LOW, HIGH]" in wrong("--set", "views.area=[0.5, 0.1]")
    assert "needs a block byol" in wrong("--method", "byol", "--set", "byol=null")
    assert "no source is called" in wrong("--data", "nowhere:x")
    assert "arch, mean and std are null: name a checkpoint with --init" in wrong("--recipe", "continue")
    assert "did you mean --method?" in wrong("--methd", "byol")
    assert "no such file or recipe; did you mean grids?" in wrong("--recipe", "girds")


def test_resume_takes_no_other_setting(tmp_path):
    assert "leave out --lr" in wrong("--resume", str(tmp_path), "--lr", "1")
    assert "not a run folder" in wrong("--resume", str(tmp_path))
    (tmp_path / "recipe.yaml").write_text("data: demo\n")
    assert "not a pre-training run" in wrong("--resume", str(tmp_path))


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert "was not made by a run" in wrong("--out", str(tmp_path))


def test_the_recipe_follows_the_data(tmp_path):
    assert resolve({}, []).path.stem == "grids"
    assert resolve({"init": "simclr-demo"}, []).path.stem == "continue"
    assert resolve({"recipe": "pretrain/photos"}, []).path.stem == "photos"
    assert resolve({"data": f"folder:{tmp_path}"}, []).path.stem == "photos"


def test_explain_says_who_said_what(capsys, tmp_path):
    out = tmp_path / "run"
    assert main(["pretrain", *SHORT, "--lr", "0.01", "--explain", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["optimizer.lr", "0.01", "--lr"] for line in lines)
    assert any(line.split() == ["size", "24", "recipe"] for line in lines)
    assert not out.exists()


def test_a_recipe_builds_on_another_and_has_no_fractions(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: pretrain/grids\nsteps: 3\n")
    found = resolve({"recipe": str(path)}, [])
    assert found.recipe == resolve({"steps": 3}, []).recipe
    assert (found.said_by["steps"], found.said_by["seed"]) == ("recipe", "base grids.yaml")
    path.write_text("base: pretrain/grids\nfractions: {0.1: {steps: 3}}\n")
    assert "fractions: unknown key" in wrong("--recipe", str(path))
    assert wrong("--set", "epochs=3").startswith("--set epochs: unknown key")
    assert "required" not in wrong("--set", "epochs=3"), "steps are not replaced where there are no epochs"
