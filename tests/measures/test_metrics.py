"""Our measures against scikit-learn's, on random input with ties and empty sets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, label_ranking_average_precision_score, top_k_accuracy_score

from finetune_mile.measures import metrics
from finetune_mile.measures.guards import LabelReport, guard, inspect_labels
from finetune_mile.measures.metrics import measure, most_confused


def sample(seed, n=60, c=7, rounding=1):
    g = torch.Generator().manual_seed(seed)
    scores = (torch.randn(n, c, generator=g) * 10**rounding).round() / 10**rounding
    truth = torch.rand(n, c, generator=g) > 0.6
    labels = torch.randint(0, c, (n,), generator=g)
    return scores, truth, labels


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9999), st.sampled_from([0, 1, 6]))
def test_f1_and_ranking_equal_scikit_learns(seed, rounding):
    scores, truth, _ = sample(seed, rounding=rounding)
    predicted = scores.sigmoid() > 0.5
    theirs = f1_score(truth.numpy(), predicted.numpy(), average="samples", zero_division=0)
    assert float(metrics.sample_f1(predicted, truth).mean()) == pytest.approx(theirs, abs=1e-6)
    theirs = label_ranking_average_precision_score(truth.numpy(), scores.double().numpy())
    assert float(metrics.ranking_precision(scores, truth).mean()) == pytest.approx(theirs, abs=1e-6)


def test_top_k_equals_scikit_learns():
    scores, _, labels = sample(1, rounding=6)
    for k in (1, 3, 5):
        theirs = top_k_accuracy_score(labels.numpy(), scores.numpy(), k=k, labels=np.arange(7))
        assert float(metrics.hits(metrics.top_k(scores, k), labels).mean()) == pytest.approx(100 * theirs)
    assert (metrics.hits(metrics.top_k(scores, 99), labels) == 100).all()


def test_an_image_without_a_label_is_neither_right_nor_wrong():
    best = torch.tensor([[0], [1], [1]])
    assert metrics.hits(best, torch.tensor([0, 2, -1])).tolist() == pytest.approx([100, 0, np.nan], nan_ok=True)
    sets = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    assert metrics.hits(best, sets).tolist() == pytest.approx([100, 0, np.nan], nan_ok=True)


def test_the_published_set_rule_adds_the_best_class():
    sizes = torch.tensor([0, 2])  # of {p > threshold}
    assert metrics.best_alone(sizes, "threshold").tolist() == [False, False]
    assert metrics.best_alone(sizes, "argmax_or_threshold").tolist() == [True, False]
    assert metrics.best_alone(sizes, "argmax").tolist() == [True, True]


def test_no_constant_beats_the_trivial_score():
    _, truth, _ = sample(5, c=5)
    best, every = metrics.constant_f1(truth), []
    for bits in range(1, 32):
        constant = torch.tensor([bool(bits >> i & 1) for i in range(5)]).expand_as(truth)
        every.append(float(metrics.sample_f1(constant, truth).mean()))
    assert best == pytest.approx(max(every), abs=0.01)
    common = truth.sum(0).argsort(descending=True, stable=True)
    sets = [torch.isin(torch.arange(5), common[:k]).expand_as(truth) for k in range(1, 6)]
    assert best == pytest.approx(max(float(metrics.sample_f1(each, truth).mean()) for each in sets))


def test_results_leave_empty_sets_out_and_say_how_many():
    scores, truth, labels = sample(2)
    truth[:10], truth[10:, 0] = False, True
    found = measure(
        scores, labels, truth, activation="sigmoid", prediction_set="threshold", thresholds={"rho": 0.1}
    ).results()
    assert found["images"] == 60
    assert found["images_with_set"] == int(truth.any(1).sum())
    assert found["f1@0.25"] == found["f1_threshold@0.25"]
    assert found["f1@best"] >= max(found["f1@0.25"], found["f1@0.5"]) - 1
    published = measure(
        scores, labels, truth, activation="sigmoid", prediction_set="argmax_or_threshold", thresholds={"rho": 0.1}
    ).results()
    assert published["f1@0.5"] == found["f1_argmax_or_threshold@0.5"]
    plain = measure(scores, labels, None, activation="softmax", prediction_set="threshold").results()
    assert not any(key.startswith(("f1", "real", "lrap", "trivial")) for key in plain)


def test_coverage_counts_the_prediction_set_that_was_asked_for():
    """With the best class always predicted no image has fewer than one label: the paper's coverage is never below 1."""
    logits = torch.tensor([[-3.0, -2.0, -4.0], [2.0, 1.0, -4.0]])  # sigmoids: none above 0.25; two
    found = {
        rule: measure(logits, torch.tensor([1, 0]), None, activation="sigmoid", prediction_set=rule).results()
        for rule in ("threshold", "argmax_or_threshold", "argmax")
    }
    assert found["threshold"]["coverage@0.25"] == 1.0
    assert found["argmax_or_threshold"]["coverage@0.25"] == 1.5
    assert found["argmax"]["coverage@0.25"] == 1.0


def test_finding_8_the_set_of_a_softmax_is_its_best_class_alone():
    """The published code's f1(): {argmax} for a softmax, at every threshold; {p > t} as well inflated its F1."""
    logits = torch.tensor([[2.0, 1.9, -4.0], [0.0, 3.0, -1.0]])  # the first softmax has two classes above 0.25
    truth = torch.tensor([[True, True, False], [True, False, False]])
    found = {
        rule: measure(
            logits, torch.tensor([0, 0]), truth, activation="softmax", prediction_set=rule, thresholds={"rho": 0.1}
        ).results()
        for rule in ("argmax", "argmax_or_threshold")
    }
    only = found["argmax"]
    assert only["f1@0.25"] == only["f1@0.5"] == only["f1@rho"] == only["f1_argmax"] == pytest.approx(100 * (2 / 3) / 2)
    assert only["coverage@0.25"] == 1.0
    assert "f1@best" not in only, "no threshold, no best one"
    assert "best_threshold" not in only
    both = found["argmax_or_threshold"]
    assert both["f1@0.25"] == pytest.approx(50.0)
    assert both["coverage@0.25"] == 1.5
    assert both["f1_argmax"] == only["f1_argmax"]
    assert only["f1_argmax_or_threshold@0.25"] == both["f1@0.25"]


def test_guards_speak_up_before_a_collapse():
    given_labels = torch.eye(3)[[0, 1, 2, 0]]
    nothing, _ = inspect_labels(torch.zeros(4, 3), given_labels, None)
    assert nothing.empty_share == 1
    assert "no pseudo-label" in guard(nothing, 3, None, new_head=True)[0]
    assert "longer warm-up" in guard(nothing, 3, None, new_head=True)[0]
    assert "warm-up" not in guard(nothing, 3, None, new_head=False)[0], "a probe is trained"
    everything, labels = inspect_labels(torch.ones(4, 3), given_labels, None)
    assert everything.labels_per_image == 3
    assert "inflating" in guard(everything, 3, None, new_head=True)[0]
    wrong = torch.zeros(4, 3)
    wrong[:, 1] = 1
    report, _ = inspect_labels(wrong, given_labels, labels)
    assert report.given_recall == 0.25
    assert report.churn == pytest.approx(2 / 3)
    assert any("given labels" in sentence for sentence in guard(report, 10, None, new_head=True))
    assert not any("warm-up" in sentence for sentence in guard(report, 10, None, new_head=False))
    fine = LabelReport(labels_per_image=1.2, empty_share=0.05, given_recall=0.8, churn=0.1)
    assert guard(fine, 10, fine, new_head=True) == []


@pytest.mark.parametrize(("churn", "told"), [(None, False), (0.5, False), (0.8, False), (0.81, True), (1.0, True)])
def test_labels_that_change_more_than_four_of_five_times_are_told(churn, told):
    report = LabelReport(labels_per_image=1.2, empty_share=0.05, given_recall=0.8, churn=churn)
    assert any("changed since the last generation" in said for said in guard(report, 10, None, new_head=True)) == told


def test_a_main_object_gives_its_accuracy_and_what_it_alone_would_score():
    logits = torch.tensor([[3.0, 1.0, -1.0], [0.0, 2.0, 1.0]])
    truth = torch.tensor([[True, True, False], [False, False, True]])
    found = measure(
        logits, torch.tensor([1, 2]), truth, activation="sigmoid", prediction_set="threshold",
        main=torch.tensor([0, 2]), thresholds={"0.8": 0.8},
    ).results()  # fmt: skip
    assert found["main_accuracy"] == 50.0
    assert found["main_only_f1"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert found["f1@0.8"] == pytest.approx(100 * (2 / 3 + 0) / 2)


def test_the_class_that_each_class_is_taken_for():
    draw = torch.Generator().manual_seed(0)
    given, best = (torch.randint(0, 7, (300,), generator=draw) for _ in range(2))
    given[given == 5], best[given == 6] = 4, 6  # no image of 5, no mistake on 6
    table = torch.zeros(7, 7, dtype=torch.long).index_put_((given, best), torch.tensor(1), accumulate=True)
    table.fill_diagonal_(0)
    found = most_confused(best, given, 7)
    assert found[[5, 6]].tolist() == [-1, -1]
    for label in range(5):
        assert found[label] != label
        assert table[label, found[label]] == table[label].max() > 0
