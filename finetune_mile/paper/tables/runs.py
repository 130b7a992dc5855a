"""From a description to runs: settings, folders, commands, order, recipes, and the state of each. No torch here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from finetune_mile.config.flags import SETTINGS, parse
from finetune_mile.config.resolve import FLAG_PATHS, NO_IMAGENET, Resolved, flat, read_yaml, resolve_anywhere
from finetune_mile.core.files import is_finished, write_whole
from finetune_mile.core.problems import Problem
from finetune_mile.methods import METHODS
from finetune_mile.paper.pretraining import recipe as pretraining
from finetune_mile.paper.tables.description import Settings, Table, TableBlock
from finetune_mile.training.plan import steps_of_epochs

FLAGS_OF_PATHS = {path: flag for flag, path in FLAG_PATHS.items()}
LAUNCH = "accelerate launch"
_NEED = re.compile(r"\{(\w+)\}")  # the folder of another run in a setting

# Settings that change no number: not compared, not hashed. A seed belongs to a run, not to its cell.
ASIDE = (
    "workers", "checkpoint_every", "log_every", "track", "precision", "seed", "channels_last", "cudnn_benchmark",
    "fused_optimizer", "compile", "gradient_checkpointing", "deterministic", "evaluate.points",
)  # fmt: skip
PLACES = ("data", "truth", "split")  # hashed without the folder that they are in


class RunKey(NamedTuple):
    """Which run: a cell and a seed."""

    block: str
    row: str
    column: str
    seed: int

    @property
    def cell(self) -> str:
        return " / ".join(part for part in (self.block, self.row, self.column) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a cell."""

    key: RunKey
    verb: str
    settings: Mapping[str, Any]  # canonical keys, in order; folders of other runs as {name}
    needs: Mapping[str, RunKey]
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
        """The flags of the command without --out; a setting that has no flag is written with --set."""
        words: list[str] = []
        for key, setting in self.settings.items():
            name, value = FLAGS_OF_PATHS.get(key, key), self.filled(setting)
            has_flag = name in SETTINGS and self.verb == "run" and not isinstance(value, bool | list | dict)
            if name in ("k_t", "k_s"):
                has_flag = has_flag and self.settings.get("method") == "mile"
            if value is not None and (has_flag or name == "recipe"):
                words += [f"--{name.replace('_', '-')}", str(value)]
            else:
                words += ["--set", f"{key}={yaml_value(value)}"]
        return [*words, "--seed", str(self.key.seed)]

    def arguments(self) -> list[str]:
        return [*self.flags(), "--out", self.folder.as_posix()]

    def command(self, launch: str = LAUNCH) -> str:
        return shell_line(self.verb, self.arguments(), launch)


def shell_line(verb: str, arguments: Sequence[str], launch: str) -> str:
    program = f"{launch} finetune_mile/run.py" if verb == "run" else f"finetune-mile {verb}"
    return f"{program} {shlex.join(arguments)}"


def yaml_value(value: Any) -> str:
    """A value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").strip()


# ---------------------------------------------------------------------------------------------------------------- jobs


def layered(*layers: Settings) -> dict[str, Any]:
    """Settings on top of each other, with dotted keys, the last one on top.

    A flag's name becomes the key that it writes (`lr`: `optimizer.lr`). Steps and epochs replace each other, as do all
    rhos.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in flat(layer).items():
            key = FLAG_PATHS.get(name.replace("-", "_"), name.replace("-", "_"))
            merged = {k: v for k, v in merged.items() if k == key or not _exclude_each_other(k, key)} | {key: value}
    return merged


def _exclude_each_other(a: str, b: str) -> bool:
    return {a, b} == {"steps", "epochs"} or ("rho" in (a, b) and a.endswith("rho") and b.endswith("rho"))


def make_jobs(table: Table, runs: Path, over: Settings) -> list[Job]:
    """Every run of a table, prerequisites first; `over` are settings for each of them."""
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
    jobs: list[Job] = []
    for block in table.blocks:
        for row in block.rows:
            for column in block.columns_of(row):
                for seed in table.seeds_of(block, row):
                    try:
                        jobs.append(_job(table, block, RunKey(block.name, row, column, seed), runs, over))
                    except Problem as problem:
                        wrong += problem.sentences
    if wrong:
        raise Problem(*dict.fromkeys(wrong))
    return _in_order(jobs)


def _job(table: Table, block: TableBlock, key: RunKey, runs: Path, over: Settings) -> Job:
    row = block.rows[key.row]
    shared = table.settings if row.verb == "run" else {}
    settings = layered(shared, block.settings, block.columns[key.column], row.settings, over)
    for name, value in settings.items():
        for other in _NEED.findall(value) if isinstance(value, str) else ():
            if other not in {*row.needs, "seed"}:
                raise Problem(f"{key.cell}: {name}: {value} names {{{other}}}, which is not among the row's needs")
    needs = {name: _needed(table, block, key, name, reference) for name, reference in row.needs.items()}
    return Job(
        key=key, verb=row.verb, needs=needs, folder=folder_of(runs, key), settings=settings,
        folders={name: folder_of(runs, need) for name, need in needs.items()}, hidden=block.hidden or row.hidden,
    )  # fmt: skip


def _needed(table: Table, block: TableBlock, key: RunKey, name: str, reference: str) -> RunKey:
    """The run that a run needs: of the same column and seed, or of the only one there is."""
    need = table.find_need(reference, block)
    columns = () if need is None else need[0].columns_of(need[1])
    if need is None or not columns:  # all references were checked when the description was read
        raise Problem(f"{key.cell} needs {name}: quick: leaves out the columns of {reference}; name them there")
    other, row, fixed = need
    seeds = table.seeds_of(other, row)
    if fixed is None and key.column not in columns and len(columns) > 1:
        raise Problem(f"{key.cell} needs {name}: {reference} has no column {key.column!r}; write {reference}/COLUMN")
    if key.seed not in seeds and len(seeds) > 1:
        has = f"it has {', '.join(map(str, seeds))}"
        raise Problem(f"{key.cell} needs {name}: {reference} has no seed {key.seed} ({has})")
    if fixed is None:
        fixed = key.column if key.column in columns else columns[0]
    return RunKey(other.name, row, fixed, key.seed if key.seed in seeds else seeds[0])


def _in_order(jobs: Iterable[Job]) -> list[Job]:
    """Prerequisites first, else in the order of the description; a circle of needs is an error."""
    by_key = {job.key: job for job in jobs}
    try:
        TopologicalSorter({key: job.needs.values() for key, job in by_key.items()}).prepare()
    except CycleError as error:
        circle = " -> ".join(key.cell for key in reversed(error.args[1]))
        raise Problem(f"needs: these runs need each other: {circle}") from error

    def chain(key: RunKey) -> Iterator[RunKey]:
        for need in by_key[key].needs.values():
            yield from chain(need)
        yield key

    return [by_key[key] for key in dict.fromkeys(k for key in by_key for k in chain(key))]


def pick(jobs: Sequence[Job], only: Sequence[str], seeds: Sequence[int] | None) -> list[Job]:
    """The runs of `--only BLOCK[/ROW]` and `--seeds`, and all that these need."""
    keys = [job.key for job in jobs]
    for name in only:
        if not any(_matches(key, name) for key in keys):
            blocks = ", ".join(dict.fromkeys(key.block for key in keys))
            raise Problem(f"--only {name}: no such block or row. Blocks are {blocks}; a row is BLOCK/ROW.")
    known = sorted({key.seed for key in keys})
    for seed in seeds or ():
        if seed not in known:
            raise Problem(f"--seeds: no run has the seed {seed}; there are {', '.join(map(str, known))}")
    picked = {
        key
        for key in keys
        if (not only or any(_matches(key, name) for name in only)) and (seeds is None or key.seed in seeds)
    }
    for job in reversed(jobs):  # prerequisites come first in `jobs`
        if job.key in picked:
            picked.update(job.needs.values())
    return [job for job in jobs if job.key in picked]


def _matches(key: RunKey, name: str) -> bool:
    return name in (key.block, f"{key.block}/{key.row}", f"{key.block}/{key.row}/{key.column}")


def slug(name: str) -> str:
    """A name as a folder: `1 %` is `1-pct`, `mocov2+mile` is `mocov2-plus-mile`."""
    spelled = name.lower().replace("%", " pct ").replace("+", " plus ")
    return re.sub(r"[^a-z0-9._=]+", "-", spelled).strip("-.") or "none"


def folder_of(runs: Path, key: RunKey) -> Path:
    return runs.joinpath(*(slug(part) for part in key[:3] if part), str(key.seed))


# --------------------------------------------------------------------------------------------------- resolved settings


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
        text = json.dumps([job.verb, dict(job.settings)], default=str)
        text += f" {job.key.seed}" if "{seed}" in text else ""
        try:
            if text not in cache:
                cache[text] = _meaning(job)
            meanings.append(cache[text])
        except Problem as problem:
            for sentence in problem.sentences:
                wrong.setdefault(sentence, {})[job.key.cell] = None
    if wrong:
        more = {sentence: f" and {len(cells) - 1} more" if len(cells) > 1 else "" for sentence, cells in wrong.items()}
        raise Problem(*(f"{next(iter(cells))}{more[sentence]}: {sentence}" for sentence, cells in wrong.items()))
    return meanings


def _meaning(job: Job) -> Meaning:
    if job.verb != "run":
        tree = dict(job.settings)
        if job.verb == "pretrain":
            sets = [f"{key}={yaml_value(value)}" for key, value in tree.items() if key != "recipe"]
            recipe = pretraining.resolve({key: tree[key] for key in tree if key == "recipe"}, sets).recipe
            tree = _used(recipe.model_dump(mode="json"), get_args(pretraining.Method))
        return Meaning(tree=tree, hash=_hash_of(tree), resolved=None, data_here=True)
    options = parse(dataclasses.replace(job, folders={}).flags())
    resolved, here = resolve_anywhere(options.given, options.sets)
    blocks = [name for name in METHODS if name != "auto"]  # which also says what runs of other methods hold out
    tree = _used(resolved.recipe.model_dump(mode="json"), blocks)
    of_seed = {k: v for k, v in job.settings.items() if k in tree and "{seed}" in str(v)}  # one hash for all seeds
    return Meaning(tree=tree, hash=_hash_of({**tree, **of_seed}), resolved=resolved, data_here=here)


def _used(tree: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """A recipe with dotted keys, without the blocks of methods that it does not use."""
    idle = {method.replace("-", "_") for method in methods if method != tree["method"]}
    return flat({key: value for key, value in tree.items() if key not in idle})


def _hash_of(tree: Mapping[str, Any]) -> str:
    """Eight digits that change with any setting that can change a number, and with nothing else."""
    kept = {k: v for k, v in tree.items() if k not in ASIDE and v is not None}
    for key in PLACES:
        if isinstance(kept.get(key), str):
            kind, colon, place = kept[key].partition(":")
            kept[key] = f"{kind}{colon}{Path(place).name}"
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# -------------------------------------------------------------------------------------------------------------- states

Status = Literal["done", "stale", "stopped", "failed", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of one run folder."""

    job: Job
    meaning: Meaning
    status: Status
    why: str = ""  # of stale and failed
    info: Mapping[str, Any]  # run.json
    results: Mapping[str, float]  # results.json
    replace: bool = False  # the contents of the folder are of no use and are overwritten


def states_of(jobs: Sequence[Job], meanings: Sequence[Meaning], runs: Path) -> list[RunState]:
    """The state of every run; a run is stale where a run that it needs is not done, or began after it."""
    states: dict[RunKey, RunState] = {}
    for job, meaning in zip(jobs, meanings, strict=True):
        info, results = (_read_json(job.folder / name) for name in ("run.json", "results.json"))
        status, why, replace = _status(job, meaning, runs, info)
        for name, need in job.needs.items() if status != "not run" else ():
            other = states[need]
            outdated = ""
            if other.status != "done":
                outdated = "is to be run again"
            elif (began := info.get("began")) and began < (other.info.get("began") or ""):
                outdated = "was run again after it"
            if outdated:
                status, why, replace = "stale", f"its {name} ({need.cell}) {outdated}", True
                break
        states[job.key] = RunState(
            job=job, meaning=meaning, status=status, why=why, info=info, results=results, replace=replace
        )
    return list(states.values())


def _status(job: Job, meaning: Meaning, runs: Path, info: Mapping[str, Any]) -> tuple[Status, str, bool]:
    """Status of a run by itself, why, and whether its folder is overwritten."""
    if not (job.folder / "recipe.yaml").is_file():
        return "not run", "", False
    changes = _changed_settings(job, meaning, runs, info)
    if info.get("status") == "failed":
        return "failed", str(info.get("error") or "no reason is known").splitlines()[-1], bool(changes)
    if changes:
        why = "; ".join(changes[:3]) + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")
        return "stale", why, True
    if is_finished(job.folder):
        return "done", "", False
    return "stopped", "", not info


def _changed_settings(job: Job, meaning: Meaning, runs: Path, info: Mapping[str, Any]) -> list[str]:
    """Settings in which the run in the folder was asked for something else than the table asks for now."""
    asked = info.get("requested")
    was = flat(read_yaml(job.folder / "recipe.yaml") | (asked if isinstance(asked, dict) else {}))
    now = {key: job.filled(value) for key, value in meaning.tree.items()} | {"seed": job.key.seed}
    now.pop("recipe", None)
    if now.get("epochs") is not None and was.get("epochs") is None:
        labelled = _read_json(job.folder / "split.json").get("labelled")
        if isinstance(labelled, int) and job.verb == "run":
            rule = now.get("steps_of_epochs")
            now["steps"] = steps_of_epochs(now["epochs"], labelled, now["batch_size"], rule)
            now["epochs"] = None
    if not meaning.data_here and now.get("data") == NO_IMAGENET:
        now.pop("data")  # ImageNet was there when it was run

    def comparable(value: Any) -> Any:
        """The same value for all ways to write the folder of the runs, and for lists and tuples."""
        if isinstance(value, str):
            return value.replace(str(runs.resolve()), "RUNS").replace(str(runs), "RUNS")
        return list(value) if isinstance(value, tuple) else value

    return [
        f"{key} was {was.get(key)}, is {value}"
        for key, value in now.items()
        if (key not in ASIDE or key == "seed")
        and (key, value) != ("accumulate", "auto")  # the run has what fitted its GPU
        and (value is not None or (key in was and job.verb == "run"))
        and comparable(was.get(key)) != comparable(value)
    ]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise Problem(f"{path} is damaged ({error.msg}). Remove its run folder to run it again.") from error
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------------------------------------------------- runs.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One line of runs.jsonl."""

    block: str
    row: str
    column: str
    seed: int
    status: str  # done, stale, stopped or failed
    recipe: str  # hash of the resolved recipe, without seed and places
    results: dict[str, float]
    seconds: float | None
    device: str | None
    threads: int | None
    commit: str | None
    why: str = ""


def records_of(states: Iterable[RunState]) -> list[RunRecord]:
    """A line for each run that was begun; only a done run has results."""
    return [
        RunRecord(
            **s.job.key._asdict(), status=s.status, recipe=s.meaning.hash, why=s.why,
            results=dict(s.results) if s.status == "done" else {}, seconds=s.info.get("seconds"),
            device=s.info.get("device"), threads=s.info.get("threads"), commit=s.info.get("git"),
        )
        for s in states
        if s.status != "not run"
    ]  # fmt: skip


def write_records(path: Path, records: Iterable[RunRecord]) -> None:
    write_whole(path, "".join(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in records))


def read_records(path: Path) -> list[RunRecord]:
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            value: dict[str, Any] = json.loads(line)
            records.append(RunRecord(**value))
        except (json.JSONDecodeError, TypeError) as error:
            raise Problem(
                f"{path} line {number} is not a run ({error}). Write the file again with --ledger-only."
            ) from error
    return records
