"""From an image to what a checkpoint wants to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from finetune_mile.checkpoints.cards import Preprocess
from finetune_mile.problems import Problem

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """One RGB image to the (3, size, size) float tensor of a checkpoint's convention."""

    how: Preprocess

    def __call__(self, image: Image | Tensor) -> Tensor:
        """Crop the centre, resize, normalise.

        Args:
            image: a PIL image of any mode, or a uint8 tensor (3, H, W) in RGB order.
        """
        pixels = image if isinstance(image, Tensor) else tv.pil_to_tensor(image.convert("RGB"))
        if pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[0] != 3:
            raise Problem(
                f"preprocess takes a PIL image or a uint8 tensor (3, H, W), not {pixels.dtype} {tuple(pixels.shape)}"
            )
        how = self.how
        height, width = pixels.shape[-2:]
        side = max(1, round(min(height, width) * how.crop))
        top, left = (height - side) // 2, (width - side) // 2
        view = pixels[:, top : top + side, left : left + side]
        if side != how.size:
            mode = InterpolationMode(how.interpolation)
            view = tv.resize(view, [how.size, how.size], mode, antialias=how.antialias)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (how.mean, how.std))
        return (view.float() / 255.0 - mean) / std
