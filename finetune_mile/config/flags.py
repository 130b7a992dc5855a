"""The command line of run.py: frozen by a test. No torch here."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeVar, get_args

from finetune_mile.config.schema import Variant
from finetune_mile.core.problems import Problem, did_you_mean, nearest
from finetune_mile.methods import METHODS

T = TypeVar("T")
# Other tools' names of a flag.
SAME = {"--lr": ("--learning-rate",), "--size": ("--image-size",), "--patience": ("--early-stopping",)}
_WHOLE = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
FORMAT = "the code that wrote the file, where it does not show it: solo-learn, byol-convert, ..."  # help of --format
AUTO: Final = "auto"  # of --resume
RESUME = "continue a run; takes no other setting. auto: start, or continue, what is in --out"
# All flags, most of them settings of the recipe, by group: the flag with a word for its value, and its help.
FLAGS = {
    "what to train": {
        "--recipe FILE": "a recipe file, or its name below recipes/",
        "--init": "card, file, directory, timm:NAME, none (from scratch)",
        "--data": "demo, folder:DIR, imagenet:DIR, hf:NAME_OR_DIR, csv:FILE, wds:DIR, webvision:DIR, celeba:DIR, "
        "multi-mnist:DIR, mosaic:DIR, colored-mnist:DIR, colored-mnist+:DIR; a bare directory is folder:",
        "--fraction": "share of the labels to use, such as 0.01 or 1%%",
        "--split FILE": "a list of the labelled images, or the split.json of a run",
        "--truth": "true label sets for evaluation: real, csv:FILE, counts:FILE.npy,INDEX.csv,0.1",
        "--method": " | ".join(METHODS),
        "--variant": " | ".join(get_args(Variant)) + ": where paper and published code differ",
        "--size": "image side in pixels (default: as the checkpoint says)",
        "--arch": "network, such as resnet50, resnet50-sk, timm:NAME",
        "--format": FORMAT,
        "--semi": "none | all | unlabelled: images for imitation",
        "--unlabelled DIR": "more images for --semi: a folder of photos, or any --data; labels are ignored",
        "--teacher": "for distill: a run folder or a checkpoint file",
        "--trunk": "all | frozen (features once, only a classifier learns) | norm-only | last:N blocks",
        "--keep-head NAME": "keep this head of the file (it may know the labels)",
    },
    "how": {
        "--k-t AMOUNT": "interaction: 200 (steps), '2 epochs', '5 %%' of the budget",
        "--k-s AMOUNT": "imitation, in the same units",
        "--rho": "pseudo-label threshold on the teacher's sigmoids, or auto",
        "--steps": "optimiser steps, teacher's and student's together, over all processes",
        "--epochs": "the same in epochs of the labelled images",
        "--batch-size": "global batch, over all processes",
        "--lr": "base learning rate",
        "--flip": "true | false: mirror training images; false for digits, text and left-right classes",
        "--head-init": "random | probe: start the classifier as a linear probe of the labelled images",
        "--keep": "last | best: best lets held-out labels decide how far the weights move from the start",
        "--patience N": "stop after N evaluations in a row without a better validation score, keep the best weights",
        "--seed": "of split, order, augmentation and head",
        "--track": "none | tensorboard | wandb | trackio (offline, unless its own settings say otherwise)",
        "--set KEY=VALUE": "any other setting, such as optimizer.momentum=0.8",
        "--seeds N": "run this many seeds and print mean and spread",
        "--minutes N": "the best model of this time (docs/own-photos.md)",
        "--refit": "at the end train on all labels, also the validation ones",
    },
    "where": {
        "--out": "run folder (default: runs/<recipe>-<number>)",
        "--overwrite": "replace a run that is in --out",
        "--keep-checkpoints": "keep checkpoints/ of a finished run",
        "--resume DIR|auto": RESUME,
        "--explain": "print what would be done, and stop",
        "--json": "with --explain: settings and who set them, as JSON",
    },
}
SWITCHES = ("--refit", "--overwrite", "--keep-checkpoints", "--explain", "--json")  # flags without a value
NO_SETTINGS = ("--format", "--set", "--seeds", "--minutes", "--out", "--resume", *SWITCHES)  # they say how to run
RARE = (  # not in the brief help
    "--split", "--truth", "--variant", "--arch", "--format", "--teacher", "--keep-head", "--k-t", "--k-s", "--rho",
    "--head-init", "--keep", "--flip", "--epochs", "--patience", "--keep-checkpoints",
)  # fmt: skip
SETTINGS = tuple(
    flag.split()[0].removeprefix("--").replace("-", "_")
    for group in FLAGS.values()
    for flag in group
    if flag.split()[0] not in NO_SETTINGS
)

EPILOG = """examples:
  finetune-mile run                                                    the demo, about a minute on two cores
  finetune-mile run --init moco.pth.tar --data folder:photos --fraction 0.1
  finetune-mile run --resume runs/demo-1                               continue a run that was stopped
  accelerate launch -m finetune_mile.run --init simclrv2-sk1 --fraction 0.01    several GPUs
"""


def number(text: str) -> int | float | str:
    """The value of a flag that takes a number; what is none stays text, and the recipe refuses it."""
    text = text.strip()
    if _WHOLE.fullmatch(text) and not text.endswith("_") and "__" not in text:
        return int(text)
    return float(text) if len(text) <= 30 and _DECIMAL.fullmatch(text) else text


def number_or_percentage(text: str) -> int | float | str:
    percent = number(text.removesuffix("%"))
    return percent / 100 if text.endswith("%") and not isinstance(percent, str) else number(text)


def resumed(text: str) -> Path | Literal["auto"]:
    """The value of --resume; a folder of the name auto is ./auto."""
    return AUTO if text == AUTO else Path(text)


# How the values of flags are read; all others are text.
TYPES: dict[str, Callable[[str], Any]] = {
    "--fraction": number_or_percentage, "--seeds": int, "--minutes": float, "--out": Path, "--resume": resumed,
    **dict.fromkeys(
        ("--k-t", "--k-s", "--rho", "--steps", "--epochs", "--batch-size", "--lr", "--seed", "--size", "--patience"),
        number,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run is asked for: the command line fills it, and so does Python."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, by flag or dotted key; and `recipe`
    sets: Sequence[str] = ()  # KEY=VALUE
    format: str | None = None  # the code that wrote the file of --init
    out: Path | None = None
    overwrite: bool = False
    resume: Path | Literal["auto"] | None = None
    keep_checkpoints: bool = False
    refit: bool = False
    seeds: int | None = None
    minutes: float | None = None
    explain: bool = False
    json: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """The settings as a recipe has them: --format is a part of --init."""
        own = {} if self.format is None else {"init": init_text(self.settings.get("init"), self.format)}
        return {**self.settings, **own}

    def check(self) -> None:
        """Refuse what does not go with --resume."""
        if self.resume == AUTO and (self.out is None or self.overwrite):
            fix = "leave out --overwrite" if self.overwrite else "add --out DIR"
            raise Problem(f"--resume auto starts or continues the run in --out: {fix}")
        if self.resume in (None, AUTO):
            return
        more = {"set": self.sets, "format": self.format}
        others = sorted([*self.settings, *(key for key, value in more.items() if value)])
        if others or self.out is not None or self.overwrite:
            name = flag_of(others[0]) if others else "--out or --overwrite"
            raise Problem(
                f"--resume continues a run with its own settings and takes no other setting; leave out {name}"
            )


class Parser(argparse.ArgumentParser):
    """Raises `Problem` instead of printing usage and exiting. Every verb reads its words with it.

    `-` and `_` are the same in a flag, an empty value is an error, and an unknown flag or choice is answered with the
    nearest one.
    """

    others: Iterable[str] = ()  # flags that are read by another parser, and may be the nearest ones

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            raise Problem(*self.strangers(rest))
        return options

    def strangers(self, rest: list[str]) -> list[str]:
        """A sentence for each unknown flag, or for the first word that is none."""
        flags = [word.partition("=")[0] for word in rest if word.startswith("-")]
        if not flags:
            return [f"unexpected argument {word!r}. Settings are flags (see --help)." for word in rest[:1]]
        near = {flag: nearest(flag, [*self._option_string_actions, *self.others]) for flag in flags}
        return [
            f"{flag}: unknown flag" + (f"; did you mean {names[0]}?" if names else " (--help lists them)")
            for flag, names in near.items()
        ]

    def fill(self, values: Mapping[str, Any]) -> Any:
        """The options of a Python call: `values` by flag (None: not given), each read and checked as the flag is."""
        actions = {action.dest: action for action in self._actions}
        if unknown := [flag_of(key) for key in values if key not in actions]:
            raise Problem(*self.strangers(unknown))
        options = argparse.Namespace(**{name: action.default for name, action in actions.items()})
        for key, value in values.items():
            if value is not None:
                setattr(options, key, self._read(actions[key], value))
        return options

    def _read(self, action: argparse.Action, value: Any) -> Any:
        """One value, or a list of them, of a Python call."""
        if isinstance(value, list):
            return [self._read(action, each) for each in value]
        if action.nargs == 0:  # a switch
            return bool(value)
        if not str(value).strip():
            raise Problem(empty_value(flag_of(action.dest)))
        try:
            return self._get_values(action, [str(value)])
        except argparse.ArgumentError as error:
            self.error(str(error))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = action.option_strings[0] if action.option_strings else self.prog
            raise Problem(f"{name} {value}: unknown; {did_you_mean(str(value), map(str, action.choices))}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, after a check for empty words: an unset shell variable must not start another experiment."""
        words = sys.argv[1:] if args is None else list(args)
        wrong = []
        for number, word in enumerate(words):
            flag, equals, value = word.partition("=")
            if word.startswith("--"):
                words[number] = flag.replace("_", "-") + equals + value
            if not word.strip():
                before = words[number - 1] if number else ""
                named = before.startswith("-") and "=" not in before
                wrong.append(
                    empty_value(before) if named else f"argument {number + 1} is empty; write a value (see --help)"
                )
            elif word.startswith("--") and equals and not value.strip():
                wrong.append(empty_value(flag))
        if wrong:
            raise Problem(*wrong)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise Problem(f"{message} (--help lists the flags)")


Flags = dict[str, dict[str, Any]]  # flags, and arguments without dashes: each with what argparse takes


def verb_parser(verb: str, flags: Flags, *, description: str | None, epilog: str, usage: str | None = None) -> Parser:
    """The parser of a verb."""
    parser = Parser(
        prog=f"finetune-mile {verb}", allow_abbrev=False, description=description, epilog=epilog, usage=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for name, how in flags.items():
        parser.add_argument(name, **how)
    return parser


class Help(argparse.Action):
    """Print the help: of the flags that most runs need, or of all."""

    def __call__(self, parser: Any, _namespace: Any, _values: Any, option_string: str | None = None) -> None:
        build_parser(brief=option_string != "--help-all").print_help()
        parser.exit()


def build_parser(*, brief: bool = False) -> Parser:
    """The parser of `run`; a brief one hides flags from its help."""
    more = "\n--help-all lists all flags, docs/recipes.md the settings of a recipe\n" if brief else ""
    parser = Parser(
        prog="finetune-mile run", allow_abbrev=False, epilog=EPILOG + more, usage="finetune-mile run [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False,
        description="Fine-tune a self-supervised checkpoint with MILe, or train from scratch, on one Accelerate loop.",
    )  # fmt: skip
    silent = argparse.SUPPRESS
    parser.add_argument("-h", "--help", action=Help, nargs=0, default=silent, help="show this help and exit")
    parser.add_argument("--help-all", action=Help, nargs=0, default=silent, help="show all flags and exit")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for words, text in flags.items():
            flag, _, metavar = words.partition(" ")
            shown = silent if brief and flag in RARE else text
            if flag in SWITCHES:
                group.add_argument(flag, action="store_true", help=shown)
            elif flag == "--set":
                group.add_argument(flag, action="append", default=[], metavar=metavar, dest="sets", help=shown)
            else:
                kind = TYPES.get(flag, str)
                group.add_argument(flag, *SAME.get(flag, ()), type=kind, metavar=metavar or None, help=shown)
    return parser


def parse(argv: list[str], parser: Parser | None = None, settings: tuple[str, ...] = SETTINGS) -> RunOptions:
    """Read the flags of a run.

    Args:
        argv: the words.
        parser: of flags whose names are fields of `RunOptions`, and of settings; None: that of `run`.
        settings: flags that are keys of the recipe.
    """
    given: dict[str, Any] = vars((parser or build_parser()).parse_args(argv))
    chosen = {key: given.pop(key) for key in settings}
    options = RunOptions(settings={key: value for key, value in chosen.items() if value is not None}, **given)
    options.check()
    return options


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def init_text(init: str | None, format: str | None) -> str:
    """--init with its --format, as a recipe keeps the two."""
    if init is None:
        raise Problem(f"--format {format} describes the file of --init; give --init FILE too")
    return init if format is None else f"{init}::format={format}"


def empty_value(flag: str) -> str:
    """The sentence about a flag without a value."""
    return f"{flag}: the value is empty; write {flag} VALUE, or leave out the flag"


# ------------------------------------------------------------------------------------ checks of every verb


def outside(options: argparse.Namespace, **ranges: tuple[int, int]) -> list[str]:
    """A sentence for each flag whose number is below the first or above the second one of its range."""
    given = {name: value for name, value in vars(options).items() if name in ranges and value is not None}
    return [
        f"--{name.replace('_', '-')} {value}: must be from {ranges[name][0]} to {ranges[name][1]:,}"
        for name, value in given.items()
        if not ranges[name][0] <= value <= ranges[name][1]
    ]


def attempt(problems: list[str], work: Callable[..., T], *arguments: Any) -> T | None:
    """What some work returns; where it raises a `Problem`, None, and its sentences are added to `problems`."""
    try:
        return work(*arguments)
    except Problem as problem:
        problems += problem.sentences
        return None


def check_all(sentences: Iterable[str], *checks: Callable[[], object]) -> None:
    """Raise one `Problem` with all sentences and those of every check that raises one."""
    problems = list(sentences)
    for check in checks:
        attempt(problems, check)
    if problems:
        raise Problem(*problems)
