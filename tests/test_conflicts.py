"""Settings that do not go together: every conflict is told, each in its own sentence."""

import pytest

from finetune_mile.cli import main
from finetune_mile.config.resolve import resolve
from finetune_mile.core.problems import Problem
from finetune_mile.paper.pretraining import recipe as pretraining

FOUR = {
    "--semi all": "--semi needs a method that imitates",
    "--patience 3 --set evaluate.images=0": "--patience needs evaluations",
    "--set deterministic=true --set cudnn_benchmark=true": "deterministic: true does not go with cudnn_benchmark",
    "--set head=mlp": "head: mlp is for --trunk frozen",
}


def test_four_conflicts_are_four_sentences(tmp_path, capsys):
    words = " ".join(FOUR).split()
    assert main(["run", "--method", "softmax", *words, "--out", str(tmp_path / "run")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines
    assert len(lines) == 4
    for sentence in FOUR.values():
        assert sum(line.startswith(f"error: {sentence}") for line in lines) == 1, sentence


def sentences(flags, *sets):
    with pytest.raises(Problem) as found:
        resolve(flags, list(sets))
    return found.value.sentences


def test_what_a_method_checks_is_told_with_the_rest():
    said = sentences({"data": "demo", "rho": "auto"}, "mile.targets=soft", "mile.pseudo_labels=cycle", "head=mlp")
    assert len(said) == 3
    for part, sentence in zip(("mile.targets", "mile.pseudo_labels", "head"), said, strict=True):
        assert part in sentence


def test_blocks_that_are_missing_are_told_with_the_rest():
    said = sentences({"data": "demo", "method": "auto"}, "auto=null", "mile=null", "head=mlp", "steps=null")
    for part in ("either steps or epochs", "block auto:", "block mile:", "head: mlp"):
        assert sum(part in sentence for sentence in said) == 1, part
    assert len(said) == 4


def test_pretraining_tells_all_of_them_too():
    with pytest.raises(Problem) as found:
        pretraining.resolve({"method": "byol"}, ["byol=null", "optimizer.name=lars", "optimizer.nesterov=true"])
    assert len(found.value.sentences) == 2


def test_two_lengths_of_a_run_are_a_conflict_however_they_are_given():
    for flags, sets in (({"steps": 5, "epochs": 1}, ()), ({"steps": 5}, ("epochs=1",)), ({}, ("epochs=1", "steps=5"))):
        assert sentences({"data": "demo", **flags}, *sets) == ("--steps and --epochs: give one of them",)
    assert resolve({"data": "demo"}, ["epochs=null", "steps=5"]).recipe.steps == 5
