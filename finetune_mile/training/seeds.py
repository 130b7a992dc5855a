"""Several seeds of one recipe: a folder with a run for each, and their mean and spread."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from finetune_mile.config.resolve import flat
from finetune_mile.config.schema import Recipe
from finetune_mile.core.files import read_scores, write_json
from finetune_mile.core.problems import Problem

SETTINGS = "seeds.json"  # the recipe of all seeds
SUMMARY = "summary.json"


def taken_up(path: Path, recipe: Recipe) -> None:
    """Begin a folder of seeds, or take up one of the same settings; anything else is refused."""
    now = recipe.model_dump(mode="json", exclude={"seed"})
    if not path.is_dir() or not any(path.iterdir()):
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / SETTINGS, now)
        return
    if not (path / SETTINGS).is_file():
        raise Problem(f"--out {path}: is not empty and holds no runs of --seeds; choose another --out")
    try:
        before = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
        keys = sorted(key for key, value in flat(now).items() if flat(before).get(key) != value)
    except (ValueError, AttributeError) as error:
        raise Problem(f"{path / SETTINGS} is damaged; choose another --out") from error
    if keys:
        raise Problem(f"--out {path}: holds runs of other settings ({', '.join(keys[:5])}); choose another --out")


def summarise(path: Path, runs: list[Path]) -> None:
    """Print and write the mean and the standard deviation over seeds of every measure that all runs have."""
    from rich.table import Table

    from finetune_mile.measures import closing_rows
    from finetune_mile.training.display import wide_console

    results = [read_scores(run / "results.json") for run in runs]
    shared = [key for key in results[0] if all(key in each for each in results)]
    values = {key: [float(each[key]) for each in results] for key in shared}
    spread = {key: statistics.stdev(each) if len(each) > 1 else 0.0 for key, each in values.items()}
    means = {key: statistics.fmean(each) for key, each in values.items()}
    write_json(path / SUMMARY, {key: {"mean": means[key], "std": spread[key], "seeds": values[key]} for key in shared})
    table = Table("measure", "mean", "std", "seeds", title=f"{len(runs)} seeds", title_justify="left")
    for key, _, unit, _, _ in closing_rows(means):
        each = ", ".join(f"{value:.1f}" for value in values[key])
        table.add_row(key, f"{means[key]:.2f} {unit}", f"{spread[key]:.2f}", each)
    out = wide_console()
    out.print(table)
    out.print(f"\n{path / SUMMARY}", soft_wrap=True)
