"""How many images a run would see and which network it would train, also where neither is on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.cards import SCRATCH, Card, check_init, find_card, list_cards, split_init
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool
from finetune_mile.images.sources import load_data
from finetune_mile.recipe import Recipe

if TYPE_CHECKING:
    from finetune_mile.networks.resnets import Padding

# Scheme of --data: training images, validation images, classes; for data that is not here.
KNOWN = {"imagenet": (1_281_167, 50_000, 1000), "webvision": (2_439_574, 50_000, 1000)}
IMAGENET_LISTS = {0.01: 12_811, 0.1: 128_116}  # the published id lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Images of a run."""

    pools: dict[Pool, int]
    val: int
    classes: int
    here: bool  # or known by its name only
    in_memory: bool

    @property
    def labelled(self) -> int:
        """Images that keep their label."""
        return self.pools["labelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """A network's build, as far as timing it needs."""

    arch: str
    padding: Padding
    size: int
    here: bool  # are its weights on this machine?


def look_at_data(recipe: Recipe) -> Scene:
    """Count the images: of the data itself where it is here, of its published description where it is known."""
    try:
        return _counted(recipe.data, recipe.fraction, recipe.seed, recipe.split, recipe.calibration)
    except Problem as problem:
        scheme = recipe.data.partition(":")[0]
        if recipe.data == "hf:ILSVRC/imagenet-1k":
            scheme = "imagenet"
        if scheme not in KNOWN:
            raise Problem(*problem.sentences, "a plan needs the data, or data that it knows: imagenet") from problem
    train, val, classes = KNOWN[scheme]
    labelled = round(recipe.fraction * train)
    if scheme == "imagenet":
        labelled = IMAGENET_LISTS.get(recipe.fraction, labelled)
    from finetune_mile.images.pools import held_out_share

    held_out = round(labelled * held_out_share(recipe.calibration, labelled))
    pools: dict[Pool, int] = {
        "labelled": labelled - held_out, "unlabelled": train - labelled, "all": train - held_out,
    }  # fmt: skip
    return Scene(pools=pools, val=val, classes=classes, here=False, in_memory=False)


@lru_cache(maxsize=2)
def opened(data: str) -> Any:
    """A data set, opened once for all the cells that use it."""
    return load_data(data)


@lru_cache(maxsize=256)
def _counted(data: str, fraction: float, seed: int, split: str | None, calibration: float) -> Scene:
    from finetune_mile.images.pools import labelled_pools

    found = opened(data)
    pools = labelled_pools(found, fraction=fraction, seed=seed, split=split, calibration=calibration)
    return Scene(
        pools={name: len(members) for name, members in pools.indices.items()}, val=len(found.val),
        classes=len(found.classes), here=True, in_memory=found.train.in_memory,
    )  # fmt: skip


def look_at_network(init: str, arch: str | None, size: int | None) -> NetworkFacts:
    """The network behind --init and --arch; what a card says is enough, its weights are not needed."""
    where, _ = split_init(init)
    card: Card = SCRATCH
    here = True
    if where.startswith("timm:"):
        arch = arch or where
    elif where in list_cards():
        card = find_card(where)
        here = _present(init)
    elif where != "none":
        own = own_config(Path(where))
        if own is not None:
            return NetworkFacts(
                arch=own["arch"], padding=own.get("padding", "torch"), size=size or own["size"], here=True
            )
        if Path(where).exists() and arch is None:
            card, arch = _opened_file(init)
        here = Path(where).exists()
        if not here and arch is None:
            check_init(init)
    arch = arch or card.arch
    if arch is None:
        raise Problem(f"--init {init}: which network? say --arch")
    return NetworkFacts(arch=arch, padding=card.padding, size=size or card.preprocess.size, here=here)


def own_config(folder: Path) -> dict[str, Any] | None:
    """The config.json of a run folder's export; None where it is no such folder."""
    for path in (folder / "export/config.json", folder / "config.json"):
        if path.is_file():
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return content if "arch" in content and "size" in content else None
    return None


def _present(init: str) -> bool:
    """Are a card's files on this machine?"""
    from finetune_mile.checkpoints.cards import is_cached, shipped_file

    card = find_card(split_init(init)[0])
    return shipped_file(card) is not None or is_cached(card)


@lru_cache(maxsize=16)
def _opened_file(init: str) -> tuple[Card, str]:
    from finetune_mile.checkpoints.loading import open_trunk

    trunk = open_trunk(init)
    return trunk.card, trunk.report.arch
