"""Recipes: every setting of a run in one YAML file, checked as a whole before any work. No torch here.

Nothing that changes a number has a hidden default: it stands in the recipe, in the column of `variant`, or in a flag.
Order of precedence: flags, then the recipe, then the variant's column for what the recipe leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, create_model, model_validator

from finetune_mile.core.problems import did_you_mean
from finetune_mile.core.types import (
    LARGEST_BATCH,
    MOST_STEPS,
    MOST_WORKERS,
    NO,
    Amount,
    Policy,
    Positive,
    Section,
    Seed,
)
from finetune_mile.methods import METHODS, Activation, Method, Traits, get_method
from finetune_mile.methods.pseudo_labels import Rho

Variant = Literal["paper", "published"]
Share = Annotated[float, Field(ge=0, le=1)]
Switch = bool | Literal["auto"]
Conflict = tuple[bool, str]  # is it so?, the sentence


def _known_method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"unknown method; {did_you_mean(name, METHODS)}")
    return name


def _four(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 4:
        raise ValueError("must be four numbers, brightness, contrast, saturation and hue: [0.4, 0.4, 0.4, 0.1]")
    return value


def _known_trunk(text: str) -> str:
    if not re.fullmatch(r"all|frozen|norm-only|last:[0-9]{1,4}", text):
        raise ValueError(f"{text[:40]!r} is not one of all, frozen, norm-only, last:N (the last N blocks learn)")
    return text


# Where the paper and its published code disagree; a recipe field that is set wins over its column.
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {"head_bias": "zero", "evaluate": {"prediction_set": "threshold"}},
    "published": {"head_bias": "prior", "evaluate": {"prediction_set": "argmax_or_threshold"}},
}
for _method in map(get_method, METHODS):
    for _variant, _fields in _method.variants.items():
        VARIANTS[_variant][_method.block] = _fields


class Optimizer(Section):
    """One optimiser for all phases; the learning rate is a function of the step alone."""

    name: Literal["sgd", "adamw", "lars", "relative"] = Field(
        description="relative: Adam whose rate for each tensor is a share of the tensor's own size"
    )
    lr: Positive | Literal["auto"] = Field(
        description="relative: the share; auto: 0.006, and 0.003 below 200 labels or with a frozen trunk"
    )
    head_lr: float | None = Field(gt=0, description="the classifier's own rate; null: the same")
    momentum: float = Field(ge=0, lt=1, description="adamw: its first beta")
    nesterov: bool = Field(description="sgd: Nesterov's momentum")
    weight_decay: float = Field(ge=0, description="never on biases and norms")
    schedule: Literal["constant", "cosine", "step"] = Field(description="how the rate falls from `lr`")
    warmup: Amount | Literal[0] = Field(description="linear warm-up of the rate")
    milestones: tuple[Amount, ...] = Field(default=(), description="for `step`: when the rate falls")
    gamma: float = Field(default=0.1, gt=0, description="for `step`: by which factor")
    restart: Amount | None = Field(
        default=None,
        description="the schedule is complete here and begins anew, for a first teacher by its own schedule",
    )
    layer_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="each layer's rate is this times the rate of the next one, as in MAE's fine-tuning (0.65); 1: off",
    )
    clip: float | None = Field(gt=0, description="largest gradient norm; null: none")
    ema: float | None = Field(gt=0, lt=1, description="decay of averaged weights; null: none")


class Augment(Section):
    """What training images go through (docs/augmentation.md); the draws depend on (seed, epoch, image) alone.

    Those of `mixup` and `cutmix`, which mix pairs of a batch, depend on (seed, step).
    """

    crop: Literal["random-resized", "shift", "none"] = Field(description="which part of the image is shown")
    scale: tuple[float, float] = Field(default=(0.08, 1.0), description="for `random-resized`: area")
    weak_scale: tuple[float, float] | None = Field(
        default=None, description="the same in the teacher's views of `views: weak-strong`; null: as scale"
    )
    shift: int = Field(default=0, ge=0, description="for `shift`: pixels in each direction")
    flip: bool = Field(description="mirror half of the images")
    jitter: Annotated[tuple[Share, Share, Share, Annotated[float, Field(ge=0, le=0.5)]], BeforeValidator(_four)] = (
        Field(default=(0.0, 0.0, 0.0, 0.0), description="largest change of brightness, contrast, saturation and hue")
    )
    policy: Policy = Field(default="none", description="TrivialAugment (Wide), or RandAugment with two operations")
    magnitude: int = Field(default=9, ge=0, le=30, description="for `rand`: strength of its operations")
    erase: Share = Field(default=0.0, description="share of the images that lose a random part")
    mixup: float = Field(default=0.0, ge=0, le=2, description="alpha of Beta(alpha, alpha); 0: off")
    cutmix: float = Field(default=0.0, ge=0, le=2, description="the same; with mixup, each step takes one of the two")

    @property
    def of_one_image(self) -> dict[str, Any]:
        """The settings of `images.pipeline.Augmentation`."""
        return self.model_dump(exclude={"weak_scale", "mixup", "cutmix"})


class Evaluate(Section):
    """When and how to measure."""

    images: int | None = Field(ge=0, description="validation images at each phase's end; null: all, 0: none")
    every: Amount | None = Field(description="also every so often inside a phase; null: phase ends only")
    points: int = Field(
        default=8,
        ge=0,
        le=1000,
        description="least points of the curve in the report. Points beside those of `every` and `phases` are of few "
        "validation images, which take 5 % of the time; 0: none",
    )
    phases: bool = Field(default=True, description="evaluate, and inspect a new teacher's labels, at each phase's end")
    prediction_set: Literal["threshold", "argmax_or_threshold", "argmax"] = Field(
        description="what f1@... and coverage@... take for predicted: p > t, or that and the best class, or it alone"
    )
    thresholds: tuple[Rho, ...] = Field(default=(), description="f1@... also at these, beside 0.25, 0.5 and rho")
    labels: bool = Field(default=True, description="write labels.parquet for the training images")


class Recipe(Section):
    """A whole run."""

    data: str = Field(description="demo, folder:DIR, imagenet:DIR, hf:NAME_OR_DIR, csv:FILE, wds:DIR, ...")
    truth: str | None = Field(
        default=None, description="true label sets of the validation images: real, csv:FILE, counts:NPY,CSV,SHARE"
    )
    init: str = Field(description="a card's name, a file, a directory, timm:NAME, or none")
    arch: str | None = Field(default=None, description="the network; null: as the checkpoint says")
    size: int | None = Field(default=None, gt=0, description="image side; null: as the card says")
    crop: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="central share of the short side in the plain view; null: as the card says",
    )
    mean: tuple[float, float, float] | None = Field(
        default=None, description="mean of RGB in 0-1; null: as the card says"
    )
    std: tuple[Positive, Positive, Positive] | None = Field(
        default=None, description="standard deviation of RGB in 0-1; null: as the card says"
    )
    fraction: float = Field(gt=0, le=1, description="share of the labels that is used")
    split: str | None = Field(default=None, description="a list of the labelled images, or a run's split.json")
    method: Annotated[str, AfterValidator(_known_method), WithJsonSchema({"type": "string", "enum": [*METHODS]})] = (
        Field(description="how it learns (docs/method.md)")
    )
    variant: Variant = Field(description="fills in what a recipe leaves open, as the paper or as its published code")
    semi: Literal["none", "all", "unlabelled"] = Field(description="images that imitation draws from")
    unlabelled: str | None = Field(
        default=None, description="further images for imitation, without their labels: a folder, or as data"
    )
    labelled_share: float | None = Field(
        default=None, gt=0, lt=1, description="share of labelled images in a batch of an imitation; null: as they come"
    )
    views: Literal["same", "weak-strong"] = Field(
        default="same",
        description="weak-strong: in imitation the teacher labels a view of its own, with crop and flip only",
    )
    then: dict[str, Any] | None = Field(
        default=None, description="settings that change for a second stage, with photos that have no label; null: none"
    )
    teacher: str | None = Field(default=None, description="for distill: a run folder or a file")
    seed: Seed = Field(description="of the split, the order, the augmentation and a new classifier")
    steps: int | None = Field(default=None, gt=0, le=MOST_STEPS, description="budget in optimiser steps")
    epochs: Annotated[float, Field(gt=0, le=10**6)] | Literal["auto"] | None = Field(
        default=None, description="the budget in epochs of the labelled images; auto: 10 of few images to 3 of many"
    )
    steps_of_epochs: Literal["next"] | None = Field(
        default=None, description="next: images x epochs // batch + 1, as SimCLR counts; null: to the nearest step"
    )
    batch_size: int = Field(
        gt=0, le=LARGEST_BATCH, description="images of a step, over all processes and accumulated parts"
    )
    accumulate: Annotated[int, Field(gt=0)] | Literal["auto"] = Field(
        default=1, description="parts that a batch is computed in; auto: as few as fit into the GPU's memory"
    )
    precision: Annotated[Literal["no", "tf32", "fp16", "bf16", "auto"], NO] = Field(
        default="no",
        description="auto: bf16 where the device computes in it, else tf32 on a GPU and no on a CPU (docs/gpus.md)",
    )
    channels_last: Switch = Field(
        default="auto", description="memory layout, which is faster for convolutions; auto: on GPUs"
    )
    cudnn_benchmark: Switch = Field(
        default="auto", description="cuDNN times its algorithms and takes the fastest; auto: unless deterministic"
    )
    fused_optimizer: Switch = Field(default="auto", description="one kernel for all tensors; auto: on GPUs")
    compile: bool = Field(default=False, description="torch.compile: faster steps after minutes of compilation")
    gradient_checkpointing: bool = Field(
        default=False, description="keep only the input of each block and compute the rest twice: less memory"
    )
    deterministic: bool = Field(
        default=False, description="the same bits in every run on a GPU, where it is slower; a CPU needs no setting"
    )
    sync_batch_norm: bool = Field(default=False, description="statistics of all processes together")
    head_bias: Literal["zero", "prior"] = Field(description="prior: -log C, sigmoids start at 1/C")
    head_weight: Literal["normal", "zero"] = Field(default="normal", description="normal: std 0.01; zero: as SimCLR's")
    keep_head: str | None = Field(default=None, description="name of a head in the file to keep (labels leak!)")
    head_from: Literal[0, 1] = Field(default=0, description="1: keep SimCLR-v2's first projection layer")
    trunk: Annotated[str, AfterValidator(_known_trunk)] = Field(
        default="all",
        description="what learns beside the classifier: all, norm-only, last:N blocks; frozen: nothing, on features "
        "that are computed once",
    )
    head: Literal["linear", "bn-linear", "mlp"] = Field(
        default="linear", description="for trunk: frozen; bn-linear: behind a batch norm; mlp: a hidden layer of 2,048"
    )
    feature_dtype: Literal["float16", "float32"] = Field(default="float16", description="for trunk: frozen, on disk")
    head_init: Literal["random", "probe"] = Field(
        default="random", description="probe: the classifier starts as a linear probe of the labelled images"
    )
    batch_norm: Literal["train", "frozen"] = Field(
        default="train", description="frozen: normalise with the statistics of the checkpoint"
    )
    keep: Literal["last", "best"] = Field(
        default="last", description="best: held-out labels decide how far the weights move from the start"
    )
    patience: int | None = Field(
        default=None,
        gt=0,
        description="stop after so many evaluations in a row without a better validation score, and keep the best "
        "weights; null: never",
    )
    class_weights: Literal["none", "balanced"] = Field(description="balanced: rare classes count more in the loss")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="share of a given label that is divided among all classes"
    )
    drop_path: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="rate at which training leaves out the last block's branches, less for earlier ones; 0: off",
    )
    optimizer: Optimizer
    augment: Augment
    evaluate: Evaluate
    workers: int | None = Field(
        default=None, ge=0, le=MOST_WORKERS, description="loader processes; null: from the cores"
    )
    checkpoint_every: int = Field(default=500, gt=0, description="steps between checkpoints")
    log_every: int = Field(default=10, gt=0, description="steps between lines of metrics.jsonl")
    track: Literal["none", "tensorboard", "wandb", "trackio"] = Field(
        default="none", description="also send losses and scores there"
    )

    @model_validator(mode="after")
    def _check_together(self) -> Recipe:
        tell_all(
            [
                (
                    (self.steps is None) == (self.epochs is None),
                    "give either steps or epochs (flags --steps, --epochs)",
                ),
                *_of_method(self),
                *_of_teacher(self),
                *_of_trunk(self),
                *_of_optimizer(self),
            ]
        )
        return self

    @property
    def method_value(self) -> Method:
        """The method that is trained; `mile.rho: auto` is another name of `auto`."""
        mile: Any = getattr(self, "mile", None)
        return get_method("auto" if self.method == "mile" and mile is not None and mile.rho == "auto" else self.method)

    @property
    def block(self) -> Any:
        """The settings of the method that is trained, as its functions take them."""
        method = self.method_value
        return method.settings(*(getattr(self, key) for key in method.blocks))

    @property
    def traits(self) -> Traits:
        return self.method_value.traits(self.block)

    @property
    def activation(self) -> Activation:
        return self.traits.activation

    @property
    def rho(self) -> float | None:
        return self.traits.rho

    @property
    def staged(self) -> bool:
        """Are images without a label for a second stage? The first one learns from labelled images alone."""
        return self.then is not None and self.trunk != "frozen"

    @property
    def labels_once_per_cycle(self) -> bool:
        """Are pseudo-labels made once per generation on the plain images, instead of per batch?"""
        return self.traits.pseudo_labels == "cycle"

    @property
    def calibration(self) -> float:
        """The share of the labelled images that no phase trains on."""
        auto: Any = getattr(self, "auto", None)
        needed = auto is not None and ("held_out" in self.method_value.needs or auto.held_out == "always")
        return auto.calibration if needed else 0.0

    @property
    def new_head(self) -> bool:
        """Does the classifier start untrained, with outputs at the prior 1/C?"""
        return self.head_init == "random" and self.keep_head is None


_BLOCKS: dict[str, Any] = {
    method.block: (method.Block | None, None) for method in map(get_method, METHODS) if method.Block is not None
}
# Method: its block, where that has a default for each setting.
BLOCKS_WITH_DEFAULTS = {
    method.name: method.block
    for method in map(get_method, METHODS)
    if method.Block is not None and not any(field.is_required() for field in method.Block.model_fields.values())
}
FullRecipe: type[Recipe] = create_model("Recipe", __base__=Recipe, __doc__=Recipe.__doc__, **_BLOCKS)


# ------------------------------------------------------------ settings that do not go together, all told at once


def tell_all(found: Iterable[Conflict]) -> None:
    """Raise one ValueError for pydantic, with a line for each conflict that is so."""
    if sentences := [sentence for is_so, sentence in found if is_so]:
        raise ValueError("\n".join(sentences))


def _of_method(recipe: Recipe) -> list[Conflict]:
    """A method and its settings."""
    name, method, needs = recipe.method, recipe.method_value, recipe.method_value.needs
    who = f"method {name}" if method.name == name else "--rho auto"
    missing = [key for key in method.blocks if getattr(recipe, key) is None]
    own = [] if missing else method.check(recipe.block, recipe)
    mixed = next((key for key in ("mixup", "cutmix") if getattr(recipe.augment, key)), None)
    return [
        *((True, f"{who} needs a block {key}: in the recipe") for key in missing),
        *((True, sentence) for sentence in own),
        (not missing and recipe.views != "same" and recipe.labels_once_per_cycle,
         f"views: {recipe.views} is for labels of each batch; with pseudo_labels: cycle the teacher sees the plain "
         "view already, so leave views out"),
        (mixed is not None and not needs.isdisjoint({"environments", "image_state"}),
         f"augment.{mixed} mixes images, and method {name} needs to know where each came from: set it to 0"),
        (recipe.label_smoothing > 0 and "hard_labels" in needs,
         f"label_smoothing: method {name} takes every target above 0 for a given label: set it to 0"),
        (recipe.accumulate not in (1, "auto") and "whole_batch" in needs,
         f"method {name} needs the complete batch at once: set accumulate to 1"),
    ]  # fmt: skip


def _of_teacher(recipe: Recipe) -> list[Conflict]:
    """A teacher, and the images that it labels."""
    name, needs, views = recipe.method, recipe.method_value.needs, recipe.views
    with_file = " or ".join(name for name in METHODS if "teacher_file" in get_method(name).needs)
    return [
        ("teacher_file" in needs and recipe.teacher is None,
         f"method {name} needs --teacher RUN_FOLDER_OR_FILE"),
        ("teacher_file" not in needs and recipe.teacher is not None,
         f"--teacher is for --method {with_file}, and the method is {name}"),
        (recipe.semi != "none" and "teacher" not in needs and not recipe.staged,
         f"--semi needs a method that imitates; {name} learns from labels alone"),
        (recipe.unlabelled is not None and "teacher" not in needs and not recipe.staged,
         f"--unlabelled needs a method that imitates, such as mile; {name} learns from labels alone"),
        (recipe.unlabelled is not None and recipe.semi == "none" and "teacher" in needs and not recipe.staged,
         "--unlabelled needs --semi all or --semi unlabelled: without it no step draws those images"),
        (views != "same" and "teacher" not in needs,
         f"views: {views} needs a method that imitates, such as mile; {name} learns from labels alone"),
        (recipe.labelled_share is not None and recipe.semi == "none",
         "labelled_share needs --semi all or --semi unlabelled: without it every image is labelled"),
    ]  # fmt: skip


def _of_trunk(recipe: Recipe) -> list[Conflict]:
    """A trunk that does not learn, and the head on it."""
    frozen = recipe.trunk == "frozen"
    return [
        (frozen and recipe.augment.cutmix > 0,
         "--trunk frozen does not go with augment.cutmix, which needs images: use mixup or --trunk last:0"),
        (frozen and recipe.views != "same",
         f"--trunk frozen does not go with views: {recipe.views}, which needs images: use --trunk last:0"),
        (frozen and recipe.teacher is not None,
         "--trunk frozen does not go with --teacher, which needs images: use --trunk last:0"),
        (recipe.head != "linear" and not frozen,
         f"head: {recipe.head} is for --trunk frozen: add it, or leave head out"),
        (recipe.head != "linear" and (recipe.head_init == "probe" or recipe.keep_head is not None),
         f"head: {recipe.head} starts anew: use --head-init random, and leave --keep-head out"),
        (recipe.head_init == "probe" and recipe.keep_head is not None,
         "--keep-head and --head-init probe: give one of them"),
    ]  # fmt: skip


def _of_optimizer(recipe: Recipe) -> list[Conflict]:
    """How steps are computed and when they stop."""
    settings = recipe.optimizer
    relative = settings.name == "relative"
    return [
        (recipe.deterministic and recipe.cudnn_benchmark is True,
         "deterministic: true does not go with cudnn_benchmark: true, which chooses algorithms by their time"),
        (recipe.compile and recipe.gradient_checkpointing,
         "compile: true does not go with gradient_checkpointing: true: set one of them to false"),
        (settings.name in ("lars", "relative") and settings.nesterov,
         f"optimizer.nesterov: true does not go with {settings.name}"),
        (not relative and settings.lr == "auto",
         f"optimizer.lr: auto is for the optimizer `relative`; give --lr a number for {settings.name}"),
        (relative and settings.head_lr is not None,
         "optimizer.head_lr does not go with relative: each tensor has its own rate"),
        (relative and settings.layer_decay < 1,
         "optimizer.layer_decay does not go with relative: each tensor has its own rate"),
        (recipe.patience is not None and recipe.evaluate.images == 0,
         "--patience needs evaluations, and evaluate.images is 0: leave one of them out"),
        (recipe.patience is not None and settings.ema is not None,
         "--patience does not go with optimizer.ema: evaluations during a run are of the weights that are not "
         "averaged"),
    ]  # fmt: skip
