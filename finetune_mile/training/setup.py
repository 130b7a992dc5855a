"""A run before its first step: recipe, device, images, phases and network, and what the loop asks of them."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from finetune_mile.checkpoints.cards import Card
from finetune_mile.checkpoints.classifier import load_teacher
from finetune_mile.checkpoints.init import Init
from finetune_mile.checkpoints.loading import LoadReport, load_network
from finetune_mile.compute.passes import Outputs, outputs_of
from finetune_mile.config.schema import Recipe
from finetune_mile.core.cores import local_processes
from finetune_mile.core.problems import Failed, Problem
from finetune_mile.core.types import Batch, Pool, Preprocess
from finetune_mile.images.index import BadImages, Data, ImageSet
from finetune_mile.images.order import Indices, Mixture, Order, micro_batches
from finetune_mile.images.pipeline import Augmentation, Readers, Views, batches, default_workers, normalise
from finetune_mile.images.sources import load_data, load_unlabelled
from finetune_mile.images.splits import Pools, add_unlabelled, labelled_pools
from finetune_mile.images.truth import with_truth
from finetune_mile.learning.mixing import Mix, draw_mix
from finetune_mile.learning.optim import rate_at
from finetune_mile.measures.metrics import Measured, measure
from finetune_mile.measures.predictions import pick_probe
from finetune_mile.measures.verdicts import edges, map_edges, sets_of
from finetune_mile.networks.heads import set_head
from finetune_mile.networks.parts import choose_trainable, plain_head, recompute_blocks, set_drop_path
from finetune_mile.networks.resnets import ResNet
from finetune_mile.networks.vits import join_options, split_options
from finetune_mile.training.plan import Plan, auto_rate, labelled_per_batch, make_plan
from finetune_mile.training.processes import Signals, on_device, start, stop_together

PROBE_IMAGES = 1000
POOLS: tuple[Pool, ...] = ("labelled", "unlabelled", "all")


@dataclass(slots=True, kw_only=True)
class Viewer:
    """Shows the images of a data set to a network, on this device."""

    accelerator: Accelerator
    signals: Signals
    data: Data
    preprocess: Preprocess
    bad: BadImages
    seed: int
    batch_size: int  # of a forward pass, over all processes
    wanted_workers: int | None  # loader processes; None: from the cores
    layout: torch.memory_format = torch.contiguous_format  # of the network's input
    _scale: tuple[Tensor, Tensor] | None = field(default=None, init=False)  # mean and std (3, 1, 1) on the device
    _readers: Readers | None = field(default=None, init=False)

    @property
    def workers(self) -> int:
        """Loader processes of this process."""
        if self.wanted_workers is not None:
            return self.wanted_workers
        return 0 if self.data.train.in_memory else default_workers(local_processes(self.accelerator.num_processes))

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, H, W) to the network's input, on the device."""
        device = self.accelerator.device
        if self._scale is None:  # once: a copy from the host in each step would wait for the device
            mean, std = (torch.tensor(v).view(3, 1, 1).to(device) for v in (self.preprocess.mean, self.preprocess.std))
            self._scale = mean, std
        return normalise(images.to(device, non_blocking=True, memory_format=self.layout), *self._scale)

    @property
    def pin(self) -> bool:
        """Do batches come in memory that a GPU copies from while it computes?"""
        return bool(self.accelerator.device.type == "cuda")

    @property
    def readers(self) -> Readers:
        """The loader processes of evaluation and labelling."""
        if self._readers is None:
            share = max(self.batch_size // self.accelerator.num_processes, 1)
            self._readers = Readers(workers=self.workers, pin=self.pin, batch_size=share)
        return self._readers

    def get_ready(self) -> None:
        """With a frozen trunk: compute the features, before a progress bar is shown."""

    def views(self, images: ImageSet, augmentation: Augmentation | None = None, pool: Indices | None = None) -> Views:
        """The views of training, validation or test images; arguments as in `Views`."""
        split = "val" if images is self.data.val else "test" if images is self.data.test else "train"
        on_bad = partial(self.bad.add, split, images.ids)
        return Views(images, self.preprocess, augmentation, self.seed, pool=pool, on_bad=on_bad)

    def tick(self) -> None:
        """Between batches outside of training: stop, where no other process waits for this one."""
        if self.accelerator.num_processes == 1:
            self.signals.raise_if_caught()

    def outputs(
        self, network: nn.Module, images: ImageSet, indices: Indices, tick: Callable[[], None] | None = None
    ) -> Outputs:
        """A bare network's outputs (n, C) on the plain view of some images."""
        outputs = outputs_of(
            self.accelerator, network, self.views(images), indices, self.prepare, self.readers, tick or self.tick
        )
        stop_together(self.accelerator, self.signals, 0)
        if bool(outputs.rows[outputs.readable].isnan().all(1).any()):
            raise Failed("the network's outputs are not numbers any more; lower --lr, or set optimizer.clip")
        return outputs


@dataclass(slots=True, kw_only=True)
class Setup:
    """A run before its first step."""

    recipe: Recipe  # with steps and precision spelled out
    requested: Recipe
    viewer: Viewer
    pools: Pools
    plan: Plan
    network: nn.Module
    teacher: nn.Module | None  # one that is brought along, --teacher
    card: Card
    report: LoadReport
    complete: nn.Module | None = None  # with a frozen trunk: the backbone and a classifier, not trained
    measured: Measured | None = None  # when the run is finished: what its scores are means of

    @property
    def accelerator(self) -> Accelerator:
        return self.viewer.accelerator

    @property
    def data(self) -> Data:
        return self.viewer.data

    @property
    def own_size(self) -> int | None:
        """The checkpoint's own image size; None for a file that does not show it."""
        size, network = self.card.preprocess.size, self.complete or self.network
        small = isinstance(network, ResNet) and isinstance(network.conv1, nn.Conv2d) and network.conv1.stride == (1, 1)
        assumed = size == Preprocess().size and small  # a 3x3 stem sees small images, a card would say which
        return None if assumed else size

    @property
    def num_classes(self) -> int:
        return len(self.data.classes)

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

    def feed(self, pool: Pool, first_step: int) -> Iterator[Batch]:
        """This process's parts of the batches of a pool, from a step of that pool on, without end."""
        recipe, augmentation = self.recipe, Augmentation(**self.recipe.augment.of_one_image)
        views = self.viewer.views(self.pools.images, augmentation, self.pools.indices[pool])
        if recipe.views == "weak-strong":
            views.weak = Augmentation(
                crop=augmentation.crop, scale=augmentation.scale, shift=augmentation.shift, flip=augmentation.flip
            )
        keys = micro_batches(
            self.order(pool), first_step=first_step, batch_size=recipe.batch_size, accumulate=int(recipe.accumulate),
            rank=self.accelerator.process_index, world=self.accelerator.num_processes,
        )  # fmt: skip
        return batches(views, keys, workers=self.viewer.workers, pin=self.viewer.pin)

    @property
    def mixing(self) -> Callable[[int, int, int], Mix] | None:
        """How a step mixes the images of its batch; None: it does not."""
        mixup, cutmix = self.recipe.augment.mixup, self.recipe.augment.cutmix
        return partial(draw_mix, self.recipe.seed, mixup=mixup, cutmix=cutmix) if mixup or cutmix else None

    def rate(self, step: int) -> float:
        """The share of the base learning rate that step `step` (from 0) is taken with."""
        settings, plan = self.recipe.optimizer, self.plan
        return rate_at(
            step, total_steps=plan.total_steps, schedule=settings.schedule, warmup=plan.steps(settings.warmup),
            milestones=tuple(plan.steps(m) for m in settings.milestones), gamma=settings.gamma,
            restart=plan.steps(settings.restart or 0),
        )  # fmt: skip

    def evaluate(self, network: nn.Module, limit: int | None, images: ImageSet | None = None) -> dict[str, float]:
        """Scores on the validation images, or on `images`; on all, or on `limit` of them."""
        val = self.data.val if images is None else images
        picked = pick_probe(len(val), limit or len(val))
        return self.scores(self.viewer.outputs(network, val, picked.numpy()), picked, images)[0]

    def scores(
        self, outputs: Outputs, picked: Tensor, images: ImageSet | None = None, *, intervals: bool = False
    ) -> tuple[dict[str, float], Measured]:
        """Scores of logits (n, C) on the validation images, or on `images`, that are `picked` (n,).

        Images that could not be read do not count, and are counted.

        Returns:
            The scores, with their `intervals` where these are asked for; and what they are means of.
        """
        val, recipe = self.data.val if images is None else images, self.recipe
        good = outputs.readable
        logits, picked = outputs.rows[good], picked[good]
        measured = measure(
            logits, val.given[picked], None if val.truth is None else val.truth[picked], activation=recipe.activation,
            prediction_set=recipe.evaluate.prediction_set, rho=recipe.rho,
            main=None if val.main is None else val.main[picked], thresholds=recipe.evaluate.thresholds,
        )  # fmt: skip
        scores = measured.results()
        if self.data.extra_scores is not None and images is None:
            scores |= self.data.extra_scores(self.probabilities(logits), picked)
        if intervals:
            ranked = logits if recipe.activation == "sigmoid" else logits.log_softmax(1)
            labels = sets_of(val.given, val.truth)[picked]
            scores |= edges(scores, measured.table) | map_edges(ranked, labels)
        bad = {} if bool(good.all()) else {"bad_images": float((~good).sum())}
        return scores | bad, measured

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (n, C), read as the recipe's activation says."""
        return logits.sigmoid() if self.recipe.activation == "sigmoid" else logits.softmax(1)

    def exported(self, learner: nn.Module) -> nn.Module:
        """The complete network of a learner, perhaps a classifier on features of a frozen trunk; its head is plain."""
        network = copy.deepcopy(learner) if self.complete is None else self.complete
        set_head(network, plain_head(learner))
        return network

    def probe(self, network: nn.Module) -> tuple[Tensor, Tensor]:
        """Logits and given labels of the labelled training images that every generation is looked at on."""
        labelled = self.pools.indices["labelled"]
        return self.training_logits(network, labelled[pick_probe(len(labelled), PROBE_IMAGES).numpy()])

    def calibrate(self, network: nn.Module) -> tuple[Tensor, Tensor]:
        """Logits and given labels of the held-out images that `auto` decides on."""
        return self.training_logits(network, self.pools.calibration)

    def training_logits(self, network: nn.Module, picked: Indices) -> tuple[Tensor, Tensor]:
        """Logits and given labels of some training images, without those that cannot be read."""
        logits, good = self.viewer.outputs(network, self.pools.images, picked)
        return logits[good], self.pools.images.given[torch.from_numpy(picked)][good]


def set_up(
    recipe: Recipe, init: Init, teacher_init: Init | None, path: Path, signals: Signals, data: Data | None = None
) -> Setup:
    """Start the processes, open the data, lay out the phases and load the network of a recipe; nothing is written.

    `data`: the images of the recipe, where they are open already.
    """
    requested, (recipe, precision) = recipe, on_device(recipe)
    accelerator = start(
        precision=precision, seed=recipe.seed, track=recipe.track, project=str(path), broadcast_buffers=False
    )
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
    data, pools, plan = lay_out(recipe, data)
    if recipe.optimizer.lr == "auto":
        rate = auto_rate(len(pools.indices["labelled"]), frozen=recipe.trunk == "frozen")
        recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"lr": rate})})
    network, card, report = load_network(
        init, arch=recipe.arch, num_classes=len(data.classes), head_bias=recipe.head_bias,
        head_weight=recipe.head_weight, keep_head=recipe.keep_head, head_from=recipe.head_from,
    )  # fmt: skip
    report = _fit_size(network, report, recipe.size)
    if recipe.channels_last:
        network.to(memory_format=torch.channels_last)
    own = {"size": recipe.size, "crop": recipe.crop, "mean": recipe.mean, "std": recipe.std}
    preprocess = card.preprocess.model_copy(update={key: value for key, value in own.items() if value is not None})
    teacher = None if teacher_init is None else load_teacher(teacher_init, classes=data.classes, seen=preprocess)
    viewer = Viewer(
        accelerator=accelerator, signals=signals, data=data, preprocess=preprocess, seed=recipe.seed,
        bad=BadImages(path / "bad_images.csv", recipe.data), batch_size=recipe.batch_size,
        wanted_workers=recipe.workers, layout=torch.channels_last if recipe.channels_last else torch.contiguous_format,
    )  # fmt: skip
    complete = None
    if recipe.trunk == "frozen":
        from finetune_mile.training.features import freeze

        complete = network
        viewer, network = freeze(viewer, network, recipe, report, pools)
    elif recipe.trunk != "all":
        choose_trainable(network, recipe.trunk)
    if recipe.drop_path and complete is None:
        set_drop_path(network, recipe.drop_path)
    if recipe.gradient_checkpointing and complete is None:
        recompute_blocks(network)
    if recipe.accumulate == "auto":
        fitting = 1 if complete is not None else _fitting_parts(recipe, plan, network, teacher, viewer)
        recipe = recipe.model_copy(update={"accumulate": fitting})
    return Setup(
        recipe=recipe.model_copy(update={"steps": plan.total_steps, "epochs": None}), requested=requested,
        viewer=viewer, pools=pools, plan=plan, network=network, teacher=teacher, card=card, report=report,
        complete=complete,
    )  # fmt: skip


def _fit_size(network: nn.Module, report: LoadReport, size: int | None) -> LoadReport:
    """Resize a vision transformer's positions once for the run's image size, in place; the name says it."""
    resize = getattr(network, "set_image_size", None)
    if resize is None or size is None or network.patch_embed.img_size == (size, size):  # type: ignore[union-attr]
        return report
    resize(size)
    name, options = split_options(report.arch)
    return dataclasses.replace(report, arch=join_options(name, {**options, "img": str(size)}))


def _fitting_parts(recipe: Recipe, plan: Plan, network: nn.Module, teacher: nn.Module | None, viewer: Viewer) -> int:
    """For `accumulate: auto`: the fewest parts that fit into the smallest GPU; 1 on a CPU."""
    from finetune_mile.training import memory

    accelerator, own = viewer.accelerator, memory.device_memory(viewer.accelerator.device)
    if own is None:
        return 1
    smallest = min(gather_object([own]))
    need = memory.need_of(recipe, plan.phases, network, teacher, viewer.preprocess.size)
    batch = recipe.batch_size // accelerator.num_processes
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
