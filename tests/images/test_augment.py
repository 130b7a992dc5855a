"""Augmentations of one image: torchvision's results for the same choices, decided by the key alone."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from finetune_mile.core.types import Preprocess
from finetune_mile.images.augment import LEVELS, OPERATIONS, ORDERS, by_policy, jittered
from finetune_mile.images.order import uniforms
from finetune_mile.images.pipeline import (
    DRAWS,
    ERASE,
    ERASED,
    FLIP,
    JITTER,
    POLICY,
    Augmentation,
    Views,
    batches,
    erased,
    normalise,
    random_view,
)  # fmt: skip
from finetune_mile.images.sources.grids import load

HOW = Preprocess(size=24, crop=1.0)
PLAIN = {"crop": "random-resized", "scale": (0.2, 1.0), "shift": 0, "flip": True}
STEPS = torch.arange(40.0)
# Smooth, in colour, and not symmetric: an operation in the wrong direction or channel shows.
PHOTO = torch.stack(
    [
        STEPS.view(1, -1) * STEPS.view(-1, 1) / 8,
        STEPS.view(1, -1).expand(40, 40) * 5,
        200 - STEPS.view(-1, 1) * 4 + STEPS,
    ]
).to(torch.uint8)[:, :, :36]


@pytest.fixture
def torchvision_draws(monkeypatch):
    """Let torchvision's transforms choose what they are told: torchvision_draws(integers, signs)."""

    def tell(integers, signs):
        integers, signs = iter(integers), iter(signs)
        monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(next(integers)))
        monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(next(signs)))

    return tell


@pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=list(OPERATIONS))
@pytest.mark.parametrize("sign", [0.2, 0.8])
def test_every_operation_at_every_level_is_torchvisions(number, sign, torchvision_draws):
    own, theirs = (number + 0.5) / len(OPERATIONS), v2.TrivialAugmentWide(interpolation="bilinear")
    for level in range(LEVELS):
        torchvision_draws([number, level], [sign])
        view = by_policy(PHOTO, "trivial", 0, [own, (level + 0.5) / LEVELS, sign])
        assert view.equal(theirs(PHOTO)), f"TrivialAugment, level {level}"
        torchvision_draws([number], [sign])
        alone = v2.RandAugment(num_ops=1, magnitude=level, interpolation="bilinear")
        view = by_policy(PHOTO, "rand", level, [own, 0.0, sign, 0.0, 0.0, 0.0])  # the second one is the identity
        assert view.equal(alone(PHOTO)), f"RandAugment, level {level}"


def test_randaugment_is_two_operations_one_after_the_other(torchvision_draws):
    torchvision_draws([5, 11], [0.2])
    expected = v2.RandAugment(interpolation="bilinear")(PHOTO)
    view = by_policy(PHOTO, "rand", 9, [5.5 / 14, 0.9, 0.2, 11.5 / 14, 0.1, 0.9])
    assert view.equal(expected)
    assert not view.equal(by_policy(PHOTO, "rand", 9, [11.5 / 14, 0.9, 0.2, 5.5 / 14, 0.1, 0.2]))


@pytest.mark.parametrize("strengths", [(0.4, 0.4, 0.4, 0.1), (1.0, 0.0, 0.3, 0.5), (0.0, 0.0, 0.0, 0.2)])
def test_jitter_is_torchvisions_for_the_same_factors_and_order(strengths):
    for draws in uniforms(0, 0, np.arange(30), 5).tolist():
        theirs = v2.ColorJitter(*(strength or None for strength in strengths))
        ranges = (theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue)
        chosen = [None if r is None else r[0] + (r[1] - r[0]) * draw for r, draw in zip(ranges, draws[:4], strict=True)]
        names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
        order = ORDERS[int(draws[4] * 24)]
        expected = theirs.transform(PHOTO, dict(zip(names, chosen, strict=True)) | {"fn_idx": order})
        assert jittered(PHOTO, strengths, draws).equal(expected)


def test_what_is_erased_is_torchvisions_size_and_zero_for_the_network():
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (HOW.mean, HOW.std))
    white, shares = torch.full((3, 40, 36), 255, dtype=torch.uint8), []
    for draws in uniforms(0, 0, np.arange(300), DRAWS)[:, ERASE + 1 :].tolist():
        view = erased(white, HOW.mean, draws)
        rows, columns = ((view[0] != 255).any(axis).nonzero().flatten() for axis in (1, 0))
        top, left, height, width = int(rows[0]), int(columns[0]), len(rows), len(columns)
        value = torch.tensor([round(255 * m) for m in HOW.mean], dtype=torch.uint8).view(3, 1, 1)
        assert view.equal(v2.functional.erase(white, top, left, height, width, value))
        zeros = normalise(view, mean, std)[:, top : top + height, left : left + width]
        assert float(zeros.abs().max()) < 0.5 / 255 / min(HOW.std) + 1e-6
        assert 0.2 < height / width < 4.5, "pixels round"
        shares.append(height * width / 1440)
    assert min(shares) > ERASED[0] - 0.01
    assert max(shares) < ERASED[1] + 0.02
    assert np.mean(shares) == pytest.approx(np.mean(ERASED), abs=0.02)
    assert bool((white == 255).all()), "the image itself is not changed"


def test_new_augmentations_leave_the_old_draws_alone():
    """Crop and flip read the draws that they always had, and nothing else."""
    short = uniforms(3, 2, np.arange(20), 41)
    assert (uniforms(3, 2, np.arange(20), DRAWS)[:, :41] == short).all()
    assert (FLIP, JITTER, POLICY, ERASE, DRAWS) == (40, 41, 46, 52, 93), "recorded runs depend on these"
    plain = Augmentation(**PLAIN)
    for draws in short.tolist():
        assert random_view(PHOTO, HOW, plain, [*draws, *[0.0] * 52]).equal(
            random_view(PHOTO, HOW, plain, [*draws, *[0.99] * 52])
        )
    erasing = Augmentation(**PLAIN, erase=1.0)
    first = [0.1] * DRAWS
    kept = random_view(PHOTO, HOW, erasing, first) == random_view(PHOTO, HOW, plain, first)
    assert 0.5 < float(kept.float().mean()) < 1, "the same crop, a part of it erased"


@pytest.mark.parametrize(
    "more", [{"jitter": (0.4, 0.4, 0.4, 0.1)}, {"policy": "trivial"}, {"policy": "rand"}, {"erase": 0.5}]
)
def test_a_view_depends_on_its_key_alone(more):
    data, augmentation = load("").train, Augmentation(**PLAIN, **more)
    keys = [[(0, 3), (1, 3), (0, 4)], [(2, 9), (2, 10), (0, 3)], [(e, 5) for e in range(8)]]
    views = Views(data, HOW, augmentation, seed=1)
    alone = list(batches(views, keys, workers=0, pin=False))
    if "policy" in more:
        helped = list(batches(views, keys, workers=2, pin=False))
        assert all(a.images.equal(b.images) for a, b in zip(alone, helped, strict=True))
    assert alone[0].images[0].equal(alone[1].images[2])
    assert views.read([(1, 3)])[0].images[0].equal(alone[0].images[1]), "whatever else is in the batch"
    before = Views(data, HOW, Augmentation(**PLAIN), seed=1).read(keys[2])[0].images
    assert not alone[2].images.equal(before), "something happens"


def test_every_operation_and_every_order_is_drawn():
    draws = uniforms(0, 0, np.arange(2000), DRAWS)
    assert len(np.unique((draws[:, JITTER + 4] * len(ORDERS)).astype(int))) == 24
    counts = np.bincount((draws[:, POLICY] * len(OPERATIONS)).astype(int))
    assert counts.min() > 100
    assert abs(np.corrcoef(draws.T) - np.eye(DRAWS)).max() < 0.1
