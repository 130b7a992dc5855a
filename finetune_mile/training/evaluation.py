"""Every score of any classifier on any data, or of logits that were saved before: what `eval` does."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from finetune_mile.checkpoints.init import Init
from finetune_mile.core.files import begun, utf8_name, whole_file, write_json
from finetune_mile.core.problems import Failed, warn
from finetune_mile.images.bad_images import write_list
from finetune_mile.images.readers import Joined, Picked
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.sources import load_data
from finetune_mile.images.truth import with_truth
from finetune_mile.measures.classifiers import columns_for, logits_of, open_classifier
from finetune_mile.measures.intervals import Comparison, compare, intervals
from finetune_mile.measures.metrics import Measured, class_table, measure
from finetune_mile.measures.predictions import (
    PER_CLASS,
    Predictions,
    matched,
    read_predictions,
    write_per_class,
    write_predictions,
)
from finetune_mile.measures.verdicts import edges
from finetune_mile.training import processes
from finetune_mile.training.folder import environment
from finetune_mile.training.origin import (
    REFITTED,
    Evaluation,
    Part,
    default_part,
    file_of_run,
    is_logits,
    recipe_of,
    say_trained_on,
)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation found."""

    results: dict[str, float]  # of results.json
    measured: Measured  # the measures of every image
    models: list[Predictions]  # of the model, and of the one that it is compared with
    facts: dict[str, Any]  # for eval.json
    differences: dict[str, Comparison]  # to the other model

    def notes(self, out: Path) -> Iterator[str]:
        """Lines about images that do not count, and where the files are."""
        left_out = int(self.results["images"] - self.results.get("images_with_set", self.results["images"]))
        if left_out:
            yield f"{left_out:,} images without a true set are left out of set measures"
        if "bad_images" in self.results:
            bad = int(self.results["bad_images"])
            yield f"{bad} images could not be read and do not count: {out / 'bad_images.csv'}"
        yield str(out)


def evaluate(how: Evaluation) -> Evaluated | None:
    """The evaluation itself; None in other processes than the first."""
    accelerator = processes.start(precision=processes.wanted_precision("no"), seed=how.seed, track="none", project=".")
    first = predictions_of(how, how.logits or how.model, accelerator)
    if how.truth is not None:
        first = with_truth_of(first, how.truth)
    models = [first]
    if how.compare is not None:
        source = Path(how.compare.name) if is_logits(how.compare) else how.compare
        models.append(matched(predictions_of(how, source, accelerator), first, f"--compare {how.compare}"))
    if not accelerator.is_main_process:
        return None
    for model in models:
        bad = int((~model.logits.isfinite().all(1)).sum())
        if bad:
            raise Failed(f"{model.about['model']} gives NaN or infinity for {bad} images")
    facts = {
        "prediction_set": how.rule or first.about.get("prediction_set") or "threshold",
        "rho": first.about.get("rho"), "truth": how.truth, "world_size": accelerator.num_processes,
        "activation": how.activation or first.activation,
    }  # fmt: skip
    measured = [
        measure(
            model.logits, first.given, first.truth, activation=how.activation or model.activation,
            main=first.main, prediction_set=facts["prediction_set"], thresholds={"rho": facts["rho"]},
        )
        for model in models
    ]  # fmt: skip
    differences: dict[str, Comparison] = {}
    if how.compare is not None:
        ours, theirs = measured
        for a, b in ((ours.samples, theirs.samples), (ours.by_class, theirs.by_class)):
            differences |= compare(a, b, draws=max(how.draws, 1), seed=how.seed)
    return Evaluated(results_of(how, measured[0], first), measured[0], models, facts, differences)


def predictions_of(how: Evaluation, source: Init | Path | None, accelerator: Accelerator) -> Predictions:
    """A model's predictions, on all processes, or those of a file.

    Images that cannot be read are left out, and listed in `about`.
    """
    if isinstance(source, Path):
        return read_predictions(source)
    assert source is not None
    assert how.data is not None
    data = load_data(how.data)
    part = how.part or default_part(how.data, source)
    images = pick_images(data, part)
    if (part == "all" or file_of_run(source, REFITTED)) and accelerator.is_main_process:
        sentence = say_trained_on(images.ids, source)
        if sentence:
            warn(sentence)
    weights = how.weights if source.flag == "--model" else None
    model = open_classifier(source, weights=weights, num_classes=len(data.classes), seed=how.seed)
    columns = columns_for(model, data.classes, source)
    began = time.monotonic()
    logits, bad = logits_of(
        model, images, accelerator, name=source.text, data=how.data, batch_size=how.batch_size, workers=how.workers
    )
    seconds = time.monotonic() - began
    recipe = recipe_of(source)  # the set rule and rho of a run, so that eval gives the numbers of its results.json
    block = recipe.get(str(recipe.get("method")).replace("-", "_"))
    rho = block.get("rho") if isinstance(block, dict) else None
    about = {
        "model": source.text, "data": how.data, "part": part,
        "prediction_set": (recipe.get("evaluate") or {}).get("prediction_set", "threshold"),
        "rho": rho if isinstance(rho, int | float) else None,
        "preprocess": model.card.preprocess.model_dump(mode="json"), "seconds": round(seconds, 3),
        "images_per_second": round(len(images) / max(seconds, 1e-9), 1),
        "bad_images": {images.ids[i]: reason for i, reason in bad.items()},
    }  # fmt: skip
    good = torch.tensor([i for i in range(len(images)) if i not in bad], dtype=torch.long)
    return Predictions(
        ids=[utf8_name(images.ids[i]) for i in good.tolist()], classes=data.classes,
        logits=logits[good] if columns is None else logits[good][:, columns],
        given=images.given[good], truth=None if images.truth is None else images.truth[good],
        main=None if images.main is None else images.main[good],
        activation=model.activation or "softmax", about=about,
    )  # fmt: skip


def results_of(how: Evaluation, measured: Measured, predictions: Predictions) -> dict[str, float]:
    """The content of results.json.

    An interval is two more keys, `accuracy_low` and `accuracy_high`: 95 %, Wilson's for accuracies, else drawn over
    images; for means over classes (recovery_map, map of images with one given label) over classes. The
    threshold of f1@best is held fixed in it.
    """
    results = measured.results()
    bad = predictions.about.get("bad_images")
    if bad:
        results["bad_images"] = float(len(bad))
    if how.draws == 0:
        return results
    for values in (measured.samples, measured.by_class):
        present = {key: value for key, value in values.items() if key in results}
        for key, (low, high) in intervals(present, draws=how.draws, seed=how.seed).items():
            results |= {f"{key}_low": low, f"{key}_high": high}
    # Shares have Wilson's interval, as in runs: no resample of 40 right answers has a wrong one.
    return results | edges(results, measured)


def write(how: Evaluation, scored: Evaluated, out: Path) -> None:
    """Write results.json, per_class.csv, eval.json, comparison.json, and logits.parquet if a model made them."""
    with begun(out) as part:
        _write(how, scored, out, part)
        for stale in ("eval.json", "comparison.json", "bad_images.csv"):  # of an evaluation that is overwritten
            (out / stale).unlink(missing_ok=True)


def _write(how: Evaluation, scored: Evaluated, out: Path, part: Path) -> None:
    first, *others = scored.models
    bad = first.about.get("bad_images") or {}
    write_json(part / "results.json", scored.results)
    write_per_class(part / PER_CLASS, first.classes, class_table(scored.measured))
    if bad:
        split = str(first.about.get("part", ""))
        write_list(part / "bad_images.csv", [(split, name, reason) for name, reason in bad.items()])
    if how.logits is None:
        with whole_file(part / "logits.parquet") as file:
            write_predictions(file, first)
    about = first.about | scored.facts | {
        "bad_images": len(bad), "images": len(first.ids), "classes": len(first.classes),
        "logits": str(how.logits or out / "logits.parquet"), "logits_sha256": first.digest(),
        "draws": how.draws, "seed": how.seed, **environment(),
    }  # fmt: skip
    write_json(part / "eval.json", about)
    for other in others if scored.differences else ():
        names = {"a": first.about["model"], "b": other.about["model"]}
        measures = {key: dataclasses.asdict(difference) for key, difference in scored.differences.items()}
        write_json(part / "comparison.json", names | {"measures": measures})


def with_truth_of(predictions: Predictions, spec: str) -> Predictions:
    """Predictions with label sets from elsewhere, joined by id."""
    images = ImageSet(ids=list(predictions.ids), given=predictions.given, truth=None, content=_no_images)
    data = with_truth(Data(name="", classes=predictions.classes, train=images, val=images), spec)
    return dataclasses.replace(predictions, truth=data.val.truth)


def _no_images(index: int) -> Any:
    raise RuntimeError(f"image {index} was read, but only its label is known")


def pick_images(data: Data, part: Part) -> ImageSet:
    """The images of a part; all of them are sorted by id again."""
    if part != "all":
        return data.val if part == "val" else data.train
    sets = (data.train, data.val)
    ids = [*data.train.ids, *data.val.ids]
    order = np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
    truth = None
    if any(images.truth is not None for images in sets):
        unknown = torch.zeros(len(ids), len(data.classes), dtype=torch.bool).split([len(images) for images in sets])
        truths = [rows if images.truth is None else images.truth for images, rows in zip(sets, unknown, strict=True)]
        truth = torch.cat(truths)[order]
    mains = [images.main for images in sets if images.main is not None]
    return ImageSet(
        ids=[ids[i] for i in order], given=torch.cat([images.given for images in sets])[order], truth=truth,
        main=torch.cat(mains)[order] if len(mains) == len(sets) else None,
        content=Picked(Joined(data.train.content, len(data.train), data.val.content), order),
        in_memory=all(images.in_memory for images in sets),
    )  # fmt: skip
