"""A recipe file's layers: `base:` below it, `fractions:` on top of it, `sources:` beside it. No torch here.

A file is its settings with those of the run's fraction on top, and it lies on its base, key by key. None of the three
keys is a setting: a resolved recipe has none of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune_mile.config.schema import FullRecipe
from finetune_mile.core.names import did_you_mean
from finetune_mile.core.places import shipped
from finetune_mile.core.problems import Problem
from finetune_mile.core.yaml_text import TooMuch, compose, construct, read_text

LONGEST_CHAIN = 4  # files, the first one included
OWN_KEYS = ("base", "fractions", "sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One file without what it builds on."""

    path: Path
    speaker: str  # who says its settings
    settings: dict[str, Any]
    sources: dict[str, str]  # dotted key, or a block's name: where the value is from
    fractions: dict[float, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Layers put on top of each other; everything by dotted key."""

    tree: dict[str, Any] = field(default_factory=dict)
    said_by: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)  # for messages: the file, and the entry in it
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, settings: Mapping[str, Any], sources: Mapping[str, str], speaker: str, place: str) -> None:
        """Put settings on top; what they replace takes its source with it."""
        if "steps" in settings or "epochs" in settings:
            for key in {"steps", "epochs"} - settings.keys():
                self.forget(key)
        merge(self.tree, settings)
        for dotted in paths(settings):
            self.said_by[dotted], self.places[dotted] = speaker, place
            self.sources.pop(dotted, None)
            found = sources.get(dotted) or sources.get(dotted.partition(".")[0])
            if found:
                self.sources[dotted] = found

    def forget(self, key: str) -> None:
        """Take a top-level setting away."""
        for known in (self.tree, self.said_by, self.places, self.sources):
            known.pop(key, None)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping, in which nothing is said twice."""
    try:
        node = compose(read_text(path))
        twice = _said_twice(node, set())
        if twice is not None:
            raise Problem(f"recipe {path}: {twice.value} stands twice, again at line {twice.start_mark.line + 1}")
        tree = construct(node)
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"recipe {path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        what = "cannot be used" if isinstance(error, TooMuch) else "is not YAML"
        raise Problem(f"recipe {path}: {what}{line} ({getattr(error, 'problem', error)})") from error
    if not isinstance(tree, dict):
        raise Problem(f"recipe {path}: must be a mapping of settings, found {type(tree).__name__}")
    return tree


def _said_twice(node: yaml.Node | None, seen: set[int]) -> yaml.ScalarNode | None:
    """The first key of a mapping that stands in it before; YAML itself takes the last one and says nothing."""
    if node is None or id(node) in seen:  # an alias
        return None
    seen.add(id(node))
    parts = []
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    return key
                keys.add(key.value)
        parts = [value for _, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    return next((found for part in parts if (found := _said_twice(part, seen)) is not None), None)


def find_recipe(name: str, below: str = "") -> Path:
    """A recipe by path, or by its name below recipes/ (or a folder in it) with or without the ending."""
    folder = shipped("recipes") / below
    for path in (Path(name), folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return path
    found = [p.relative_to(folder) for p in sorted(folder.rglob("*.yaml"))]
    names = [str(p.with_suffix("")) for p in found if p.parts[0] not in ("splits", "tables", "pretrain")]
    raise Problem(f"--recipe {name}: no such file or recipe; {did_you_mean(name, names)}")


def layers_of(tree: Mapping[str, Any], path: Path) -> list[Layer]:
    """The file's layers, the lowest base first.

    Args:
        tree: the file's contents.
        path: where they are from.
    """
    layers = [_layer(tree, path, "recipe")]
    seen = [path.resolve()]
    while (base := tree.get("base")) is not None:
        below = _find_base(base, path)
        if below.resolve() in seen:
            raise Problem(f"recipe {path.name}: base: {base} leads back to {below.name}, in a circle")
        if len(seen) == LONGEST_CHAIN:
            raise Problem(
                f"recipe {path.name}: base: {base} is one too many; a chain has at most {LONGEST_CHAIN} files"
            )
        tree, path = read_yaml(below), below
        layers.append(_layer(tree, path, f"base {path.name}"))
        seen.append(path.resolve())
    return layers[::-1]


def put_together(layers: list[Layer], fraction: float | None) -> Merged:
    """Settings of all layers for a run on `fraction` of the labels; None: without their fractions."""
    merged = Merged()
    for layer in layers:
        merged.add(layer.settings, layer.sources, layer.speaker, f"recipe {layer.path.name}: ")
        if fraction is not None and layer.fractions:
            near = nearest(fraction, layer.fractions)
            entry = dict(layer.fractions[near])
            sources = layer.sources | entry.pop("sources", {})
            about = f"fractions {near:g}" + ("" if near == fraction else f" (nearest to {fraction:g})")
            place = f"recipe {layer.path.name}: fractions.{near:g}."
            merged.add(entry, sources, f"{layer.speaker}, {about}", place)
    return merged


def nearest(fraction: float, entries: Mapping[float, object]) -> float:
    """The entry nearest to a fraction on a log scale: 0.03 is nearer to 0.01 than to 0.1."""
    return min(sorted(entries), key=lambda entry: abs(math.log(entry / fraction)))


def _find_base(base: object, path: Path) -> Path:
    for near in (path.parent / str(base), path.parent / f"{base}.yaml"):
        if near.is_file():
            return near
    try:
        return find_recipe(str(base))
    except Problem as problem:
        there = problem.sentences[0].partition("; ")[2]
        raise Problem(f"recipe {path.name}: base: {base} is no file beside it and no recipe; {there}") from problem


def _layer(tree: Mapping[str, Any], path: Path, speaker: str) -> Layer:
    settings = {key: value for key, value in copy.deepcopy(dict(tree)).items() if key not in OWN_KEYS}
    fractions = _fractions(tree.get("fractions"), path)
    said = {dotted for entry in (settings, *fractions.values()) for dotted in paths(entry)}
    sources = _sources(tree.get("sources"), said, f"recipe {path.name}: sources")
    for number, entry in fractions.items():
        if "sources" in entry:
            place = f"recipe {path.name}: fractions.{number:g}.sources"
            entry["sources"] = _sources(entry["sources"], set(paths(entry)), place)
    return Layer(path=path, speaker=speaker, settings=settings, sources=sources, fractions=fractions)


def _fractions(value: object, path: Path) -> dict[float, dict[str, Any]]:
    if value is None:
        return {}
    what = f"recipe {path.name}: fractions"
    if not isinstance(value, dict) or not value:
        raise Problem(f"{what} must map shares of the labels to settings, as in fractions: {{0.01: {{epochs: 60}}}}")
    found = {}
    for key, entry in copy.deepcopy(value).items():
        if isinstance(key, bool) or not isinstance(key, int | float) or not 0 < key <= 1:
            raise Problem(f"{what}.{key} is not a share of the labels, above 0 and up to 1")
        if not isinstance(entry, dict):
            raise Problem(f"{what}.{key:g} must be a mapping of settings, found {type(entry).__name__}")
        wrong = [name for name in ("fraction", "base", "fractions") if name in entry]
        if wrong:
            raise Problem(f"{what}.{key:g}.{wrong[0]} cannot be set there; the fraction is already chosen")
        found[float(key)] = entry
    return found


def _sources(value: object, said: set[str], what: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Problem(f'{what} must map settings to words, as in sources: {{optimizer.lr: "SwAV README"}}')
    blocks = {dotted.partition(".")[0] for dotted in said}
    for dotted in value:
        if dotted not in said | blocks:
            raise Problem(f"{what}.{dotted} is no setting of this file; {did_you_mean(str(dotted), sorted(said))}")
    return dict(value)


# ----------------------------------------------------------------------------------------------- trees


def paths(tree: Mapping[str, Any]) -> list[str]:
    """Every leaf's dotted key; `sources` is none."""
    return list(flat({key: value for key, value in tree.items() if key != "sources"}))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def merge(tree: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Put `over` on top of `tree`, in place, key by key."""
    for key, value in over.items():
        below = tree.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merge(below, value)
        else:
            tree[key] = copy.deepcopy(value)


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one leaf by its dotted key."""
    *blocks, last = dotted.split(".")
    for block in blocks:
        inner = tree.get(block)
        tree[block] = inner if isinstance(inner, dict) else {}
        tree = tree[block]
    tree[last] = value


def file_schema() -> dict[str, Any]:
    """JSON schema of a recipe file: `Recipe`, where any value may come from another layer, and the three keys."""
    schema: dict[str, Any] = _nothing_required(FullRecipe.model_json_schema())
    settings = dict(schema["properties"])
    words = {"type": "object", "additionalProperties": {"type": "string"}}
    sources = words | {"description": "setting or block (optimizer.lr): where its value is from"}
    entry = {"type": "object", "properties": settings | {"sources": sources}, "additionalProperties": False}
    schema["properties"] = settings | {
        "base": {"type": "string", "description": "a recipe that this one lies on: a file beside it, or its name"},
        "fractions": {
            "type": "object",
            "additionalProperties": entry,
            "description": "settings on top for a share of the labels; the nearest one counts",
        },
        "sources": sources,
    }
    return schema


def _nothing_required(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _nothing_required(value) for key, value in node.items() if key != "required"}
    return [_nothing_required(value) for value in node] if isinstance(node, list) else node
