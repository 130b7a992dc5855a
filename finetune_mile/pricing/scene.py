"""How many images a run would see and which network it would train, also where neither is on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.cards import SCRATCH, Card, Missing, find_card, is_cached
from finetune_mile.checkpoints.init import Init, parse_init, read_config
from finetune_mile.config.schema import Recipe
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Pool
from finetune_mile.images.sources import load_data

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
    from finetune_mile.images.splits import held_out_share

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
    from finetune_mile.images.splits import labelled_pools

    found = opened(data)
    pools = labelled_pools(found, fraction=fraction, seed=seed, split=split, calibration=calibration)
    return Scene(
        pools={name: len(members) for name, members in pools.indices.items()}, val=len(found.val),
        classes=len(found.classes), here=True, in_memory=found.train.in_memory,
    )  # fmt: skip


def look_at_network(init: str | Init, arch: str | None, size: int | None) -> NetworkFacts:
    """The network behind --init and --arch; what a card says is enough, its weights are not needed."""
    card, here = SCRATCH, True
    try:
        init = parse_init(init)
    except Missing:
        if arch is None:
            raise
        return NetworkFacts(arch=arch, padding=card.padding, size=size or card.preprocess.size, here=False)
    config = read_config(init.path) if init.path and init.kind == "folder" else {}
    if {"arch", "size"} <= config.keys():
        padding = config.get("padding", "torch")
        return NetworkFacts(arch=config["arch"], padding=padding, size=size or config["size"], here=True)
    if init.kind == "timm":
        arch = arch or f"timm:{init.name}"
    elif init.kind == "card":
        card = find_card(init.name)
        here = is_cached(card)
    elif init.kind == "hf":
        here = False
    elif init.path and arch is None:
        card, arch = _opened_file(init)
    arch = arch or card.arch
    if arch is None:
        raise Problem(f"{init.flag} {init}: which network? say --arch")
    return NetworkFacts(arch=arch, padding=card.padding, size=size or card.preprocess.size, here=here)


@lru_cache(maxsize=16)
def _opened_file(init: Init) -> tuple[Card, str]:
    from finetune_mile.checkpoints.loading import open_trunk

    trunk = open_trunk(init)
    return trunk.card, trunk.report.arch
