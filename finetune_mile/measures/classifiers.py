"""Any classifier by its name, and its logits: a run of ours, a timm model, one on the hub, a file with a head."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor

from finetune_mile.checkpoints.cards import Card
from finetune_mile.checkpoints.init import Init
from finetune_mile.checkpoints.loading import LoadReport, Opened, open_with_head
from finetune_mile.checkpoints.readers import read
from finetune_mile.compute.passes import outputs_of
from finetune_mile.core.console import progress
from finetune_mile.core.cores import local_processes
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images.bad_images import allowed
from finetune_mile.images.pipeline import Readers, Views, default_workers, normalise
from finetune_mile.images.sets import ImageSet


def open_classifier(model: Init, *, weights: str | None, num_classes: int, seed: int) -> Opened:
    """Open a model with its own head.

    Args:
        model: as `origin.parse_model` returns it.
        weights: for timm: a file instead of the published weights, or `none` for random ones.
        num_classes: of the data; random weights get as many.
        seed: of random weights.
    """
    if model.kind in ("timm", "hf"):
        return _open_timm(model, weights, num_classes, seed)
    if weights is not None:
        raise Problem(f"--weights {weights} goes with {model.flag} timm:NAME; {model} has its own")
    return open_with_head(model, model.flag)


def _open_timm(model: Init, weights: str | None, num_classes: int, seed: int) -> Opened:
    import timm
    from timm.data import create_transform, resolve_data_config

    name = model.name
    if model.kind == "hf":
        name = f"local-dir:{name}" if Path(name).is_dir() else f"hf-hub:{name}"
    elif not timm.is_model(name.split(".")[0]):
        near = ", ".join(timm.list_models(f"*{name.split('.')[0]}*")[:3])
        raise Problem(f"{model.flag} {model}: timm has no such model" + (f"; near: {near}" if near else ""))
    if weights == "none":
        torch.manual_seed(seed)
        network = timm.create_model(name, pretrained=False, num_classes=num_classes)
    elif weights is not None:
        network = _with_file(name, Path(weights))
    else:
        try:
            network = timm.create_model(name, pretrained=True)
        except Exception as error:  # hub, network, file and version troubles have no common base
            hint = "fetch its file elsewhere and give it by --weights FILE"
            raise Problem(f"{model.flag} {model} could not be fetched ({_first_line(error)}); {hint}") from error
    config = resolve_data_config(network.pretrained_cfg, model=network)
    height, width = config["input_size"][1:]
    if height != width or not network.num_classes:
        reason = "has no classifier" if not network.num_classes else f"needs {height} x {width} images, not squares"
        raise Problem(f"{model.flag} {model}: it {reason}, so it cannot be evaluated here")
    seen = Preprocess(mean=tuple(config["mean"]), std=tuple(config["std"]), size=height, crop=1.0)
    arch = f"timm:{name}"
    return Opened(
        network=network.eval(),
        card=Card(name=model.text, method="timm", arch=arch, preprocess=seen),
        report=LoadReport(
            format="timm", why=f"{model.flag} says so", arch=arch, padding="torch", classifier=network.num_classes
        ),
        config={"label_names": list(network.pretrained_cfg.get("label_names") or ())},
        transform=create_transform(**config, is_training=False, use_prefetcher=True),
    )


def _with_file(name: str, path: Path) -> Any:
    """A timm network with the weights of a file, read as every file is; its head is as wide as the file's."""
    import timm

    head = timm.get_pretrained_cfg_value(name, "classifier") or "fc"
    head = head if isinstance(head, str) else head[0]
    tree = read(path).tree
    state = tree.get("state_dict", tree)
    if f"{head}.weight" not in state:
        raise Problem(f"--weights {path}: no classifier in it ({head}.weight is missing)")
    network = timm.create_model(name, pretrained=False, num_classes=len(state[f"{head}.weight"]))
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise Problem(f"--weights {path} does not fit timm:{name}: {_first_line(error)}") from error
    return network


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def columns_for(model: Opened, classes: Sequence[str], source: Init) -> list[int] | None:
    """Which logits belong to the data's classes, in their order; None: all, in the model's order.

    By name where the checkpoint names its classes, by ImageNet's synset ids where the data's classes are such, and
    otherwise by position if there are as many.
    """
    names = model.classes
    if names is None and model.report.classifier == 1000 and len(classes) < 1000:
        from timm.data import ImageNetInfo

        names = tuple(ImageNetInfo().label_names())
    if names is not None and set(classes) <= set(names):
        place = {name: i for i, name in enumerate(names)}
        columns = [place[name] for name in classes]
        return None if columns == list(range(model.report.classifier)) else columns
    if model.classes is not None and len(model.classes) == len(classes):
        odd = sorted(set(classes) - set(model.classes))
        raise Problem(f"{source.flag} {source}: it does not know the data's class {odd[0]!r}; are these its data?")
    if model.report.classifier != len(classes):
        raise Problem(
            f"{source.flag} {source}: it knows {model.report.classifier} classes, the data has {len(classes)}, and "
            "their names do not say which is which"
        )
    return None


def logits_of(
    model: Opened,
    images: ImageSet,
    accelerator: Accelerator,
    *,
    name: str,
    data: str,
    batch_size: int,
    workers: int | None,
) -> tuple[Tensor, dict[int, str]]:
    """Logits (N, C) of all images, the same on every process, and which images could not be read, and why.

    Args:
        model: it is moved to the accelerator's device.
        images: N of them.
        accelerator: for devices and processes.
        name: the model, for the progress bar.
        data: --data, for messages.
        batch_size: over all processes.
        workers: loader processes; None: from the cores.
    """
    world, device, seen = accelerator.num_processes, accelerator.device, model.card.preprocess
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (seen.mean, seen.std))
    if model.transform is not None:
        images = dataclasses.replace(images, content=partial(_as_timm, images.read, model.transform), in_memory=False)
    views = Views(images, seen, None, 0)
    if workers is None:
        workers = 0 if images.in_memory else default_workers(local_processes(world))
    share = max(batch_size // world, 1)
    title, quiet = f"{name} on {len(images):,} images", not accelerator.is_main_process
    with progress(title, -(-len(images) // (share * world)), quiet=quiet) as advance:
        logits, _ = outputs_of(
            accelerator, model.network.to(device), views, np.arange(len(images)),
            lambda batch: normalise(batch.to(device, non_blocking=True), mean, std),
            Readers(workers=workers, pin=device.type == "cuda", batch_size=share), lambda: advance(1),
        )  # fmt: skip
    bad: dict[int, str] = dict(sorted(gather_object(list(views.bad.items()))))
    if len(bad) > allowed(len(images)):
        first, reason = next(iter(bad.items()))
        raise Problem(
            f"--data {data}: {len(bad)} of {len(images):,} images cannot be read, more than {allowed(len(images))}; "
            f"the first is {images.ids[first]} ({reason}), and "
            f"`finetune-mile check --data {shlex.quote(data)}` finds all of them"
        )
    return logits, bad


def _as_timm(read: Callable[[int], Tensor], transform: Callable[[Any], Tensor], index: int) -> Tensor:
    """One image through timm's own evaluation transform, on PIL images as timm does it, without the normalisation."""
    return transform(Image.fromarray(read(index).permute(1, 2, 0).numpy()))
