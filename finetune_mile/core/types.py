"""Values that several folders hand to each other. B batch, C classes, H and W height and width. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Pool = Literal["labelled", "unlabelled", "all"]


class Batch(NamedTuple):
    """Images as they come out of a loader."""

    images: Tensor  # (B, 3, H, W) uint8
    labels: Tensor  # (B,) or (B, C), the given labels
    samples: Tensor  # (B,) which ones of the image set


class Preprocess(BaseModel):
    """What the network wants to see: RGB in [0, 1], cropped, resized, normalised."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    size: int = Field(default=224, gt=0, description="side of the square the network sees")
    crop: float = Field(default=0.875, gt=0, le=1, description="central share of the short side")
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    antialias: bool = Field(default=True, description="TensorFlow's resize does without")
