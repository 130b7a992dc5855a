"""From flags and YAML files to one checked `Recipe`, or to all that is wrong with them at once. No torch here.

A recipe file is its settings with those of the run's fraction (`fractions:`) on top, and it builds on its `base:`, key
by key; `sources:` says where values are from. These three keys are no settings: a resolved recipe has none of them. On
top of the files come the flags and `--set`; the variant fills in what nobody has set.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from finetune_mile.checkpoints.cards import Missing
from finetune_mile.checkpoints.init import family_of, parse_init
from finetune_mile.config.flags import SETTINGS, flag_of
from finetune_mile.config.schema import BLOCKS_WITH_DEFAULTS, VARIANTS, FullRecipe, Recipe
from finetune_mile.core.files import RefusedYaml, load_yaml, load_yaml_file, shipped
from finetune_mile.core.problems import Problem, did_you_mean
from finetune_mile.images.sources import imagenet_folder
from finetune_mile.methods import METHOD_FLAGS, METHODS, get_method

NO_IMAGENET = "imagenet:data/imagenet"  # stands for ImageNet where it is not
NO_RUNS = ("launch", "pretrain", "splits", "tables", "upstream.yaml")  # what `run` does not take of recipes/
LONGEST_CHAIN = 4  # recipe files, the first one included
LENGTHS = frozenset({"steps", "epochs"})  # of a run: one of them
MOST_SENTENCES = 20  # problems of one recipe that are told at once
SOFTMAX_STAGE = {"averaged_teacher": {"loss": "cross_entropy"}}  # of a second stage, unless it says something else
# Flags that write into a block of the recipe; every other flag is the top-level key of its name.
# k_t and k_s are MILe's where no method is named.
FLAG_PATHS = {"k_t": "mile.k_t", "k_s": "mile.k_s", "lr": "optimizer.lr", "flip": "augment.flip"}
AnyRecipe = TypeVar("AnyRecipe", bound=BaseModel)  # of a run, or of pre-training


class Speaker(NamedTuple):
    """Who says a setting: a recipe file, an entry in it, a flag or a variant."""

    name: str
    place: str = ""  # for messages: the file, and the entry in it
    sources: Mapping[str, str] = MappingProxyType({})  # dotted key, or a block's name: where the value is from


class Setting(NamedTuple):
    """The value of a flag, and who says so."""

    value: Any
    speaker: Speaker


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedAs(Generic[AnyRecipe]):
    """A checked recipe, the file it came from, and who set what."""

    recipe: AnyRecipe
    path: Path
    why: str
    speakers: Mapping[str, Speaker]  # by dotted key, of all settings that were said

    @property
    def said_by(self) -> dict[str, str]:
        """Who set a setting, by dotted key."""
        return {dotted: speaker.name for dotted, speaker in self.speakers.items()}

    @property
    def sources(self) -> dict[str, str]:
        """Where the value of a setting is from, by dotted key, if that is known."""
        known = {
            dotted: speaker.sources.get(dotted) or speaker.sources.get(dotted.partition(".")[0])
            for dotted, speaker in self.speakers.items()
        }
        return {dotted: source for dotted, source in known.items() if source}


Resolved: TypeAlias = ResolvedAs[Recipe]


def resolve(flags: Mapping[str, Any], sets: Sequence[str]) -> Resolved:
    """Flags over recipe over variant, checked; every problem is raised in one go.

    Args:
        flags: what was given, by flag (`k_t`, `batch_size`, ...) or dotted key (`optimizer.momentum`).
        sets: `--set KEY=VALUE` arguments, keys dotted (`optimizer.momentum=0.8`).
    """
    path, why = choose_recipe(flags)
    given = {"data": "imagenet"} if path == shipped("recipes") / "finetune.yaml" else {}
    given |= {key: value for key, value in flags.items() if key != "recipe"}
    resolved = resolve_tree(FullRecipe, read_yaml(path), path, why, given, sets)
    if resolved.recipe.data != "imagenet":
        return resolved
    place, speaker = find_imagenet()
    recipe = resolved.recipe.model_copy(update={"data": place})
    return replace(resolved, recipe=recipe, speakers={**resolved.speakers, "data": Speaker(speaker)})


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
    name, data, init = flags.get("recipe"), flags.get("data", ""), flags.get("init", "none")
    if name is not None:
        return find_recipe(str(name)), f"--recipe {name}"
    scheme = data.partition(":")[0]
    if scheme == "demo" or (not data and init in ("none", "simclr-demo")):
        return shipped("recipes") / "demo.yaml", "no --data and no --init: the demo"
    if init == "none":
        return shipped("recipes") / "scratch.yaml", "no --recipe and no --init: from random weights"
    on_hub = scheme == "hf" and any(name in data.lower() for name in ("imagenet-1k", "ilsvrc"))
    if (not data or scheme == "imagenet" or on_hub) and (found := _family_recipe(str(init))):
        return found
    return shipped("recipes") / "finetune.yaml", "no --recipe: fine-tuning on your images"


def _family_recipe(init: str) -> tuple[Path, str] | None:
    """The recipe for a family of weights on ImageNet, such as SimCLR's; None where there is none."""
    try:
        family = family_of(parse_init(init))
    except Missing:  # told later, with all that is wrong with the settings
        return None
    if family is None:
        return None
    names = [f"{family.method}-large", family.method] if family.large else [family.method]
    paths = [shipped("recipes") / "ssl" / f"{name}.yaml" for name in names]
    path = next((path for path in paths if path.is_file()), None)
    return None if path is None else (path, f"no --recipe: {family.method} weights on ImageNet")


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
        "ImageNet was not found. Set IMAGENET_DIR to its folder, or put it into data/imagenet, or download the hub's "
        "ILSVRC/imagenet-1k into the local cache. For your own images use --data folder:DIR"
    )


def resolve_tree(
    model: type[AnyRecipe],
    tree: Mapping[str, Any],
    path: Path,
    why: str,
    given: Mapping[str, Any] = MappingProxyType({}),
    sets: Sequence[str] = (),
) -> ResolvedAs[AnyRecipe]:
    """Put flags over the settings of a recipe file and its bases, and validate once.

    Args:
        model: of the recipe.
        tree: the recipe file's contents.
        path: the recipe file.
        why: this file, for people.
        given: settings from flags, by key.
        sets: `--set` arguments.
    """
    wrong: list[str] = []
    files = files_of(tree, path)
    plain = {key: value for file in reversed(files) for key, value in file.tree.items()}
    over = _flag_settings(given, str(given.get("method", plain.get("method"))), wrong) | set_settings(sets, wrong)
    if "fractions" in plain and "fraction" not in model.model_fields:
        wrong.append(f"recipe {path.name}: fractions: unknown key; this kind of recipe has no fraction of labels")
    lengths = LENGTHS if model.model_fields.keys() >= LENGTHS else frozenset()
    if lengths and all(key in over and over[key].value is not None for key in lengths):
        wrong.append("--steps and --epochs: give one of them")
        del over["epochs"]
    fraction = over["fraction"].value if "fraction" in over else plain.get("fraction")
    settings: dict[str, Any] = {}
    speakers: dict[str, Speaker] = {}
    layers = [layer for file in reversed(files) for layer in _layers(file, fraction)]
    for own, speaker in layers:
        settings = merged(_without_length(settings, own, lengths), own)
        speakers |= dict.fromkeys(flat(own), speaker)
    settings = _without_length(settings, over, lengths)
    for dotted, (value, speaker) in over.items():
        settings = put(settings, dotted, value)
        speakers |= dict.fromkeys(flat({dotted: value}), speaker)
    column, speaker = _defaults(settings)
    speakers = dict.fromkeys(flat(column), speaker) | speakers
    settings = merged(column, settings)
    known = {dotted: speakers[dotted] for dotted in flat(settings)}  # without those whose block was replaced
    try:
        recipe = model.model_validate(settings)
    except ValidationError as error:
        # A key that has a dot itself, such as 'optimizer.lr', is in quotes: it is no key of a block.
        literal = {f"'{key}'": speaker for own, speaker in layers for key in own if "." in str(key)}
        wrong += _in_words(error, path, known | literal, model)
        raise Problem(*wrong) from error
    if wrong:
        raise Problem(*wrong)
    if isinstance(recipe, Recipe):
        second_stage(recipe)  # what is wrong with it is told now
    return ResolvedAs(recipe=recipe, path=path, why=why, speakers=known)


def second_stage(recipe: Recipe) -> Recipe | None:
    """The recipe of the second stage: this one with the settings of `then`; None where it has none."""
    if not recipe.staged:
        return None
    then = dict(recipe.then or {})
    if then.get("steps") is not None:  # from --set: instead of the recipe's epochs
        then.pop("epochs", None)
    own = {"then": None, "teacher": recipe.teacher if then.get("method", recipe.method) == recipe.method else None}
    settings = merged(_without_length(recipe.model_dump(mode="json"), then, LENGTHS), then) | own
    block = BLOCKS_WITH_DEFAULTS.get(str(settings["method"]))
    if block is not None and settings[block] is None:
        settings[block] = {}
    if recipe.activation == "softmax":  # one network: both stages read its outputs in one way
        settings = merged(SOFTMAX_STAGE, settings)
    try:
        return FullRecipe.model_validate(settings)
    except ValidationError as error:
        sentences = _in_words(error, Path("then"), {}, FullRecipe)
        raise Problem(*(f"then: {sentence.removeprefix('recipe then: ')}" for sentence in sentences)) from error


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


class File(NamedTuple):
    """A recipe file, without what it builds on."""

    path: Path
    tree: Mapping[str, Any]
    speaker: str  # who says its settings


def files_of(tree: Mapping[str, Any], path: Path) -> list[File]:
    """The file whose contents are `tree`, then its base, the base of that, ..."""
    files = [File(path, tree, "recipe")]
    while (base := files[-1].tree.get("base")) is not None:
        above = files[-1].path
        below = find_recipe(str(base), builder=above)
        if any(file.path.resolve() == below.resolve() for file in files):
            raise Problem(f"recipe {above.name}: base: {base} leads back to {below.name}, in a circle")
        if len(files) == LONGEST_CHAIN:
            raise Problem(
                f"recipe {above.name}: base: {base}: too many levels of 'base:' (at most {LONGEST_CHAIN} files)."
            )
        files.append(File(below, read_yaml(below), f"base {below.name}"))
    return files


def _layers(file: File, fraction: object) -> list[tuple[dict[str, Any], Speaker]]:
    """The settings of a file and, on top, those for the run's fraction of the labels."""
    place, tree = f"recipe {file.path.name}: ", file.tree
    entries = {} if tree.get("fractions") is None else _fractions(tree["fractions"], f"{place}fractions")
    entered = (tree, *entries.values())
    sources = {} if tree.get("sources") is None else _sources(tree["sources"], entered, f"{place}sources")
    layers = [(_own(tree), Speaker(file.speaker, place, sources))]
    share = _share(fraction) if entries else None
    if share is not None:
        near = nearest_fraction(share, entries)
        about = f"fractions {near:g}" + ("" if near == share else f" (nearest to {share:g})")
        sources = {**sources, **(entries[near].get("sources") or {})}
        speaker = Speaker(f"{file.speaker}, {about}", f"{place}fractions.{near:g}.", sources)
        layers.append((_own(entries[near]), speaker))
    return layers


def _own(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the keys of a file, or of its entry for a fraction."""
    return {key: value for key, value in tree.items() if key not in ("base", "fractions", "sources")}


def _fractions(value: object, place: str) -> dict[float, dict[str, Any]]:
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
        if entry.get("sources") is not None:
            _sources(entry["sources"], (entry,), f"{place}.{key:g}.sources")
        fractions[float(key)] = entry
    return fractions


def _sources(value: object, entries: Sequence[Mapping[str, Any]], place: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Problem(f'{place} must map settings to words, as in sources: {{optimizer.lr: "SwAV README"}}')
    keys = {dotted for entry in entries for dotted in flat(_own(entry))}
    blocks = {dotted.partition(".")[0] for dotted in keys}
    for dotted in value:
        if dotted not in keys | blocks:
            raise Problem(f"{place}.{dotted} is no setting of this file; {did_you_mean(str(dotted), sorted(keys))}")
    return value


def _share(fraction: object) -> float | None:
    """A fraction of the labels as a number; None for a wrong one, which is told with all that is wrong."""
    try:
        share = float(str(fraction))
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def nearest_fraction(fraction: float, entries: Iterable[float]) -> float:
    """The entry nearest to a fraction on a log scale: 0.03 is nearer to 0.01 than to 0.1."""
    return min(sorted(entries), key=lambda entry: abs(math.log(entry / fraction)))


# ------------------------------------------------------------------------------------------ flags and defaults


def _flag_settings(given: Mapping[str, Any], method: str, wrong: list[str]) -> dict[str, Setting]:
    """Flags by the dotted key of the setting that they write."""
    keys = FLAG_PATHS | (dict(get_method(method).flags) if method in METHODS else {})
    over: dict[str, Setting] = {}
    for key, value in given.items():
        flag = flag_of(key) if key in SETTINGS else f"--set {key}"
        if key in METHOD_FLAGS and method in METHODS and key not in get_method(method).flags:
            owners = " or ".join(name for name in METHODS if key in get_method(name).flags)
            wrong.append(f"{flag} belongs to --method {owners}, and the method is {method}")
        else:
            over[keys.get(key, key)] = Setting(value, Speaker(flag))
    return over


def set_settings(sets: Sequence[str], wrong: list[str]) -> dict[str, Setting]:
    """`--set KEY=VALUE` arguments by dotted key; what cannot be read goes into `wrong`."""
    over: dict[str, Setting] = {}
    for pair in sets:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not (equals and key):
            wrong.append(f"--set {pair}: write KEY=VALUE, for example --set optimizer.momentum=0.8")
            continue
        if not text.partition("#")[0].strip():
            wrong.append(f"--set {pair}: the value is empty; write --set {key}=VALUE, or {key}=null for none")
            continue
        try:
            over[key] = Setting(load_yaml(text), Speaker(f"--set {key}"))
        except yaml.YAMLError as error:
            why = f" ({error.problem})" if isinstance(error, RefusedYaml) else ""
            wrong.append(f"--set {key}={short(text)}: {short(text)!r} is not a YAML value{why}")
    return over


def _without_length(settings: dict[str, Any], over: Mapping[str, Any], lengths: frozenset[str]) -> dict[str, Any]:
    """Settings without what others replace under another name: steps replace epochs, and epochs steps."""
    replaced = lengths - over.keys() if lengths & over.keys() else ()
    return {key: value for key, value in settings.items() if key not in replaced}


def _defaults(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Speaker]:
    """The variant's column, and an empty block for a method with a default for each setting."""
    variant, block = str(settings.get("variant")), BLOCKS_WITH_DEFAULTS.get(str(settings.get("method")))
    column = {key: value for key, value in VARIANTS.get(variant, {}).items()
              if isinstance(settings.get(key), dict) or not isinstance(value, Mapping)}  # fmt: skip
    return ({} if block is None else {block: {}}) | column, Speaker(f"variant {variant}")


# ------------------------------------------------------------------------------------------- errors in words


def _in_words(error: ValidationError, path: Path, speakers: Mapping[str, Speaker], model: type[BaseModel]) -> list[str]:
    """Each of pydantic's complaints as a sentence that names the flag or the key."""
    sentences: list[str] = []
    items = error.errors()
    for number, item in enumerate(items):
        if len(sentences) == MOST_SENTENCES:
            return [*sentences, f"recipe {path.name}: up to {len(items) - number:,} more problems of this kind"]
        unions = ("int", "str", "float")  # pydantic's names of a union's branches
        dotted = ".".join(
            f"'{part}'" if "." in str(part) else str(part)
            for part in item["loc"]
            if "[" not in str(part) and part not in unions
        )
        speaker = (
            speakers.get(dotted)
            or speakers.get(dotted.rpartition(".")[0])  # std.0 is part of --set std
            or speakers.get(dotted.replace("'", ""))  # a key with a dot that is inside of a block
            or Speaker("recipe")
        )
        where = speaker.name if speaker.name.startswith("--") else f"{speaker.place or f'recipe {path.name}: '}{dotted}"
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
    if key.endswith("'"):
        return f"write a block: {block}: {{{key}: VALUE}}".replace("'", "")
    if block in model.model_fields:
        annotation = model.model_fields[block].annotation
        options = [annotation, *get_args(annotation)]
        model = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return did_you_mean(key, model.model_fields)


def short(text: str) -> str:
    """A value for a message: its beginning, where it is long."""
    return text if len(text) <= 80 else f"{text[:77]}..."


# ----------------------------------------------------------------------------------------------------- trees


def merged(settings: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others on top, key by key."""
    inner = {
        key: merged(settings[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(settings.get(key), Mapping)
    }
    return {**settings, **over, **inner}


def put(settings: Mapping[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """Settings with a value, or a block, in its place."""
    block, _, key = dotted.partition(".")
    if not key:
        return {**settings, dotted: value}
    inner = settings.get(block)
    return {**settings, block: put(inner if isinstance(inner, Mapping) else {}, key, value)}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping with dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves
