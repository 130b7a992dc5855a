"""Views: decided by (seed, epoch, sample, view) alone, and doing what their names say."""

import torch

from finetune_mile.paper.pretraining.recipe import ViewSettings
from finetune_mile.paper.pretraining.views import DRAWS, colour_matrices, draw, make_view

STILL = {
    "area": (1.0, 1.0), "aspect": (1.0, 1.0), "shift": 0, "turn": 0, "flip": 0, "jitter": 0, "brightness": 0,
    "contrast": 0, "saturation": 0, "hue": 0, "grey": 0, "blur": 0, "noise": 0,
}  # fmt: skip
WILD = STILL | {
    "area": (0.3, 1.2), "aspect": (0.75, 1.333), "shift": 0.1, "turn": 20, "flip": 0.5, "jitter": 0.8,
    "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "grey": 0.2, "blur": 0.5, "noise": 0.1,
}  # fmt: skip


def kind(size=12, **changes):
    how = ViewSettings.model_validate(STILL | changes)
    return how, size


def photos(count=6, side=12):
    return torch.randint(0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_without_strength_a_view_is_the_image():
    images = photos()
    found = make_view(images, draw(0, [(0, i) for i in range(6)], 0), *kind())
    assert torch.allclose(found, images / 255, atol=1e-5)


def test_a_view_depends_on_its_key_and_not_on_its_batch():
    images, keys, wild = photos(), [(3, i) for i in range(6)], kind(**WILD)
    whole = make_view(images, draw(1, keys, 0), *wild)
    parts = [make_view(images[a:b], draw(1, keys[a:b], 0), *wild) for a, b in ((0, 1), (1, 6))]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-6)
    for other in (draw(1, keys, 1), draw(2, keys, 0), draw(1, [(4, i) for i in range(6)], 0)):
        assert float((make_view(images, other, *wild) - whole).abs().mean()) > 0.01


def test_every_view_stays_in_range_and_has_its_size():
    found = make_view(photos(64), draw(0, [(0, i) for i in range(64)], 0), *kind(size=7, **WILD))
    assert found.shape == (64, 3, 7, 7)
    assert 0 <= float(found.min()) < float(found.max()) <= 1


def test_flip_mirrors():
    images = photos()
    found = make_view(images, draw(0, [(0, i) for i in range(6)], 0), *kind(flip=1))
    assert torch.allclose(found, (images / 255).flip(-1), atol=1e-5)


def test_crops_stay_inside_the_image():
    """On a white image a crop that left it would show black."""
    white = torch.full((50, 3, 16, 16), 255, dtype=torch.uint8)
    found = make_view(white, draw(0, [(0, i) for i in range(50)], 0), *kind(area=(0.2, 0.8)))
    assert float(found[:, :, 1:-1, 1:-1].min()) > 0.999


def test_grey_has_no_colour_and_keeps_brightness():
    images = photos()
    found = make_view(images, draw(0, [(0, i) for i in range(6)], 0), *kind(grey=1))
    assert torch.allclose(found[:, 0], found[:, 1], atol=1e-3)
    assert torch.allclose(found[:, 0], found[:, 2], atol=1e-3)
    luma = (images / 255 * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1)
    assert torch.allclose(found[:, 0], luma, atol=1e-2)


def test_a_whole_turn_of_the_hue_is_none():
    both = torch.ones(2)
    eye = torch.eye(3).expand(2, 3, 3)
    assert torch.allclose(colour_matrices(both, torch.tensor([0.0, 1.0])), eye, atol=1e-4)
    assert float((colour_matrices(both, torch.tensor([0.3, 0.5])) - eye).abs().max()) > 0.3


def test_noise_has_its_strength():
    grey = torch.full((200, 3, 16, 16), 128, dtype=torch.uint8)
    draws = draw(0, [(0, i) for i in range(200)], 0)
    assert draws.shape == (200, DRAWS)
    found = make_view(grey, draws, *kind(size=16, noise=0.1)) - 128 / 255
    assert torch.allclose(found[:, 0].flatten(1).std(1), 0.1 * draws[:, 13], atol=0.02)
    assert abs(float(found.mean())) < 0.003
