"""Scores of an audit on features whose wrong, missing and unusual photos are known."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from finetune_mile.learning.ridge import LeftOut
from finetune_mile.measures.audit import errors_left, judge_labels, outliers

CLASSES, WIDTH = 4, 12


def blobs(count, seed=0, spread=1.0):
    """Features around a centre for each class, and the classes."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    centres = 3 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    return centres[labels] + spread * torch.randn(count, WIDTH, generator=draw), labels


def with_errors(labels, share, seed=0):
    draw = np.random.default_rng(seed)
    rows = draw.choice(len(labels), round(share * len(labels)), replace=False)
    wrong = labels.clone()
    wrong[rows] = (labels[rows] + torch.from_numpy(draw.integers(1, CLASSES, len(rows)))) % CLASSES
    return wrong, torch.isin(torch.arange(len(labels)), torch.from_numpy(rows))


@pytest.mark.parametrize("count", [60, 9])  # more photos than features, and fewer
def test_a_left_out_score_is_that_of_a_ridge_regression_without_the_photo(count):
    features, labels = blobs(count)
    targets = torch.nn.functional.one_hot(labels, CLASSES).float()
    groups = torch.full((count,), -1)
    groups[[2, 5, 6]] = 7
    keep = torch.ones(count, dtype=torch.bool)
    keep[1] = False
    found = LeftOut(features, keep=keep, groups=groups).scores(targets, 0.01)
    z = (features - features[keep].mean(0)) / features[keep].std(0, correction=0) / WIDTH**0.5
    z = torch.cat([z, torch.ones(count, 1)], 1).double()
    penalty = torch.eye(WIDTH + 1).double() * 0.01 * keep.sum()
    penalty[-1, -1] = 0
    for left_out in ([0], [1], [2, 5, 6], [8]):
        rest = keep.clone()
        rest[left_out] = False
        weights = torch.linalg.solve(z[rest].T @ z[rest] + penalty, z[rest].T @ targets[rest].double())
        torch.testing.assert_close(found[left_out].double(), z[left_out] @ weights, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_wrong_labels_come_first_and_their_number_is_known(share):
    features, labels = blobs(600)
    given, wrong = with_errors(labels, share)
    judged = judge_labels(features, given, CLASSES)
    estimate, low, high = judged.shares["wrong"]
    assert low <= share <= high
    assert abs(estimate - share) < 0.03
    assert high - low < 0.15
    assert abs(float(judged.wrong.sum()) - int(wrong.sum())) < 0.03 * len(labels)
    if share:
        first = judged.wrong.argsort(descending=True)[: int(wrong.sum())]
        assert wrong[first].float().mean() > 0.9
        assert judged.logits.argmax(1)[wrong].eq(labels[wrong]).float().mean() > 0.9


def test_features_that_say_nothing_accuse_nobody():
    _, labels = blobs(300)
    noise = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(3))
    judged = judge_labels(noise, labels, CLASSES)
    assert int((judged.wrong > 0.5).sum()) == 0
    assert judged.shares["wrong"][1] == 0


def test_a_near_duplicate_with_the_same_wrong_label_does_not_defend_it():
    features, labels = blobs(200)
    given = labels.clone()
    features = torch.cat([features, features[:1].repeat(12, 1)])
    given = torch.cat([given, (given[:1] + 1).repeat(12) % CLASSES])
    given[0] = given[-1]
    groups = torch.full((len(given),), -1)
    groups[0], groups[200:] = 3, 3
    assert judge_labels(features, given, CLASSES, groups).wrong[0] > 0.7
    assert judge_labels(features, given, CLASSES).wrong[0] < judge_labels(features, given, CLASSES, groups).wrong[0]


def sets_of(count, seed=0):
    """Features of photos with one to three of the classes, and which (n, C)."""
    draw = torch.Generator().manual_seed(seed)
    truth = torch.rand(count, CLASSES, generator=draw) < 0.4
    truth[torch.arange(count), torch.arange(count) % CLASSES] = True
    centres = 3 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    return truth.float() @ centres + 0.6 * torch.randn(count, WIDTH, generator=draw), truth


def test_missing_labels_of_sets_are_found_and_counted():
    features, truth = sets_of(500)
    draw = torch.Generator().manual_seed(2)
    hidden = truth & (torch.rand(truth.shape, generator=draw) < 0.15)
    hidden[(truth & ~hidden).sum(1) == 0] = False
    judged = judge_labels(features, (truth & ~hidden).float(), CLASSES)
    share = float(hidden.sum() / truth.sum())
    assert abs(judged.shares["missing"][0] - share) < 0.05
    found = judged.missing > 0.5
    assert (found & hidden).sum() > 0.8 * hidden.sum()
    assert (found & hidden).sum() > 0.8 * found.sum()
    assert not (found & truth & ~hidden).any(), "what is given is not missing"


def test_wrong_labels_of_sets_are_found():
    features, truth = sets_of(500)
    draw = torch.Generator().manual_seed(2)
    extra = ~truth & (torch.rand(truth.shape, generator=draw) < 0.06)
    judged = judge_labels(features, (truth | extra).float(), CLASSES)
    found = judged.wrong > 0.5
    assert (found & extra).sum() > 0.7 * extra.sum()
    assert (found & extra).sum() > 0.7 * found.sum()


def test_an_outlier_is_far_from_all_and_a_pair_of_copies_too():
    features, _ = blobs(200, spread=0.3)
    far = torch.zeros(2, WIDTH)
    far[:, 0], far[:, 5] = 60, -60
    rows = torch.cat([features, far])
    groups = torch.full((202,), -1)
    groups[200:] = 0
    _, flagged = outliers(rows, groups)
    assert flagged[200:].all()
    assert flagged[:200].sum() <= 4


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_wrong_labels_between_similar_classes_come_first_and_the_interval_holds_their_number(share):
    """Classes 0 and 1 are alike, and so are 2 and 3: the wrong label is the other one of the pair."""
    features, labels = blobs(800, spread=2.2)
    centres = 3 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    features += 0.75 * (centres[labels ^ 1] - centres[labels]) / 2
    rows = np.random.default_rng(0).choice(len(labels), round(share * len(labels)), replace=False)
    wrong = torch.isin(torch.arange(len(labels)), torch.from_numpy(rows))
    given = torch.where(wrong, labels ^ 1, labels)
    judged = judge_labels(features, given, CLASSES)
    low, high = judged.shares["wrong"][1:]
    assert low <= share <= high
    assert average_precision_score(wrong, judged.wrong) > average_precision_score(
        wrong, -judged.logits.softmax(1).gather(1, given.unsqueeze(1)).squeeze(1)
    ), "better than the probability of the given label"


def test_a_class_of_few_photos_accuses_less():
    """Photos that are like none of their class: with few others that is no surprise."""
    features, labels = blobs(400)
    rare = (labels == 3) & (torch.arange(400) > 40)
    features, labels = features[~rare], labels[~rare]
    odd = torch.tensor([0, 3])  # a photo of class 0 and one of class 3, both like class 1
    features[odd] = features[labels == 1][:2]
    judged = judge_labels(features, labels, CLASSES)
    assert judged.wrong[odd[1]] < judged.wrong[odd[0]]
    assert judged.wrong[odd].min() > 2 * float(judged.wrong.mean())


def left_after(ticked, wrong, chances):
    """`errors_left` when some labels (n,) of these probabilities were judged."""
    return errors_left(chances[ticked], wrong[ticked], chances[~ticked], np.ones(int((~ticked).sum())))


def test_errors_left_follow_from_the_ticks():
    chances, rest = np.full(100, 0.4), np.full(200, 0.1)
    as_expected = errors_left(chances, np.arange(100) < 40, rest[:1], np.array([200.0]))
    fewer = errors_left(chances, np.arange(100) < 10, rest, np.ones(200))
    assert as_expected[1] <= 20 <= as_expected[2]
    assert as_expected[0] == pytest.approx(20, rel=0.4)
    assert fewer[0] < as_expected[0]
    assert fewer[2] < as_expected[2]
    nothing = np.zeros(0)
    low, high = errors_left(nothing, nothing.astype(bool), rest, np.ones(200))[1:]
    assert low < 10
    assert high > 30, "without a tick little is known"
    assert errors_left(chances, chances > 1, nothing, nothing) == (0.0, 0.0, 0.0), "all labels were judged"


@pytest.mark.parametrize(("shift", "slope"), [(0.0, 1.0), (-0.5, 1.0), (0.0, 0.7)])
def test_the_interval_of_errors_left_holds_what_it_says(shift, slope):
    """Probabilities that are right, too high, or too far apart: 95 % of the intervals hold the number left."""
    draw, hits = np.random.default_rng(0), []
    for _ in range(60):
        said = np.sort(draw.beta(0.5, 4, 400))[::-1]
        odds = np.log(said / (1 - said)) * slope + shift
        wrong = draw.random(400) < 1 / (1 + np.exp(-odds))
        ticked = np.arange(400) < 60
        _, low, high = left_after(ticked, wrong, said)
        hits.append(low <= wrong[~ticked].sum() <= high)
    assert np.mean(hits) > 0.9
