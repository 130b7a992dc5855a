"""`python -m tests.reference_pages` writes docs/reference/ from the code: commands, settings, results.json, Python."""

import contextlib
import inspect
import io
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/reference"
WRITTEN = "<!-- Written by `python -m tests.reference_pages`; do not edit by hand. -->\n"
WEIGHTS = ("ls", "show", "check", "convert", "add", "verify")

# What a key of results.json means. The keys that a run shows at its end have their words in measures/__init__.py.
MEANING = {
    "images": "validation images that were scored",
    "images_with_label": "those with a given label, where some have none",
    "images_with_set": "those with a set of labels; set measures are of these",
    "chance_accuracy": "accuracy of guessing: 100 divided by the number of classes",
    "majority_accuracy": "accuracy of always answering the most frequent class",
    "main_accuracy": "the best class is the main object, or the label without noise",
    "top5": "the given label is among the five best classes",
    "coverage@0.25": "labels per image that are predicted at the threshold 0.25, by the run's rule for sets",
    "main_only_f1": "F1 of a perfect classifier of the main object alone",
    "best_threshold": "the threshold of f1@best",
    "f1@T": "F1 at threshold T, by the rule for sets (evaluate.prediction_set). T is 0.25, 0.5, rho, best, or one "
    "of evaluate.thresholds",
    "f1_threshold@T": "F1 of all classes above T",
    "f1_argmax_or_threshold@T": "F1 of all classes above T, and the best class",
    "f1_argmax": "F1 of the best class alone",
    "chance_map": "map of images in random order",
    "recovery_map": "0 to 1: how well labels that are true and not given are ranked (the paper's measure)",
    "recovery_map_others": "0 to 1: the same, with given labels left out of the ranking",
    "bad_images": "images that could not be decoded",
    "unreadable_files": "files in formats that are not read, such as HEIC",
    "chosen_step": "with --patience: the step whose weights were kept",
    "last_step": "with --patience: the step at which training ended",
    "unlabelled_confident": "images without a label to which the model gives a label of the second stage's confidence",
    "confident": "validation images to which it gives such a label",
    "confident_accuracy": "how many of the labels of these validation images are right",
    "own_size": "image side of the checkpoint, in pixels, where the run has a smaller one",
    "other_colour_on_digits": "mean output of the colour that a digit does not have",
    "test_images": "test images that were scored, once, at the end",
}
ENDINGS = {"NAME_low, NAME_high": "the 95 % interval of NAME", "test_NAME": "NAME on the test images"}
PRETRAINED = {
    "loss": "the last loss",
    "neighbours_before": "k-NN accuracy of the features before pre-training, where images have labels",
    "neighbours": "the same after it",
    "steps": "optimiser steps",
    "images": "training images",
    "bad_images": "images that could not be decoded",
}


def known_key(key):
    """Does the page have a line for this key of a run's results.json?"""
    from finetune_mile.measures import CLOSING

    key = re.sub(r"_(low|high)$", "", key).removeprefix("test_")
    key = re.sub(r"^(f1(_[a-z_]+)?)@.*", r"\1@T", key)
    return key in MEANING or key in {closing for closing, _, _ in CLOSING} or f"test_{key}" in MEANING


def table(head, rows):
    cells = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |\n" for row in cells)


def results():
    from finetune_mile.measures import CLOSING
    from finetune_mile.measures.predictions import PER_CLASS

    closing = {key: (meaning, unit) for key, meaning, unit in CLOSING if not re.match(r"f1@0|coverage", key)}
    rows = [(f"`{key}`", unit, meaning) for key, (meaning, unit) in closing.items()]
    more = [(f"`{key}`", unit_of(key), meaning) for key, meaning in MEANING.items()]
    return f"""# results.json

A run folder, and the folder of `finetune-mile eval`, has a `results.json`: a flat list of numbers. A key is there only
if the data has what it needs. Per cent are 0 to 100.

## What a run shows at its end

{table(("key", "unit", "meaning"), rows)}
## The other keys

{table(("key", "unit", "meaning"), more)}
## Endings and beginnings

{table(("key", "meaning"), [(f"`{key}`", meaning) for key, meaning in ENDINGS.items()])}
The interval of an accuracy is Wilson's, over images. `over_probe` and `over_own_size_probe` compare image by image.
Where the score is `map`, they compare class by class. `{PER_CLASS}` has the numbers of each class.

## After pre-training

`finetune-mile pretrain` writes other keys.

{table(("key", "meaning"), [(f"`{key}`", meaning) for key, meaning in PRETRAINED.items()])}"""


def unit_of(key):
    if re.match(r"images|bad|unread|test_images|chosen|last|own_size$", key):
        return "pixels" if key == "own_size" else "count"
    return "" if re.match(r"coverage|best_thr|recovery|other_colour", key) else "%"


def commands():
    from finetune_mile.cli import VERBS

    parts = ["# Commands\n\nEvery verb, with what `--help` prints. `finetune-mile train` is `finetune-mile run`.\n\n"]
    parts.append(table(("verb", "what it does"), [(f"[{verb}](#{verb})", does) for verb, (_, does) in VERBS.items()]))
    parts.append(
        "\nExit codes:\n\n- 0: fine\n- 1: the check or the run failed\n- 2: the command or its input was wrong\n"
        "- 130 or 143: stopped by a signal\n"
    )
    for verb in VERBS:
        parts.append(f"\n## {verb}\n\n```text\n{help_of([verb])}```\n")
        if verb == "weights":
            parts += [f"\n### weights {name}\n\n```text\n{help_of([verb, name])}```\n" for name in WEIGHTS]
    return "".join(parts)


def help_of(words):
    """What --help prints, at a width of 100 columns; of `run` all flags."""
    from finetune_mile.cli import main

    out, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help-all" if words == ["run"] else "--help"])
    if before is None:
        del os.environ["COLUMNS"]
    else:
        os.environ["COLUMNS"] = before
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip() + "\n"


def settings():
    from finetune_mile.config.resolve import read_yaml, resolve_tree
    from finetune_mile.config.schema import FullRecipe

    path = ROOT / "recipes/finetune.yaml"
    chosen = resolve_tree(FullRecipe, read_yaml(path), path, "page").recipe.model_dump(mode="json")
    schema = FullRecipe.model_json_schema()
    blocks, rows = [], []
    for key, spec in schema["properties"].items():
        inner = next((each["$ref"] for each in spec.get("anyOf", [spec]) if "$ref" in each), None)
        if inner is None:
            rows.append(setting_row(key, spec, chosen.get(key)))
            continue
        block, values = schema["$defs"][inner.split("/")[-1]], chosen.get(key) or {}
        lines = [setting_row(f"{key}.{name}", each, values.get(name)) for name, each in block["properties"].items()]
        title = " ".join(block.get("description", "").split("\n")[0].split())
        blocks.append(f"\n## {key}\n\n{title}\n\n{table(HEAD, lines)}")
    return f"""# Settings of a recipe

A recipe is a YAML file with these keys. `--set KEY=VALUE` sets one on the command line, and in Python it is a keyword.
A key with a dot is inside a block. Frequent ones have a flag of their own ([commands](commands.md#run)).

- *default*: the value where a recipe says nothing. Where it is blank, every recipe must say it.
- *your photos*: the value in `recipes/finetune.yaml`, which a run on your photos takes.
- An *amount* is `200` (steps), `2 epochs` or `5 %` of the budget.

`finetune-mile run --explain` prints every value of a run, and who set it.

## General

{table(HEAD, rows)}{"".join(blocks)}"""


HEAD = ("key", "values", "default", "your photos", "meaning")


def setting_row(key, spec, value):
    default = show(spec["default"]) if "default" in spec else ""
    meaning = " ".join(spec.get("description", "").split())
    return f"`{key}`", values_of(spec), default, "" if value is None else show(value), meaning


def show(value):
    if isinstance(value, list):
        return f"`{value}`"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def values_of(spec):
    """The values that a setting takes, in words."""
    kinds = spec.get("anyOf") or [spec]
    plain = {each.get("type") for each in kinds if not {"enum", "const"} & set(each)}
    names = {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text", "null": "null"}
    names["object"] = "settings"
    words = []
    for kind in kinds:
        if "enum" in kind:
            words += [str(value) for value in kind["enum"]]
        elif "const" in kind:
            words.append(str(kind["const"]))
        elif kind.get("type") == "array":
            words.append("list" if "minItems" not in kind else f"{kind['minItems']} numbers")
        elif plain >= {"integer", "string"} and kind.get("type") in ("integer", "string"):
            words.append("amount")
        else:
            words.append(names[kind["type"]] + limits(kind))
    return ", ".join(dict.fromkeys(words))


def limits(kind):
    low, high = kind.get("minimum", kind.get("exclusiveMinimum")), kind.get("maximum", kind.get("exclusiveMaximum"))
    least = "" if low is None else f" {'above' if 'exclusiveMinimum' in kind else 'from'} {low:,}"
    return least + ("" if high is None else f" {'below' if 'exclusiveMaximum' in kind else 'to'} {high:,}")


def python():
    import finetune_mile

    parts = [
        "# Python\n\nEverything that `import finetune_mile` offers, with its docstring. "
        "A tour that runs from top to bottom: [From Python](../python.md).\n"
    ]
    for name in sorted(finetune_mile.__all__, key=lambda name: (name == "__version__", name[0].isupper(), name)):
        value = getattr(finetune_mile, name)
        if inspect.isclass(value):
            parts.append(f"\n## {name}\n\n{prose(value)}")
            for each, member in members(value):
                parts.append(f"\n### {name}.{each}\n\n{signature(each, member)}{prose(member)}")
        elif callable(value):
            parts.append(f"\n## {name}\n\n{signature(name, value)}{prose(value)}")
        else:
            parts.append(f"\n## {name}\n\nThe version of the package, a text.\n")
    return "".join(parts)


def members(cls):
    """The public methods and properties that a class defines itself, in the order of its source."""
    for name, value in vars(cls).items():
        member = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(member) and member.__doc__:
            yield name, value


def signature(name, value):
    if isinstance(value, property):
        return ""
    value = getattr(value, "__func__", value)
    found = inspect.signature(value)
    shown = [each for each in found.parameters.values() if each.name not in ("self", "cls")]
    text = f"{name}{found.replace(parameters=shown)}"
    if len(text) > 100:
        text = f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f") -> {found.return_annotation}"
    return f"```text\n{text.replace(chr(39), '')}\n```\n\n"


def prose(value):
    """A docstring of Google's style as Markdown: its text, and a list of what it takes and returns."""
    lines = inspect.getdoc(value.fget if isinstance(value, property) else value).splitlines()
    out, listing = [], False
    for line in lines:
        section = re.fullmatch(r"(Args|Returns|Raises|Yields):", line)
        if section:
            out += [f"**{ {'Args': 'Takes'}.get(section[1], section[1]) }**", ""]
            listing = section[1] == "Args"
        elif listing and (found := re.match(r"    (\*{0,2}\w+): (.*)", line)):
            out.append(f"- `{found[1]}`: {found[2]}")
        else:
            out.append(line.strip() if not listing or not line.strip() else f"  {line.strip()}")
    return "\n".join(out).strip() + "\n"


def pages():
    """The pages as they should be: path to text."""
    made = {"commands": commands, "settings": settings, "results": results, "python": python}
    return {FOLDER / f"{name}.md": WRITTEN + "\n" + make().strip() + "\n" for name, make in made.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}: {len(text.split()):,} words\n")
