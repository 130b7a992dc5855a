"""What became of each run: done, stale, stopped, or not there. No torch here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune_mile.problems import Problem
from finetune_mile.settings import read_yaml
from finetune_mile.tables.cells import Job, Key
from finetune_mile.tables.resolving import ASIDE, NO_IMAGENET, Meaning, dotted

Status = Literal["done", "stale", "stopped", "failed", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A run folder, looked at."""

    job: Job
    meaning: Meaning
    status: Status
    why: str = ""  # of stale and failed
    info: Mapping[str, Any]  # run.json
    results: Mapping[str, float]  # results.json
    replace: bool = False  # what is in the folder is of no use: it is overwritten


def look(jobs: Sequence[Job], meanings: Sequence[Meaning], runs: Path) -> list[State]:
    """The state of every run; a run whose prerequisite is not done is not done either."""
    states: list[State] = []
    done: dict[Key, bool] = {}
    for job, meaning in zip(jobs, meanings, strict=True):
        state = _look_at(job, meaning, runs)
        late = next((name for name, need in job.needs.items() if not done.get(need, False)), None)
        if state.status == "done" and late is not None:
            why = f"its {late} ({job.needs[late].cell}) is to be run again"
            state = dataclasses.replace(state, status="stale", why=why, replace=True)
        done[job.key] = state.status == "done"
        states.append(state)
    return states


def _look_at(job: Job, meaning: Meaning, runs: Path) -> State:
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
    was = dotted(read_yaml(job.folder / "recipe.yaml"))
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
    found = []
    for key, value in now.items():
        if key in aside or (value is None and (key not in was or job.verb != "run")):
            continue
        if _same(was.get(key), value, runs):
            continue
        found.append(f"{key} was {was.get(key)}, is {value}")
    return found


def _same(a: Any, b: Any, runs: Path) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return a == b or _below(a, runs) == _below(b, runs)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return list(a) == list(b)
    return bool(a == b)


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
