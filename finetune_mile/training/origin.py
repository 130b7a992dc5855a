"""A model by its name, and what its run folder says: recipe, data, and images that it was trained on. No torch here."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune_mile.checkpoints.cards import Missing
from finetune_mile.checkpoints.init import Init, parse_source, read_config
from finetune_mile.config.resolve import read_yaml
from finetune_mile.core.files import read_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import anchored, scheme_and_place, split_name
from finetune_mile.training.folder import REFIT, read_info

if TYPE_CHECKING:
    from finetune_mile.measures.metrics import Activation, SetRule

Part = Literal["val", "train", "all"]
REFITTED = f"{REFIT}/split.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What `eval` is asked for: a model on data, or saved logits."""

    model: Init | None = None
    logits: Path | None = None  # instead of a model
    data: str | None = None  # --data; a model needs it
    part: Part | None = None  # which images; None: `default_part`
    truth: str | None = None  # true label sets, --truth
    compare: Init | None = None  # a second model, or a file of its logits
    weights: str | None = None  # of a timm model: a file, or none
    activation: Activation | None = None  # None: what the model was trained with
    rule: SetRule | None = None  # None: the run's
    batch_size: int = 128  # over all processes
    workers: int | None = None  # None: from the cores
    draws: int = 1000  # of the bootstrap; 0: no intervals
    seed: int = 0


def parse_model(spec: str, flag: str) -> Init:
    """Parse --model: `run:DIR`, `timm:NAME`, `hf:NAME` or `hf:DIR`, or a file."""
    scheme, colon, name = spec.partition(":")
    if colon and scheme == "run":
        if not Path(name).is_dir():
            raise Problem(f"{flag} {spec}: there is no directory {name!r}")
        if "arch" not in read_config(Path(name)):
            raise Problem(f"{flag} {spec}: no export in it; a finished run has export/config.json")
        return Init(spec, "folder", name, flag=flag)
    if colon and scheme in ("timm", "hf"):
        if not name:
            raise Problem(f"{flag} {spec}: the model's name is missing, as in timm:resnet50.a1_in1k")
        return Init(spec, "hf" if scheme == "hf" else "timm", name, flag=flag)
    try:
        return parse_source(spec, flag)
    except Missing as error:
        hint = "write run:DIR, timm:NAME, hf:NAME or a checkpoint file"
        raise Problem(f"{flag} {spec}: no such file; {hint}") from error


def is_logits(source: Init | None) -> bool:
    """Does a --compare name a file of saved logits?"""
    return source is not None and source.kind == "file" and source.name.endswith(".parquet")


def file_of_run(model: Init, name: str) -> Path | None:
    """A file of a run folder, or of the run that an export folder is in; None for a model that is no run."""
    folder = model.path if model.kind == "folder" else None
    if folder is None or "arch" not in read_config(folder):
        return None
    return next((path for path in (folder / name, folder.parent / name) if path.is_file()), None)


def recipe_of(model: Init) -> dict[str, Any]:
    """The recipe of a run; empty for another model."""
    path = file_of_run(model, "recipe.yaml")
    return {} if path is None else recipe_in(path.parent)


def recipe_in(run: Path) -> dict[str, Any]:
    """The recipe of a run folder; --data as it is called from here."""
    recipe, base = read_yaml(run / "recipe.yaml"), read_info(run).get("started_in")
    if isinstance(base, str) and isinstance(recipe.get("data"), str):
        recipe["data"] = anchored(recipe["data"], base)
    return recipe


def default_part(data: str, model: Init) -> Literal["val", "all"]:
    """The validation images; all of a folder without train/ or a list without splits that the model was not made of."""
    scheme, where = split_name(data)
    place = Path(where.partition("?")[0])
    one_tree = (scheme == "folder" and not (place / "train").is_dir()) or (scheme == "csv" and not _has_splits(place))
    trained_on = str(recipe_of(model).get("data", ""))
    return "val" if not one_tree or (trained_on and _place(trained_on) == _place(data)) else "all"


def _has_splits(path: Path) -> bool:
    """Has a CSV file a column `split`?"""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        return "split" in next(csv.reader(stream), [])


def _place(data: str) -> tuple[str, Path, str]:
    """--data with an absolute path."""
    scheme, where = scheme_and_place(data)
    path, _, options = where.partition("?")
    return scheme, Path(path).resolve(), options


def say_trained_on(ids: Sequence[str], model: Init) -> str | None:
    """A sentence where a run is scored on images that it was trained on: the number would be too good."""
    refitted = file_of_run(model, REFITTED)
    split = refitted or file_of_run(model, "split.json")
    lists = {} if split is None else read_json(split)
    trained = {str(name) for key in ("ids", "val_ids") if isinstance(lists.get(key), list) for name in lists[key]}
    seen = sum(each in trained for each in ids)
    if not seen:
        return None
    start = f"{seen:,} of these {len(ids):,} images have the names of images that {model.text} was trained on"
    if refitted:
        return (
            f"{start} by --refit. If they are the same photos, the scores are too good; results.json of the run has "
            "those before"
        )
    return f"{start}. If they are the same photos, the scores are too good: evaluate on others"
