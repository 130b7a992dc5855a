"""A run before its first step: what is learned (`Task`), the network (`Model`), and where it computes (`Device`)."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from finetune_mile.checkpoints.cards import Card
from finetune_mile.checkpoints.classifier import load_teacher
from finetune_mile.checkpoints.init import Init
from finetune_mile.checkpoints.loading import LoadReport, load_network
from finetune_mile.compute.passes import Outputs
from finetune_mile.config.resolve import second_stage
from finetune_mile.config.schema import Recipe
from finetune_mile.core.cores import local_processes
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Batch, Pool, Preprocess
from finetune_mile.images.bad_images import BadImages
from finetune_mile.images.order import Indices, Mixture, Order, micro_batches
from finetune_mile.images.pipeline import Augmentation, Views, batches, default_workers
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.sources import load_data, load_unlabelled
from finetune_mile.images.splits import Pools, add_unlabelled, labelled_pools, one_label_each
from finetune_mile.images.truth import with_truth
from finetune_mile.learning.mixing import Mix, draw_mix
from finetune_mile.learning.optim import rate_at
from finetune_mile.measures.metrics import Measured, class_precisions, hits, measure, top_k
from finetune_mile.measures.predictions import pick_probe
from finetune_mile.measures.verdicts import edges
from finetune_mile.networks.heads import set_head
from finetune_mile.networks.parts import (
    choose_trainable,
    plain_head,
    recompute_blocks,
    set_drop_path,
    split_head,
    use_head,
)
from finetune_mile.networks.resnets import ResNet
from finetune_mile.networks.vits import join_options, split_options
from finetune_mile.training.plan import Plan, auto_rate, computing, labelled_per_batch, make_plan, second_steps
from finetune_mile.training.processes import Device, Signals, on_device, start

POOLS: tuple[Pool, ...] = ("labelled", "unlabelled", "all")


Split = Literal["train", "val", "test"]
# The views of the images of a split: augmented or plain, and the pool that a bad one is replaced from, as in `Views`.
ViewsOf = Callable[[ImageSet, Split, Augmentation | None, Indices | None], Views]


@dataclass(slots=True, kw_only=True)
class Model:
    """The network of a run, before its first step."""

    network: nn.Module  # complete: backbone and classifier
    learner: nn.Module  # what learns: the network itself, or a classifier for the features of its frozen trunk
    teacher: nn.Module | None  # one that is brought along, --teacher
    card: Card
    report: LoadReport

    @property
    def own_size(self) -> int | None:
        """The checkpoint's own image size; None for a file that does not show it."""
        size, network = self.card.preprocess.size, self.network
        small = isinstance(network, ResNet) and isinstance(network.conv1, nn.Conv2d) and network.conv1.stride == (1, 1)
        assumed = size == Preprocess().size and small  # a 3x3 stem sees small images, a card would say which
        return None if assumed else size

    def copied(self) -> Model:
        network = copy.deepcopy(self.network)
        learner = network if self.learner is self.network else copy.deepcopy(self.learner)
        return dataclasses.replace(self, network=network, learner=learner)

    def exported(self, learner: nn.Module) -> nn.Module:
        """The complete network of a trained learner; its classifier is plain."""
        network = copy.deepcopy(learner) if self.learner is self.network else self.network
        set_head(network, plain_head(learner))
        return network


@dataclass(slots=True, kw_only=True)
class Task:
    """What is learned: settings, images, which of them keep their label, and the phases."""

    recipe: Recipe  # with steps and precision spelled out
    requested: Recipe
    data: Data
    pools: Pools  # their images are the training images, without the labels that are not used
    plan: Plan
    preprocess: Preprocess
    bad: BadImages
    show: ViewsOf  # images, or features of a frozen trunk

    @property
    def num_classes(self) -> int:
        return len(self.data.classes)

    def views(self, split: Split, augmentation: Augmentation | None = None, pool: Indices | None = None) -> Views:
        """The views of a split; other arguments as in `Views`."""
        images = self.pools.images if split == "train" else images_of(self.data, split)
        return self.show(images, split, augmentation, pool)

    def order(self, pool: Pool) -> Order | Mixture:
        """The walk over a pool; over all images with a labelled share it is two walks, woven."""
        recipe = self.recipe

        def walk(members: Pool, number: Pool) -> Order:
            return Order(self.pools.indices[members], len(POOLS) * recipe.seed + POOLS.index(number))

        if pool != "all" or recipe.labelled_share is None:
            return walk(pool, pool)
        return Mixture(
            walk("labelled", "all"), walk("unlabelled", "unlabelled"),
            some=labelled_per_batch(recipe), of=recipe.batch_size,
        )  # fmt: skip

    @property
    def mixing(self) -> Callable[[int, int, int], Mix] | None:
        """How a step mixes the images of its batch; None: it does not."""
        mixup, cutmix = self.recipe.augment.mixup, self.recipe.augment.cutmix
        return partial(draw_mix, self.recipe.seed, mixup=mixup, cutmix=cutmix) if mixup or cutmix else None

    @property
    def rate(self) -> Callable[[int], float]:
        """The share of the base learning rate that a step (from 0) is taken with."""
        settings, plan = self.recipe.optimizer, self.plan
        return partial(
            rate_at, total_steps=plan.total_steps, schedule=settings.schedule, warmup=plan.steps(settings.warmup),
            milestones=tuple(plan.steps(m) for m in settings.milestones), gamma=settings.gamma,
            restart=plan.steps(settings.restart or 0),
        )  # fmt: skip

    def scores(
        self, outputs: Outputs, picked: Tensor, split: Split = "val", *, intervals: bool = False
    ) -> tuple[dict[str, float], Measured]:
        """Scores of logits (n, C) on the images of a split that are `picked` (n,).

        Images that could not be read do not count, and are counted.

        Returns:
            The scores, with their `intervals` where these are asked for; and what they are means of.
        """
        images, recipe = images_of(self.data, split), self.recipe
        good = outputs.readable
        logits, picked = outputs.rows[good], picked[good]
        measured = measure(
            logits, images.given[picked], None if images.truth is None else images.truth[picked],
            activation=recipe.activation, prediction_set=recipe.evaluate.prediction_set,
            main=None if images.main is None else images.main[picked],
            thresholds={**{f"{t:g}": t for t in recipe.evaluate.thresholds}, "rho": recipe.rho},
        )  # fmt: skip
        scores = measured.results()
        if self.data.extra_scores is not None and split == "val":
            scores |= self.data.extra_scores(self.probabilities(logits), picked)
        if intervals:
            scores |= edges(scores, measured)
        bad = {} if bool(good.all()) else {"bad_images": float((~good).sum())}
        return scores | bad, measured

    def score(self, outputs: Outputs, picked: Tensor) -> dict[str, float]:
        """Only the score that a run is judged by, and the images that it is of; arguments as in `scores`."""
        logits, given = outputs.rows[outputs.readable], self.data.val.given[picked[outputs.readable]]
        if given.ndim == 1:
            value = float(hits(top_k(logits, 1), given).nanmean())
        else:
            ranked = logits if self.recipe.activation == "sigmoid" else logits.log_softmax(1)
            value = 100 * float(class_precisions(ranked, [(given > 0, None)])[0].nanmean())
        found = {"images": float(len(logits)), "accuracy" if given.ndim == 1 else "map": value}
        return {key: value for key, value in found.items() if value == value}

    @property
    def evaluated(self) -> Tensor:
        """The validation images that evaluations during the run are of."""
        count = len(self.data.val)
        return pick_probe(count, self.recipe.evaluate.images or count)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (n, C), read as the recipe's activation says."""
        return logits.sigmoid() if self.recipe.activation == "sigmoid" else logits.softmax(1)


def images_of(data: Data, split: Split) -> ImageSet:
    """The images of a split."""
    images = {"train": data.train, "val": data.val, "test": data.test}[split]
    assert images is not None, f"there are no {split} images"
    return images


def second_task(task: Task) -> Task | None:
    """The second stage of a task: what it learns when the first stage is done; None where there is none.

    It needs images that came without a label, or `--semi all`, which counts those whose label --fraction hides.
    """
    second, recipe, pools = second_stage(task.recipe), task.recipe, task.pools
    came_without = recipe.unlabelled is not None or bool((one_label_each(task.data.train.given) < 0).any())
    if second is None or not len(pools.indices["unlabelled"]) or (recipe.semi == "none" and not came_without):
        return None
    if second.epochs == "auto":
        steps = second_steps(second, task.plan.total_steps * recipe.batch_size, len(pools.indices["unlabelled"]))
        second = second.model_copy(update={"steps": steps, "epochs": None})
    return unseen(task, with_rate(second, pools), pools)


def second_cost(task: Task) -> float:
    """The computing of a second stage, in steps of the first one; 0 where there is none."""
    then = second_task(task)
    return 0.0 if then is None else then.plan.total_steps * computing(then.recipe) / task.recipe.batch_size


def with_rate(recipe: Recipe, pools: Pools) -> Recipe:
    """A recipe whose learning rate is a number."""
    if recipe.optimizer.lr != "auto":
        return recipe
    rate = auto_rate(len(pools.indices["labelled"]), frozen=recipe.trunk == "frozen")
    return recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"lr": rate})})


def unseen(task: Task, recipe: Recipe, pools: Pools) -> Task:
    """The same task with another recipe or other labels; it is not evaluated while it trains."""
    silent = {"evaluate": recipe.evaluate.model_copy(update={"images": 0}), "track": "none", "patience": None}
    sizes = {name: len(members) for name, members in pools.indices.items()}
    plan = make_plan(recipe, sizes)
    recipe = recipe.model_copy(update={"steps": plan.total_steps, "epochs": None, **silent})
    return dataclasses.replace(task, recipe=recipe, pools=pools, plan=plan)


def image_views(
    preprocess: Preprocess, bad: BadImages, seed: int, images: ImageSet, split: Split,
    augmentation: Augmentation | None, pool: Indices | None,
) -> Views:  # fmt: skip
    """What a task that shows images has as `show`; its first three arguments are bound."""
    return Views(images, preprocess, augmentation, seed, pool=pool, on_bad=partial(bad.add, split, images.ids))


def feed(task: Task, device: Device, pool: Pool, first_step: int) -> Iterator[Batch]:
    """This process's parts of the batches of a pool, from a step of that pool on, without end."""
    recipe, augmentation = task.recipe, Augmentation(**task.recipe.augment.of_one_image)
    views = task.views("train", augmentation, task.pools.indices[pool])
    if recipe.views == "weak-strong":
        scale = recipe.augment.weak_scale or augmentation.scale
        views.weak = Augmentation(crop=augmentation.crop, scale=scale, shift=augmentation.shift, flip=augmentation.flip)
    keys = micro_batches(
        task.order(pool), first_step=first_step, batch_size=recipe.batch_size, accumulate=int(recipe.accumulate),
        rank=device.accelerator.process_index, world=device.accelerator.num_processes,
    )  # fmt: skip
    return batches(views, keys, workers=device.workers, pin=device.pin)


def on_training_images(task: Task, device: Device, network: nn.Module, picked: Indices) -> tuple[Tensor, Tensor]:
    """A network's outputs and the given labels of some training images, without those that cannot be read."""
    rows, good = device.outputs(network, task.views("train"), picked)
    return rows[good], task.pools.images.given[torch.from_numpy(picked)][good]


def set_up(
    recipe: Recipe, init: Init, teacher_init: Init | None, path: Path, signals: Signals, data: Data | None = None
) -> tuple[Task, Model, Device]:
    """Start the processes, open the data, lay out the phases and load the network of a recipe; nothing is written.

    `data`: the images of the recipe, where they are open already.
    """
    requested, recipe = recipe, on_device(recipe)
    accelerator = start(
        precision=recipe.precision, seed=recipe.seed, track=recipe.track, project=str(path), broadcast_buffers=False
    )
    _check_parts(recipe, accelerator)
    data, pools, plan = lay_out(recipe, data)
    recipe = with_rate(recipe, pools)
    model, preprocess = _load(recipe, init, teacher_init, data.classes)
    device = Device(
        accelerator=accelerator, signals=signals, batch_size=recipe.batch_size,
        workers=wanted_workers(recipe.workers, data, accelerator),
        layout=torch.channels_last if recipe.channels_last else torch.contiguous_format,
    )  # fmt: skip
    if recipe.accumulate == "auto":
        fitting = 1 if recipe.trunk == "frozen" else _fitting_parts(recipe, plan, model, preprocess.size, device)
        recipe = recipe.model_copy(update={"accumulate": fitting})
    recipe = recipe.model_copy(update={"steps": plan.total_steps, "epochs": None})
    bad = BadImages(path / "bad_images.csv", recipe.data)
    task = Task(
        recipe=recipe, requested=requested, data=data, pools=pools, plan=plan, preprocess=preprocess, bad=bad,
        show=partial(image_views, preprocess, bad, recipe.seed),
    )  # fmt: skip
    if (second := second_task(task)) is not None:
        _check_parts(second.recipe, accelerator)
    return task, model, device


def _check_parts(recipe: Recipe, accelerator: Accelerator) -> None:
    """Can a batch be shared out?"""
    parts = accelerator.num_processes * (1 if recipe.accumulate == "auto" else recipe.accumulate)
    if recipe.batch_size % parts:
        raise Problem(f"--batch-size {recipe.batch_size} must be a multiple of processes x accumulate = {parts}")
    if (recipe.augment.mixup or recipe.augment.cutmix) and recipe.batch_size // parts % 2:
        raise Problem(
            f"--batch-size {recipe.batch_size}: augment.mixup and augment.cutmix mix pairs of images; use a multiple "
            f"of 2 x processes x accumulate = {2 * parts}"
        )
    if recipe.sync_batch_norm and accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        raise Problem("sync_batch_norm: true needs GPUs; for several processes on CPUs use --set sync_batch_norm=false")


def _load(recipe: Recipe, init: Init, teacher_init: Init | None, classes: tuple[str, ...]) -> tuple[Model, Preprocess]:
    """The network of a recipe, ready to learn, and the input that it expects."""
    network, card, report = load_network(
        init, arch=recipe.arch, num_classes=classes, head_bias=recipe.head_bias,
        head_weight=recipe.head_weight, keep_head=recipe.keep_head, head_from=recipe.head_from,
    )  # fmt: skip
    report = _fit_size(network, report, recipe.size)
    if recipe.channels_last:
        network.to(memory_format=torch.channels_last)
    own = {"size": recipe.size, "crop": recipe.crop, "mean": recipe.mean, "std": recipe.std}
    preprocess = card.preprocess.model_copy(update={key: value for key, value in own.items() if value is not None})
    teacher = None if teacher_init is None else load_teacher(teacher_init, classes=classes, seen=preprocess)
    learner = network
    if recipe.trunk == "frozen":
        learner = split_head(network)[1]
        use_head(learner, recipe.head, recipe.head_weight)
    else:
        if recipe.trunk != "all":
            choose_trainable(network, recipe.trunk)
        if recipe.drop_path:
            set_drop_path(network, recipe.drop_path)
        if recipe.gradient_checkpointing:
            recompute_blocks(network)
    return Model(network=network, learner=learner, teacher=teacher, card=card, report=report), preprocess


def wanted_workers(wanted: int | None, data: Data, accelerator: Accelerator) -> int:
    """Loader processes of this process: those that are asked for, else by the cores."""
    if wanted is not None:
        return wanted
    return 0 if data.train.in_memory else default_workers(local_processes(accelerator.num_processes))


def _fit_size(network: nn.Module, report: LoadReport, size: int | None) -> LoadReport:
    """Resize a vision transformer's positions once for the run's image size, in place; the name says it."""
    resize = getattr(network, "set_image_size", None)
    if resize is None or size is None or network.patch_embed.img_size == (size, size):  # type: ignore[union-attr]
        return report
    resize(size)
    name, options = split_options(report.arch)
    return dataclasses.replace(report, arch=join_options(name, {**options, "img": str(size)}))


def _fitting_parts(recipe: Recipe, plan: Plan, model: Model, size: int, device: Device) -> int:
    """For `accumulate: auto`: the fewest parts that fit into the smallest GPU; 1 on a CPU."""
    from finetune_mile.training import memory

    own = memory.device_memory(device.accelerator.device)
    if own is None:
        return 1
    smallest = min(gather_object([own]))
    need = memory.need_of(recipe, plan.phases, model.learner, model.teacher, size)
    batch = recipe.batch_size // device.accelerator.num_processes
    return need.parts(batch, smallest, recipe) or 1  # where nothing fits, the step says what to do


def lay_out(recipe: Recipe, data: Data | None = None) -> tuple[Data, Pools, Plan]:
    """The data of a recipe (opened, unless given), which of its images keep their label, and the phases."""
    data = data or load_data(recipe.data)
    if recipe.truth is not None:
        data = with_truth(data, recipe.truth)
    if "environments" in recipe.method_value.needs and data.train.environment is None:
        raise Problem(f"--method {recipe.method} needs images from several environments, such as colored-mnist:DIR; "
                      f"--data {recipe.data} has none")  # fmt: skip
    pools = labelled_pools(
        data, fraction=recipe.fraction, seed=recipe.seed, split=recipe.split, calibration=recipe.calibration
    )
    if recipe.unlabelled is not None:
        extra = load_unlabelled(recipe.unlabelled)
        pools = add_unlabelled(pools, extra.train)
        unreadable = Counter(data.unreadable) + Counter(extra.unreadable)
        data = dataclasses.replace(data, train=pools.images, unreadable=unreadable)
    sizes = {name: len(members) for name, members in pools.indices.items()}
    return data, pools, make_plan(recipe, sizes)
