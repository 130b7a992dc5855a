"""Settings of a pre-training run: one YAML file and flags, checked as a whole before any work. No torch here.

As in `config/schema.py`, nothing that changes a number has a hidden default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from finetune_mile.config.resolve import ResolvedAs, find_recipe, read_yaml, resolve_tree
from finetune_mile.config.schema import tell_all
from finetune_mile.core.types import LARGEST_BATCH, MOST_STEPS, MOST_WORKERS, NO, Amount, Positive, Section, Seed

FOLDER = "pretrain"  # below recipes/
GRIDS = ("demo", "multi-mnist")
Method = Literal["simclr", "mocov2", "byol", "swav"]
Share = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0)]
Momentum = Annotated[float, Field(ge=0, le=1)]


def _rising(limits: tuple[float, float]) -> tuple[float, float]:
    if not 0 < limits[0] <= limits[1]:
        raise ValueError("write [LOW, HIGH], above zero")
    return limits


Limits = Annotated[tuple[float, float], AfterValidator(_rising)]


class ViewSettings(Section):
    """How a view is drawn; what one view gets depends on (seed, epoch, image, view) alone."""

    area: Limits = Field(description="share of the image that is seen; above 1 zooms out, into black")
    aspect: Limits = Field(description="width over height of the part that is seen")
    shift: Strength = Field(description="moves the part by up to so many half sides, also beyond the border")
    turn: Strength = Field(description="degrees, in both directions")
    flip: Share = Field(description="share of the views that are mirrored")
    jitter: Share = Field(description="share of the views whose colours change, by the next four")
    brightness: Share = Field(description="0.4: times 0.6 to 1.4")
    contrast: Share = Field(description="the same around the image's mean")
    saturation: Share = Field(description="the same around the pixel's grey value")
    hue: Share = Field(description="0.1: by up to a tenth of the colour circle, in both directions")
    grey: Share = Field(description="share of the views without colour")
    blur: Share = Field(description="share of the views that are blurred, more or less")
    noise: Strength = Field(description="largest standard deviation of the pixel noise; a view's own is drawn below it")


class LocalViews(Section):
    """Small extra views (SwAV's multi-crop)."""

    count: int = Field(ge=1, le=8)
    size: int = Field(gt=0, description="side in pixels")
    area: Limits


class Head(Section):
    """The projection head on top of the trunk; it is dropped before fine-tuning."""

    hidden: int = Field(gt=0)
    output: int = Field(gt=0)
    batch_norm: bool = Field(description="in the heads")


class SimCLRSettings(Head):
    """Each view must find its partner among all views of the batch."""

    temperature: float = Field(gt=0)


class MoCoV2Settings(Head):
    """A view must find its partner, seen by a slow copy of the network, among a queue of earlier ones."""

    temperature: float = Field(gt=0)
    queue: int = Field(gt=0, description="views of earlier batches")
    momentum: Momentum = Field(description="of the slow copy, at the first step")
    momentum_end: Momentum = Field(description="and at the last; a cosine between")
    symmetric: bool = Field(description="both views take both parts (twice the work), or one each")


class BYOLSettings(Head):
    """A view must predict its partner as a slow copy of the network sees it; there are no negatives."""

    momentum: Momentum = Field(description="of the slow copy, at the first step")
    momentum_end: Momentum = Field(description="and at the last; a cosine between")


class SwAVSettings(Head):
    """A view must predict the cluster of its partner; clusters are kept equally full."""

    temperature: float = Field(gt=0)
    prototypes: int = Field(gt=1)
    frozen: Amount | Literal[0] = Field(description="the prototypes stay as they are for so long")
    sinkhorn_iterations: int = Field(gt=0)
    sinkhorn_epsilon: float = Field(gt=0)
    queue: int = Field(ge=0, description="views of earlier batches that help to fill the clusters; 0: none")
    queue_from: Amount | Literal[0] = Field(description="and from when on")
    local_views: LocalViews | None


class PretrainOptimizer(Section):
    """The learning rate is a function of the step alone."""

    name: Literal["sgd", "adamw", "lars"]
    lr: float = Field(gt=0)
    momentum: float = Field(ge=0, lt=1, description="adamw: its first beta")
    nesterov: bool
    weight_decay: float = Field(ge=0, description="never on biases and norms")
    schedule: Literal["constant", "cosine"]
    warmup: Amount | Literal[0] = Field(description="linear warm-up of the rate")
    clip: float | None = Field(gt=0, description="largest gradient norm; null: none")


class Neighbours(Section):
    """The k-nearest-neighbour look at the features, before and after; the labels are used for nothing else."""

    k: int = Field(gt=0)
    temperature: float = Field(gt=0)
    bank: int = Field(gt=0, description="training images that vote, at most")
    queries: int = Field(gt=0, description="validation images that ask, at most")


class Pretrain(Section):
    """A whole pre-training run."""

    data: str = Field(description="any --data of finetune-mile run; labels are not used")
    method: Method
    init: str | None = Field(default=None, description="a checkpoint to continue from; null: random weights")
    arch: str | None = Field(description="resnet-mini, resnet18-cifar, resnet50, timm:NAME, ...; null: that of init")
    size: int | None = Field(gt=0, description="side of a view; null: that of init, or of the first image")
    source_size: int | None = Field(
        gt=0, description="side that images are brought to before views are cut out of them; null: size"
    )
    mean: tuple[float, float, float] | None = Field(
        description="of the pixels in [0, 1]; is kept with the checkpoint; null: that of init"
    )
    std: tuple[Positive, Positive, Positive] | None
    seed: Seed
    steps: int = Field(gt=0, le=MOST_STEPS)
    batch_size: int = Field(gt=1, le=LARGEST_BATCH, description="images over all processes; each gives two views")
    optimizer: PretrainOptimizer
    views: ViewSettings
    simclr: SimCLRSettings | None = None
    mocov2: MoCoV2Settings | None = None
    byol: BYOLSettings | None = None
    swav: SwAVSettings | None = None
    neighbours: Neighbours
    precision: Annotated[Literal["no", "tf32", "fp16", "bf16", "auto"], NO] = "no"
    sync_batch_norm: bool = False
    workers: int | None = Field(
        default=None, ge=0, le=MOST_WORKERS, description="loader processes; null: from the cores"
    )
    keep_megabytes: int = Field(default=1024, ge=0, description="images that fit into this are read once and kept")
    checkpoint_every: int = Field(default=200, gt=0, description="steps between checkpoints")
    log_every: int = Field(default=10, gt=0, description="steps between lines of metrics.jsonl")

    @model_validator(mode="after")
    def _whole(self) -> Pretrain:
        tell_all([
            (getattr(self, self.method) is None, f"method {self.method} needs a block {self.method}: in the recipe"),
            (self.optimizer.name == "lars" and self.optimizer.nesterov,
             "optimizer.nesterov: true does not go with lars"),
            (self.init is None and None in (self.arch, self.mean, self.std),
             "arch, mean and std are null: name a checkpoint with --init, or give them"),
            (self.size is None and self.source_size is not None,
             "source_size needs size: set the side of the views too"),
        ])  # fmt: skip
        return self

    @property
    def local_views(self) -> LocalViews | None:
        """Small views, where the method takes them."""
        return self.swav.local_views if self.method == "swav" and self.swav is not None else None


ResolvedPretrain: TypeAlias = ResolvedAs[Pretrain]


def resolve(flags: Mapping[str, Any], sets: Sequence[str]) -> ResolvedPretrain:
    """Flags over recipe, checked; every problem is raised in one go.

    Args:
        flags: what was given on the command line, by key.
        sets: `--set KEY=VALUE` arguments.
    """
    wanted = flags.get("recipe")
    if wanted is not None:
        path, why = find_recipe(str(wanted).removeprefix(f"{FOLDER}/"), FOLDER), f"--recipe {wanted}"
    else:
        grids = "init" not in flags and str(flags.get("data", "demo")).partition(":")[0] in GRIDS
        kind, why = "grids" if grids else "photos", "no --recipe: by the kind of --data"
        if "init" in flags:
            kind, why = "continue", "no --recipe: continues a checkpoint"
        path = find_recipe(kind, FOLDER)
    given = {key: value for key, value in flags.items() if key != "recipe"}
    return resolve_tree(Pretrain, read_yaml(path), path, why, given, sets)
