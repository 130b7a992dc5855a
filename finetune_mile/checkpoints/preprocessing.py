"""From an image to what a checkpoint wants to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images.pipeline import centre_view, from_pil, normalise

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """One RGB image to the (3, size, size) float tensor of a checkpoint's convention."""

    how: Preprocess

    def __call__(self, image: Image | Tensor) -> Tensor:
        """Crop the centre, resize, normalise.

        Args:
            image: a PIL image of any mode, or a uint8 tensor (3, H, W) in RGB order. A PIL image is turned upright
                and converted to RGB exactly as image files are in training.
        """
        pixels = image if isinstance(image, Tensor) else from_pil(image)
        if pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[0] != 3:
            raise Problem(
                f"preprocess takes a PIL image or a uint8 tensor (3, H, W), not {pixels.dtype} {tuple(pixels.shape)}"
            )
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.how.mean, self.how.std))
        return normalise(centre_view(pixels, self.how), mean, std)
