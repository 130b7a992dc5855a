"""The run folder: what a run was told, how it went, what came out. Plain files, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune_mile.problems import Problem

KEPT_CHECKPOINTS = 2
LOCK_SECONDS = 10.0  # loader processes outlive a kill by some seconds


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path`, flushed to disk, if the block ends well."""
    part = path.with_name(f".{path.name}.part")
    yield part
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    part.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write JSON at once."""
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def next_folder(base: Path, name: str) -> Path:
    """`base/name-1`, or the next number that is free."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    taken = [int(m[1]) for p in base.glob(f"{name}-*") if (m := pattern.fullmatch(p.name))]
    return base / f"{name}-{max(taken, default=0) + 1}"


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuse to write into a folder that holds something, unless it is a run that may be overwritten."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "recipe.yaml").is_file():
        raise Problem(f"--out {folder}: exists and is not a run folder; choose another name")
    if not overwrite:
        raise Problem(f"--out {folder}: holds a run; go on with --resume {folder}, or say --overwrite")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a run folder: two processes that write into it would spoil it. A process that died holds nothing."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "checkpoints/.lock")
    try:
        with contextlib.suppress(NotImplementedError):  # a file system without locks
            lock.acquire(timeout=LOCK_SECONDS)
    except Timeout as error:
        raise Problem(f"{folder}: another process is at work on this run; wait for it, or stop it first") from error
    try:
        yield
    finally:
        lock.release()


class RunFolder:
    """Paths and records of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._info: dict[str, Any] = {}
        self._started = time.monotonic()

    @classmethod
    def create(cls, path: Path, recipe_yaml: str, *, overwrite: bool) -> RunFolder:
        """Make the folder, with its recipe in it, in one rename."""
        check_free(path, overwrite)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with alone(path):
                shutil.rmtree(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        (part / "checkpoints").mkdir(parents=True)
        (part / "recipe.yaml").write_text(recipe_yaml, encoding="utf-8")
        part.rename(path)
        run = cls(path)
        run._info["began"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """A run that was made before."""
        run = cls(path)
        if (path / "run.json").is_file():
            run._info = json.loads((path / "run.json").read_text(encoding="utf-8"))
        return run

    def update(self, **facts: object) -> None:
        """Write facts into run.json; seconds go on from an earlier session."""
        now = time.monotonic()
        self._info["seconds"] = round(self._info.get("seconds", 0.0) + now - self._started, 3)
        self._started = now
        self._info |= facts
        write_json(self.path / "run.json", self._info)

    @property
    def info(self) -> dict[str, Any]:
        """What run.json holds."""
        return self._info

    def append(self, record: dict[str, object]) -> None:
        """One line of metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of metrics.jsonl; a line that a kill cut off is left out."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        records = []
        for number, line in enumerate(lines):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                if number < len(lines) - 1:
                    raise Problem(f"{path} line {number + 1} is damaged ({error.msg})") from error
        return records

    def rewind(self, step: int) -> None:
        """Forget what was recorded after the checkpoint of `step`: it will be done, or looked at, again."""
        kept = [r for r in self.metrics() if r["step"] < step or (r["step"] == step and r["kind"] == "train")]
        with whole_file(self.path / "metrics.jsonl") as part:
            part.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step goes."""
        return self.checkpoints / f"step-{step:08d}.pt"

    def saved(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(self.checkpoints.glob("step-*.pt"))

    def prune(self) -> None:
        """Keep the newest checkpoints only, and no leftovers of a kill."""
        for path in [*self.saved()[:-KEPT_CHECKPOINTS], *self.checkpoints.glob(".*.part")]:
            path.unlink(missing_ok=True)


def environment() -> dict[str, object]:
    """Versions, machine and git state, for run.json."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in ("finetune-mile", "torch", "torchvision", "accelerate", "timm", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    root = Path(__file__).resolve().parent.parent
    return {"versions": versions, "git": _git_hash(root), "machine": platform.machine()}


def _git_hash(root: Path) -> str | None:
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    ask = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    found = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=10)
    return found.stdout.strip() or None
