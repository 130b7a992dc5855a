"""Cards: one YAML file of facts per checkpoint in `weights/`. No torch here."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finetune_mile.places import shipped
from finetune_mile.problems import Problem

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Preprocess(BaseModel):
    """What the network wants to see: RGB in [0, 1], resized, cropped, less the mean, over the deviation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    size: int = Field(default=224, gt=0, description="side of the square the network sees")
    crop: float = Field(default=0.875, gt=0, le=1, description="central share of the short side")
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"


class Card(BaseModel):
    """What is known of one checkpoint: where it is, what is in it, what it expects."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    method: str = Field(description="how the weights were made: mocov2, simclr, byol, swav, none, ...")
    arch: str | None = Field(description="a name that networks/ knows, or timm:NAME; null: read from the file")
    padding: Literal["torch", "tf", "same"] = "torch"
    format: str | None = Field(default=None, description="an adapter's name; null: detect")
    file: str | None = Field(default=None, description="file name beside the card or in the cache")
    urls: tuple[str, ...] = ()
    sha256: str | None = None
    md5: str | None = Field(default=None, description="a published md5, or its published first digits")
    bytes: int | None = None
    verified: bool = Field(default=False, description="did anybody here load the published file itself?")
    preprocess: Preprocess = Preprocess()
    licence: str = "unknown"
    paper: str = ""
    source: str = ""
    linear_top1: float | None = None
    finetune_top1: dict[str, float] = Field(default_factory=dict, description="fraction: top-1, as published")
    notes: str = ""


SCRATCH = Card(name="none", method="none", arch=None, verified=True, notes="random weights")


def list_cards() -> dict[str, Path]:
    """Every card's name and file, sorted by name."""
    return {path.stem: path for path in sorted(shipped("weights").glob("*.yaml"))}


def read_card(path: Path) -> Card:
    """Read one card; what is wrong with it is said with the file's name."""
    try:
        card = Card.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        raise Problem(f"card {path.name} is not valid: {error}") from error
    if card.name != path.stem:
        raise Problem(f"card {path.name} calls itself {card.name!r}; name and file must agree")
    return card


def find_card(name: str) -> Card:
    """The card called `name`; an unknown name is answered with the nearest ones."""
    cards = list_cards()
    if name not in cards:
        near = difflib.get_close_matches(name, cards, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise Problem(
            f"--init {name}: no such file, and no card of that name{hint} (`finetune-mile weights ls` lists them)"
        )
    return read_card(cards[name])


def check_init(init: str) -> None:
    """Raise if `--init` cannot be anything: fast, before torch is imported."""
    if init != "none" and not init.startswith("timm:") and not Path(init).exists():
        find_card(init)
