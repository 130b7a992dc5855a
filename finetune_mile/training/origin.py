"""What the run folder of a model says: its recipe, its data, and the images that it was trained on. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from finetune_mile.checkpoints.init import Init
from finetune_mile.config.resolve import read_yaml
from finetune_mile.images.sources import anchored, scheme_and_place, split_name
from finetune_mile.measures.classifiers import run_folder
from finetune_mile.training.folder import REFIT, read_info

REFITTED = f"{REFIT}/split.json"


def is_logits(source: Init | None) -> bool:
    """Does a --compare name a file of saved logits?"""
    return source is not None and source.kind == "file" and source.name.endswith(".parquet")


def file_of_run(model: Init, name: str) -> Path | None:
    """A file of a run folder, or of the run that an export folder is in; None for a model that is no run."""
    folder = run_folder(model)
    places = (folder / name, folder.parent / name) if folder else ()
    return next((path for path in places if path.is_file()), None)


def recipe_of(model: Init) -> dict[str, Any]:
    """The recipe of a run; empty for another model."""
    path = file_of_run(model, "recipe.yaml")
    if path is None:
        return {}
    recipe, base = read_yaml(path), read_info(path.parent).get("started_in")
    if isinstance(base, str) and isinstance(recipe.get("data"), str):
        recipe["data"] = anchored(recipe["data"], base)
    return recipe


def default_part(data: str, model: Init) -> Literal["val", "all"]:
    """The validation images; all images of a folder without train/, unless the model was trained on that folder."""
    scheme, where = split_name(data)
    one_tree = scheme == "folder" and not (Path(where.partition("?")[0]) / "train").is_dir()
    trained_on = str(recipe_of(model).get("data", ""))
    return "val" if not one_tree or (trained_on and _place(trained_on) == _place(data)) else "all"


def _place(data: str) -> tuple[str, Path, str]:
    """--data with an absolute path."""
    scheme, where = scheme_and_place(data)
    path, _, options = where.partition("?")
    return scheme, Path(path).resolve(), options


def say_trained_on(ids: Sequence[str], model: Init) -> str | None:
    """A sentence where a run is scored on images that it was trained on: the number would be too good."""
    refitted = file_of_run(model, REFITTED)
    split = refitted or file_of_run(model, "split.json")
    lists = {} if split is None else json.loads(split.read_text(encoding="utf-8"))
    trained = {*lists.get("ids", ()), *lists.get("val_ids", ())}
    seen = sum(each in trained for each in ids)
    if not seen:
        return None
    start = f"{seen:,} of these {len(ids):,} images have the names of images that {model.text} was trained on"
    if refitted:
        return (
            f"{start} by --refit. If they are the same photos, the scores are too good; results.json of the run has "
            "those before"
        )
    return f"{start}, so the scores are too good; --part val evaluates the others"
