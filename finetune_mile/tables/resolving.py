"""What a cell's settings come to once its recipe is read, and the hash of that. No torch here."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from finetune_mile.core.problems import Problem
from finetune_mile.flags import given_settings, parse
from finetune_mile.layers import flat
from finetune_mile.methods import METHODS
from finetune_mile.settings import Resolved, resolve
from finetune_mile.tables.cells import Job, yaml_value

# What changes no number: not compared, not hashed. A seed belongs to a run, not to its cell.
ASIDE = ("workers", "checkpoint_every", "log_every", "track", "precision", "seed")
PLACES = ("data", "truth", "split")  # hashed without the folder that they lie in
RECIPES = {"pretrain": "finetune_mile.pretraining"}  # verbs besides run that have recipes of their own
NO_IMAGENET = "imagenet:data/imagenet"  # stands for ImageNet where it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """A job's settings, resolved as far as its verb is known here."""

    tree: Mapping[str, Any]  # dotted: value, other runs as {name}
    hash: str
    resolved: Resolved | None  # for the verb `run`
    data_here: bool


def resolve_all(jobs: Sequence[Job]) -> list[Meaning]:
    """Resolve each job; cells are resolved once for all their seeds, and all problems are raised at once."""
    cache: dict[str, Meaning] = {}
    wrong: dict[str, dict[str, None]] = {}  # sentence: cells
    found = []
    for job in jobs:
        mark = json.dumps([job.verb, dict(job.settings)], default=str)
        mark += f" {job.key.seed}" if "{seed}" in mark else ""
        if mark not in cache:
            try:
                cache[mark] = _meaning(job)
            except Problem as problem:
                for sentence in problem.sentences:
                    wrong.setdefault(sentence, {})[job.key.cell] = None
                continue
        found.append(cache[mark])
    if wrong:
        raise Problem(*(f"{_some(list(cells))}: {sentence}" for sentence, cells in wrong.items()))
    return found


def _some(cells: Sequence[str]) -> str:
    return cells[0] if len(cells) == 1 else f"{cells[0]} and {len(cells) - 1} more"


def _meaning(job: Job) -> Meaning:
    if job.verb != "run":
        tree = _other_verb(job)
        return Meaning(tree=tree, hash=hash_of(tree), resolved=None, data_here=True)
    options = parse(dataclasses.replace(job, folders={}).flags())
    resolved, here = resolve_anywhere(given_settings(options), options.sets)
    blocks = [name for name in METHODS if name != "auto"]  # which also says what runs of other methods hold out
    tree = _used(resolved.recipe.model_dump(mode="json"), blocks)
    of_seed = {k: v for k, v in job.settings.items() if k in tree and "{seed}" in str(v)}  # one hash for all seeds
    return Meaning(tree=tree, hash=hash_of({**tree, **of_seed}), resolved=resolved, data_here=here)


def _other_verb(job: Job) -> dict[str, Any]:
    """The whole recipe of a verb that has one, else the settings that the table gives."""
    if job.verb not in RECIPES:
        return dict(job.settings)
    settings, recipe = (importlib.import_module(f"{RECIPES[job.verb]}.{name}") for name in ("settings", "recipe"))
    flags = {"recipe": job.settings["recipe"]} if "recipe" in job.settings else {}
    sets = [f"{key}={yaml_value(value)}" for key, value in job.settings.items() if key != "recipe"]
    return _used(settings.resolve(flags, sets).recipe.model_dump(mode="json"), get_args(recipe.Method))


def _used(tree: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """A recipe with dotted keys, without the blocks of methods that it does not use."""
    idle = {method.replace("-", "_") for method in methods if method != tree["method"]}
    return flat({key: value for key, value in tree.items() if key not in idle})


def resolve_anywhere(flags: Mapping[str, Any], sets: list[str]) -> tuple[Resolved, bool]:
    """A recipe, also where ImageNet is meant and not on this machine; False: it is not."""
    try:
        return resolve(flags, sets), True
    except Problem:
        if flags.get("data", "imagenet") != "imagenet":
            raise
    return resolve({**flags, "data": NO_IMAGENET}, sets), False


def hash_of(tree: Mapping[str, Any]) -> str:
    """Eight digits that change with any setting that can change a number, and with nothing else."""
    kept = {k: v for k, v in tree.items() if k not in ASIDE and v is not None}
    for key in PLACES:
        if isinstance(kept.get(key), str):
            kind, colon, place = kept[key].partition(":")
            kept[key] = f"{kind}{colon}{Path(place).name}"
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
