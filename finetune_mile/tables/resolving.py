"""What a cell's settings come to once its recipe is read, and the hash of that. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from finetune_mile.flags import given_settings, parse
from finetune_mile.problems import Problem
from finetune_mile.recipe import Method
from finetune_mile.settings import Resolved, find_imagenet, resolve
from finetune_mile.tables.cells import Job

# What changes no number: not compared, not hashed. A seed belongs to a run, not to its cell.
ASIDE = ("workers", "checkpoint_every", "log_every", "track", "precision", "seed")
PLACES = ("data", "truth", "split")  # hashed without the folder that they lie in
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
    wrong: dict[str, None] = {}
    found = []
    for job in jobs:
        mark = json.dumps([job.verb, dict(job.settings)], default=str)
        mark += f" {job.key.seed}" if "{seed}" in mark else ""
        if mark not in cache:
            try:
                cache[mark] = _meaning(job)
            except Problem as problem:
                wrong |= dict.fromkeys(f"{job.key.cell}: {sentence}" for sentence in problem.sentences)
                continue
        found.append(cache[mark])
    if wrong:
        raise Problem(*wrong)
    return found


def _meaning(job: Job) -> Meaning:
    if job.verb != "run":
        tree = dict(job.settings)
        return Meaning(tree=tree, hash=hash_of(tree), resolved=None, data_here=True)
    template = Job(
        key=job.key, verb=job.verb, settings=job.settings, needs=job.needs, folder=job.folder, folders={},
        hidden=job.hidden,
    )  # fmt: skip
    options = parse([*template.flags()])
    flags = given_settings(options)
    here = True
    if "data" not in flags:
        try:
            find_imagenet()
        except Problem:
            here = False
    try:
        resolved = resolve(flags, options.sets)
    except Problem:
        if here:
            raise
        resolved = resolve({**flags, "data": NO_IMAGENET}, options.sets)
    recipe = resolved.recipe
    idle = {m.replace("-", "_") for m in get_args(Method) if m != recipe.method}  # blocks of other methods
    tree = dotted({k: v for k, v in recipe.model_dump(mode="json").items() if k not in idle})
    of_seed = {k: v for k, v in job.settings.items() if k in tree and "{seed}" in str(v)}  # one hash for all seeds
    return Meaning(tree=tree, hash=hash_of({**tree, **of_seed}), resolved=resolved, data_here=here)


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def hash_of(tree: Mapping[str, Any]) -> str:
    """Eight digits that change with any setting that can change a number, and with nothing else."""
    kept = {k: v for k, v in tree.items() if k not in ASIDE and v is not None}
    for key in PLACES:
        if isinstance(kept.get(key), str):
            kind, colon, place = kept[key].partition(":")
            kept[key] = f"{kind}{colon}{Path(place).name}"
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
