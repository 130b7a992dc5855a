"""Logits on disk: what comes back is what went in, and a damaged file is noticed."""

import dataclasses

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from finetune_mile.core.problems import Problem
from finetune_mile.measures.predictions import Predictions, read_predictions, write_predictions

ONE = torch.tensor([0, -1, 2, 0])
SEVERAL = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 1, 1]])


def predictions(**changes):
    truth = torch.tensor([[True, True, False], [False, False, False], [False, False, True], [True, False, False]])
    plain = Predictions(
        ids=["a/1.jpg", "a/2.jpg", "é/3.jpg", "x"], classes=("a", "b", "é"), given=ONE, truth=truth,
        logits=torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), activation="sigmoid",
        about={"model": "run:x"},
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize("given", [ONE, SEVERAL])
@pytest.mark.parametrize("sets", [True, False])
def test_round_trip(given, sets, tmp_path, monkeypatch):
    monkeypatch.setattr("finetune_mile.measures.predictions.ROWS", 3)
    before = predictions(given=given, **({} if sets else {"truth": None}))
    write_predictions(tmp_path / "l.parquet", before)
    after = read_predictions(tmp_path / "l.parquet")
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.given, before.given)
    assert after.truth is None if before.truth is None else torch.equal(after.truth, before.truth)
    assert list(after.ids) == before.ids
    assert all(getattr(after, key) == getattr(before, key) for key in ("classes", "activation", "about"))


def test_any_change_changes_the_hash():
    plain = predictions()
    changed = [
        predictions(logits=plain.logits + 1e-6), predictions(ids=["a/1.jpg", "a/2.jpg", "é/3.jpg", "y"]),
        predictions(classes=("a", "b", "c")), predictions(activation="softmax"),
    ]  # fmt: skip
    assert len({p.digest() for p in [plain, *changed]}) == 5


def test_damaged_and_foreign_files_are_said_to_be_that(tmp_path):
    path = tmp_path / "l.parquet"
    write_predictions(path, predictions())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Problem, match="not a complete parquet file"):
        read_predictions(path)
    pq.write_table(pa.table({"id": ["a"]}), path)
    with pytest.raises(Problem, match="not a file of logits"):
        read_predictions(path)
    path.write_bytes(whole)
    table = pq.read_table(path)
    ids = pa.array(["other", *table["id"].to_pylist()[1:]])
    pq.write_table(table.set_column(0, "id", ids), path)
    with pytest.raises(Problem, match="do not match the hash"):
        read_predictions(path)
