"""Bars on each seed and on two measures; sweeps as heat maps, trade-offs as curves."""

import copy
import io

import matplotlib.image
import pytest
import yaml
from shortcuts import refused

from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables.description import find_table, read_table
from finetune_mile.paper.tables.ledger import make_ledger
from finetune_mile.paper.tables.plot import draw
from finetune_mile.paper.tables.runs import RunRecord
from finetune_mile.paper.tables.writing import bars

TABLE = {
    "title": "T", "runs": "runs/t", "seeds": [0, 1], "settings": {"recipe": "demo"},
    "blocks": [{
        "name": "b", "columns": {"x": {"k_t": 5}, "y": {"k_t": 10}},
        "rows": {"one": {"settings": {"k_s": 1}}, "two": {"settings": {"k_s": 2}}},
        "measures": {"accuracy": "accuracy", "F1": "f1@0.25"},
        "bars": [
            {"row": "one", "column": "x", "measure": "accuracy", "at_least": 15},
            {"row": "one", "column": "x", "measure": "accuracy", "at_least": 15, "each": True},
            {"rows": ["one", "two"], "column": "x", "measure": "F1", "against": "accuracy", "between": [4, 6]},
        ],
    }],
}  # fmt: skip


def read(tmp_path, **changes):
    tree = copy.deepcopy(TABLE)
    tree["blocks"][0].update(changes)
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return read_table(path)


def runs():
    values = {("one", 0): (10.0, 30.0), ("one", 1): (30.0, 40.0), ("two", 0): (25.0, 1.0), ("two", 1): (35.0, 2.0)}
    return [
        RunRecord(block="b", row=row, column=column, seed=seed, status="done", recipe="r", seconds=1.0, device="cpu",
               threads=1, commit="abc", results={"accuracy": accuracy, "f1@0.25": f1})
        for column in ("x", "y") for (row, seed), (accuracy, f1) in values.items()
    ]  # fmt: skip


def test_a_bar_on_each_seed_and_one_on_two_measures(tmp_path):
    block = make_ledger(read(tmp_path), runs(), {}).blocks[0]
    assert [bar.outcome for bar in block.bars] == ["met", "NOT met", "met"]
    assert block.bars[2].measured.values == (5.0, 5.0)
    shown = [row[:3] for row in bars(block).rows]
    assert shown[1] == ("accuracy: one, x, each seed", "at least 15", "10.00 to 30.00")
    assert shown[2][0] == "F1 of one - accuracy of two, x"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heatmap": {"x": "k_t", "y": "k_s", "measures": ["F1", "accuracy"]}},
        {"curve": {"x": "accuracy", "y": "F1", "rows": ["two"], "rivals": ["one"], "rivals_y": "accuracy"}},
    ],
)
def test_every_kind_of_picture_is_drawn_and_differs(tmp_path, changes):
    ledger = make_ledger(read(tmp_path, **changes), runs(), {})
    picture = matplotlib.image.imread(io.BytesIO(draw(ledger, "hash")))
    inside = picture[40:-10, 40:-10, :3]
    assert picture.shape[1] == 1430
    colours = {tuple(c) for c in (inside.reshape(-1, 3) * 255).round().astype(int)[::7].tolist()}
    assert ((68, 1, 84) in colours) == ("heatmap" in changes), "viridis begins with this"
    points = [c for c in colours if c == (27, 127, 181)]
    assert bool(points) == ("heatmap" not in changes), "the first colour of points"


def test_a_picture_of_measures_that_are_not_there_is_refused(tmp_path):
    with pytest.raises(Problem, match="heatmap: there is no measure 'f1'"):
        read(tmp_path, heatmap={"x": "k_t", "y": "k_s", "measures": ["f1"]})
    with refused("curve", "no row 'three'", "no measure 'LRAP'"):
        read(tmp_path, curve={"x": "LRAP", "y": "F1", "rows": ["three"]})
    with pytest.raises(Problem, match="against: is the measure of a second row"):
        read(tmp_path, bars=[{"row": "one", "column": "x", "measure": "F1", "against": "accuracy", "at_least": 0}])


@pytest.mark.parametrize("name", ["multi-mnist", "ablations", "auto"])
def test_the_tables_that_fit_a_laptop_say_what_is_learning_and_what_is_thresholding(name):
    for block in read_table(find_table(name)).blocks:
        if "F1@0.25" in block.measures:
            assert {"LRAP", "labels"} <= set(block.measures), block.name
        if "best F1" in block.measures:
            assert block.constants, block.name
