"""From flags and YAML files to one checked `Recipe`, or to all that is wrong with them at once. No torch here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from finetune_mile.places import shipped
from finetune_mile.problems import Problem
from finetune_mile.recipe import LABELS_ALONE, VARIANTS, Recipe

# Flags that write into a block of the recipe; every other flag is the top-level key of its name.
FLAG_PATHS = {"k_t": "mile.k_t", "k_s": "mile.k_s", "lr": "optimizer.lr"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A checked recipe, the file it came from, and for each setting who said it."""

    recipe: Recipe
    path: Path
    why: str
    said_by: Mapping[str, str]


def choose_recipe(flags: Mapping[str, Any]) -> tuple[Path, str]:
    """The recipe file of a run, and why this one."""
    wanted = flags.get("recipe")
    if wanted is not None:
        return find_recipe(str(wanted)), f"--recipe {wanted}"
    data, init = flags.get("data"), flags.get("init")
    if (data or "").partition(":")[0] == "demo" or (data is None and init in (None, "none", "simclr-demo")):
        return shipped("recipes") / "demo.yaml", "no --data and no --init: the demo"
    return shipped("recipes") / "finetune.yaml", "no --recipe: fine-tuning on your images"


def find_recipe(name: str) -> Path:
    """A recipe by path, or by its name below recipes/ with or without the ending."""
    folder = shipped("recipes")
    for path in (Path(name), folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return path
    found = [p.relative_to(folder) for p in sorted(folder.rglob("*.yaml"))]
    names = [str(p.with_suffix("")) for p in found if p.parts[0] not in ("splits", "tables")]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:5]
    raise Problem(f"--recipe {name}: no such file or recipe; there are {', '.join(near)}")


def resolve(flags: Mapping[str, Any], sets: list[str]) -> Resolved:
    """Flags over recipe over variant, checked; every problem is raised in one go.

    Args:
        flags: what was given on the command line, by key (`k_t`, `batch_size`, ...); None = not given.
        sets: `--set KEY=VALUE` arguments, keys dotted (`optimizer.momentum=0.8`).
    """
    path, why = choose_recipe(flags)
    tree = read_yaml(path)
    given = {k: v for k, v in flags.items() if v is not None and k != "recipe"}
    if "data" not in given and path == shipped("recipes") / "finetune.yaml":
        given["data"] = find_imagenet()
    return check(tree, given, sets, path, why)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"recipe {path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        raise Problem(f"recipe {path}: is not YAML{line} ({getattr(error, 'problem', error)})") from error
    if not isinstance(tree, dict):
        raise Problem(f"recipe {path}: must be a mapping of settings, found {type(tree).__name__}")
    return tree


def check(tree: dict[str, Any], given: Mapping[str, Any], sets: list[str], path: Path, why: str) -> Resolved:
    """Put the layers on top of each other and validate once."""
    said_by = dict.fromkeys(_paths(tree), "recipe")
    wrong: list[str] = []
    over = _flag_settings(given, sets, tree, wrong)
    for dotted, (value, speaker) in over.items():
        _put(tree, dotted, value)
        said_by[dotted] = speaker
    if {"steps", "epochs"} <= given.keys():
        wrong.append("--steps and --epochs: give one of them")
    elif "steps" in over or "epochs" in over:
        tree.pop("epochs" if "steps" in over else "steps", None)
    variant = tree.get("variant")
    for dotted, value in VARIANTS.get(variant, {}).items() if isinstance(variant, str) else ():
        block = dotted.rpartition(".")[0]
        if dotted not in said_by and (not block or isinstance(tree.get(block), dict)):
            _put(tree, dotted, value)
            said_by[dotted] = f"variant {variant}"
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        wrong += explain(error, path, said_by)
    if wrong:
        raise Problem(*wrong)
    return Resolved(recipe=recipe, path=path, why=why, said_by=said_by)


def _flag_settings(
    given: Mapping[str, Any], sets: list[str], tree: dict[str, Any], wrong: list[str]
) -> dict[str, tuple[Any, str]]:
    method = str(given.get("method", tree.get("method")))
    over: dict[str, tuple[Any, str]] = {}
    for key, value in given.items():
        flag = "--" + key.replace("_", "-")
        dotted = FLAG_PATHS.get(key, key)
        if key == "rho":
            dotted = f"{method.replace('-', '_')}.rho"
        if key in ("k_t", "k_s") and method != "mile":
            wrong.append(f"{flag} belongs to --method mile, and the method is {method}")
        elif key == "rho" and method in LABELS_ALONE:
            wrong.append(f"{flag} belongs to a method with a teacher, and the method is {method}")
        else:
            over[dotted] = (value, flag)
    for pair in sets:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            wrong.append(f"--set {pair}: write KEY=VALUE, for example --set optimizer.momentum=0.8")
            continue
        try:
            over[key] = (yaml.safe_load(text), f"--set {key}")
        except yaml.YAMLError:
            wrong.append(f"--set {pair}: {text!r} is not a YAML value")
    return over


def _paths(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        found += _paths(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *blocks, last = dotted.split(".")
    for block in blocks:
        inner = tree.get(block)
        tree[block] = inner if isinstance(inner, dict) else {}
        tree = tree[block]
    tree[last] = value


# ---------------------------------------------------------------------------------- errors in words


def explain(error: ValidationError, path: Path, said_by: Mapping[str, str]) -> list[str]:
    """Each of pydantic's complaints as a sentence that names the flag or the key."""
    sentences: list[str] = []
    for item in error.errors():
        dotted = ".".join(str(part) for part in item["loc"] if not _is_union_branch(part))
        speaker = said_by.get(dotted, "recipe")
        where = f"recipe {path.name}: {dotted}" if not speaker.startswith("--") else speaker
        if item["type"] == "extra_forbidden":
            sentence = f"{where}: unknown key{_nearest(dotted)}"
        elif item["type"] == "missing":
            sentence = f"recipe {path.name}: {dotted} is missing, and nothing else says it"
        else:
            message = str(item["msg"]).removeprefix("Value error, ")
            message = message[0].lower() + message[1:]
            value = "" if isinstance(item["input"], dict | BaseModel) else f" {item['input']}"
            sentence = f"{where}{value}: {message}" if dotted else message
        if sentence not in sentences and not any(s.startswith(f"{where} ") for s in sentences):
            sentences.append(sentence)
    return sentences


def _is_union_branch(part: object) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("int", "str", "float"))


def _nearest(dotted: str) -> str:
    block, _, key = dotted.rpartition(".")
    model: type[BaseModel] = Recipe
    if block in Recipe.model_fields:
        annotation = Recipe.model_fields[block].annotation
        options = [annotation, *get_args(annotation)]
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(model.model_fields)}"


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, every value spelled out, so that it runs again as it is."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def find_imagenet() -> str:
    """ImageNet on this machine, as --data: IMAGENET_DIR, else data/imagenet, else the hub's copy in the local cache."""
    place = os.environ.get("IMAGENET_DIR")
    if place and not Path(place).is_dir():
        raise Problem(f"IMAGENET_DIR is {place}, and there is no such directory")
    for folder in (place, "data/imagenet"):
        if folder and Path(folder).is_dir():
            return f"imagenet:{folder}"
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface")) / "hub/datasets--ILSVRC--imagenet-1k"
    if hub.is_dir():
        return "hf:ILSVRC/imagenet-1k"
    raise Problem(
        "no --data, so ImageNet is meant, and it was not found: set IMAGENET_DIR to its folder, or put it into "
        "data/imagenet, or download the hub's ILSVRC/imagenet-1k into the local cache; for your own images say "
        "--data folder:DIR"
    )
