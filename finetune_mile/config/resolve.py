"""From flags and YAML files to one checked `Recipe`, or to all that is wrong with them at once. No torch here.

A recipe file is its settings with those of the run's fraction (`fractions:`) on top, and it builds on its `base:`, key
by key; `sources:` says where values are from. These three keys are no settings: a resolved recipe has none of them. On
top of the files come the flags and `--set`; the variant fills in what nobody has set.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from finetune_mile.checkpoints.cards import Missing
from finetune_mile.checkpoints.init import family_of, parse_init
from finetune_mile.config.flags import SETTINGS, flag_of
from finetune_mile.config.schema import VARIANTS, FullRecipe, Recipe
from finetune_mile.core.files import RefusedYaml, load_yaml, load_yaml_file, shipped
from finetune_mile.core.problems import Problem, did_you_mean
from finetune_mile.images.sources import imagenet_folder
from finetune_mile.methods import METHOD_FLAGS, METHODS, get_method

NO_IMAGENET = "imagenet:data/imagenet"  # stands for ImageNet where it is not
NO_RUNS = ("launch", "pretrain", "splits", "tables", "upstream.yaml")  # what `run` does not take of recipes/
LONGEST_CHAIN = 4  # recipe files, the first one included
MOST_SENTENCES = 20  # problems of one recipe that are told at once
# Flags that write into a block of the recipe; every other flag is the top-level key of its name.
# k_t and k_s are MILe's where no method is named.
FLAG_PATHS = {"k_t": "mile.k_t", "k_s": "mile.k_s", "lr": "optimizer.lr", "flip": "augment.flip"}
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A checked recipe, the file it came from, and for each setting who set it and where its value is from."""

    recipe: Recipe
    path: Path
    why: str
    said_by: Mapping[str, str]
    sources: Mapping[str, str]


def resolve(flags: Mapping[str, Any], sets: Sequence[str]) -> Resolved:
    """Flags over recipe over variant, checked; every problem is raised in one go.

    Args:
        flags: what was given, by flag (`k_t`, `batch_size`, ...) or dotted key (`optimizer.momentum`).
        sets: `--set KEY=VALUE` arguments, keys dotted (`optimizer.momentum=0.8`).
    """
    path, why = choose_recipe(flags)
    given = {key: value for key, value in flags.items() if key != "recipe"}
    if path == shipped("recipes") / "finetune.yaml":
        given.setdefault("data", "imagenet")
    resolved = check(read_yaml(path), given, sets, path, why)
    if resolved.recipe.data != "imagenet":
        return resolved
    place, speaker = find_imagenet()
    recipe = resolved.recipe.model_copy(update={"data": place})
    return replace(resolved, recipe=recipe, said_by={**resolved.said_by, "data": speaker})


def resolve_anywhere(flags: Mapping[str, Any], sets: Sequence[str]) -> tuple[Resolved, bool]:
    """A recipe, also where it needs ImageNet and this machine has none; False: it has none."""
    try:
        return resolve(flags, sets), True
    except Problem:
        if flags.get("data", "imagenet") != "imagenet":
            raise
    return resolve({**flags, "data": NO_IMAGENET}, sets), False


def choose_recipe(flags: Mapping[str, Any]) -> tuple[Path, str]:
    """The recipe file of a run, and why this one."""
    name, data, init = flags.get("recipe"), flags.get("data"), flags.get("init")
    if name is not None:
        return find_recipe(str(name)), f"--recipe {name}"
    scheme, _, place = (data or "").partition(":")
    if scheme == "demo" or (data is None and init in (None, "none", "simclr-demo")):
        return shipped("recipes") / "demo.yaml", "no --data and no --init: the demo"
    on_hub = scheme == "hf" and any(part in place.lower() for part in ("imagenet-1k", "ilsvrc"))
    family = None
    if init is not None and (not data or scheme == "imagenet" or on_hub):
        try:
            family = family_of(parse_init(str(init)))
        except Missing:  # told later, with all that is wrong with the settings
            family = None
    if family is not None:
        names = [f"{family.method}-large", family.method] if family.large else [family.method]
        for path in (shipped("recipes") / "ssl" / f"{name}.yaml" for name in names):
            if path.is_file():
                return path, f"no --recipe: {family.method} weights on ImageNet"
    if init in (None, "none"):
        return shipped("recipes") / "scratch.yaml", "no --recipe and no --init: from random weights"
    return shipped("recipes") / "finetune.yaml", "no --recipe: fine-tuning on your images"


def find_recipe(name: str, below: str = "", *, builder: Path | None = None) -> Path:
    """A recipe by path, or by its name below recipes/ (or a folder in it) with or without the ending.

    Args:
        name: the path or name.
        below: the folder in recipes/.
        builder: the recipe whose `base:` this is; files beside it come first.
    """
    folder = shipped("recipes") / below
    beside = [] if builder is None else [builder.parent / name, builder.parent / f"{name}.yaml"]
    for path in (*beside, Path(name), folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return path
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*.yaml"))]
    names = [str(path.with_suffix("")) for path in paths if path.parts[0] not in NO_RUNS]
    where = "--recipe" if builder is None else f"recipe {builder.name}: base:"
    raise Problem(f"{where} {name}: no such file or recipe; {did_you_mean(name, names)}")


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
        "ImageNet was not found: set IMAGENET_DIR to its folder, or put it into data/imagenet, or download the hub's "
        "ILSVRC/imagenet-1k into the local cache; for your own images use --data folder:DIR"
    )


def check(tree: dict[str, Any], given: Mapping[str, Any], sets: Sequence[str], path: Path, why: str) -> Resolved:
    """Put flags over the files' layers and validate once.

    Args:
        tree: the recipe file's contents.
        given: settings from flags, by key.
        sets: `--set` arguments.
        path: the recipe file.
        why: this file, for people.
    """
    wrong: list[str] = []
    layers = layers_of(tree, path)
    plain = put_together(layers, None).tree
    over = _flag_settings(given, plain, wrong) | set_settings(sets, wrong)
    fraction, _ = over.get("fraction", (plain.get("fraction"), ""))
    merged = put_together(layers, _share(fraction))
    put_flags(merged, over)
    if all(over.get(key, (None,))[0] is not None for key in ("steps", "epochs")):
        wrong.append("--steps and --epochs: give one of them")
    if "steps" in over or "epochs" in over:
        merged.forget("epochs" if "steps" in over else "steps")
    _put_defaults(merged)
    recipe = validated(FullRecipe, merged, path, wrong)
    return Resolved(recipe=recipe, path=path, why=why, said_by=merged.said_by, sources=merged.sources)


def _share(fraction: object) -> float | None:
    """The run's fraction as a number; a wrong one is told when the whole recipe is validated."""
    try:
        share = float(str(fraction))
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def to_yaml(recipe: BaseModel) -> str:
    """The whole recipe, every value spelled out, so that it runs again."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# ---------------------------------------------------------------------------------- recipe files and their layers


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = load_yaml_file(path)
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"recipe {path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        verdict = "cannot be used" if isinstance(error, RefusedYaml) else "is not YAML"
        raise Problem(f"recipe {path}: {verdict}{line} ({getattr(error, 'problem', error)})") from error
    if not isinstance(tree, dict):
        raise Problem(f"recipe {path}: must be a mapping of settings, found {type(tree).__name__}")
    return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One file without what it builds on."""

    path: Path
    speaker: str  # who says its settings
    settings: dict[str, Any]
    sources: dict[str, str]  # dotted key, or a block's name: where the value is from
    fractions: dict[float, dict[str, Any]]


def layers_of(tree: Mapping[str, Any], path: Path) -> list[Layer]:
    """The layers of a file whose contents are `tree`, the lowest base first."""
    layers = [_layer(tree, path, "recipe")]
    while (base := tree.get("base")) is not None:
        below = find_recipe(str(base), builder=path)
        if any(layer.path.resolve() == below.resolve() for layer in layers):
            raise Problem(f"recipe {path.name}: base: {base} leads back to {below.name}, in a circle")
        if len(layers) == LONGEST_CHAIN:
            raise Problem(
                f"recipe {path.name}: base: {base}: too many levels of 'base:' (at most {LONGEST_CHAIN} files)."
            )
        tree, path = read_yaml(below), below
        layers.append(_layer(tree, path, f"base {path.name}"))
    return layers[::-1]


def _layer(tree: Mapping[str, Any], path: Path, speaker: str) -> Layer:
    settings = {
        key: value for key, value in copy.deepcopy(dict(tree)).items() if key not in ("base", "fractions", "sources")
    }
    fractions = _fractions(tree.get("fractions"), f"recipe {path.name}: fractions")
    keys = {dotted for entry in (settings, *fractions.values()) for dotted in paths(entry)}
    sources = _sources(tree.get("sources"), keys, f"recipe {path.name}: sources")
    return Layer(path=path, speaker=speaker, settings=settings, sources=sources, fractions=fractions)


def _fractions(value: object, place: str) -> dict[float, dict[str, Any]]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not value:
        raise Problem(f"{place} must map shares of the labels to settings, as in fractions: {{0.01: {{epochs: 60}}}}")
    fractions = {}
    for key, entry in value.items():
        if isinstance(key, bool) or not isinstance(key, int | float) or not 0 < key <= 1:
            raise Problem(f"{place}.{key} is not a share of the labels, above 0 and up to 1")
        if not isinstance(entry, dict):
            raise Problem(f"{place}.{key:g} must be a mapping of settings, found {type(entry).__name__}")
        for name in ("fraction", "base", "fractions"):
            if name in entry:
                raise Problem(f"{place}.{key:g}.{name} cannot be set there; the fraction is already chosen")
        sources = _sources(entry.get("sources"), set(paths(entry)), f"{place}.{key:g}.sources")
        fractions[float(key)] = copy.deepcopy(entry) | {"sources": sources}
    return fractions


def _sources(value: object, keys: set[str], place: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Problem(f'{place} must map settings to words, as in sources: {{optimizer.lr: "SwAV README"}}')
    blocks = {dotted.partition(".")[0] for dotted in keys}
    for dotted in value:
        if dotted not in keys | blocks:
            raise Problem(f"{place}.{dotted} is no setting of this file; {did_you_mean(str(dotted), sorted(keys))}")
    return dict(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Layers put on top of each other; everything by dotted key."""

    tree: dict[str, Any] = field(default_factory=dict)
    said_by: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)  # for messages: the file, and the entry in it
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, settings: Mapping[str, Any], sources: Mapping[str, str], speaker: str, place: str) -> None:
        """Put settings on top; the source of a value that they replace is removed too."""
        if "steps" in settings or "epochs" in settings:
            for key in {"steps", "epochs"} - settings.keys():
                self.forget(key)
        merge(self.tree, settings)
        for dotted in paths(settings):
            self.said_by[dotted], self.places[dotted] = speaker, place
            self.sources.pop(dotted, None)
            source = sources.get(dotted) or sources.get(dotted.partition(".")[0])
            if source:
                self.sources[dotted] = source

    def forget(self, key: str) -> None:
        for table in (self.tree, self.said_by, self.places, self.sources):
            table.pop(key, None)


def put_together(layers: list[Layer], fraction: float | None) -> Merged:
    """Settings of all layers for a run on `fraction` of the labels; None: without their fractions."""
    merged = Merged()
    for layer in layers:
        merged.add(layer.settings, layer.sources, layer.speaker, f"recipe {layer.path.name}: ")
        if fraction is not None and layer.fractions:
            near = nearest_fraction(fraction, layer.fractions)
            entry = dict(layer.fractions[near])
            sources = layer.sources | entry.pop("sources")
            about = f"fractions {near:g}" + ("" if near == fraction else f" (nearest to {fraction:g})")
            place = f"recipe {layer.path.name}: fractions.{near:g}."
            merged.add(entry, sources, f"{layer.speaker}, {about}", place)
    return merged


def nearest_fraction(fraction: float, entries: Mapping[float, object]) -> float:
    """The entry nearest to a fraction on a log scale: 0.03 is nearer to 0.01 than to 0.1."""
    return min(sorted(entries), key=lambda entry: abs(math.log(entry / fraction)))


# ------------------------------------------------------------------------------------------ flags and defaults


def _flag_settings(given: Mapping[str, Any], tree: dict[str, Any], wrong: list[str]) -> dict[str, tuple[Any, str]]:
    method = str(given.get("method", tree.get("method")))
    keys = FLAG_PATHS | (dict(get_method(method).flags) if method in METHODS else {})
    over: dict[str, tuple[Any, str]] = {}
    for key, value in given.items():
        flag = flag_of(key) if key in SETTINGS else f"--set {key}"
        if key in METHOD_FLAGS and method in METHODS and key not in get_method(method).flags:
            owners = " or ".join(name for name in METHODS if key in get_method(name).flags)
            wrong.append(f"{flag} belongs to --method {owners}, and the method is {method}")
        else:
            over[keys.get(key, key)] = (value, flag)
    return over


def set_settings(sets: Sequence[str], wrong: list[str]) -> dict[str, tuple[Any, str]]:
    """`--set KEY=VALUE` arguments as (value, speaker) by dotted key; what cannot be read goes into `wrong`."""
    over: dict[str, tuple[Any, str]] = {}
    for pair in sets:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not (equals and key):
            wrong.append(f"--set {pair}: write KEY=VALUE, for example --set optimizer.momentum=0.8")
            continue
        try:
            value = load_yaml(text, empty=...)
            if value is ...:
                wrong.append(f"--set {pair}: the value is empty; write --set {key}=VALUE, or {key}=null for none")
            else:
                over[key] = (value, f"--set {key}")
        except yaml.YAMLError as error:
            why = f" ({error.problem})" if isinstance(error, RefusedYaml) else ""
            wrong.append(f"--set {key}={short(text)}: {short(text)!r} is not a YAML value{why}")
    return over


def put_flags(merged: Merged, over: Mapping[str, tuple[Any, str]]) -> None:
    """Put (value, speaker) by dotted key on top."""
    for dotted, (value, speaker) in over.items():
        put(merged.tree, dotted, value)
        merged.said_by[dotted] = speaker
        for known in [key for key in merged.sources if key == dotted or key.startswith(f"{dotted}.")]:
            del merged.sources[known]


def _put_defaults(merged: Merged) -> None:
    """The variant's values for what nobody has set; an empty block for a method with a default for each setting."""
    variant, method = merged.tree.get("variant"), merged.tree.get("method")
    for dotted, value in VARIANTS.get(variant, {}).items() if isinstance(variant, str) else ():
        block = dotted.rpartition(".")[0]
        if dotted not in merged.said_by and (not block or isinstance(merged.tree.get(block), dict)):
            put(merged.tree, dotted, value)
            merged.said_by[dotted] = f"variant {variant}"
    if isinstance(method, str) and method in METHODS:
        settings = get_method(method).Block
        if settings is not None and not any(field.is_required() for field in settings.model_fields.values()):
            merged.tree.setdefault(get_method(method).block, {})


# ------------------------------------------------------------------------------------------- errors in words


def validated(model: type[Model], merged: Merged, path: Path, wrong: list[str]) -> Model:
    """The checked settings, or a `Problem` with what is wrong with them after what was `wrong` already."""
    try:
        recipe = model.model_validate(merged.tree)
    except ValidationError as error:
        raise Problem(*wrong, *_in_words(error, path, merged, model)) from error
    if wrong:
        raise Problem(*wrong)
    return recipe


def _in_words(error: ValidationError, path: Path, merged: Merged, model: type[BaseModel]) -> list[str]:
    """Each of pydantic's complaints as a sentence that names the flag or the key."""
    sentences: list[str] = []
    items = error.errors()
    for number, item in enumerate(items):
        if len(sentences) == MOST_SENTENCES:
            return [*sentences, f"recipe {path.name}: up to {len(items) - number:,} more problems of this kind"]
        unions = ("int", "str", "float")  # pydantic's names of a union's branches
        dotted = ".".join(str(part) for part in item["loc"] if "[" not in str(part) and part not in unions)
        setting = dotted if dotted in merged.said_by else dotted.rpartition(".")[0]  # std.0 is part of --set std
        speaker = merged.said_by.get(setting, "recipe")
        place = merged.places.get(dotted, f"recipe {path.name}: ")
        where = speaker if speaker.startswith("--") else f"{place}{dotted}"
        if item["type"] == "extra_forbidden":
            found = [f"{short(where)}: unknown key; {_nearest_key(dotted, model)}"]
        elif item["type"] == "missing":
            found = [f"recipe {path.name}: {dotted} is required. Set it in the recipe or with --set {dotted}=VALUE."]
        else:
            message = str(item["msg"]).removeprefix("Value error, ")
            message = "must be true or false" if item["type"].startswith("bool") else message
            message = message[0].lower() + message[1:]
            value = "" if isinstance(item["input"], dict | BaseModel) else f" {short(str(item['input']))}"
            found = [f"{where}{value}: {message}"] if dotted else message.splitlines()  # conflicts, one a line
        if found[0] not in sentences and not any(other.startswith(f"{where} ") for other in sentences):
            sentences += found
    return sentences


def _nearest_key(dotted: str, model: type[BaseModel]) -> str:
    block, _, key = dotted.rpartition(".")
    if block in model.model_fields:
        annotation = model.model_fields[block].annotation
        options = [annotation, *get_args(annotation)]
        model = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return did_you_mean(key, model.model_fields)


def short(text: str) -> str:
    """A value for a message: its beginning, where it is long."""
    return text if len(text) <= 80 else f"{text[:77]}..."


# ----------------------------------------------------------------------------------------------------- trees


def paths(tree: Mapping[str, Any]) -> list[str]:
    """Every leaf's dotted key; `sources` is none."""
    return list(flat({key: value for key, value in tree.items() if key != "sources"}))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping with dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves


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
