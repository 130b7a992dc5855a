"""A classifier over images for `finetune-mile eval`: which images, and what it says of them. Torch comes late."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune_mile.checkpoints.init import Init
from finetune_mile.config.resolve import read_yaml
from finetune_mile.core.problems import Problem
from finetune_mile.images.bad_images import allowed
from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.sources import load_data, scheme_and_place, split_name
from finetune_mile.verbs.classifiers import Classifier, columns_for, open_classifier, run_folder

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from finetune_mile.measures.predictions import Predictions


def recipe_of(folder: Path) -> dict[str, Any]:
    """The recipe of a run folder, or of the run that an export folder lies in; empty without one."""
    path = _file_of_run(folder, "recipe.yaml")
    return read_yaml(path) if path else {}


def _file_of_run(folder: Path, name: str) -> Path | None:
    """A file of a run folder, or of the run that an export folder lies in."""
    return next((path for path in (folder / name, folder.parent / name) if path.is_file()), None)


def how_sets_are_made(model: Init) -> dict[str, Any]:
    """The set rule and rho of a run, so that eval gives the numbers of its results.json."""
    folder = run_folder(model)
    recipe = recipe_of(folder) if folder else {}
    block = recipe.get(str(recipe.get("method")).replace("-", "_"))
    rho = block.get("rho") if isinstance(block, dict) else None
    rule = (recipe.get("evaluate") or {}).get("prediction_set", "threshold")
    return {"prediction_set": rule, "rho": rho if isinstance(rho, int | float) else None}


def predict_with(source: Init, options: argparse.Namespace, accelerator: Accelerator) -> Predictions:
    """Show the images to a model, on all processes; images that cannot be read are left out, and listed in `about`."""
    import torch

    from finetune_mile.measures.predictions import Predictions

    data = load_data(options.data)
    part = options.part or default_part(options.data, source)
    images = pick_images(data, part)
    if part == "all" and accelerator.is_main_process:
        warn_of_training_images(images, source)
    weights = options.weights if source.flag == "--model" else None
    model = open_classifier(source, weights=weights, num_classes=len(data.classes), seed=options.seed)
    columns = columns_for(model, data.classes, source.flag)
    began = time.monotonic()
    logits, bad = _logits(model, images, options, accelerator)
    seconds = time.monotonic() - began
    about = {
        "model": source.text, "data": options.data, "part": part, **how_sets_are_made(source),
        "preprocess": model.how.model_dump(mode="json"), "seconds": round(seconds, 3),
        "images_per_second": round(len(images) / max(seconds, 1e-9), 1),
        "bad_images": {images.ids[i]: reason for i, reason in bad.items()},
    }  # fmt: skip
    good = torch.tensor([i for i in range(len(images)) if i not in bad], dtype=torch.long)
    return Predictions(
        ids=[images.ids[i] for i in good.tolist()], classes=data.classes,
        logits=logits[good] if columns is None else logits[good][:, columns],
        given=images.given[good], truth=None if images.truth is None else images.truth[good],
        main=None if images.main is None else images.main[good], activation=model.activation, about=about,
    )  # fmt: skip


def _logits(
    model: Classifier, images: ImageSet, options: argparse.Namespace, accelerator: Accelerator
) -> tuple[Tensor, dict[int, str]]:
    """Logits (N, C) of all images, the same on every process, and which images could not be read, and why."""
    import numpy as np
    import torch
    from accelerate.utils import gather_object

    from finetune_mile.images.pipeline import Views, default_workers, normalise
    from finetune_mile.measures.evaluation import predict
    from finetune_mile.verbs.evaluate_page import Bar

    world, device = accelerator.num_processes, accelerator.device
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (model.how.mean, model.how.std))
    views = Views(model.shown(images), model.how, None, options.seed)
    workers = options.workers
    if workers is None:
        workers = 0 if views.images.in_memory else default_workers(world)
    share = max(options.batch_size // world, 1)
    with Bar(-(-len(images) // (share * world)), f"{model.name} on {len(images):,} images", accelerator) as bar:
        logits = predict(
            accelerator, model.network.to(device), views, np.arange(len(images)),
            lambda batch: normalise(batch.to(device, non_blocking=True), mean, std),
            batch_size=share, workers=workers, tick=bar.tick,
        )  # fmt: skip
    bad: dict[int, str] = dict(sorted(gather_object(list(views.bad.items()))))
    if len(bad) > allowed(len(images)):
        first, reason = next(iter(bad.items()))
        raise Problem(
            f"--data {options.data}: {len(bad)} of {len(images):,} images cannot be read, more than "
            f"{allowed(len(images))}; the first is {images.ids[first]} ({reason}), and "
            f"`finetune-mile doctor --data {options.data}` finds all of them"
        )
    return logits, bad


def default_part(data: str, model: Init) -> Literal["val", "all"]:
    """The validation images; all images of a folder without train/, unless the model was trained on that folder."""
    scheme, where = split_name(data)
    one_tree = scheme == "folder" and not (Path(where.partition("?")[0]) / "train").is_dir()
    folder = run_folder(model)
    trained_on = str(recipe_of(folder).get("data", "")) if folder else ""
    if not one_tree or (trained_on and _same_place(trained_on, data)):
        return "val"
    return "all"


def _same_place(one: str, other: str) -> bool:
    """Whether two values of --data name the same folder, one perhaps by a relative path."""

    def place(data: str) -> tuple[str, Path, str]:
        scheme, where = scheme_and_place(data)
        path, _, options = where.partition("?")
        return scheme, Path(path).resolve(), options

    return place(one) == place(other)


def warn_of_training_images(images: ImageSet, model: Init) -> None:
    """Say that a run is scored on images that it was trained on: the number would be too good."""
    folder = run_folder(model)
    split = None if folder is None else _file_of_run(folder, "split.json")
    if split is None:
        return
    trained = set(json.loads(split.read_text(encoding="utf-8")).get("ids", ()))
    seen = sum(each in trained for each in images.ids)
    if seen:
        sys.stderr.write(
            f"warning: {seen:,} of these {len(images):,} images have the names of images that {model.text} was trained "
            "on, so the scores are too good; --part val evaluates the others\n"
        )


def pick_images(data: Data, part: Literal["val", "train", "all"]) -> ImageSet:
    """The images of a part; all of them are sorted by id again."""
    if part != "all":
        return data.val if part == "val" else data.train
    import numpy as np
    import torch

    sets = (data.train, data.val)
    ids = [*data.train.ids, *data.val.ids]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    truths = [images.truth for images in sets]
    truth = None
    if any(t is not None for t in truths):
        empty = [torch.zeros(len(images), len(data.classes), dtype=torch.bool) for images in sets]
        truth = torch.cat([e if t is None else t for e, t in zip(empty, truths, strict=True)])[order]
    mains = [images.main for images in sets if images.main is not None]
    return ImageSet(
        ids=[ids[i] for i in order], given=torch.cat([images.given for images in sets])[order], truth=truth,
        main=torch.cat(mains)[order] if len(mains) == len(sets) else None,
        read=_Both(data.train, data.val, np.array(order)), in_memory=all(images.in_memory for images in sets),
    )  # fmt: skip


class _Both:
    """Reads from two image sets in one order."""

    def __init__(self, first: ImageSet, second: ImageSet, order: Any) -> None:
        self.first, self.second, self.order = first, second, order

    def __call__(self, index: int) -> Any:
        """The image at a place of the common order."""
        at = int(self.order[index])
        return self.first.read(at) if at < len(self.first) else self.second.read(at - len(self.first))
