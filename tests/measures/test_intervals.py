"""Intervals that hold what they promise, and paired comparisons that see more than two single ones."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_mile.measures.intervals import compare, intervals, resampled_means, sign_test


def test_the_interval_is_that_of_the_normal_law_for_many_images():
    values = (torch.rand(4000, generator=torch.Generator().manual_seed(1)) < 0.3).double() * 100
    low, high = intervals({"accuracy": values})["accuracy"]
    error = 1.96 * float(values.std()) / 4000**0.5
    assert low == pytest.approx(float(values.mean()) - error, abs=0.2 * error)
    assert high == pytest.approx(float(values.mean()) + error, abs=0.2 * error)


def test_a_seed_is_a_seed_and_what_does_not_count_is_left_out():
    values = torch.arange(50.0)
    values[10:20] = torch.nan
    first, again, other = (intervals({"x": values}, seed=s)["x"] for s in (0, 0, 1))
    assert first == again != other
    assert first[0] < float(values.nanmean()) < first[1]
    assert intervals({}) == intervals({"x": torch.zeros(0)}) == {}
    assert intervals({"x": torch.full((5,), 7.0)}, draws=20)["x"] == (7, 7)


def test_blocks_do_not_change_the_draws(monkeypatch):
    matrix = np.random.default_rng(0).random((30, 2))
    whole = resampled_means(matrix, draws=40, seed=3)
    monkeypatch.setattr("finetune_mile.measures.intervals.BLOCK", 90)
    assert resampled_means(matrix, draws=40, seed=3) == pytest.approx(whole)


def test_the_paired_difference_sees_what_single_intervals_hide():
    generator = torch.Generator().manual_seed(2)
    easy = torch.rand(500, generator=generator) * 100
    a, b = {"f1": easy + 1}, {"f1": easy + torch.randn(500, generator=generator) * 0.5}
    alone = intervals(a)["f1"]
    paired = compare(a, b)["f1"]
    assert alone[0] < float(b["f1"].mean()) < alone[1], "not told apart by themselves"
    assert 0.9 < paired.low < paired.difference < paired.high < 1.1
    assert paired.wins > 400
    assert paired.p_value < 1e-6
    assert compare(b, a)["f1"].difference == pytest.approx(-paired.difference)
    nothing = compare(a, a)["f1"]
    assert (nothing.difference, nothing.wins, nothing.losses, nothing.p_value) == (0, 0, 0, 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300))
def test_the_sign_test_counts_splits_at_least_as_uneven(wins, losses):
    count = wins + losses
    uneven = 2 * sum(math.comb(count, k) for k in range(min(wins, losses) + 1))
    assert sign_test(wins, losses) == pytest.approx(min(1.0, uneven / 2**count), rel=1e-9)
