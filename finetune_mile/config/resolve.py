"""From flags and YAML files to one checked `Recipe`, or to all that is wrong with them at once. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from finetune_mile.checkpoints.cards import Missing
from finetune_mile.checkpoints.init import Family, family_of, parse_init
from finetune_mile.config.layers import Merged, find_recipe, layers_of, put, put_together, read_yaml
from finetune_mile.config.schema import VARIANTS, FullRecipe, Recipe
from finetune_mile.core.names import did_you_mean
from finetune_mile.core.places import shipped
from finetune_mile.core.problems import Problem
from finetune_mile.core.yaml_text import TooMuch, compose, construct
from finetune_mile.images.sources import imagenet_folder
from finetune_mile.methods import METHOD_FLAGS, METHODS, get_method

NO_IMAGENET = "imagenet:data/imagenet"  # stands for ImageNet where it is not
Model = TypeVar("Model", bound=BaseModel)
__all__ = [
    "Resolved", "check", "choose_recipe", "find_imagenet", "find_recipe", "read_yaml", "resolve",
    "to_yaml",
]  # fmt: skip

# Flags that write into a block of the recipe; every other flag is the top-level key of its name.
MOST_SENTENCES = 20  # problems of one recipe that are told at once
FLAG_PATHS = {"k_t": "mile.k_t", "k_s": "mile.k_s", "lr": "optimizer.lr"}  # of MILe, where no method is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A checked recipe, the file it came from, and for each setting who said it and where its value is from."""

    recipe: Recipe
    path: Path
    why: str
    said_by: Mapping[str, str]
    sources: Mapping[str, str]


def choose_recipe(flags: Mapping[str, Any]) -> tuple[Path, str]:
    """The recipe file of a run, and why this one."""
    wanted = flags.get("recipe")
    if wanted is not None:
        return find_recipe(str(wanted)), f"--recipe {wanted}"
    data, init = flags.get("data"), flags.get("init")
    if (data or "").partition(":")[0] == "demo" or (data is None and init in (None, "none", "simclr-demo")):
        return shipped("recipes") / "demo.yaml", "no --data and no --init: the demo"
    family = _family(str(init)) if init is not None and is_imagenet(data) else None
    if family is not None:
        names = [f"{family.method}-large", family.method] if family.large else [family.method]
        for path in (shipped("recipes") / "ssl" / f"{name}.yaml" for name in names):
            if path.is_file():
                return path, f"no --recipe: {family.method} weights on ImageNet"
    return shipped("recipes") / "finetune.yaml", "no --recipe: fine-tuning on your images"


def _family(init: str) -> Family | None:
    try:
        return family_of(parse_init(init))
    except Missing:  # the run says it, after all that is wrong with its settings
        return None


def is_imagenet(data: str | None) -> bool:
    """Is --data ImageNet? Nothing beside a paper's --init is."""
    scheme, _, where = (data or "imagenet").partition(":")
    return scheme == "imagenet" or (scheme == "hf" and any(n in where.lower() for n in ("imagenet-1k", "ilsvrc")))


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
        given["data"] = "imagenet"
    resolved = check(tree, given, sets, path, why)
    if resolved.recipe.data != "imagenet":
        return resolved
    place, who = find_imagenet()
    recipe = resolved.recipe.model_copy(update={"data": place})
    return replace(resolved, recipe=recipe, said_by={**resolved.said_by, "data": who})


def resolve_anywhere(flags: Mapping[str, Any], sets: list[str]) -> tuple[Resolved, bool]:
    """A recipe, also where ImageNet is meant and not on this machine; False: it is not."""
    try:
        return resolve(flags, sets), True
    except Problem:
        if flags.get("data", "imagenet") != "imagenet":
            raise
    return resolve({**flags, "data": NO_IMAGENET}, sets), False


def check(tree: dict[str, Any], given: Mapping[str, Any], sets: list[str], path: Path, why: str) -> Resolved:
    """Put the layers on top of each other and validate once."""
    wrong: list[str] = []
    layers = layers_of(tree, path)
    plain = put_together(layers, None).tree
    over = _flag_settings(given, plain, wrong) | set_settings(sets, wrong)
    fraction, _ = over.get("fraction", (plain.get("fraction"), ""))
    merged = put_together(layers, _share(fraction))
    put_flags(merged, over)
    if {"steps", "epochs"} <= given.keys():
        wrong.append("--steps and --epochs: give one of them")
    elif "steps" in over or "epochs" in over:
        merged.forget("epochs" if "steps" in over else "steps")
    _put_variant(merged)
    _put_defaults(merged)
    recipe = validated(FullRecipe, merged, path, wrong)
    return Resolved(recipe=recipe, path=path, why=why, said_by=merged.said_by, sources=merged.sources)


def _share(fraction: object) -> float | None:
    """The run's fraction as a number; what is none is told when the whole is validated."""
    try:
        share = float(str(fraction))
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def put_flags(merged: Merged, over: Mapping[str, tuple[Any, str]]) -> None:
    """Put (value, speaker) by dotted key on top."""
    for dotted, (value, speaker) in over.items():
        put(merged.tree, dotted, value)
        merged.said_by[dotted] = speaker
        for known in [k for k in merged.sources if k == dotted or k.startswith(f"{dotted}.")]:
            del merged.sources[known]


def _put_variant(merged: Merged) -> None:
    """The variant's column, for what nobody has said."""
    variant = merged.tree.get("variant")
    for dotted, value in VARIANTS.get(variant, {}).items() if isinstance(variant, str) else ():
        block = dotted.rpartition(".")[0]
        if dotted not in merged.said_by and (not block or isinstance(merged.tree.get(block), dict)):
            put(merged.tree, dotted, value)
            merged.said_by[dotted] = f"variant {variant}"


def _put_defaults(merged: Merged) -> None:
    """An empty block for a method whose settings all have a default, so that the recipe shows them."""
    method = merged.tree.get("method")
    if method in METHODS:
        block = get_method(method).Block
        if block is not None and not any(field.is_required() for field in block.model_fields.values()):
            merged.tree.setdefault(get_method(method).block, {})


def validated(model: type[Model], merged: Merged, path: Path, wrong: list[str]) -> Model:
    """The checked settings, or a `Problem` with what is wrong with them after what was `wrong` already."""
    try:
        recipe = model.model_validate(merged.tree)
    except ValidationError as error:
        raise Problem(*wrong, *explain(error, path, merged, model)) from error
    if wrong:
        raise Problem(*wrong)
    return recipe


def _flag_settings(given: Mapping[str, Any], tree: dict[str, Any], wrong: list[str]) -> dict[str, tuple[Any, str]]:
    method = str(given.get("method", tree.get("method")))
    over: dict[str, tuple[Any, str]] = {}
    for key, value in given.items():
        flag = "--" + key.replace("_", "-")
        dotted = FLAG_PATHS.get(key, key)
        if key in METHOD_FLAGS and method in METHODS:
            flags = get_method(method).flags
            if key not in flags:
                owners = " or ".join(name for name in METHODS if key in get_method(name).flags)
                wrong.append(f"{flag} belongs to --method {owners}, and the method is {method}")
                continue
            dotted = flags[key]
        over[dotted] = (value, flag)
    return over


def set_settings(sets: list[str], wrong: list[str]) -> dict[str, tuple[Any, str]]:
    """`--set KEY=VALUE` arguments by dotted key, with who said them; what cannot be read goes into `wrong`."""
    over: dict[str, tuple[Any, str]] = {}
    for pair in sets:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not (equals and key):
            wrong.append(f"--set {pair}: write KEY=VALUE, for example --set optimizer.momentum=0.8")
            continue
        try:
            over[key] = (set_value(key, text), f"--set {key}")
        except Problem as problem:
            wrong += problem.sentences
    return over


def set_value(key: str, text: str) -> Any:
    """The value of `--set KEY=TEXT`; what is empty or cannot be read raises `Problem`."""
    try:
        node = compose(text)
        if node is None:
            raise Problem(f"--set {key}={text}: the value is empty; write --set {key}=VALUE, or {key}=null for none")
        return construct(node)
    except yaml.YAMLError as error:
        why = f" ({error.problem})" if isinstance(error, TooMuch) else ""
        raise Problem(f"--set {key}={short(text)}: {short(text)!r} is not a YAML value{why}") from error


# ---------------------------------------------------------------------------------- errors in words


def explain(error: ValidationError, path: Path, merged: Merged, model: type[BaseModel] = FullRecipe) -> list[str]:
    """Each of pydantic's complaints as a sentence that names the flag or the key."""
    sentences: list[str] = []
    items = error.errors()
    for number, item in enumerate(items):
        if len(sentences) == MOST_SENTENCES:
            return [*sentences, f"recipe {path.name}: up to {len(items) - number:,} more problems of this kind"]
        dotted = ".".join(str(part) for part in item["loc"] if not _is_union_branch(part))
        whole = dotted if dotted in merged.said_by else dotted.rpartition(".")[0]  # std.0 is part of --set std
        speaker = merged.said_by.get(whole, "recipe")
        place = merged.places.get(dotted, f"recipe {path.name}: ")
        where = speaker if speaker.startswith("--") else f"{place}{dotted}"
        if item["type"] == "extra_forbidden":
            sentence = f"{short(where)}: unknown key{_nearest(dotted, model)}"
        elif item["type"] == "missing":
            sentence = f"recipe {path.name}: {dotted} is missing, and nothing else says it"
        else:
            message = str(item["msg"]).removeprefix("Value error, ")
            message = message[0].lower() + message[1:]
            value = "" if isinstance(item["input"], dict | BaseModel) else f" {short(str(item['input']))}"
            sentence = f"{where}{value}: {message}" if dotted else message
        if sentence not in sentences and not any(s.startswith(f"{where} ") for s in sentences):
            sentences.append(sentence)
    return sentences


def short(text: str) -> str:
    """A value for a message: its beginning, where it is long."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_union_branch(part: object) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("int", "str", "float"))


def _nearest(dotted: str, model: type[BaseModel]) -> str:
    block, _, key = dotted.rpartition(".")
    if block in model.model_fields:
        annotation = model.model_fields[block].annotation
        options = [annotation, *get_args(annotation)]
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return f"; {did_you_mean(key, model.model_fields)}"


def to_yaml(recipe: BaseModel) -> str:
    """The whole recipe, every value spelled out, so that it runs again as it is."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def find_imagenet() -> tuple[str, str]:
    """ImageNet on this machine as --data, and who says so: IMAGENET_DIR, data/imagenet, or the hub's local cache."""
    place = os.environ.get("IMAGENET_DIR")
    if place and not Path(place).is_dir():
        raise Problem(f"IMAGENET_DIR is {place}, and there is no such directory")
    folder = imagenet_folder()
    if folder is not None:
        return f"imagenet:{folder}", "IMAGENET_DIR" if place else folder
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface")) / "hub/datasets--ILSVRC--imagenet-1k"
    if hub.is_dir():
        return "hf:ILSVRC/imagenet-1k", "the hub's cache"
    raise Problem(
        "ImageNet is meant, and it was not found: set IMAGENET_DIR to its folder, or put it into "
        "data/imagenet, or download the hub's ILSVRC/imagenet-1k into the local cache; for your own images say "
        "--data folder:DIR"
    )
