"""Values that several folders hand to each other. B batch, C classes, H and W height and width. No torch here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# Upper bounds of what a file may say about a network: above any real one, and below what would fill the memory.
LARGEST_INPUT, MOST_CLASSES, LONGEST_TEXT = 2048, 10**6, 1000
Mean = Annotated[float, Field(ge=-1000, le=1000)]
Deviation = Annotated[float, Field(ge=1e-4, le=1000)]
Probability = Annotated[float, Field(ge=0, le=1)]
ShortText = Annotated[str, Field(max_length=LONGEST_TEXT)]
Names = Annotated[list[ShortText], Field(max_length=MOST_CLASSES)]
Activation = Literal["softmax", "sigmoid"]
Pool = Literal["labelled", "unlabelled", "all"]
Policy = Literal["none", "trivial", "rand"]


class Section(BaseModel):
    """Immutable settings; unknown keys raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False, defer_build=True)


def first_fault(error: ValidationError) -> str:
    """The first fault that pydantic found: where, and what."""
    fault = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ")


class Batch(NamedTuple):
    """Images as they come out of a loader."""

    images: Tensor  # (B, 3, H, W) uint8
    labels: Tensor  # (B,) or (B, C), the given labels
    samples: Tensor  # (B,) which ones of the image set
    weak: Tensor | None = None  # (B, 3, H, W) uint8: the teacher's views, where they are not the student's


class Preprocess(Section):
    """The input of a network: RGB in [0, 1], cropped, resized, normalised."""

    mean: tuple[Mean, Mean, Mean] = IMAGENET_MEAN
    std: tuple[Deviation, Deviation, Deviation] = IMAGENET_STD
    size: int = Field(default=224, gt=0, le=LARGEST_INPUT, description="side of the square the network sees")
    crop: float = Field(default=0.875, gt=0, le=1, description="central share of the short side")
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    antialias: bool = Field(default=True, description="TensorFlow's resize does without")


class ExportConfig(Section):
    """What an export's config.json may hold, ours or timm's, as far as we use it. Other entries are left alone."""

    model_config = ConfigDict(extra="ignore", strict=True)

    arch: ShortText = ""
    padding: ShortText = ""
    method: ShortText = ""
    licence: ShortText = ""
    data: ShortText = ""
    init: ShortText = ""
    warning: str = Field(default="", max_length=2 * LONGEST_TEXT)
    steps: int = 0
    seed: int = 0
    refit_labels: int = 0
    fraction: float = 1.0
    architecture: ShortText = ""  # timm's name
    num_classes: int = Field(default=0, ge=0, le=MOST_CLASSES)
    classes: Names | None = None
    label_names: Names | dict[str, str] | None = None  # timm's word for classes
    activation: Activation | None = None
    threshold: Probability | None = None
    thresholds: list[Probability] | None = None
    model_args: dict[str, Any] | None = None  # timm's
    pretrained_cfg: dict[str, Any] | None = None


# ------------------------------------------------------------------------ blocks of a recipe

# Upper bounds: above any real run, and below what would fill the memory before the first step.
MOST_STEPS, LARGEST_BATCH, MOST_WORKERS = 10**9, 10**6, 1024

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|epochs?|steps?)?", re.IGNORECASE)


def in_steps(amount: int | str, *, total_steps: int, steps_per_epoch: float) -> int:
    """`200`, `200 steps`, `2 epochs` or `5 %` in optimiser steps, rounded to the nearest and at least 1.

    Raises:
        ValueError: it is anything else, or not above zero.
    """
    match = _AMOUNT.fullmatch(str(amount).strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{str(amount)[:40]!r} is not an amount above zero: write 200 (steps), '2 epochs' or '5 %'")
    value, unit = float(match[1]), (match[2] or "steps").lower()
    if unit.startswith("step") and not value.is_integer():
        raise ValueError(f"{str(amount)[:40]!r}: steps are whole numbers; a share of the budget is '5 %'")
    if unit == "%":
        value *= total_steps / 100
    elif unit.startswith("epoch"):
        value *= steps_per_epoch
    return max(round(value), 1)


def check_amount(amount: int | str) -> int | str:
    in_steps(amount, total_steps=1, steps_per_epoch=1)
    return amount


OFF = BeforeValidator(lambda word: "off" if word is False else word)  # YAML reads a bare `off` as false
NO = BeforeValidator(lambda word: "no" if word is False else word)  # and a bare `no`
Amount = Annotated[int | str, AfterValidator(check_amount)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
