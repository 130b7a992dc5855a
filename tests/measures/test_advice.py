"""Advice: a method only where its gain is above chance, and 'cannot tell' where the features are too weak."""

import re

import pytest
import torch

from finetune_mile.compute.passes import Outputs
from finetune_mile.learning.evidence import judge
from finetune_mile.measures.advice import against, interval, recommended, say_methods, say_several
from finetune_mile.measures.metrics import measure
from finetune_mile.measures.probing import scored


def seeds(share, images=200, seed=0):
    """Hits of five seeds, of which a share is right."""
    draw = torch.Generator().manual_seed(seed)
    return 100.0 * (torch.rand(5, images, generator=draw) < share)


def test_a_winner_inside_the_noise_is_not_recommended():
    base = seeds(0.28)
    near = base.clone()
    near[:, :2] = 100.0
    near[:, 5:7] = 0.0
    gaps = against({"softmax": base, "wan": near}, "softmax")
    assert gaps["wan"].low <= 0 <= gaps["wan"].high
    assert recommended(gaps, "softmax") == "softmax"
    (sentence,) = say_methods(gaps, "softmax")
    assert "Level with softmax" in sentence
    assert "so the simplest one was taken: softmax" in sentence


def test_the_method_with_the_largest_clear_gain_is_recommended():
    base = seeds(0.3)
    scores = {"softmax": base, "sigmoid": seeds(0.6, seed=1), "mile": seeds(0.9, seed=2), "auto": seeds(0.01, seed=3)}
    gaps = against(scores, "softmax")
    assert recommended(gaps, "softmax") == "mile"
    better, worse = say_methods(gaps, "softmax")
    assert better.startswith("Better than softmax")
    assert worse.startswith("Worse than softmax: auto -")


def test_scores_are_those_of_results_for_one_label_and_for_sets():
    draw = torch.Generator().manual_seed(0)
    logits, one = torch.randn(50, 4, generator=draw), torch.randint(-1, 4, (50,), generator=draw)
    sets = (torch.rand(50, 4, generator=draw) < 0.4).long()
    for given, key in ((one, "accuracy"), (sets, "map")):
        for activation in ("softmax", "sigmoid"):
            measured = measure(logits, given, None, activation=activation, prediction_set="threshold")
            own = scored(Outputs(logits, torch.ones(50, dtype=torch.bool)), given, activation)
            assert float(own.nanmean()) == pytest.approx(measured.results()[key])
            low, high = interval(own, key)
            assert 0 <= low < float(own.nanmean()) < high <= 100
    logits[3] = torch.nan
    outputs = Outputs(logits, torch.arange(50) != 3)
    assert scored(outputs, one.clamp(min=0), "softmax").isnan().tolist() == [row == 3 for row in range(50)]
    assert not scored(outputs, sets, "sigmoid").isnan().any()


def test_the_interval_of_a_perfect_score_is_not_empty():
    low, high = interval(torch.full((20,), 100.0), "accuracy")
    assert 80 < low < high == pytest.approx(100)


def verdicts(objects, strength, images=100, classes=5, many=5):
    """What `auto` would measure: logits that show the objects of an image, one of which is given."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(many):
        order = torch.rand(images, classes, generator=draw).argsort(1)
        there = torch.zeros(images, classes).scatter_(1, order[:, :objects], 1.0)
        given = order[torch.arange(images), torch.randint(0, objects, (images,), generator=draw)]
        # an image shows its objects more or less clearly
        clear = strength * 2 * torch.rand(images, 1, generator=draw)
        logits = clear * there + torch.randn(images, classes, generator=draw)
        found.append(judge(logits, given, torch.ones(classes), generation=0, bars=(1.0, 0.5), was_open=False))
    return [{"open": v.open, "g": v.g, "misses": v.misses, "images": v.images, "labels_found": 2.0} for v in found]


@pytest.mark.parametrize(
    ("objects", "strength", "answer"),
    [
        (1, 3.0, "No evidence"),  # it would have been seen
        (1, 0.0, "Cannot tell"),  # features that show nothing
        (2, 0.5, "Cannot tell"),  # two objects, features too weak: it was called "no evidence"
        (2, 4.0, "Many photos"),
    ],
)
def test_no_evidence_is_said_only_where_it_would_have_been_seen(objects, strength, answer):
    sentence = say_several(verdicts(objects, strength, images=400 if answer == "Many photos" else 100), 0.5)
    assert sentence.startswith(answer)
    if answer != "Many photos":  # the number that decides
        low, high = map(float, re.findall(r"interval ([\d.]+) to ([\d.]+)", sentence)[0])
        assert (high < 0.5) is (answer == "No evidence")
        assert low <= high


def test_a_classifier_without_mistakes_shows_one_class_per_photo():
    right = {"open": False, "g": 0.0, "misses": 0.0, "images": 50, "labels_found": 1.0}
    assert say_several([right], 0.5).startswith("No evidence")
