"""Every setting of a run, who set it, and the first phases: what `--explain` adds to the head of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby

import yaml
from pydantic import BaseModel
from rich.table import Table

from finetune_mile.config.resolve import Resolved, flat
from finetune_mile.learning.phases import Phase

SHOWN_PHASES = 8


def settings_table(recipe: BaseModel, said_by: Mapping[str, str], sources: Mapping[str, str]) -> Table:
    """Every setting, its value, who said so, and where it is from."""
    table = Table(
        "setting", "value", "set by", "source", title="recipe", title_justify="left", box=None, pad_edge=False
    )
    for dotted, leaf in flat(recipe.model_dump(mode="json")).items():
        shown = yaml.safe_dump(leaf, default_flow_style=True).removesuffix("...\n").strip()
        table.add_row(dotted, shown, said_by.get(dotted, "schema"), sources.get(dotted, ""))
    return table


def settings_json(resolved: Resolved) -> str:
    """`--explain --json`: every setting with its value, who set it, and where the value is from, if that is known."""
    settings = {}
    for dotted, leaf in flat(resolved.recipe.model_dump(mode="json")).items():
        source = {"source": resolved.sources[dotted]} if dotted in resolved.sources else {}
        settings[dotted] = {"value": leaf, "set_by": resolved.said_by.get(dotted, "schema"), **source}
    return json.dumps({"recipe": resolved.path.name, "why": resolved.why, "settings": settings}, indent=1)


def phase_table(phases: tuple[Phase, ...]) -> Table:
    table = Table(
        "phase", "generation", "steps", "starts from", "becomes", "labels", "loss", "pool", "method's own",
        title=f"phases ({len(phases)})", title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for p in phases[:SHOWN_PHASES]:
        cells = (
            p.name,
            p.generation,
            p.steps,
            p.start,
            ", ".join(p.becomes),
            "given" if p.given else "teacher" if not p.union else "teacher + given",
            p.loss,
            p.pool,
            "" if p.values is None else p.values,
        )
        table.add_row(*(str(c) for c in cells))
    if len(phases) > SHOWN_PHASES:
        table.add_row("...")
    return table


def runs_of(letters: str) -> str:
    """`TTTTSS` as it is while short, else as `T4 S2`."""
    if len(letters) <= 60:
        return letters
    return " ".join(f"{letter}{len(list(same))}" for letter, same in groupby(letters))
