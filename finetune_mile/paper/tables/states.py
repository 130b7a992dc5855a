"""State of each run (done, stale, stopped, failed, not run), and its line in runs.jsonl. No torch here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from finetune_mile.config.resolve import NO_IMAGENET, flat, read_yaml
from finetune_mile.core.files import whole_file
from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables.cells import ASIDE, Job, Key, Meaning

Status = Literal["done", "stale", "stopped", "failed", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of one run folder: done, stale, stopped, failed or not run."""

    job: Job
    meaning: Meaning
    status: Status
    why: str = ""  # of stale and failed
    info: Mapping[str, Any]  # run.json
    results: Mapping[str, float]  # results.json
    replace: bool = False  # what is in the folder is of no use: it is overwritten


def states_of(jobs: Sequence[Job], meanings: Sequence[Meaning], runs: Path) -> list[State]:
    """The state of every run; a run is stale where what it needs is not done, or was begun after it."""
    states: dict[Key, State] = {}
    for job, meaning in zip(jobs, meanings, strict=True):
        state = _state_of(job, meaning, runs)
        why = next((w for name, need in job.needs.items() if (w := _outdated(state, name, states[need]))), "")
        if why and state.status != "not run":
            state = dataclasses.replace(state, status="stale", why=why, replace=True)
        states[job.key] = state
    return list(states.values())


def _outdated(state: State, name: str, need: State) -> str:
    """Why a run that was begun cannot rest on what `need` is now; nothing where it can."""
    subject = f"its {name} ({need.job.key.cell})"
    if need.status != "done":
        return f"{subject} is to be run again"
    began, other = state.info.get("began"), need.info.get("began")
    return f"{subject} was run again after it" if began and other and began < other else ""


def _state_of(job: Job, meaning: Meaning, runs: Path) -> State:
    folder = job.folder

    def state(status: Status, why: str = "", *, replace: bool = False) -> State:
        return State(job=job, meaning=meaning, status=status, why=why, info=info, results=results, replace=replace)

    info, results = _json(folder / "run.json"), _json(folder / "results.json")
    if not (folder / "recipe.yaml").is_file():
        return state("not run")
    other = differences(job, meaning, runs)
    if info.get("status") == "failed":
        error = str(info.get("error") or "no reason is known").splitlines()[-1]
        return state("failed", error, replace=bool(other))
    if other:
        why = "; ".join(other[:3]) + (f"; and {len(other) - 3} more" if len(other) > 3 else "")
        return state("stale", why, replace=True)
    if info.get("status") == "finished" and (results or job.verb != "run"):
        return state("done")
    return state("stopped", replace=not info)


def differences(job: Job, meaning: Meaning, runs: Path) -> list[str]:
    """Settings in which the run in the folder is not what the table asks for now."""
    was = flat(read_yaml(job.folder / "recipe.yaml"))
    now = {key: job.filled(value) for key, value in meaning.tree.items()} | {"seed": job.key.seed}
    now.pop("recipe", None)
    if now.get("epochs") is not None and was.get("epochs") is None:
        labelled = _json(job.folder / "split.json").get("labelled")
        if isinstance(labelled, int) and job.verb == "run":
            now["steps"] = max(round(now["epochs"] * labelled / now["batch_size"]), 1)
            now["epochs"] = None
    if not meaning.data_here and now.get("data") == NO_IMAGENET:
        now.pop("data")  # ImageNet was there when it was run
    aside = [key for key in ASIDE if key != "seed"]
    return [
        f"{key} was {was.get(key)}, is {value}"
        for key, value in now.items()
        if key not in aside
        and (value is not None or (key in was and job.verb == "run"))
        and not _same(was.get(key), value, runs)
    ]


def _same(a: Any, b: Any, runs: Path) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return _below(a, runs) == _below(b, runs)
    return bool(a == b) or (isinstance(a, list | tuple) and isinstance(b, list | tuple) and list(a) == list(b))


def _below(text: str, runs: Path) -> str:
    """A path inside the runs' folder, whichever way that folder was written."""
    for folder in (str(runs.resolve()), str(runs)):
        text = text.replace(folder, "RUNS")
    return text


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise Problem(f"{path} is damaged ({error.msg}); remove its run folder to run it again") from error
    return value if isinstance(value, dict) else {}


# --------------------------------------------------------------------------------------------------------- runs.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a run folder says about itself."""

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

    @property
    def key(self) -> Key:
        """Which run."""
        return Key(self.block, self.row, self.column, self.seed)


def records_of(states: Iterable[State]) -> list[Record]:
    """A line for each run that was begun; only a done run has results."""
    return [
        Record(
            **s.job.key._asdict(), status=s.status, recipe=s.meaning.hash, why=s.why,
            results=dict(s.results) if s.status == "done" else {}, seconds=s.info.get("seconds"),
            device=s.info.get("device"), threads=s.info.get("threads"), commit=s.info.get("git"),
        )
        for s in states
        if s.status != "not run"
    ]  # fmt: skip


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write runs.jsonl at once."""
    with whole_file(path) as part:
        part.write_text("".join(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in records), encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """Read runs.jsonl."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            value: dict[str, Any] = json.loads(line)
            records.append(Record(**value))
        except (json.JSONDecodeError, TypeError) as error:
            raise Problem(f"{path} line {number} is not a run ({error}); write it anew with --ledger-only") from error
    return records
