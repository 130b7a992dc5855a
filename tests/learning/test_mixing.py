"""Mixup, cutmix and label smoothing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shortcuts import SHORT, losses
from torchvision.transforms import v2

from finetune_mile.checkpoints.cards import SCRATCH
from finetune_mile.checkpoints.loading import load_network
from finetune_mile.images.order import Order, uniforms
from finetune_mile.images.pipeline import Augmentation, Views, normalise
from finetune_mile.images.sources.grids import load
from finetune_mile.learning.loop import LabelObjective, StepRecord
from finetune_mile.learning.losses import bce, cross_entropy, given_matrix, shared, smoothed
from finetune_mile.learning.mixing import Mix, draw_mix, symmetric_beta
from finetune_mile.learning.phases import Budget, one_interaction
from finetune_mile.run import main

IMAGES = torch.rand(6, 3, 10, 14, generator=torch.Generator().manual_seed(0))
TARGETS = given_matrix(torch.tensor([0, 1, 2, 2, 4, 0]), 5)
SWAPPED = [1, 0, 3, 2, 5, 4]


@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.4, 1.0, 2.0]), st.integers(1, 40), st.integers(1, 40))
def test_the_share_of_cutmix_is_the_area_that_stays(step, alpha, height, width):
    mix = draw_mix(0, step, height, width, mixup=0.0, cutmix=alpha)
    ours, theirs = torch.zeros(1, 1, height, width), torch.ones(1, 1, height, width)
    mixed = mix.images(torch.cat([ours, theirs]))
    assert float((mixed[0] == 0).float().mean()) == pytest.approx(mix.share, abs=1e-6)
    assert mixed[1].equal(1 - mixed[0]), "neighbours exchange the same part"


def test_mixed_images_and_targets_are_torchvisions():
    """Its transforms mix with the image before; pairs are two images that mix with each other."""
    pair, labels = IMAGES[:2], TARGETS[:2]
    mixup, cutmix = Mix(0.3, None), Mix(1 - 4 * 5 / 140, (slice(2, 6), slice(3, 8)))
    theirs = v2.MixUp(num_classes=5)
    expected = theirs.transform(pair, {"lam": 0.3, "labels": labels, "batch_size": 2})
    assert mixup.images(pair).allclose(expected)
    theirs = v2.CutMix(num_classes=5)
    chosen = {"box": (3, 2, 8, 6), "lam_adjusted": cutmix.share, "labels": labels, "batch_size": 2}
    assert cutmix.images(pair).equal(theirs.transform(pair, chosen))


@pytest.mark.parametrize("settings", [{"mixup": 0.4, "cutmix": 0.0}, {"mixup": 0.0, "cutmix": 1.0}])
def test_targets_keep_their_sum_and_pairs_are_neighbours(settings):
    for step in range(20):
        mix = draw_mix(5, step, 10, 14, **settings)
        rows = mix.rows(TARGETS)
        assert rows.allclose(mix.share * TARGETS + (1 - mix.share) * TARGETS[SWAPPED])
        assert rows.sum(1).allclose(torch.ones(6))
        for part in (slice(0, 2), slice(2, 6)):  # a process's, or an accumulated part
            assert mix.images(IMAGES)[part].equal(mix.images(IMAGES[part]))
            assert rows[part].equal(mix.rows(TARGETS[part]))


def test_a_step_decides_and_both_kinds_get_half_of_the_steps():
    def kinds(seed):
        return [draw_mix(seed, step, 8, 8, mixup=0.4, cutmix=1.0) for step in range(400)]

    assert kinds(1) == kinds(1)
    assert kinds(1) != kinds(2)
    assert sum(mix.box is None for mix in kinds(1)) == pytest.approx(200, abs=50)


@pytest.mark.parametrize("alpha", [0.001, 0.2, 1.0, 2.0])
def test_shares_are_beta_distributed(alpha):
    from scipy.stats import beta, kstest

    shares = [symmetric_beta(alpha, row) for row in uniforms(0, 0, np.arange(2000), 512)]
    assert min(shares) >= 0
    assert max(shares) <= 1
    assert np.mean(shares) == pytest.approx(0.5, abs=0.04)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)
    if alpha > 0.01:  # below, most shares are 0 or 1 to the last bit
        assert kstest(shares, beta(alpha, alpha).cdf).pvalue > 0.01


def test_smoothed_labels_are_torchs_and_timms():
    from timm.loss import BinaryCrossEntropy

    logits, labels = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 3, 1, 1])
    targets = smoothed(given_matrix(labels, 5), 0.1)
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert float(cross_entropy(logits, targets)) == pytest.approx(float(expected), rel=1e-6)
    expected = BinaryCrossEntropy(smoothing=0.1, sum_classes=True)(logits, labels)
    assert float(bce(logits, targets)) == pytest.approx(float(expected), rel=1e-6)
    several = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]])
    assert smoothed(shared(several), 0.1).tolist()[0] == pytest.approx([0.47, 0.47, 0.02, 0.02, 0.02])


def test_the_run_equals_a_naive_loop(run_demo):
    """Which images, how strongly, targets and smoothing, as one would write it in a notebook."""
    flags = [
        *SHORT,
        "--method",
        "softmax",
        "--steps",
        "4",
        "--set",
        "optimizer.name=sgd",
        "--set",
        "optimizer.warmup=0",
    ]
    flags += ["--set", "optimizer.schedule=constant", "--set", "optimizer.weight_decay=0", "--lr", "0.01"]
    flags += ["--set", "augment.crop=none", "--set", "optimizer.momentum=0", "--set", "evaluate.images=10"]
    run = run_demo(
        "run", *flags, "--set", "augment.mixup=1", "--set", "augment.cutmix=1", "--set", "label_smoothing=0.1"
    )
    torch.manual_seed(0)
    network, _, _ = load_network("none", arch="resnet-demo", num_classes=10, head_bias="prior")
    optimizer, data = torch.optim.SGD(network.train().parameters(), lr=0.01), load("200").train
    how = SCRATCH.preprocess.model_copy(update={"size": 24})
    views = Views(data, how, Augmentation(crop="none", scale=(1, 1), shift=0, flip=False), 0)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (how.mean, how.std))
    expected, kinds = [], set()
    for step in range(4):
        (images, labels, *_), _ = views.read(Order(np.arange(len(data)), 0).keys(step * 8, 8))
        images, partner = normalise(images, mean, std), torch.arange(8) ^ 1
        share, box = draw_mix(0, step, 24, 24, mixup=1, cutmix=1)
        other = images[partner].clone()
        if box is None:
            images = share * images + (1 - share) * other
        else:
            images[:, :, box[0], box[1]] = other[:, :, box[0], box[1]]
        logits = network(images)
        part = [F.cross_entropy(logits, each, label_smoothing=0.1) for each in (labels, labels[partner])]
        loss = share * part[0] + (1 - share) * part[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        kinds.add(box is None)
    assert kinds == {True, False}, "both kinds are compared"
    assert losses(run) == pytest.approx(expected, rel=1e-4)


def test_an_odd_part_of_a_batch_is_told(tmp_path, capsys):
    flags = [*SHORT, "--set", "augment.mixup=0.4", "--set", "accumulate=2", "--batch-size", "6"]
    assert main([*flags, "--out", str(tmp_path / "run")]) == 2
    assert "--batch-size 6: augment.mixup and augment.cutmix mix pairs" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_teachers_softmax_is_mixed_as_its_labels_are():
    """`auto` has it in its loss, beside the targets."""
    teacher = torch.tensor([[0.0, 90.0, 2.0], [3.0, 0.0, -200.0]])
    (phase,) = one_interaction(Budget(total_steps=1, steps_per_epoch=1.0), "bce")
    objective = SimpleNamespace(label_smoothing=0.0, mixing=lambda *_: Mix(0.25, None))
    record = StepRecord(0, phase, 1, 1.0, torch.zeros(()), torch.zeros(3))
    rows = torch.eye(3)[:2]
    _, targets, known, logits = LabelObjective._softened(objective, record, IMAGES[:2], rows, rows, teacher)
    expected = 0.25 * teacher.softmax(1) + 0.75 * teacher.flip(0).softmax(1)
    assert logits.softmax(1).allclose(expected, atol=1e-6)
    assert targets.tolist() == known.tolist() == [[0.25, 0.75, 0], [0.75, 0.25, 0]]
