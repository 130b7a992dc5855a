"""Features of a backbone, computed once and kept in a folder: `embed`, `probe` and runs with a frozen trunk read them.

A row counts only once its byte is written, after the row itself has reached the disk: a killed run continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from finetune_mile.checkpoints.loading import LoadReport
from finetune_mile.compute.passes import Outputs, keys_of, show, stream
from finetune_mile.compute.rows import (
    BAD,
    Dtype,
    Writer,
    begin,
    check_room,
    clear,
    examined,
    kept_stores,
    key_of,
    preallocate,
    reuse,
    unfit,
)
from finetune_mile.compute.rows import DONE as DONE
from finetune_mile.compute.rows import Split as Split
from finetune_mile.compute.rows import Store as Store
from finetune_mile.core.console import progress
from finetune_mile.core.files import cache, locked, writing
from finetune_mile.core.in_memory import SCHEME
from finetune_mile.core.problems import BadImage, Failed, Problem
from finetune_mile.core.types import Batch, Pool, Preprocess
from finetune_mile.images.bad_images import BadImages
from finetune_mile.images.order import Indices, Key
from finetune_mile.images.pipeline import Augmentation, Readers, Views
from finetune_mile.images.readers import Files, Joined, Picked, TarFiles
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.sources.hf import Rows
from finetune_mile.learning.roles import weights_hash
from finetune_mile.networks.parts import split_head
from finetune_mile.training.processes import Device, from_first, stop_together
from finetune_mile.training.task import Model, Task, image_views, images_of
from finetune_mile.training.task import Split as TaskSplit

FORMAT = 1  # of a store; another number is another key
FLUSH = 256  # images of a process between two records on disk
ROWS_AT_ONCE = 4096  # features that a classifier sees at a time in evaluation
VIEW = Augmentation(crop="random-resized", scale=(0.35, 1.0), shift=0, flip=True)
VIEW_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSet:
    """Which features: all that decides the numbers in a store."""

    data: Data
    network: nn.Module  # images (B, 3, H, W) to features (B, D)
    arch: str  # its name, with all that its weights do not say, such as the padding
    preprocess: Preprocess  # the input that it expects
    dtype: Dtype = "float16"  # on disk
    precision: str = "no"  # of the accelerator, where they are computed in mixed precision; no: in float32
    contents: bool = False  # images are identified by their contents, instead of path, size and modification time

    def depends_on(self) -> dict[str, Any]:
        """What a store notes of it."""
        arch, size, contents = self.arch, self.preprocess.size, self.contents
        if arch.startswith(f"{SCHEME}:"):  # the code of a user's own network may change while its name and weights stay
            noise = torch.rand(2, 3, size, size, generator=torch.Generator())
            outputs = show(self.network, noise.to(_place(self.network))).float().cpu().numpy()
            arch += f", outputs {hashlib.sha256(outputs.tobytes()).hexdigest()[:16]}"
        return {
            "format": FORMAT, "network": arch, "weights": weights_hash(self.network),
            "preprocess": self.preprocess.model_dump(mode="json"), "dtype": self.dtype, "precision": self.precision,
            "images": {
                "by": "contents" if contents else "path, size and modification time",
                "train": images_hash(self.data.train, contents=contents),
                "val": images_hash(self.data.val, contents=contents),
            },
        }  # fmt: skip


def embed(
    device: Device, wanted: FeatureSet, *, about: Mapping[str, str], path: Path | None = None,
    rows: Mapping[Split, Indices] | None = None, views: int = 0,
) -> Store:  # fmt: skip
    """Compute the features that are not on disk yet; all processes call it.

    Args:
        device: where to compute.
        wanted: which features.
        about: --init and --data, for people.
        path: the store; None: one in the cache that is named by its key.
        rows: the images that are needed; None: all.
        views: augmented views of the training images beside the plain one.
    """
    accelerator, data = device.accelerator, wanted.data
    wanted.network.to(accelerator.device).eval()
    needed = rows or {"train": np.arange(len(data.train)), "val": np.arange(len(data.val))}
    parts: list[tuple[Split, int]] = [(split, 0) for split in needed]
    parts += [("train", view) for view in range(1, views + 1)]

    def begin_store() -> tuple[Store, list[tuple[Split, int, Indices]]]:
        facts, likes = wanted.depends_on(), _likes(wanted)
        store = Store(path or cache() / "features" / key_of(facts)[:24])
        left = partial(_missing, store, parts, needed, likes)
        why = unfit(store, facts)
        todo, damage = list[tuple[Split, int, Indices]](), list[str]()
        if not why:
            todo, damage = left()
        if path is not None and (why or damage):  # the user's own folder
            raise Problem(f"{path}: {why}" if why else f"{damage[0]}; remove {path}, then embed again")
        if why or todo or path is not None:
            held.enter_context(_locked(store))
            if why := unfit(store, facts):
                damage = [f"{store.path}: the folder {why.partition(';')[0]}"]
                clear(store)
            for sentence in damage:
                sys.stderr.write(f"warning: kept features, {sentence}. They are computed again\n")
            counts = {split: len(likes[split]) for split in likes}
            begin(store, {"key": key_of(facts), "images": counts, "depends_on": facts, **about}, data)
            todo, _ = left()  # another process may have been at work until now
            check_room(store, [(likes[split], indices) for split, _, indices in todo])
            for split, view, _ in todo:
                preallocate(store, split, view, likes[split])
            if _copy_known(store, facts, data, todo, device.tick):
                todo, _ = left()
        return store, todo

    with contextlib.ExitStack() as held:
        store, todo = from_first(begin_store)
        total = sum(len(indices) for _, _, indices in todo)
        with progress(f"features of {about.get('init', '')}", total, quiet=not accelerator.is_main_process) as advance:
            bad = BadImages(store.path / "bad_images.csv", about["data"])
            for part in todo:
                _fill(device, wanted, store, part, bad, advance)
        accelerator.wait_for_everyone()
    return store


def _likes(wanted: FeatureSet) -> dict[Split, npt.NDArray[Any]]:
    """Dtype and shape (N, D) of the features of each split; they take no memory."""
    row = np.zeros((1, _width(wanted)), dtype=wanted.dtype)
    sets: dict[Split, ImageSet] = {"train": wanted.data.train, "val": wanted.data.val}
    return {split: np.broadcast_to(row, (len(images), row.shape[1])) for split, images in sets.items()}


def _missing(
    store: Store, parts: list[tuple[Split, int]], needed: Mapping[Split, Indices],
    likes: Mapping[Split, npt.NDArray[Any]],
) -> tuple[list[tuple[Split, int, Indices]], list[str]]:  # fmt: skip
    """The splits and views of which some needed images are not on disk, or damaged; these images; and the damage."""
    left, damage = [], []
    for split, view in parts:
        state, why = examined(store, split, view, likes[split], needed[split])
        left.append((split, view, needed[split][state != DONE]))
        damage += [f"{store.file(split, view, 'npy')}: {why}"] if why else []
    return [part for part in left if len(part[2])], damage


@contextlib.contextmanager
def _locked(store: Store) -> Iterator[None]:
    """Make the folder of a store, and keep other processes out of it."""
    with writing(store.path):
        store.path.mkdir(parents=True, exist_ok=True)
    sentence = f"{store.path}: another process is computing these features; wait for it, then run again"
    with locked(store.path / ".lock", sentence):
        yield


def _copy_known(
    store: Store, facts: Mapping[str, Any], data: Data, todo: list[tuple[Split, int, Indices]],
    tick: Callable[[], None],
) -> int:  # fmt: skip
    """Copy the features of photos that were computed before, in another list of photos; returns how many."""
    plain = [(split, indices) for split, view, indices in todo if view == 0]
    found = sum(reuse(store, facts, split, images_of(data, split), indices, tick) for split, indices in plain)
    if found:
        known = sum(len(indices) for _, indices in plain)
        sys.stderr.write(f"features of {found:,} of {known:,} photos were computed before and are copied\n")
    return found


def stored(wanted: FeatureSet, train: Indices) -> Store | None:
    """The cached features of some training images and of all validation images, where they are complete.

    They may have another dtype. Images are not even listed if no store has as many of them, the network and the
    preprocessing.
    """
    facts, data = None, wanted.data
    alike = {"images": {"train": len(data.train), "val": len(data.val)}, "network": wanted.arch}
    alike["preprocess"] = wanted.preprocess.model_dump(mode="json")
    rows: dict[Split, Indices] = {"train": train, "val": np.arange(len(data.val))}
    for store in kept_stores():
        note = store.note()
        known = note["depends_on"]
        about = known | {"images": note.get("images")}
        if about | alike != about or known.get("dtype") not in get_args(Dtype):
            continue
        facts = facts or wanted.depends_on()
        if facts | {"dtype": known["dtype"]} != known:
            continue
        likes = _likes(dataclasses.replace(wanted, dtype=known["dtype"]))
        states = (examined(store, split, 0, likes[split], needed)[0] for split, needed in rows.items())
        if all(bool(np.isin(state, (DONE, BAD)).all()) for state in states):
            return store
    return None


# ------------------------------------------------------------------------------------------ runs with a frozen trunk


class FeatureViews(Views):
    """Rows of features in the place of images: an image that could not be read is replaced as in `Views`."""

    def __init__(
        self, features: npt.NDArray[Any], readable: npt.NDArray[np.bool_], images: ImageSet, *others: Any, **more: Any
    ) -> None:
        """Take features (N, D) of all images, and which could be read (N,); other arguments as in `Views`."""
        self.features, self.readable = features, readable
        super().__init__(dataclasses.replace(images, content=partial(_row, features, readable)), *others, **more)

    def read(self, keys: list[Key]) -> tuple[Batch, dict[int, str]]:
        bad: dict[int, str] = {}
        shown = [sample for _, sample in keys]
        rows = torch.from_numpy(self.features[shown].astype(np.float32))
        for place in np.flatnonzero(~self.readable[shown]).tolist():
            row, shown[place] = self._read(shown[place], bad)
            rows[place] = row if row.ndim == 1 else 0.0
        index = torch.tensor(shown)
        return Batch(rows, self.images.given[index], index), bad

    __getitem__ = read


def _row(features: npt.NDArray[Any], readable: npt.NDArray[np.bool_], index: int) -> Tensor:
    if not readable[index]:
        raise BadImage("it could not be read when its features were computed")
    return torch.from_numpy(features[index].astype(np.float32))


def on_features(task: Task, model: Model, device: Device, *, scored: bool = True) -> tuple[Task, Device]:
    """With a frozen trunk: the same task on features, computed now where they are not kept; else nothing changes.

    Args:
        task: on images.
        model: the checkpoint.
        device: where to compute.
        scored: False: the features of the validation images are not needed.
    """
    recipe, pools = task.recipe, task.pools
    if recipe.trunk != "frozen":
        return task, device
    trunk, _ = split_head(model.network)
    drawn: tuple[Pool, ...] = ("labelled",) if recipe.semi == "none" else ("labelled", "all")
    train = np.unique(np.concatenate([pools.calibration, *(pools.indices[pool] for pool in drawn)]))
    rows: dict[Split, Indices] = {"train": train}
    if scored:
        rows["val"] = np.arange(len(task.data.val))
    wanted = FeatureSet(  # in float32, as `embed` and `probe` do by default
        data=task.data, network=trunk, arch=full_name(model.report), preprocess=task.preprocess,
        dtype=recipe.feature_dtype,
    )  # fmt: skip
    store = embed(device, wanted, about={"init": recipe.init, "data": recipe.data}, rows=rows)

    def show_rows(images: ImageSet, split: TaskSplit, augmentation: Augmentation | None, pool: Indices | None) -> Views:
        shown = task.show(images, split, augmentation, pool)
        if split == "test":  # shown once, so their features are not kept
            computed = device.outputs(trunk, shown, np.arange(len(shown.images)))
            features, readable = computed.rows.numpy(), computed.readable.numpy()
        else:
            features, readable = store.features(split), store.state(split) == DONE
        return FeatureViews(
            features, readable, shown.images, shown.preprocess, augmentation, shown.seed, pool=pool,
            on_bad=shown.on_bad,
        )  # fmt: skip

    large, weights = max(device.batch_size, ROWS_AT_ONCE), sum(each.numel() for each in model.learner.parameters())
    place = dataclasses.replace(device, batch_size=large, workers=0, step_work=recipe.batch_size * weights)
    return dataclasses.replace(task, show=show_rows), place


def full_name(report: LoadReport) -> str:
    """A network's name with what its weights do not say."""
    return f"{report.arch}, {report.padding} padding"


# ---------------------------------------------------------------------------------------- what features depend on


def _place(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def images_hash(images: ImageSet, *, contents: bool) -> str:
    """A hash over the ids, and over where the images are and when they changed, or over their contents.

    Images that are in no file of their own, such as those of the demo, are always hashed by their contents.
    """
    stamp = None if contents else stamper(images.content)
    digest = hashlib.sha256()
    for index, name in enumerate(images.ids):
        mark = _content(images, index) if stamp is None else stamp(index).encode("utf-8", "surrogateescape")
        digest.update(b"%s\0%s\n" % (name.encode("utf-8", "surrogateescape"), mark))
    return digest.hexdigest()


def stamper(reader: Callable[[int], bytes | Tensor]) -> Callable[[int], str] | None:
    """A function from an image's index to its place, size and modification time; None where there is no file."""
    if isinstance(reader, Picked):
        inner, rows = stamper(reader.inner), reader.rows
        return None if inner is None else lambda index: inner(int(rows[index]))
    if isinstance(reader, Joined):
        first, rest, count = stamper(reader.first), stamper(reader.rest), reader.count
        return None if first is None or rest is None else Joined(first, count, rest)
    if isinstance(reader, Files):
        root, names = Path(reader.root).resolve(), reader.names
        return lambda index: _stamp(f"{root}/{names[index]}")
    if isinstance(reader, TarFiles):
        which, offsets, sizes = reader.which, reader.offsets, reader.sizes
        tars = [_stamp(path) for path in reader.paths]
        return lambda index: f"{tars[int(which[index])]} {offsets[index]} {sizes[index]}"
    if isinstance(reader, Rows) and reader.files:
        table = "\n".join(_stamp(path) for path in reader.files)
        mark = hashlib.sha256(table.encode()).hexdigest()
        return lambda index: f"{mark} {index} {_stamp(reader.path(index))}"
    return None


def _stamp(path: str | None) -> str:
    if path is None:
        return ""
    try:
        status = os.stat(path)  # noqa: PTH116  a Path per image would cost
    except OSError:
        return f"{path} cannot be read"
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _content(images: ImageSet, index: int) -> bytes:
    try:
        content = images.content(index)
    except BadImage as error:
        content = str(error).encode()
    return hashlib.sha256(content if isinstance(content, bytes) else content.numpy().tobytes()).digest()


# ------------------------------------------------------------------------------------------------------- computing


def _width(wanted: FeatureSet) -> int:
    size = wanted.preprocess.size
    features = show(wanted.network, torch.zeros(1, 3, size, size, device=_place(wanted.network)))
    if features.ndim != 2:
        raise Problem(f"--init: the network gives {tuple(features.shape)} for an image, not one row of features")
    return features.shape[1]


def _fill(
    device: Device, wanted: FeatureSet, store: Store, part: tuple[Split, int, Indices], bad: BadImages,
    advance: Callable[[int], None],
) -> None:  # fmt: skip
    """Compute and write the rows of some images of a split and view; each process has its part of them."""
    accelerator, (split, view, indices) = device.accelerator, part
    augmentation, images = VIEW if view else None, images_of(wanted.data, split)
    views = image_views(wanted.preprocess, bad, VIEW_SEED, images, split, augmentation, None)
    world = accelerator.num_processes
    share = -(-len(indices) // world)
    mine = indices[accelerator.process_index * share :][:share]
    size = max(device.batch_size // world, 1)
    blocks = [mine[at : at + FLUSH] for at in range(0, share, FLUSH)]  # as many in every process
    keys = [key for block in blocks for key in keys_of(block, size, view)]
    readers = Readers(workers=device.workers, pin=device.pin, batch_size=size)
    precision = contextlib.nullcontext if wanted.precision == "no" else accelerator.autocast
    prepare = partial(device.prepare, preprocess=views.preprocess)
    computed = stream(wanted.network, views, keys, prepare, readers, precision)
    with Writer(store, split, view) as writer:
        for block in blocks:
            for members, outputs in islice(computed, -(-len(block) // size)):
                _write_rows(writer, members, outputs)
                advance(len(members) * world)
                device.tick()
            writer.keep({index: BAD if index in views.bad else DONE for index in block.tolist()})
            stop_together(accelerator, device.signals, 0)


def _write_rows(writer: Writer, members: Indices, outputs: Outputs) -> None:
    """Put rows (b, D) at the places of their images."""
    rows = outputs.rows.cpu()
    good = rows[outputs.readable]
    if not bool(good.isfinite().all()):
        raise Failed("--init: the network's features are not finite numbers; check the weights and the preprocessing")
    if writer.dtype == np.float16 and good.numel() and float(good.abs().max()) > float(np.finfo(np.float16).max):
        raise Problem(
            f"features up to {float(good.abs().max()):.0f} do not fit float16: use --dtype float32, in a run "
            "--set feature_dtype=float32"
        )
    writer.put(members, rows.numpy())
