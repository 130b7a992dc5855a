"""The run folder: what a run was told, how it went, what came out. Plain files, written whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from finetune_mile.config.flags import RunOptions
from finetune_mile.config.resolve import flat, read_yaml, resolve_tree
from finetune_mile.core.files import load_yaml_file, locked, read_json, write_json, write_whole, writing
from finetune_mile.core.problems import Problem
from finetune_mile.core.times import Times

if TYPE_CHECKING:
    from accelerate import Accelerator
    from pydantic import BaseModel

KEPT_CHECKPOINTS = 2
MADE_BY = {"made_by": "finetune_mile"}  # the mark in run.json of a folder that a run made
LOCK = "checkpoints/.lock"
START = "start.json"  # scores of a linear probe of the checkpoint, and of k nearest neighbours
FIRST_STAGE = "first_stage"  # in it: the run before its second stage
OWN_SIZE = "own_size"  # in it: a probe at the checkpoint's own image size, for a run at a smaller one
REFIT = "refit"  # a run folder inside a run folder, on all labels
TRIAL = "trial"  # a run folder inside a run folder
SECOND = "then"  # the same, of the second stage
VALIDATION = "validation.json"  # which validation images were scored, and what is right
AT_WORK = "{}: another process is at work on this run; wait for it, or stop it first"

# Every file that a run writes, as globs below its folder; --overwrite removes these and nothing else. The recipe is
# the first to go and the last to come: a folder that has one can be resumed. {name} is the folder's own name, where
# TensorBoard's files are.
INNER = (TRIAL, REFIT, SECOND, f"{TRIAL}/{SECOND}", f"{REFIT}/{SECOND}")  # folders of runs inside that of a run
INSIDE = (
    "checkpoints/step-*.pt", "checkpoints/.lock", "*.json", "*.jsonl", "recipe.yaml",
    "pseudo_labels/generation-*/block-*.safetensors",
)  # fmt: skip
WRITTEN = (
    "recipe.yaml", "init.json", "split.json", "metrics.jsonl", "results.json", "validation.json", "labels.parquet",
    "bad_images.csv", "per_class.csv", "test_per_class.csv", "report.html", "views.png", "start.json",
    "checkpoints/step-*.pt",
    "export/model.safetensors", "export/config.json",
    "export/README.md", "export/checkpoint.ckpt", "pseudo_labels/generation-*/block-*.safetensors",
    *(f"{inner}/{name}" for inner in INNER for name in INSIDE), "unlabelled.parquet", "minutes.json",
    "{name}/events.out.tfevents.*", "{name}/*/events.out.tfevents.*", "{name}/*/hparams.yml",
)  # fmt: skip


def next_folder(base: Path, name: str) -> Path:
    """`base/name-1`, or the next number that is free."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    taken = [int(m[1]) for p in base.glob(f"{name}-*") if (m := pattern.fullmatch(p.name))]
    return base / f"{name}-{max(taken, default=0) + 1}"


def claim_folder(base: Path, name: str) -> Path:
    """Make `next_folder` at once: another command that is started meanwhile takes the next number."""
    base.mkdir(parents=True, exist_ok=True)
    while True:
        path = next_folder(base, name)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuse to write into a folder that holds something, unless it is a run that may be overwritten."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            if not _made_by_run(folder):
                raise Problem(f"--out {folder}: it is not empty and was not made by a run; choose another --out")
            if not overwrite and (folder / "recipe.yaml").exists():  # without one, it was killed while it was made
                raise Problem(
                    f"--out {folder} holds a run: continue it with --resume {shlex.quote(str(folder))}, or replace it "
                    "with --overwrite"
                )
        above = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise Problem(f"--out {folder}: {above} is not a folder that can be written; choose another --out")
    except OSError as error:
        raise Problem(f"--out {folder}: {error.strerror}; choose another --out") from error


# What is read from a run.json, and of which type it is.
INFO: dict[str, tuple[type, ...]] = {
    "status": (str,), "recipe_sha256": (str,), "started_in": (str,), "began": (str,), "world_size": (int,),
    "seconds": (int, float), "share": (int, float), "requested": (dict,), "recipe": (dict,),
}  # fmt: skip


def _made_by_run(folder: Path) -> bool:
    try:
        info = read_info(folder)
    except Problem:
        return False
    return info | MADE_BY == info or "finetune-mile" in str(info.get("versions"))  # the first runs had no mark


def read_info(folder: Path) -> dict[str, Any]:
    """The content of run.json; empty where there is none."""
    path = folder / "run.json"
    if not path.exists():
        return {}
    info = read_json(path)
    for key, kinds in INFO.items():
        if info.get(key) is not None and not isinstance(info[key], kinds):
            raise Problem(f"{path} is damaged ({key} is a {type(info[key]).__name__}); restore it, or start a new run")
    return info


def recipe_hash(tree: Mapping[str, Any]) -> str:
    """A hash of the settings in a recipe.yaml; comments and layout do not count."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()


def resumed_recipe(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The recipe.yaml of a run that is resumed, and its settings; refused where it changed since the run began."""
    path = folder / "recipe.yaml"
    if not path.is_file():
        raise Problem(f"--resume {folder}: not a run folder (it has no recipe.yaml)")
    tree, info = read_yaml(path), read_info(folder)
    if info.get("recipe_sha256") not in (None, recipe_hash(tree)):
        was, now = flat(info.get("recipe", {})), flat(tree)
        keys = sorted(key for key in was | now if was.get(key) != now.get(key))
        changes = ", ".join(f"{key} was {was.get(key)}, is {now.get(key)}" for key in keys)
        raise Problem(
            f"--resume {folder}: recipe.yaml was changed after the run began ({changes}); undo the change to resume, "
            f"or start a new run with --recipe {shlex.quote(str(path))} --out DIR"
        )
    return path, tree


def choose_folder(options: RunOptions, name: str, requested: BaseModel) -> tuple[Path, bool]:
    """The folder of a run, and whether a run in it is continued; told by the first process to all.

    A process that is slower to start must not check a folder that the first one has made by then.

    Args:
        options: of the command.
        name: of a new folder below runs/.
        requested: the settings that the command asks for.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _choose_folder(options, name, requested)
    from finetune_mile.training.processes import from_first

    return from_first(lambda: _choose_folder(options, name, requested))


def _choose_folder(options: RunOptions, name: str, requested: BaseModel) -> tuple[Path, bool]:
    if isinstance(options.resume, Path):
        return options.resume, True
    out: Path = options.out or next_folder(Path("runs"), name)
    if options.resume is None or not (out / "recipe.yaml").is_file() or not _made_by_run(out):
        check_free(out, options.overwrite)
        return out, False
    path, tree = resumed_recipe(out)
    info = read_info(out)
    if "requested" not in info:
        again = f"--resume {shlex.quote(str(out))}"
        raise Problem(f"--resume auto: {out} began with an earlier version; continue it with {again}")
    began = resolve_tree(type(requested), tree | info["requested"], path, "--resume").recipe
    was, now = (flat(each.model_dump(mode="json")) for each in (began, requested))
    changes = [f"{key} was {was.get(key)}, is {now.get(key)}" for key in was | now if was.get(key) != now.get(key)]
    if changes:
        raise Problem(
            f"--resume auto: {out} holds a run of other settings ({', '.join(changes)}); use the run's own settings, "
            "or another --out"
        )
    return out, True


def refit_is_left(folder: Path, wanted: bool) -> bool:
    """Is `--refit` wanted, and not done?"""
    return wanted and not (folder / REFIT / "recipe.yaml").is_file()


def say_finished(folder: Path) -> int:
    """Say that there is nothing left to do; returns the exit code."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"{folder} is finished; its results are in results.json\n")
    return 0


def requested_settings(requested: BaseModel, used: BaseModel) -> dict[str, Any]:
    """For run.json: what was asked for, where a run has put another value, such as steps for epochs."""
    now = used.model_dump(mode="json")
    return {key: value for key, value in requested.model_dump(mode="json").items() if value != now[key]}


def alone(folder: Path, seconds: float | None = None) -> AbstractContextManager[None]:
    """Hold a run folder: two processes that write into it would spoil it."""
    return locked(folder / LOCK, AT_WORK.format(folder), seconds)


class RunFolder:
    """Paths and records of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.info: dict[str, Any] = {}  # what run.json holds
        self.times = Times()
        self._started = time.monotonic()

    @classmethod
    def create(
        cls,
        path: Path,
        recipe_yaml: str,
        *,
        overwrite: bool,
        notes: Mapping[str, object] | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> RunFolder:
        """Make the folder with its recipe, its notes and run.json: complete, or not there after a kill.

        Args:
            path: where to; of a run that is there only the files that runs write are removed.
            recipe_yaml: the settings.
            overwrite: replace a run.
            notes: name.json to its content.
            facts: for run.json.
        """
        check_free(path, overwrite)
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            (part / "checkpoints").mkdir(parents=True)
            with alone(part):
                run = cls(part)
                write_whole(part / "recipe.yaml", recipe_yaml)
                run.complete(notes or {}, facts or {})
                if path.is_dir() and any(path.iterdir()):
                    _replace(path, part)
                else:
                    part.rename(path)
        finally:
            if part.is_dir():
                with contextlib.suppress(OSError):
                    _discard(part)
        run.path, run.checkpoints = path, path / "checkpoints"
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """A run that was made before."""
        run = cls(path)
        run.info = read_info(path)
        run.times.seconds |= run.info.get("times", {})
        return run

    def complete(self, notes: Mapping[str, object], facts: Mapping[str, object]) -> None:
        """Write the notes and the facts of run.json that are not there yet."""
        for name, content in notes.items():
            if not (self.path / name).is_file():
                write_json(self.path / name, content)
        if self.info | MADE_BY != self.info or "recipe_sha256" not in self.info:
            tree = load_yaml_file(self.path / "recipe.yaml")
            began = datetime.now(UTC).isoformat(timespec="milliseconds")
            known = {**MADE_BY, "began": began, "recipe_sha256": recipe_hash(tree), "recipe": tree, **facts}
            self.update(**({"status": "running"} | known | self.info))

    def update(self, **facts: object) -> None:
        """Write facts into run.json; seconds go on from an earlier session."""
        now = time.monotonic()
        self.info["seconds"] = round(self.info.get("seconds", 0.0) + now - self._started, 3)
        self._started = now
        self.times.note()
        if self.times.seconds:
            self.info["times"] = {part: round(seconds, 3) for part, seconds in self.times.seconds.items()}
        self.info |= facts
        write_json(self.path / "run.json", self.info)

    def end(self, **facts: object) -> None:
        """Write into run.json that the run was stopped or failed; on a full disk at least its status, in place."""
        try:
            self.update(**facts)
        except (Problem, OSError):
            was, now = b'"status": "running"', f'"status": "{facts["status"]}"'.encode()
            with contextlib.suppress(OSError), (self.path / "run.json").open("r+b") as stream:
                at = stream.read().find(was)
                if at >= 0 and len(now) <= len(was):
                    stream.seek(at)
                    stream.write(now.ljust(len(was)))

    def append(self, record: dict[str, object]) -> None:
        """One line of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def start(self) -> dict[str, Any]:
        """The content of start.json; empty where there is none."""
        path = self.path / START
        return read_json(path) if path.is_file() else {}

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of metrics.jsonl; a line that a kill cut off is left out."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = path.read_bytes().splitlines()
        records = []
        for number, line in enumerate(lines):
            try:
                record = json.loads(line)
                if not isinstance(record["kind"], str) or type(record["step"]) is not int:
                    raise TypeError
                records.append(record)
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                if number < len(lines) - 1:
                    raise Problem(f"{path} line {number + 1} is damaged; remove that line") from error
        return records

    def rewind(self, step: int) -> None:
        """Forget what was recorded after the checkpoint of `step`: it will be done, or looked at, again."""
        kept = [r for r in self.metrics() if r["step"] < step or (r["step"] == step and r["kind"] == "train")]
        write_whole(self.path / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in kept))

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step goes."""
        return self.checkpoints / f"step-{step:08d}.pt"

    def saved(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(self.checkpoints.glob("step-*.pt"))

    def prune(self, kept: int = KEPT_CHECKPOINTS) -> None:
        """Keep the newest checkpoints only, and no leftovers of a kill; with none, also none of a second stage."""
        saved = self.saved()
        second = [] if kept else [*self.path.glob(f"{SECOND}/{self.checkpoints.name}/*.pt")]
        for path in [*saved[: max(len(saved) - kept, 0)], *second, *self.checkpoints.glob(".step-*.pt.part")]:
            path.unlink(missing_ok=True)


def remove_written(folder: Path, patterns: tuple[str, ...] = WRITTEN) -> None:
    """Remove files that a run writes, the leftovers of writing them, and folders that are empty then."""
    for pattern in patterns:
        head, _, last = pattern.format(name=glob.escape(folder.name)).rpartition("/")
        for one in (last, f".{last}.part"):
            for path in [*folder.glob(f"{head}/{one}" if head else one)]:
                if not path.is_dir() or path.is_symlink():
                    path.unlink()
    above = {str(parent) for pattern in patterns for parent in PurePosixPath(pattern).parents} - {"."}
    for pattern in sorted(above, key=lambda pattern: -pattern.count("/")):
        for path in folder.glob(pattern.format(name=glob.escape(folder.name))):
            if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                path.rmdir()


def _replace(path: Path, part: Path) -> None:
    """Put a new run, complete in `part`, in the place of an old one; what no run wrote is kept and named."""
    with alone(path):
        remove_written(path)
        kept = [*_kept(path)]
        (path / "checkpoints").mkdir(exist_ok=True)
        files = [new for new in part.iterdir() if new.is_file()]
        for new in sorted(files, key=lambda new: (new.name == "recipe.yaml", new.name == "run.json")):
            new.replace(path / new.name)
    if kept:
        sys.stderr.write(f"--overwrite {path}: kept what a run did not write: {', '.join(kept)}\n")


def _kept(folder: Path) -> Iterator[str]:
    for entry in sorted(folder.iterdir()):
        if entry.name in ("checkpoints", "export") and not entry.is_symlink():
            yield from (f"{entry.name}/{inner.name}" for inner in sorted(entry.iterdir()) if inner.name != ".lock")
        elif entry.name != "run.json":
            yield entry.name


def _remove_leftovers(path: Path) -> None:
    """Remove what a process that was killed while it made this run left beside it."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if not re.fullmatch(r"\d+", part.suffixes[-2][1:]) or not part.is_dir():
            continue  # not a process number: not ours
        (part / "checkpoints").mkdir(exist_ok=True)
        with contextlib.suppress(Problem), alone(part, seconds=0.0):  # a process that is alive holds it
            _discard(part)


def _discard(part: Path) -> None:
    remove_written(part, (*WRITTEN, "run.json", LOCK))
    if not any(part.iterdir()):
        part.rmdir()


def open_on_main(
    accelerator: Accelerator,
    path: Path,
    recipe: str,
    notes: Mapping[str, object],
    facts: Mapping[str, object],
    *,
    resume: bool,
    overwrite: bool,
) -> RunFolder:
    """A run folder that the first process makes, or completes where it is resumed.

    Args:
        accelerator: for processes.
        path: where it is.
        recipe: its recipe.yaml.
        notes: name.json to its content.
        facts: for run.json, beside machine, versions and processes.
        resume: the run was made before.
        overwrite: replace a run.
    """
    import torch

    if accelerator.is_main_process:
        here = {"world_size": accelerator.num_processes, "device": str(accelerator.device)}
        facts = {**facts, **here, "threads": torch.get_num_threads(), **environment()}
        if resume:
            run = RunFolder.reopen(path)
            run.complete(notes, facts)
            began, now = run.info["world_size"], accelerator.num_processes
            if began != now:
                sys.stderr.write(
                    f"warning: {path} began with {began} processes and continues with {now}; sums are rounded in "
                    "another order, so the weights will differ in their last digits\n"
                )
        else:
            RunFolder.create(path, recipe, overwrite=overwrite, notes=notes, facts=facts)
    accelerator.wait_for_everyone()
    return RunFolder.reopen(path)


def environment() -> dict[str, object]:
    """Versions, machine and git state, for run.json."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in ("finetune-mile", "torch", "torchvision", "accelerate", "timm", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    root, commit = Path(__file__).resolve().parents[2], None
    if (root / ".git").exists() and shutil.which("git") is not None:
        ask = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
        with contextlib.suppress(subprocess.TimeoutExpired):  # a slow disk
            commit = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=10).stdout.strip() or None
    started_in = str(Path.cwd())  # where relative paths of the recipe begin
    return {"versions": versions, "git": commit, "machine": platform.machine(), "started_in": started_in}
