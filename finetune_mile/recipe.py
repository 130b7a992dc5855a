"""Recipes: every setting of a run in one YAML file, checked as a whole before any work. No torch here.

Nothing that changes a number has a hidden default: it stands in the recipe, in the column of `variant`, or in a flag.
Order of precedence: flags, then the recipe, then the variant's column for what the recipe leaves out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from finetune_mile.learning.phases import check_amount

Method = Literal["softmax", "sigmoid", "mile", "noisy-student", "self-distill", "distill", "irm", "rex"]
LABELS_ALONE = ("softmax", "sigmoid", "irm", "rex")  # methods without a teacher
OVER_ENVIRONMENTS = ("irm", "rex")
Variant = Literal["paper", "published"]
Amount = Annotated[int | str, AfterValidator(check_amount)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]

# Upper bounds: above any real run, and below what would fill the memory before the first step.
MOST_STEPS, LARGEST_BATCH, MOST_WORKERS = 10**9, 10**6, 1024


def _a_number(value: object) -> object:
    if value == "auto":
        raise ValueError("auto is for --method mile; here it must be a number between 0 and 1")
    return value


Rho = Annotated[float, Field(gt=0, lt=1), BeforeValidator(_a_number)]


def _rho_or_auto(value: float | str) -> float | str:
    if value != "auto" and not (isinstance(value, float) and 0 < value < 1):
        raise ValueError("must be a number between 0 and 1, or auto")
    return value


RhoOrAuto = Annotated[float | str, AfterValidator(_rho_or_auto)]

# Where the paper and its published code disagree; a recipe field that is set wins over its column.
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {
        "mile.imitate_from": "student",
        "mile.phase_steps": "exact",
        "mile.rho": 0.25,
        "mile.pseudo_labels": "batch",
        "mile.union": False,
        "mile.optimizer_state": "keep",
        "head_bias": "zero",
        "evaluate.prediction_set": "threshold",
    },
    "published": {
        "mile.imitate_from": "teacher",
        "mile.phase_steps": "minus_one",
        "mile.rho": 0.5,
        "mile.pseudo_labels": "batch",
        "mile.union": False,
        "mile.optimizer_state": "keep",
        "head_bias": "prior",
        "evaluate.prediction_set": "argmax_or_threshold",
    },
}


class Section(BaseModel):
    """Frozen, and deaf to nothing: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class Mile(Section):
    """MILe (Algorithm 1)."""

    k_t: Amount = Field(description="interaction: 200 (steps), '2 epochs' or '5 %' of the budget")
    k_s: Amount = Field(description="imitation, in the same units")
    warmup: Amount | Literal[0] = Field(description="interaction before the first generation; 0: none")
    last: Amount | None = Field(default=None, description="the last imitation, where it differs from k_s")
    rho: RhoOrAuto = Field(description="threshold on the teacher's sigmoids; auto: see the block auto:")
    imitate_from: Literal["student", "teacher"] = Field(description="weights an imitation starts from")
    phase_steps: Literal["exact", "minus_one"] = Field(description="k steps a phase, or k - 1")
    pseudo_labels: Literal["batch", "cycle"] = Field(
        description="label each augmented batch, or the plain images once per generation"
    )
    targets: Literal["threshold", "argmax", "soft"] = Field(
        default="threshold", description="MILe is `threshold`; the others are controls"
    )
    union: bool = Field(description="OR the given label into the teacher's")
    empty: Literal["negative", "argmax"] = Field(description="what an empty label set trains towards")
    optimizer_state: Literal["keep", "reset"] = Field(description="momentum when weights are swapped")


def _off(word: object) -> object:
    return "off" if word is False else word  # YAML reads a bare `off` as false


class Auto(Section):
    """`mile.rho: auto`: thresholds and a gate from held-out images with given labels (docs/auto.md)."""

    calibration: Annotated[float, Field(gt=0, le=0.5)] = Field(
        description="share of the labelled images that is held out; at least 500 where that is a fifth of them or less"
    )
    held_out: Literal["auto", "always"] = Field(
        description="always: also in runs that do not look at them, so that methods train on the same images"
    )
    gate: Annotated[Literal["auto", "off"], BeforeValidator(_off)] = Field(
        description="off: labels are added whatever the held-out images say"
    )
    v_min: float = Field(ge=0, description="the gate needs v (hits of given labels, 1 = chance) two errors above this")
    g_min: float = Field(ge=0, description="and g (misses where the teacher is surest against all) one above this")
    beta: float = Field(ge=0, le=1, description="the least target of a label that was found")
    ce: float = Field(ge=0, description="weight of the softmax term, which keeps the order of the labels")
    teacher: float = Field(ge=0, le=1, description="the teacher's share in that term; the rest is the given label")


class Imitation(Section):
    """What noisy-student, self-distill and distill imitate."""

    targets: Literal["threshold", "argmax", "soft"]
    loss: Literal["bce", "cross_entropy"]
    rho: Rho = Field(description="for `threshold`; also what f1@rho is read at")
    temperature: float = Field(gt=0, description="for `soft`")
    union: bool
    pseudo_labels: Literal["batch", "cycle"]


class NoisyStudent(Imitation):
    """Interaction, then long imitations from fresh weights."""

    interaction: Amount = Field(description="steps on the given labels before the first imitation")
    generations: int = Field(ge=1)


class SelfDistill(Imitation):
    """Interaction, then one imitation of it from fresh weights."""

    interaction: Amount


class Invariance(Section):
    """IRM and REx: softmax training whose risks should not differ between environments."""

    weight: float = Field(ge=0, description="of the penalty")
    anneal: Amount | Literal[0] = Field(description="steps before that weight; 0: none")
    anneal_weight: float = Field(ge=0, description="of the penalty until then; DomainBed: 1")
    optimizer_state: Literal["keep", "reset"] = Field(description="momentum where the weight changes; DomainBed: reset")


class Optimizer(Section):
    """One optimiser for all phases; the learning rate is a function of the step alone."""

    name: Literal["sgd", "adamw", "lars"]
    lr: float = Field(gt=0)
    head_lr: float | None = Field(gt=0, description="the classifier's own rate; null: the same")
    momentum: float = Field(ge=0, lt=1, description="adamw: its first beta")
    nesterov: bool
    weight_decay: float = Field(ge=0, description="never on biases and norms")
    schedule: Literal["constant", "cosine", "step"]
    warmup: Amount | Literal[0] = Field(description="linear warm-up of the rate")
    milestones: tuple[Amount, ...] = Field(default=(), description="for `step`: when the rate falls")
    gamma: float = Field(default=0.1, gt=0, description="for `step`: by which factor")
    clip: float | None = Field(gt=0, description="largest gradient norm; null: none")
    ema: float | None = Field(gt=0, lt=1, description="decay of averaged weights; null: none")


class Augment(Section):
    """What a training image goes through; the draw depends on (seed, epoch, image) alone."""

    crop: Literal["random-resized", "shift", "none"]
    scale: tuple[float, float] = Field(default=(0.08, 1.0), description="for `random-resized`: area")
    shift: int = Field(default=0, ge=0, description="for `shift`: pixels in each direction")
    flip: bool


class Evaluate(Section):
    """When and how to measure."""

    images: int | None = Field(gt=0, description="validation images at each phase's end; null: all")
    every: Amount | None = Field(description="also every so often inside a phase; null: phase ends only")
    prediction_set: Literal["threshold", "argmax_or_threshold"] = Field(
        description="what counts as predicted in f1@... and coverage@...: p > t, or that and the best class"
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
    arch: str | None = Field(default=None, description="null: as the checkpoint says")
    size: int | None = Field(default=None, gt=0, description="image side; null: as the card says")
    crop: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="central share of the short side in the plain view; null: as the card says",
    )
    mean: tuple[float, float, float] | None = Field(default=None, description="of RGB in 0-1; null: as the card says")
    std: tuple[Positive, Positive, Positive] | None = Field(
        default=None, description="the same; null: as the card says"
    )
    fraction: Fraction = Field(description="share of the labels that is used")
    split: str | None = Field(default=None, description="a list of the labelled images, or a run's split.json")
    method: Method
    variant: Variant
    semi: Literal["none", "all", "unlabelled"] = Field(description="images that imitation draws from")
    labelled_share: float | None = Field(
        default=None, gt=0, lt=1, description="of each batch in imitation, the rest unlabelled; null: as they come"
    )
    teacher: str | None = Field(default=None, description="for distill: a run folder or a file")
    seed: Seed
    steps: int | None = Field(default=None, gt=0, le=MOST_STEPS, description="budget in optimiser steps")
    epochs: float | None = Field(default=None, gt=0, le=10**6, description="or in epochs of the labelled images")
    batch_size: int = Field(gt=0, le=LARGEST_BATCH, description="over all processes and accumulated parts")
    accumulate: int = Field(default=1, gt=0, description="parts that a batch is computed in")
    precision: Literal["no", "fp16", "bf16"] = "no"
    sync_batch_norm: bool = False
    head_bias: Literal["zero", "prior"] = Field(description="prior: -log C, sigmoids start at 1/C")
    head_weight: Literal["normal", "zero"] = Field(default="normal", description="normal: std 0.01; zero: as SimCLR's")
    keep_head: str | None = Field(default=None, description="name of a head in the file to keep (labels leak!)")
    head_from: Literal[0, 1] = Field(default=0, description="1: keep SimCLR-v2's first projection layer")
    class_weights: Literal["none", "balanced"]
    mile: Mile | None = None
    auto: Auto | None = None
    noisy_student: NoisyStudent | None = None
    self_distill: SelfDistill | None = None
    distill: Imitation | None = None
    irm: Invariance | None = None
    rex: Invariance | None = None
    optimizer: Optimizer
    augment: Augment
    evaluate: Evaluate
    workers: int | None = Field(
        default=None, ge=0, le=MOST_WORKERS, description="loader processes; null: from the cores"
    )
    checkpoint_every: int = Field(default=500, gt=0, description="steps between checkpoints")
    log_every: int = Field(default=10, gt=0, description="steps between lines of metrics.jsonl")
    track: Literal["none", "tensorboard", "wandb"] = "none"

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs (flags --steps, --epochs)")
        block = self.method.replace("-", "_")
        if block in type(self).model_fields and getattr(self, block) is None:
            raise ValueError(f"method {self.method} needs a block {block}: in the recipe")
        if self.method == "distill" and self.teacher is None:
            raise ValueError("method distill needs --teacher RUN_FOLDER_OR_FILE")
        if self.method != "distill" and self.teacher is not None:
            raise ValueError(f"--teacher is for --method distill, and the method is {self.method}")
        if self.semi != "none" and self.method in LABELS_ALONE:
            raise ValueError(f"--semi needs a method that imitates; {self.method} learns from labels alone")
        if self.is_auto:
            _check_auto(self)
        if self.accumulate > 1 and self.method in OVER_ENVIRONMENTS:
            raise ValueError(f"method {self.method} penalises the whole batch at once: set accumulate to 1")
        if self.labelled_share is not None and self.semi == "none":
            raise ValueError("labelled_share needs --semi all or --semi unlabelled: without it every image is labelled")
        if self.optimizer.name == "lars" and self.optimizer.nesterov:
            raise ValueError("optimizer.nesterov: true does not go with lars")
        return self

    @property
    def is_auto(self) -> bool:
        """Do held-out images decide the pseudo-labels?"""
        return self.method == "mile" and self.mile is not None and self.mile.rho == "auto"

    @property
    def calibration(self) -> float:
        """The share of the labelled images that no phase trains on."""
        return self.auto.calibration if self.auto and (self.is_auto or self.auto.held_out == "always") else 0.0

    @property
    def activation(self) -> Literal["softmax", "sigmoid"]:
        """How the final network's logits become probabilities."""
        if self.method in ("sigmoid", "mile"):
            return "sigmoid"
        if self.method in LABELS_ALONE:
            return "softmax"
        return "sigmoid" if self.imitation.loss == "bce" else "softmax"

    @property
    def imitation(self) -> Imitation:
        """The block of noisy-student, self-distill or distill."""
        block = getattr(self, self.method.replace("-", "_"))
        assert isinstance(block, Imitation)
        return block

    @property
    def optimizer_state(self) -> Literal["keep", "reset"]:
        """What becomes of the momentum where the learner's weights are swapped, or a penalty's weight changes."""
        block = getattr(self, self.method) if self.method in ("mile", *OVER_ENVIRONMENTS) else None
        return "keep" if block is None else block.optimizer_state

    @property
    def rho(self) -> float | None:
        """The pseudo-label threshold that f1@rho is read at; None where the method has none."""
        if self.method == "mile":
            assert self.mile is not None
            return self.mile.rho if isinstance(self.mile.rho, float) else None
        return None if self.method in LABELS_ALONE else self.imitation.rho


def _check_auto(recipe: Recipe) -> None:
    assert recipe.mile is not None
    if recipe.auto is None:
        raise ValueError("--rho auto needs a block auto: in the recipe (recipes/multi-mnist/auto.yaml has one)")
    if recipe.mile.targets != "threshold" or recipe.mile.pseudo_labels != "batch":
        raise ValueError("--rho auto needs mile.targets: threshold and mile.pseudo_labels: batch")
