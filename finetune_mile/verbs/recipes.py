"""`finetune-mile recipes`: the recipe files that come with the package, to read and to copy."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from finetune_mile.config.flags import Flags, verb_parser
from finetune_mile.config.resolve import NO_RUNS, find_recipe
from finetune_mile.core.files import shipped, write_whole
from finetune_mile.core.problems import Problem

EPILOG = """examples:
  finetune-mile recipes ls
  finetune-mile recipes show finetune
  finetune-mile recipes cp ssl/mocov2 mine.yaml       then: finetune-mile run --recipe mine.yaml
"""
FLAGS: Flags = {
    "verb": {"choices": ("ls", "show", "cp"), "help": "list names, print one, copy one"},
    "name": {"nargs": "?", "help": "a name that ls prints"},
    "file": {"nargs": "?", "type": Path, "help": "where cp writes"},
}


def main(argv: list[str]) -> int:
    """0 fine, 2 the command or its input was wrong."""
    options = verb_parser("recipes", FLAGS, description=__doc__, epilog=EPILOG).parse_args(argv)
    wanted = {"ls": 0, "show": 1, "cp": 2}[options.verb]
    if sum(value is not None for value in (options.name, options.file)) != wanted:
        words = ("", " NAME", " NAME FILE")[wanted]
        raise Problem(f"write: finetune-mile recipes {options.verb}{words}")
    if options.verb == "ls":
        for name, first in listed():
            sys.stdout.write(f"{name:<28}{first}\n")
        return 0
    path = find_recipe(options.name)
    text = path.read_text(encoding="utf-8")
    if options.verb == "show":
        sys.stdout.write(text)
        return 0
    if os.path.lexists(options.file):
        raise Problem(f"{options.file}: the file already exists; choose another name")
    if not options.file.parent.is_dir():
        raise Problem(f"{options.file}: there is no folder {options.file.parent}")
    text = re.sub(r"\A# yaml-language-server:.*\n", "", text)
    base = re.search(r"^base: *(\S+)", text, re.MULTILINE)
    if base is not None:  # it is named from here, no longer from beside the recipe
        called = find_recipe(base[1], builder=path).relative_to(shipped("recipes")).with_suffix("")
        text = f"{text[: base.start(1)]}{called}{text[base.end(1) :]}"
    write_whole(options.file, text)
    sys.stdout.write(f"{options.file}: use it with finetune-mile run --recipe {shlex.quote(str(options.file))}\n")
    return 0


def listed() -> Iterator[tuple[str, str]]:
    """Names of recipes that a run takes, each with the first sentence of its comment."""
    folder = shipped("recipes")
    for path in sorted(folder.rglob("*.yaml")):
        file = path.relative_to(folder)
        if file.parts[0] in NO_RUNS:
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        text = " ".join(line[1:].strip() for line in lines if line.startswith("#") and "$schema" not in line)
        about = re.split(r"(?<=[.?]) (?=[A-Z])| {2}", text.strip(), maxsplit=1)[0]  # two blanks: a paragraph ends
        yield str(file.with_suffix("")), about
