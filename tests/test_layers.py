"""Recipe files on top of each other: base, fractions, sources."""

import pytest
import yaml
from shortcuts import ROOT

from finetune_mile.config.resolve import nearest_fraction, read_yaml, resolve_tree, to_yaml
from finetune_mile.config.schema import FullRecipe
from finetune_mile.core.problems import Problem

DEMO = ROOT / "recipes/demo.yaml"


def write(folder, name, **tree):
    path = folder / name
    path.write_text(yaml.safe_dump(tree))
    return path


def solve(path, *sets, **given):
    return resolve_tree(FullRecipe, read_yaml(path), path, "test", given, list(sets))


def test_a_base_is_merged_key_by_key(tmp_path):
    below = write(tmp_path, "below.yaml", base=str(DEMO), optimizer={"lr": 0.5, "momentum": 0.8})
    top = write(tmp_path, "top.yaml", base="below", optimizer={"lr": 0.25})
    found = solve(top)
    assert (found.recipe.optimizer.lr, found.recipe.optimizer.momentum) == (0.25, 0.8)
    assert found.recipe.optimizer.name == "adamw", "the rest is the demo's"
    assert found.said_by["optimizer.lr"] == "recipe"
    assert found.said_by["optimizer.momentum"] == f"base {below.name}"
    assert found.said_by["optimizer.name"] == "base demo.yaml"


def test_a_base_is_found_by_its_name_below_recipes(tmp_path):
    assert solve(write(tmp_path, "top.yaml", base="demo", seed=7)).recipe.seed == 7


def test_steps_replace_epochs_of_a_base(tmp_path):
    recipe = solve(write(tmp_path, "top.yaml", base="demo", epochs=3)).recipe
    assert (recipe.steps, recipe.epochs) == (None, 3)


FRACTIONS = {0.01: {"epochs": 60, "optimizer": {"lr": 1.0}}, 0.1: {"epochs": 30}, 1.0: {"epochs": 20}}


@pytest.mark.parametrize(
    ("fraction", "epochs", "speaker"),
    [
        (0.01, 60, "recipe, fractions 0.01"),
        (0.02, 60, "recipe, fractions 0.01 (nearest to 0.02)"),
        (0.05, 30, "recipe, fractions 0.1 (nearest to 0.05)"),
        (0.5, 20, "recipe, fractions 1 (nearest to 0.5)"),
        (1, 20, "recipe, fractions 1"),
    ],
)
def test_fractions_lie_on_top_of_their_file(tmp_path, fraction, epochs, speaker):
    top = write(tmp_path, "top.yaml", base="demo", fractions=FRACTIONS)
    for found in (
        solve(top, fraction=fraction),
        solve(top, f"fraction={fraction}"),
        solve(top, fraction=str(fraction)),
    ):
        assert found.recipe.epochs == epochs
        assert found.said_by["epochs"] == speaker
        assert found.recipe.optimizer.lr == (1.0 if epochs == 60 else 2e-3)


def test_a_file_wins_over_the_fractions_of_its_base(tmp_path):
    write(tmp_path, "below.yaml", base="demo", fractions=FRACTIONS)
    found = solve(write(tmp_path, "top.yaml", base="below", epochs=5), fraction=0.01)
    assert found.recipe.epochs == 5
    assert found.said_by["optimizer.lr"] == "base below.yaml, fractions 0.01"


def test_flags_win_over_fractions(tmp_path):
    top = write(tmp_path, "top.yaml", base="demo", fractions=FRACTIONS, sources={"epochs": "a book"})
    found = solve(top, fraction=0.01, steps=3)
    assert (found.recipe.steps, found.recipe.epochs) == (3, None)
    assert "epochs" not in found.sources


def test_nearest_is_meant_on_a_log_scale():
    assert nearest_fraction(0.03, {0.01: 0, 0.1: 0}) == 0.01
    assert nearest_fraction(0.04, {0.01: 0, 0.1: 0}) == 0.1


def test_a_source_goes_with_its_value(tmp_path):
    write(
        tmp_path, "below.yaml", base="demo", seed=3, optimizer={"lr": 0.5, "momentum": 0.8},
        sources={"optimizer": "a book", "optimizer.lr": "its page 3", "seed": "a die"},
    )  # fmt: skip
    top = write(
        tmp_path, "top.yaml", base="below", optimizer={"lr": 0.25}, epochs=2,
        fractions={0.1: {"epochs": 4, "sources": {"epochs": "a friend"}}, 1.0: {"epochs": 9}},
        sources={"epochs": "a letter"},
    )  # fmt: skip
    found = solve(top, fraction=0.1)
    assert found.sources == {"optimizer.momentum": "a book", "epochs": "a friend", "seed": "a die"}
    assert solve(top, fraction=1.0).sources["epochs"] == "a letter"
    assert "seed" not in solve(top, seed=1).sources, "the command line says so, not the die"
    assert "optimizer.momentum" not in solve(top, "optimizer.momentum=0.5").sources


def test_the_resolved_recipe_has_none_of_the_three_keys(tmp_path):
    top = write(tmp_path, "top.yaml", base="demo", fractions=FRACTIONS, sources={"epochs": "a book"})
    first = solve(top, fraction=0.1)
    tree = yaml.safe_load(to_yaml(first.recipe))
    assert not {"base", "fractions", "sources"} & tree.keys()
    assert resolve_tree(FullRecipe, tree, top, "again").recipe == first.recipe


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"base": "nowhere"}, "top.yaml: base: nowhere: no such file or recipe; known:"),
        ({"base": "top.yaml"}, "leads back to top.yaml, in a circle"),
        ({"base": "chain-0"}, "at most 4 files"),
        ({"base": "demo", "fractions": {2: {}}}, "top.yaml: fractions.2 is not a share"),
        ({"base": "demo", "fractions": {"some": {}}}, "top.yaml: fractions.some is not a share"),
        ({"base": "demo", "fractions": [1]}, "top.yaml: fractions must map"),
        ({"base": "demo", "fractions": {0.1: 3}}, "fractions.0.1 must be a mapping of settings, found int"),
        ({"base": "demo", "fractions": {0.1: {"fraction": 1}}}, "fractions.0.1.fraction cannot be set there"),
        ({"base": "demo", "fractions": {1.0: {"batch_size": 0}}}, "recipe top.yaml: fractions.1.batch_size 0:"),
        ({"base": "demo", "seed": 1, "sources": {"sed": "?"}}, "top.yaml: sources.sed is no setting of this file; did"),
        ({"base": "demo", "seed": 1, "sources": {"seed": 3}}, "top.yaml: sources must map settings to words"),
        ({"base": "demo", "bases": "demo"}, "top.yaml: bases: unknown key"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_file_and_key(tmp_path, tree, sentence):
    for i in range(4):
        write(tmp_path, f"chain-{i}.yaml", base=f"chain-{i + 1}")
    with pytest.raises(Problem, match=r".") as caught:
        solve(write(tmp_path, "top.yaml", **tree))
    assert len(caught.value.sentences) == 1
    assert sentence in caught.value.sentences[0]


def test_a_mistake_in_a_base_names_the_base(tmp_path):
    write(tmp_path, "below.yaml", base="demo", optimizer={"lr": -1})
    with pytest.raises(Problem, match=r"recipe below\.yaml: optimizer\.lr -1"):
        solve(write(tmp_path, "top.yaml", base="below"))


@pytest.mark.parametrize("text", ["steps: 3\nlr: 1\nsteps: 4\n", "a: &a {k_t: 1}\nb: [*a, {k_s: 1,\n k_s: 2}]\n"])
def test_a_key_that_stands_twice_is_refused(tmp_path, text):
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(Problem, match=r"cannot be used at line 3 \((steps|k_s) is set twice\)"):
        read_yaml(path)


def test_an_alias_is_not_said_twice(tmp_path):
    path = tmp_path / "once.yaml"
    path.write_text("a: &a {k_t: 1}\nb: *a\nc: {<<: *a, k_t: 2}\n")
    assert read_yaml(path) == {"a": {"k_t": 1}, "b": {"k_t": 1}, "c": {"k_t": 2}}
