"""Rankings and thresholds without a pass per label or threshold: equal to scikit-learn and to plain loops."""

import json
import lzma
from importlib.resources import files

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, label_ranking_average_precision_score

from finetune_mile.measures import metrics
from finetune_mile.measures.metrics import measure

HOW = {"prediction_set": "threshold"}
ROUNDINGS = st.sampled_from([0, 1, 6])  # whole numbers have ties


def sample(seed, n=60, c=7, rounding=1):
    g = torch.Generator().manual_seed(seed)
    scores = (torch.randn(n, c, generator=g) * 10**rounding).round() / 10**rounding
    truth = torch.rand(n, c, generator=g) > 0.6
    labels = torch.randint(0, c, (n,), generator=g)
    return scores, truth, labels


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9999), ROUNDINGS)
def test_average_precision_equals_scikit_learns(seed, rounding):
    scores, truth, _ = sample(seed, rounding=rounding)
    truth[:, 2] = False  # a class without a positive does not count
    columns = [c for c in range(7) if truth[:, c].any()]
    theirs = average_precision_score(truth[:, columns].numpy(), scores[:, columns].double().numpy(), average=None)
    (ours,) = metrics.class_precisions(scores, [(truth, None)])
    assert ours[columns].numpy() == pytest.approx(theirs, abs=1e-9)
    assert ours[2].isnan()
    theirs = label_ranking_average_precision_score(truth.numpy(), scores.double().numpy())
    assert float(metrics.ranking_precision(scores, truth).mean()) == pytest.approx(theirs, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9999), ROUNDINGS, st.sampled_from(["softmax", "sigmoid"]))
def test_recovery_equals_a_plain_loop(seed, rounding, activation):
    """The paper's definition: true labels that are not the given one are right, all else is wrong."""
    scores, truth, labels = sample(seed, n=40, c=5, rounding=rounding)
    truth[:4] = False  # no set: not counted
    shown = scores.log_softmax(1) if activation == "softmax" else scores
    others, strict, fair = truth.clone(), [], []
    others[torch.arange(40), labels] = False
    for c in range(5):
        rows = truth.any(1)
        if others[rows, c].any():
            strict.append(average_precision_score(others[rows, c].numpy(), shown[rows, c].numpy()))
            rows = rows & (labels != c)
            fair.append(average_precision_score(others[rows, c].numpy(), shown[rows, c].numpy()))
    found = measure(scores, labels, truth, activation=activation, **HOW).results()
    assert found["recovery_map"] == pytest.approx(np.mean(strict), abs=1e-6)
    assert found["recovery_map_others"] == pytest.approx(np.mean(fair), abs=1e-6)


def test_recovery_by_hand():
    logits = torch.tensor([[3.0, 2.0], [1.0, 3.0], [0.0, 1.0], [2.0, 0.0]])
    truth = torch.tensor([[True, True], [False, True], [False, True], [True, False]])
    found = measure(logits, torch.tensor([0, 1, 0, 0]), truth, activation="sigmoid", **HOW).results()
    # Only class 1 has labels that were not given: images 0 (second, behind the given one of image 1) and 2 (third).
    assert found["recovery_map"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["recovery_map_others"] == 1
    labels = torch.tensor([0, 1, 1, 0])
    same = measure(logits, labels, torch.eye(2).bool()[labels], activation="sigmoid", **HOW).results()
    assert "recovery_map" not in same, "there is nothing to recover"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9999), ROUNDINGS, st.sampled_from(metrics.RULES))
def test_f1_from_counts_equals_f1_of_sets_at_every_threshold(seed, rounding, rule):
    scores, truth, labels = sample(seed, rounding=rounding)
    p = scores.sigmoid()
    thresholds = torch.cat([metrics.GRID[::5], p.flatten()[:9]]).unique()  # ties with a threshold too
    alone = torch.zeros_like(truth).scatter_(1, p.argmax(1, keepdim=True), True)

    def plain(t):
        predicted = {"threshold": p > t, "argmax_or_threshold": (p > t) | alone, "argmax": alone}[rule]
        return metrics.sample_f1(predicted, truth)

    known, named = truth.any(1), {f"number {i}": t for i, t in enumerate(thresholds.tolist())}
    measured = measure(scores, labels, truth, activation="sigmoid", prediction_set=rule, thresholds=named)
    for name, t in named.items():
        assert torch.equal(measured.samples[f"f1@{name}"][known], 100 * plain(t)[known])
    results = measure(scores, labels, truth, activation="sigmoid", prediction_set=rule).results()
    best = max(float(plain(t)[known].mean()) for t in metrics.GRID.tolist())
    if rule == "argmax":
        assert results["f1@0.25"] == results["f1_argmax"] == pytest.approx(100 * best)
        return
    assert results["f1@best"] == pytest.approx(100 * best)
    assert float(plain(results["best_threshold"])[known].mean()) == pytest.approx(best)


def test_many_labels_and_few_images_need_no_special_case():
    for n, c in ((1, 3), (3, 1), (2, 2)):
        scores, truth = torch.zeros(n, c), torch.ones(n, c, dtype=torch.bool)
        found = measure(scores, truth.long(), None, activation="sigmoid", **HOW).results()
        assert found["f1@0.25"] == found["lrap"] == found["map"] == 100
        nothing = measure(scores, torch.zeros(n).long(), ~truth, activation="sigmoid", **HOW).results()
        assert nothing["images_with_set"] == 0
        assert not any(key.startswith("f1") for key in nothing)


@pytest.mark.slow
def test_real_labels_at_full_size(shared):
    """ReaL's own numbers, and the scores of 50,000 x 1,000 logits against scikit-learn's."""
    sets = json.loads(files("timm").joinpath("data/_info/imagenet_real_labels.json").read_text())
    here = shared / "data/imagenet"
    paths = json.loads(lzma.decompress((here / "imagenet_val_index_to_filepath.json.xz").read_bytes()))
    numbers = [int(path[-13:-5]) - 1 for path in paths]  # ReaL goes by the number in the name, these by class
    labels = torch.zeros(50000, dtype=torch.long)
    labels[numbers] = torch.from_numpy(np.load(here / "imagenet_val_original_labels.npy").astype(np.int64))
    truth = torch.zeros(len(sets), 1000, dtype=torch.bool)
    truth[[i for i, s in enumerate(sets) for _ in s], [c for s in sets for c in s]] = True
    sizes = truth.sum(1)
    assert [int((sizes == 0).sum()), int((sizes > 1).sum())] == [3163, 7443]
    logits = torch.randn(50000, 1000, generator=torch.Generator().manual_seed(0)) * 3 - 6
    logits += 9 * truth
    logits[torch.arange(50000), labels] += 6
    found = measure(logits, labels, truth, activation="sigmoid", **HOW).results()
    known = sizes > 0
    assert found["images_with_set"] == int(known.sum())
    inside = truth[torch.arange(50000), labels][known].double().mean()
    assert 100 * float(inside) == pytest.approx(90.02, abs=0.005)
    predicted = (logits[known].sigmoid() > 0.5).numpy()
    theirs = f1_score(truth[known].numpy(), predicted, average="samples", zero_division=0)
    assert found["f1@0.5"] == pytest.approx(100 * theirs, abs=1e-9)
    theirs = label_ranking_average_precision_score(truth[known].numpy(), logits[known].numpy())
    assert found["lrap"] == pytest.approx(100 * theirs, abs=1e-6)
    others = truth.clone()
    others[torch.arange(50000), labels] = False
    picked = others[known].any(0)
    theirs = average_precision_score(others[known][:, picked].numpy(), logits[known][:, picked].numpy())
    assert found["recovery_map"] == pytest.approx(theirs, abs=1e-9)
