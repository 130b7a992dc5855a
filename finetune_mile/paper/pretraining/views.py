"""Views of images, a whole batch at once: where and how is drawn from (seed, epoch, sample, view) and nothing else.

B images, S side of the stored images, s side of a view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, pad

from finetune_mile.images.order import Key, uniforms
from finetune_mile.paper.pretraining.recipe import ViewSettings

SEEDS = 16  # one seed of a run is so many of the draws: the order of the images, then each view
DRAWS = 18
TABLE = 1 << 18  # normal numbers that noise is cut out of
LUMA = (0.299, 0.587, 0.114)
YIQ = (LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def draw(seed: int, keys: Sequence[Key], view: int) -> Tensor:
    """Uniform numbers (B, DRAWS) for view number `view` of the images of `keys`."""
    epochs, samples = np.array(keys, dtype=np.int64).reshape(-1, 2).T
    return torch.from_numpy(uniforms(SEEDS * seed + 1 + view, epochs, samples, DRAWS)).float()


def make_view(images: Tensor, draws: Tensor, how: ViewSettings, size: int) -> Tensor:
    """One view (B, 3, s, s), floats in [0, 1], of each image.

    Args:
        images: (B, 3, S, S) uint8.
        draws: (B, DRAWS) in [0, 1), on the device of the images.
        how: strengths.
        size: s.
    """
    d, floats = draws, images.to(torch.float32).div_(255.0)
    shape = (len(images), 3, size, size)
    grid = affine_grid(placement(d, how), list(shape), align_corners=False)
    view = grid_sample(floats, grid, align_corners=False)
    if how.blur:
        view = blurred(view, torch.where(d[:, 11] < how.blur, d[:, 12], 0.0))
    view = recoloured(view, d, how)
    if how.noise:
        view += noise(d[:, 13], d[:, 14], how.noise, size)
    return view.clamp_(0, 1)


def placement(d: Tensor, how: ViewSettings) -> Tensor:
    """Affine maps (B, 2, 3) from a view's coordinates to the image's, both in [-1, 1]."""
    smallest, largest = how.area
    side = (smallest + (largest - smallest) * d[:, 0]).sqrt()
    low, high = (math.log(a) / 2 for a in how.aspect)
    stretch = (low + (high - low) * d[:, 1]).exp()
    width, height = side * stretch, side / stretch
    x, y = ((1 - extent).clamp(min=0) * (2 * d[:, at] - 1) for extent, at in ((width, 2), (height, 3)))
    x, y = x + how.shift * (2 * d[:, 4] - 1), y + how.shift * (2 * d[:, 5] - 1)
    angle = math.radians(how.turn) * (2 * d[:, 6] - 1)
    mirror = torch.where(d[:, 7] < how.flip, -1.0, 1.0)
    cos, sin = angle.cos(), angle.sin()
    rows = [mirror * width * cos, -height * sin, x, mirror * width * sin, height * cos, y]
    return torch.stack(rows, 1).view(-1, 2, 3)


def recoloured(view: Tensor, d: Tensor, how: ViewSettings) -> Tensor:
    """Brightness, contrast, saturation, hue and grey as one matrix (3, 3) and one number per image."""
    on = d[:, 8] < how.jitter
    bright, contrast, colour = (
        torch.where(on, 1 + strength * (2 * part - 1), 1.0)
        for strength, part in ((how.brightness, d[:, 9]), (how.contrast, d[:, 10]), (how.saturation, d[:, 15]))
    )
    gain = (bright * contrast).view(-1, 1, 1, 1)
    offset = None
    if how.contrast:
        luma = view.new_tensor(LUMA)
        mean = bright * (view.mean((2, 3)) @ luma)
        offset = ((1 - contrast) * mean).view(-1, 1, 1, 1)
    if how.saturation or how.hue or how.grey:
        turn = torch.where(on, how.hue * (2 * d[:, 16] - 1), 0.0)
        colour = torch.where(d[:, 17] < how.grey, 0.0, colour)
        mixing = colour_matrices(colour, turn) * gain.view(-1, 1, 1)
        view = torch.bmm(mixing, view.flatten(2)).view_as(view)
    elif how.brightness or how.contrast:
        view = view * gain
    return view if offset is None else view.add_(offset)


def colour_matrices(colour: Tensor, turn: Tensor) -> Tensor:
    """Matrices (B, 3, 3) that scale the distance to grey by `colour` and turn the hue by `turn` of the circle."""
    to_yiq = colour.new_tensor(YIQ)
    back = torch.linalg.inv(to_yiq)
    angle = 2 * math.pi * turn
    cos, sin, none = colour * angle.cos(), colour * angle.sin(), torch.zeros_like(angle)
    rows = [torch.ones_like(angle), none, none, none, cos, -sin, none, sin, cos]
    mixed: Tensor = back @ torch.stack(rows, 1).view(-1, 3, 3) @ to_yiq
    return mixed


def blurred(view: Tensor, amount: Tensor) -> Tensor:
    """Move each image by `amount` (B,) of the way to its 5x5 binomial blur."""
    taps = view.new_tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    kernel = torch.outer(taps, taps).expand(3, 1, 5, 5)
    soft = conv2d(pad(view, (2, 2, 2, 2), mode="replicate"), kernel, groups=3)
    return view.lerp(soft, amount.view(-1, 1, 1, 1))


def noise(size_draw: Tensor, place_draw: Tensor, strength: float, side: int) -> Tensor:
    """Normal noise (B, 1, side, side), the same in all colours; each image's own strength is up to `strength`."""
    table = _normal_numbers(side * side).to(size_draw.device)
    found = table.unfold(0, side * side, 1)[(place_draw * TABLE).long()]
    return (found * (strength * size_draw).unsqueeze(1)).view(-1, 1, side, side)


@cache
def _normal_numbers(more: int) -> Tensor:
    even = torch.from_numpy(uniforms(0, 0, np.arange(TABLE + more), 1)[:, 0])
    normal: Tensor = torch.special.ndtri(even.clamp(min=1e-9)).float()
    return normal
