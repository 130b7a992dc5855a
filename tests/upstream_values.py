"""Upstream's value beside each of ours, from recipes/upstream.yaml: equal, ours or unknown.

`python -m tests.upstream_values [TABLE ...]` prints every cell (default: ssl, semi and imagenet).
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from finetune_mile.config.resolve import read_yaml
from finetune_mile.core.files import shipped
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Section

Verdict = Literal["equal", "ours", "unknown"]
NO_VALUE = ("unknown", "absent")
TABLES = ("ssl", "semi", "imagenet")


class Source(Section):
    """A repository at a commit, or a paper."""

    repository: str = ""
    commit: str = Field(default="", pattern=r"^([0-9a-f]{40})?$")
    paper: str = ""
    note: str = ""
    files: dict[str, str] = Field(default={}, description="short name: path, for long ones")


class Entry(Section):
    """What upstream says of one setting."""

    value: Any = Field(description="in our units; unknown: nobody says; absent: upstream has no such thing")
    source: str = ""
    at: str = Field(default="", pattern=r"^([\w./-]+:\d+|issue \d+|(sec|alg|tab|eq)\. [\d.]+)?$")
    says: str = Field(default="", description="a word of that line")
    ours: Any = Field(default=None, description="our value, where it is another")
    why: str = ""
    when: dict[str, Any] = Field(default={}, description="settings of the cells that it is about")

    @model_validator(mode="after")
    def _complete(self) -> Entry:
        if self.value in NO_VALUE and "ours" not in self.model_fields_set:
            raise ValueError(f"value: {self.value} needs ours:, our value")
        if self.value not in NO_VALUE and not (self.source and self.at):
            raise ValueError("a value needs source: and at:, where it is written")
        return self

    def fits(self, tree: Mapping[str, Any]) -> bool:
        """Is it about the cell with these settings?"""
        return all(tree.get(key) in (v if isinstance(v, list) else [v]) for key, v in self.when.items())

    @property
    def expected(self) -> Any:
        """Our value, as the file knows it."""
        return self.ours if "ours" in self.model_fields_set else self.value


class Family(Section):
    """The entries of one recipe, on top of those of its base."""

    base: str = "any"
    values: dict[str, Entry | list[Entry]]


class Upstream(Section):
    """All of recipes/upstream.yaml."""

    sources: dict[str, Source]
    recipes: dict[str, Family]

    def entries(self, recipe: str) -> dict[str, list[Entry]]:
        """Setting: its entries, for a recipe such as ssl/swav; empty: upstream is not known."""
        if recipe not in self.recipes:
            return {}
        family = self.recipes[recipe]
        below = {} if recipe == "any" else self.entries(family.base)
        return below | {key: v if isinstance(v, list) else [v] for key, v in family.values.items()}

    def place(self, entry: Entry) -> str:
        """Where a value is written: `google-research/simclr 383d414 README.md:160`."""
        if not entry.source:
            return ""
        source = self.sources[entry.source]
        return f"{source.paper or f'{source.repository} {source.commit[:7]}'} {entry.at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of our settings beside upstream's."""

    verdict: Verdict
    sentence: str
    expected: bool  # our value is the one that upstream.yaml knows


@functools.cache
def read_upstream(path: Path | None = None) -> Upstream:
    path = path or shipped("recipes") / "upstream.yaml"
    try:
        upstream = Upstream.model_validate(read_yaml(path))
    except ValidationError as error:
        wrong = [f"{path.name}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise Problem(*wrong) from error
    for name in upstream.recipes:
        for entry in (e for entries in upstream.entries(name).values() for e in entries):
            if entry.source and entry.source not in upstream.sources:
                raise Problem(f"{path.name}: {name}: {entry.source} is not among its sources")
    return upstream


def compare(recipe: str, tree: Mapping[str, Any]) -> dict[str, Compared]:
    """Each setting of a cell that upstream.yaml knows, beside upstream's; empty for other recipes.

    Args:
        recipe: its name below recipes/, such as ssl/swav.
        tree: dotted key: value, of the resolved recipe.
    """
    upstream = read_upstream()
    found = {}
    for key, entries in upstream.entries(recipe).items():
        entry = next((e for e in entries if e.fits(tree)), None)
        without = key in ("epochs", "steps") and tree.get(key) is None  # a budget is in one of them
        if entry is not None and key in tree and not without:
            found[key] = _compared(upstream, entry, _plain(tree[key]))
    return found


def _compared(upstream: Upstream, entry: Entry, ours: Any) -> Compared:
    verdict: Verdict = "unknown" if entry.value == "unknown" else "equal" if ours == entry.value else "ours"
    there = [f"upstream {'none' if entry.value == 'absent' else entry.value}"] if verdict == "ours" else []
    said = ", ".join(filter(None, [*there, upstream.place(entry)])) + (f"; {entry.why}" if entry.why else "")
    return Compared(
        verdict=verdict, sentence=verdict + (f" ({said.removeprefix('; ')})" if said else ""),
        expected=ours == _plain(entry.expected),
    )  # fmt: skip


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def main():
    """Print every cell of the tables with each setting beside upstream's; 1: a recipe is not what the file says."""
    from finetune_mile.paper.tables.description import find_table, read_table
    from finetune_mile.paper.tables.runs import make_jobs, resolve_all

    drifted = 0
    for name in sys.argv[1:] or TABLES:
        table = read_table(find_table(name))
        jobs = make_jobs(table, Path(table.runs), {})
        for job, meaning in zip(jobs, resolve_all(jobs), strict=True):
            path = meaning.resolved.path if meaning.resolved else Path()
            beside = compare(f"{path.parent.name}/{path.stem}", meaning.tree)
            if not beside:
                continue
            counts = Counter(each.verdict for each in beside.values())
            told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict))
            print(f"{name}: {job.key.cell}: {told}")
            for key, each in beside.items():
                drifted += not each.expected
                print(f"  {key} = {meaning.tree[key]}   [{each.sentence}]" + ("" if each.expected else "   DRIFTED"))
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
