"""From a description to cells, and from cells to runs: settings, folders, commands, order, recipes. No torch here."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from finetune_mile.config.flags import SETTINGS, given_settings, parse
from finetune_mile.config.resolve import FLAG_PATHS, Resolved, flat, resolve_anywhere
from finetune_mile.core.problems import Problem
from finetune_mile.methods import METHODS
from finetune_mile.paper.tables.description import Block, Settings, Table

FLAGS_OF_PATHS = {path: flag for flag, path in FLAG_PATHS.items()}
LAUNCH = "accelerate launch"
_PLACE = re.compile(r"\{(\w+)\}")  # of another run in a setting


class Key(NamedTuple):
    """Which run: a cell and a seed."""

    block: str
    row: str
    column: str
    seed: int

    @property
    def cell(self) -> str:
        """The cell in words."""
        return " / ".join(part for part in (self.block, self.row, self.column) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a cell."""

    key: Key
    verb: str
    settings: Mapping[str, Any]  # canonical keys, in order; runs of other rows as {name}
    needs: Mapping[str, Key]
    folder: Path
    folders: Mapping[str, Path]  # of `needs`
    hidden: bool

    def filled(self, value: Any) -> Any:
        """A setting with the folders of other runs in the place of {name}."""
        if isinstance(value, str):
            for name, folder in self.folders.items():
                value = value.replace(f"{{{name}}}", folder.as_posix())
            return value.replace("{seed}", str(self.key.seed))
        return value

    def flags(self) -> list[str]:
        """The flags of the command, --out not included."""
        words: list[str] = []
        for key, value in self.settings.items():
            words += _flag(key, self.filled(value), self.verb, str(self.settings.get("method")))
        return [*words, "--seed", str(self.key.seed)]

    def arguments(self) -> list[str]:
        """The command's arguments for a new run."""
        return [*self.flags(), "--out", self.folder.as_posix()]

    def command(self, launch: str = LAUNCH) -> str:
        """The command as a line for a shell."""
        return f"{head(self.verb, launch)} {shlex.join(self.arguments())}"


def head(verb: str, launch: str = LAUNCH) -> str:
    """How a verb is started from a shell."""
    return f"{launch} finetune_mile/run.py" if verb == "run" else f"finetune-mile {verb}"


def _flag(key: str, value: Any, verb: str, method: str) -> list[str]:
    """One setting as words: a flag where there is one, else --set."""
    name = FLAGS_OF_PATHS.get(key, key)
    plain = name == "recipe" or (verb == "run" and name in SETTINGS and not isinstance(value, bool | list | dict))
    if plain and value is not None and (name not in ("k_t", "k_s") or method == "mile"):
        return [f"--{name.replace('_', '-')}", str(value)]
    return ["--set", f"{key}={yaml_value(value)}"]


def yaml_value(value: Any) -> str:
    """A value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").strip()


# ------------------------------------------------------------------------------------------- settings


def layered(*layers: Settings) -> dict[str, Any]:
    """Settings on top of each other, with dotted keys, the last one on top.

    A flag's name becomes the key that it writes (`lr`: `optimizer.lr`). Steps and epochs replace each other, as do all
    rhos.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in flat(layer).items():
            key = FLAG_PATHS.get(name.replace("-", "_"), name.replace("-", "_"))
            merged = {k: v for k, v in merged.items() if k == key or not _same_place(k, key)} | {key: value}
    return merged


def _same_place(a: str, b: str) -> bool:
    if {a, b} == {"steps", "epochs"}:
        return True
    return "rho" in (a, b) and a.endswith("rho") and b.endswith("rho")


# ---------------------------------------------------------------------------------------------- jobs


def make_jobs(table: Table, runs: Path, over: Settings) -> list[Job]:
    """Every run of a table, prerequisites first; `over` are settings for each of them."""
    _check_slugs(table)
    keys = [
        Key(block.name, row, column, seed)
        for block in table.blocks
        for row in block.rows
        for column in block.columns_of(row)
        for seed in table.seeds_of(block, row)
    ]
    known = set(keys)
    jobs: list[Job] = []
    wrong: list[str] = []
    for key in keys:
        try:
            jobs.append(_job(table, key, known, runs, over))
        except Problem as problem:
            wrong += problem.sentences
    if wrong:
        raise Problem(*dict.fromkeys(wrong))
    return in_order(jobs)


def _job(table: Table, key: Key, known: set[Key], runs: Path, over: Settings) -> Job:
    block = table.block(key.block)
    row = block.rows[key.row]
    shared = table.settings if row.verb == "run" else {}
    settings = layered(shared, block.settings, block.columns[key.column], row.settings, over)
    for name, value in settings.items():
        for other in _PLACE.findall(value) if isinstance(value, str) else ():
            if other not in {*row.needs, "seed"}:
                raise Problem(f"{key.cell}: {name}: {value} names {{{other}}}, which is not among the row's needs")
    needs = {name: _needed(table, block, key, name, where, known) for name, where in row.needs.items()}
    return Job(
        key=key, verb=row.verb, needs=needs, folder=folder_of(runs, key),
        settings=settings,
        folders={name: folder_of(runs, need) for name, need in needs.items()}, hidden=block.hidden or row.hidden,
    )  # fmt: skip


def _needed(table: Table, block: Block, key: Key, name: str, where: str, known: set[Key]) -> Key:
    """The run that a run needs: of the same column and seed, or of the only one there is."""
    need = table.find_need(where, block)
    columns = () if need is None else need[0].columns_of(need[1])
    if need is None or not columns:  # the description as a whole was checked when it was read
        raise Problem(f"{key.cell} needs {name}: quick: leaves out the columns of {where}; name them there")
    other, row, fixed = need
    seeds = table.seeds_of(other, row)
    column = fixed if fixed is not None else key.column if key.column in columns else columns[0]
    seed = key.seed if key.seed in seeds else seeds[0]
    if fixed is None and key.column not in columns and len(columns) > 1:
        raise Problem(f"{key.cell} needs {name}: {where} has no column {key.column!r}; say {where}/COLUMN")
    if key.seed not in seeds and len(seeds) > 1:
        raise Problem(f"{key.cell} needs {name}: {where} has no seed {key.seed} (it has {', '.join(map(str, seeds))})")
    assert Key(other.name, row, column, seed) in known
    return Key(other.name, row, column, seed)


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Prerequisites first, else in the order of the description; a circle of needs is an error."""
    by_key = {job.key: job for job in jobs}
    try:
        TopologicalSorter({key: job.needs.values() for key, job in by_key.items()}).prepare()
    except CycleError as error:
        circle = " -> ".join(key.cell for key in reversed(error.args[1]))
        raise Problem(f"needs: these wait for each other: {circle}") from error

    def chain(key: Key) -> Iterator[Key]:
        for need in by_key[key].needs.values():
            yield from chain(need)
        yield key

    return [by_key[key] for key in dict.fromkeys(k for key in by_key for k in chain(key))]


def pick(jobs: Sequence[Job], only: Sequence[str], seeds: Sequence[int] | None) -> list[Job]:
    """The runs of `--only BLOCK[/ROW]` and `--seeds`, and all that these need."""
    by_key = {job.key: job for job in jobs}
    for name in only:
        if not any(_matches(key, name) for key in by_key):
            blocks = dict.fromkeys(k.block for k in by_key)
            raise Problem(f"--only {name}: no such block or row; blocks are {', '.join(blocks)}, rows BLOCK/ROW")
    for seed in seeds or ():
        if not any(key.seed == seed for key in by_key):
            there = sorted({key.seed for key in by_key})
            raise Problem(f"--seeds: no run has the seed {seed}; there are {', '.join(map(str, there))}")
    wanted = {
        key
        for key in by_key
        if (not only or any(_matches(key, name) for name in only)) and (seeds is None or key.seed in seeds)
    }
    for job in reversed(jobs):  # prerequisites come first in `jobs`
        if job.key in wanted:
            wanted.update(job.needs.values())
    return [job for job in jobs if job.key in wanted]


def _matches(key: Key, name: str) -> bool:
    return name in (key.block, f"{key.block}/{key.row}", f"{key.block}/{key.row}/{key.column}")


# ------------------------------------------------------------------------------------------- folders


def slug(name: str) -> str:
    """A name as a folder: `1 %` is `1-pct`, `mocov2+mile` is `mocov2-plus-mile`."""
    spelled = name.lower().replace("%", " pct ").replace("+", " plus ")
    return re.sub(r"[^a-z0-9._=]+", "-", spelled).strip("-.") or "none"


def folder_of(runs: Path, key: Key) -> Path:
    """Where a run lies."""
    parts = [slug(p) for p in (key.block, key.row, key.column) if p]
    return runs.joinpath(*parts, str(key.seed))


def _check_slugs(table: Table) -> None:
    groups: list[Iterable[str]] = [[block.name for block in table.blocks]]
    groups += [names for block in table.blocks for names in (block.rows, block.columns)]
    wrong = [
        f"{a!r} and {b!r} would share a folder; give one of them another name"
        for names in groups
        for a, b in combinations(names, 2)
        if slug(a) == slug(b)
    ]
    if wrong:
        raise Problem(*wrong)


# -------------------------------------------------------------------------------------------------- resolved settings


# What changes no number: not compared, not hashed. A seed belongs to a run, not to its cell.
ASIDE = ("workers", "checkpoint_every", "log_every", "track", "precision", "seed")
PLACES = ("data", "truth", "split")  # hashed without the folder that they lie in
RECIPES = {"pretrain": "finetune_mile.pretraining"}  # verbs besides run that have recipes of their own


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
    meanings = []
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
        meanings.append(cache[mark])
    if wrong:
        raise Problem(*(f"{_some(list(cells))}: {sentence}" for sentence, cells in wrong.items()))
    return meanings


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


def hash_of(tree: Mapping[str, Any]) -> str:
    """Eight digits that change with any setting that can change a number, and with nothing else."""
    kept = {k: v for k, v in tree.items() if k not in ASIDE and v is not None}
    for key in PLACES:
        if isinstance(kept.get(key), str):
            kind, colon, place = kept[key].partition(":")
            kept[key] = f"{kind}{colon}{Path(place).name}"
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
