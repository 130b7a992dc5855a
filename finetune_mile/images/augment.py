"""Colour jitter, TrivialAugment and RandAugment of one image, uint8 (3, H, W). Draws in [0, 1) decide, nothing else.

The operations and their strengths are torchvision's; its transforms draw from a generator with a state, ours do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from finetune_mile.core.types import Policy

LEVELS = 31  # of an operation's strength
PAIR = 2  # operations of RandAugment, one after the other
ORDERS = tuple(permutations(range(4)))
JITTERS: tuple[Callable[[Tensor, float], Tensor], ...] = (
    F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue,
)  # fmt: skip


def jittered(image: Tensor, strengths: Sequence[float], draws: Sequence[float]) -> Tensor:
    """Brightness, contrast, saturation and hue, changed in a random order.

    Args:
        image: uint8 (3, H, W).
        strengths: of the four, in this order; 0: not changed.
        draws: five.
    """
    for which in ORDERS[int(draws[4] * len(ORDERS))]:
        strength, draw = strengths[which], draws[which]
        if strength:
            middle, least = (0.0, -0.5) if which == 3 else (1.0, 0.0)
            low, high = max(middle - strength, least), middle + strength
            image = JITTERS[which](image, low + (high - low) * draw)
    return image


def by_policy(image: Tensor, policy: Policy, magnitude: int, draws: Sequence[float]) -> Tensor:
    """TrivialAugment (Wide): one operation of a random strength; RandAugment: two of one strength.

    Args:
        image: uint8 (3, H, W).
        policy: which of the two.
        magnitude: for `rand`, below LEVELS.
        draws: three for each operation: which one, its strength, its sign.
    """
    names = tuple(OPERATIONS)
    for first in range(0, 3 * (PAIR if policy == "rand" else 1), 3):
        name_draw, level_draw, sign_draw = draws[first : first + 3]
        name = names[int(name_draw * len(names))]
        level = magnitude if policy == "rand" else int(level_draw * LEVELS)
        strength = strength_of(name, policy, level, image.shape[-2], image.shape[-1])
        image = OPERATIONS[name](image, -strength if name in SIGNED and sign_draw < 0.5 else strength)
    return image


def strength_of(name: str, policy: Policy, level: int, height: int, width: int) -> float:
    """What an operation gets: a shear, pixels, degrees, a factor less 1, bits, or a threshold; 0 where it has none."""
    wide = policy == "trivial"
    if name == "posterize":
        return float(round(8 - level / ((LEVELS - 1) / (6 if wide else 4))))
    if name == "solarize":
        return float(torch.linspace(1.0, 0.0, LEVELS)[level])
    if name not in SIGNED:
        return 0.0
    most = SIGNED[name][0 if wide else 1]
    if name.startswith("translate") and not wide:
        most *= width if name == "translate-x" else height
    return float(torch.linspace(0.0, most, LEVELS)[level])


def _moved(image: Tensor, translate: Sequence[float], shear: Sequence[float], center: list[float] | None) -> Tensor:
    moved: Tensor = F.affine(
        image, angle=0.0, translate=[int(pixels) for pixels in translate], scale=1.0, center=center,
        shear=[math.degrees(math.atan(part)) for part in shear], interpolation=InterpolationMode.BILINEAR,
    )  # fmt: skip
    return moved


OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "identity": lambda image, _: image,
    "shear-x": lambda image, by: _moved(image, (0, 0), (by, 0), [0, 0]),
    "shear-y": lambda image, by: _moved(image, (0, 0), (0, by), [0, 0]),
    "translate-x": lambda image, by: _moved(image, (by, 0), (0, 0), None),
    "translate-y": lambda image, by: _moved(image, (0, by), (0, 0), None),
    "rotate": lambda image, by: F.rotate(image, by, interpolation=InterpolationMode.BILINEAR),
    "brightness": lambda image, by: F.adjust_brightness(image, 1 + by),
    "saturation": lambda image, by: F.adjust_saturation(image, 1 + by),
    "contrast": lambda image, by: F.adjust_contrast(image, 1 + by),
    "sharpness": lambda image, by: F.adjust_sharpness(image, 1 + by),
    "posterize": lambda image, by: F.posterize(image, int(by)),
    "solarize": lambda image, by: F.solarize(image, 255.0 * by),
    "autocontrast": lambda image, _: F.autocontrast(image),
    "equalize": lambda image, _: F.equalize(image),
}
# Operations in two directions: the largest strength in TrivialAugment (Wide) and in RandAugment.
SIGNED = {
    "shear-x": (0.99, 0.3), "shear-y": (0.99, 0.3), "translate-x": (32.0, 150 / 331), "translate-y": (32.0, 150 / 331),
    "rotate": (135.0, 30.0), "brightness": (0.99, 0.9), "saturation": (0.99, 0.9), "contrast": (0.99, 0.9),
    "sharpness": (0.99, 0.9),
}  # fmt: skip
