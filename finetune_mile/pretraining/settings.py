"""From flags and a YAML file to one checked `Pretrain`. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_mile.config.resolve import Merged, find_recipe, put_flags, read_yaml, set_settings, validated
from finetune_mile.pretraining.recipe import Pretrain

FOLDER = "pretrain"  # below recipes/
GRIDS = ("demo", "multi-mnist")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A checked recipe, the file it came from, and for each setting who said it."""

    recipe: Pretrain
    path: Path
    why: str
    said_by: Mapping[str, str]


def resolve(flags: Mapping[str, Any], sets: list[str]) -> Resolved:
    """Flags over recipe, checked; every problem is raised in one go.

    Args:
        flags: what was given on the command line, by key.
        sets: `--set KEY=VALUE` arguments.
    """
    wanted = flags.get("recipe")
    if wanted is not None:
        path, why = find_recipe(str(wanted).removeprefix(f"{FOLDER}/"), FOLDER), f"--recipe {wanted}"
    else:
        grids = str(flags.get("data", "demo")).partition(":")[0] in GRIDS
        path, why = find_recipe("grids" if grids else "photos", FOLDER), "no --recipe: by the kind of --data"
    return check(read_yaml(path), {k: v for k, v in flags.items() if k != "recipe"}, sets, path, why)


def check(tree: dict[str, Any], given: Mapping[str, Any], sets: list[str], path: Path, why: str) -> Resolved:
    """Put the layers on top of each other and validate once."""
    wrong: list[str] = []
    flags = {
        "optimizer.lr" if key == "lr" else key: (value, "--" + key.replace("_", "-")) for key, value in given.items()
    }
    merged = Merged()
    merged.add(tree, {}, "recipe", f"recipe {path.name}: ")
    put_flags(merged, flags | set_settings(sets, wrong))
    recipe = validated(Pretrain, merged, path, wrong)
    return Resolved(recipe=recipe, path=path, why=why, said_by=merged.said_by)
