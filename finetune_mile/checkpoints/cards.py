"""Cards: one YAML file of facts per checkpoint in `weights/`. No torch here."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from finetune_mile.core.download import RemoteFile, digest, fetch
from finetune_mile.core.files import cache as cache_folder
from finetune_mile.core.files import config, load_yaml_file, shipped
from finetune_mile.core.problems import Problem, nearest
from finetune_mile.core.types import Preprocess, first_fault

_NETWORK = re.compile(
    r"(?:wide_)?(?:resnet|resnext|vit|deit|beit|convnext|swin|efficientnet|mobilenet|regnet|densenet|vgg)[\w.]*"
)
# licences by their SPDX names: those that allow commercial use, and others
_FREE = ("MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CC-BY-4.0")
LICENCES = (*_FREE, "CC-BY-NC-4.0", "CC-BY-NC-SA-4.0")


def spdx(licence: str) -> str:
    """The SPDX name of a licence that we know, however it is written; another one as it is."""
    return next((known for known in LICENCES if known.lower() == licence.lower().replace(" ", "-")), licence)


class Card(BaseModel):
    """What is known of one checkpoint: where it is, what is in it, what it expects."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    aliases: tuple[str, ...] = Field(default=(), description="other names of the same card")
    method: str = Field(description="how the weights were made: mocov2, simclr, byol, swav, none, ...")
    arch: str | None = Field(description="a name that networks/ knows, or timm:NAME; null: read from the file")
    padding: Literal["torch", "tf", "same", "port"] = "torch"
    format: str | None = Field(default=None, description="an adapter's name; null: detect")
    file: str | None = Field(default=None, description="the file to open: beside the card, or one of those fetched")
    urls: tuple[str, ...] = Field(default=(), description="mirrors of `file`, where it is one file")
    sha256: str | None = None
    md5: str | None = Field(default=None, description="a published md5, or its published first digits")
    bytes: int | None = None
    files: tuple[RemoteFile, ...] = Field(default=(), description="where the checkpoint is several files")
    instead: RemoteFile | None = Field(
        default=None, description="the same weights in another file, which is fetched where `urls` cannot be"
    )
    unpack: str | None = Field(
        default=None, description="the fetched file is a zip: take out members whose name begins so, open `file`"
    )
    path: str | None = Field(default=None, description="a file of the user, added by `weights add`")
    choice: str | None = Field(default=None, description="what follows :: in --init, where the file needs it")
    features: tuple[float, ...] = Field(default=(), description="first features of a fixed picture, as a check")
    verified: bool = Field(default=False, description="did anybody here load the published file itself?")
    preprocess: Preprocess = Preprocess()
    licence: Annotated[str, AfterValidator(spdx)] = "unknown"
    megabytes: int | None = Field(
        default=None, gt=0, description="the network's weights in MB; a file with heads or an optimiser is larger"
    )
    paper: str = ""
    source: str = ""
    data: str = Field(default="", description="the images it was pre-trained on; empty: not known")
    epochs: int | None = None
    linear_top1: float | None = None
    linear_head: bool = Field(default=False, description="is the classifier in the file the one of `linear_top1`?")
    knn_top1: float | None = Field(default=None, description="k-NN with all training images, as published")
    knn_k: int = 20
    knn_temperature: float = 0.07
    finetune_top1: dict[str, float] = Field(default_factory=dict, description="fraction: top-1, as published")
    scores_on: str = Field(default="ImageNet-1k", description="the data of these accuracies")
    scores_from: str = Field(default="", description="where these accuracies were published")
    problems: tuple[str, ...] = Field(default=(), description="what is known to go wrong with it")
    notes: str = ""

    @model_validator(mode="after")
    def _one_way_to_fetch(self) -> Self:
        if self.urls and self.files:
            raise ValueError("either urls (one file) or files (several), not both")
        if self.urls and not self.file and not self.unpack:
            raise ValueError("urls needs file, the name to save it under")
        return self

    @property
    def commercial(self) -> bool:
        """Does the licence allow commercial use? False where that is not known."""
        return self.licence in _FREE

    @property
    def size_mb(self) -> int | None:
        return self.megabytes or (round(self.bytes / 1e6) if self.bytes else None)

    def remote(self) -> tuple[RemoteFile, ...]:
        """What has to be fetched; empty where the file comes with the install or there is none."""
        if self.files or not self.urls:
            return self.files
        name = Path(urlsplit(self.urls[0]).path).name if self.unpack else self.file or ""
        return (RemoteFile(name=name, urls=self.urls, bytes=self.bytes, sha256=self.sha256, md5=self.md5),)


SCRATCH = Card(name="none", method="none", arch=None, verified=True, notes="random weights")


def own_cards() -> Path:
    """The folder of the cards that the user added."""
    return config() / "weights"


def list_cards() -> dict[str, Path]:
    """Cards by name: those of the package, and the user's own, which have other names."""
    own = {path.stem: path for path in sorted(own_cards().glob("*.yaml"))}
    return own | {path.stem: path for path in sorted(shipped("weights").glob("*.yaml"))}


@cache
def _parse(path: Path, _changed: int) -> Any:
    """A card's YAML; `_changed` is the file's time stamp, so that an edited card is read again."""
    return load_yaml_file(path)


def read_card(path: Path) -> Card:
    """Read one card; what is wrong with it is said with the file's name."""
    try:
        card = Card.model_validate(_parse(path, path.stat().st_mtime_ns))
    except ValidationError as error:
        raise Problem(f"card {path.name} is not valid: {first_fault(error)}") from error
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise Problem(f"card {path.name} is not valid: {error}") from error
    if card.name != path.stem:
        raise Problem(f"card {path.name}: name is {card.name!r}; it must be {path.stem!r}, as the file is called")
    return card


class Missing(Problem):
    """A checkpoint was named, and there is no such card, file or folder."""


def find_card(name: str, flag: str = "--init") -> Card:
    """The card with that name or alias; an unknown name is answered with the nearest ones."""
    cards = list_cards()
    if name in cards:
        return read_card(cards[name])
    known = {alias: card for path in cards.values() for card in [read_card(path)] for alias in card.aliases}
    if name in known:
        return known[name]
    if _NETWORK.fullmatch(name):
        raise Missing(
            f"{flag} {name}: this is the name of a network, not of a checkpoint. Use timm:{name} for timm's weights "
            "(timm:resnet50.a1_in1k, for example), or dinov2-s for DINOv2's (`finetune-mile weights ls` lists others)"
        )
    near = nearest(name, [*cards, *known], 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise Missing(
        f"{flag} {name}: no such file, and no card of that name{hint} (`finetune-mile weights ls` lists them)"
    )


def folder_of(card: Card) -> Path:
    """The folder of a card's files in the cache; files that were put there by hand are used."""
    return cache_folder() / "weights" / card.name


def shipped_file(card: Card) -> Path | None:
    """The file of a card that needs no fetching: it comes with the package, or it is the user's own."""
    if card.path is not None:
        return Path(card.path)
    path = shipped("weights") / card.file if card.file else None
    return path if path is not None and path.is_file() else None


def is_cached(card: Card) -> bool:
    own = shipped_file(card)
    if own is not None:
        return own.is_file()
    names = [card.file] if card.unpack and card.file else [remote.name for remote in card.remote()]
    all_here = bool(names) and all((folder_of(card) / name).is_file() for name in names if name)
    return all_here or (card.instead is not None and (folder_of(card) / card.instead.name).is_file())


def fetch_card(card: Card) -> Path:
    """The file to open for a card: shipped, in the cache, or fetched now; always checked."""
    own = shipped_file(card)
    if own is not None:
        if not own.is_file():
            raise Problem(
                f"{own}: the file of card {card.name} does not exist any more; restore it, or add the card again"
            )
        if card.sha256 and digest(own, "sha256") != card.sha256:
            again = f"`finetune-mile weights add {shlex.quote(str(own))} --name {card.name}`"
            advice = "install again" if card.path is None else again
            raise Problem(f"{own} is not the file that card {card.name} describes; {advice}")
        return own
    if not card.remote() or card.file is None:
        why = f" ({card.notes.partition(';')[0]})" if card.notes else ""
        raise Problem(f"card {card.name} has no file to fetch{why}; if you have the file, use --init FILE")
    folder = folder_of(card)
    here = (folder / card.file).is_file()
    if card.instead is not None and not here and (folder / card.instead.name).is_file():
        return fetch((card.instead,), folder)
    try:
        return fetch(card.remote(), folder, file=card.file, unpack=card.unpack)
    except Problem as problem:
        if card.instead is None or here:
            raise
        try:
            return fetch((card.instead,), folder)
        except Problem:
            raise Problem(f"{problem}; {card.instead.urls[0]} could not be fetched either") from problem
