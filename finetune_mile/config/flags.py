"""The command line of run.py: frozen by a test. No torch here."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, get_args

from finetune_mile.config.schema import Variant
from finetune_mile.core.problems import Problem, did_you_mean, nearest
from finetune_mile.methods import METHODS

NUMBERS = ("fraction", "k_t", "k_s", "rho", "steps", "epochs", "batch_size", "lr", "seed", "size", "patience")
SAME = {"--lr": "--learning-rate", "--size": "--image-size", "--patience": "--early-stopping"}  # other tools' names
_WHOLE = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
FORMAT = "the code that wrote the file, where it does not show it: solo-learn, byol-convert, ..."  # help of --format
# Settings of the recipe, by group: the flag with a word for its value, and its help.
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
    },
}
RARE = (  # not in the brief help
    "--split", "--truth", "--variant", "--arch", "--format", "--teacher", "--keep-head", "--k-t", "--k-s", "--rho",
    "--head-init", "--keep", "--flip", "--epochs", "--patience",
)  # fmt: skip
SETTINGS = tuple(
    flag.split()[0].removeprefix("--").replace("-", "_")
    for group in FLAGS.values()
    for flag in group
    if flag != "--format"  # a part of --init
)

EPILOG = """examples:
  finetune-mile run                                                    the demo, about a minute on two cores
  finetune-mile run --init moco.pth.tar --data folder:photos --fraction 0.1
  finetune-mile run --resume runs/demo-1                               continue a run that was stopped
  accelerate launch -m finetune_mile.run --init simclrv2-sk1 --fraction 0.01    several GPUs
"""
AUTO: Final = "auto"  # of --resume
RESUME = "continue a run; takes no other setting. auto: start, or continue, what is in --out"


class Parser(argparse.ArgumentParser):
    """Raises `Problem` instead of printing usage and exiting. Every verb reads its words with it.

    `-` and `_` are the same in a flag, an empty value is an error, and an unknown flag or choice is answered with the
    nearest one.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            raise Problem(*self.strangers(rest))
        if hasattr(options, "init") and getattr(options, "format", None) is not None:
            if options.init is None:
                raise Problem(f"--format {options.format} describes the file of --init; give --init FILE too")
            # a part of what is loaded, and kept with it
            mark = f"::format={options.format}"
            several = isinstance(options.init, list)
            options.init = [text + mark for text in options.init] if several else options.init + mark
            options.format = None
        return options

    def strangers(self, rest: list[str]) -> list[str]:
        """A sentence for each unknown flag, or for the first word that is none."""
        flags = [word.partition("=")[0] for word in rest if word.startswith("-")]
        if not flags:
            return [f"unexpected argument {word!r}. Settings are flags (see --help)." for word in rest[:1]]
        near = {flag: nearest(flag, self._option_string_actions) for flag in flags}
        return [
            f"{flag}: unknown flag" + (f"; did you mean {names[0]}?" if names else " (--help lists them)")
            for flag, names in near.items()
        ]

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
                wrong.append(_empty(before) if named else f"argument {number + 1} is empty; write a value (see --help)")
            elif word.startswith("--") and equals and not value.strip():
                wrong.append(_empty(flag))
        if wrong:
            raise Problem(*wrong)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise Problem(f"{message} (--help lists the flags)")


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
    parser.add_argument("-h", "--help", action=Help, nargs=0, help="show this help and exit")
    parser.add_argument("--help-all", action=Help, nargs=0, help="show all flags and exit")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for words, text in flags.items():
            flag, _, metavar = words.partition(" ")
            names = (flag, SAME[flag]) if flag in SAME else (flag,)
            hidden = brief and flag in RARE
            group.add_argument(*names, metavar=metavar or None, help=argparse.SUPPRESS if hidden else text)
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
                       help="any other setting, such as optimizer.momentum=0.8")  # fmt: skip
    group.add_argument("--seeds", type=int, metavar="N", help="run this many seeds and print mean and spread")
    group.add_argument("--minutes", type=float, metavar="N", help="the best model of this time (docs/own-photos.md)")
    group.add_argument("--refit", action="store_true",
                       help="at the end train on all labels, also the validation ones")  # fmt: skip
    where = parser.add_argument_group("where")
    where.add_argument("--out", type=Path, help="run folder (default: runs/<recipe>-<number>)")
    where.add_argument("--overwrite", action="store_true", help="replace a run that is in --out")
    where.add_argument("--keep-checkpoints", action="store_true",
                       help=argparse.SUPPRESS if brief else "keep checkpoints/ of a finished run")  # fmt: skip
    where.add_argument("--resume", type=resumed, metavar="DIR|auto", help=RESUME)
    where.add_argument("--explain", action="store_true", help="print what would be done, and stop")
    where.add_argument("--json", action="store_true", help="with --explain: settings and who set them, as JSON")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    return read_flags(build_parser(), argv, SETTINGS)


def resumed(text: str) -> Path | Literal["auto"]:
    """The value of --resume; a folder of the name auto is ./auto."""
    return AUTO if text == AUTO else Path(text)


def read_flags(parser: Parser, argv: list[str], settings: tuple[str, ...]) -> argparse.Namespace:
    """Read flags, and refuse other settings beside --resume DIR.

    Args:
        parser: with --resume, --out, --overwrite and --set among its flags.
        argv: the words.
        settings: flags that are keys of the recipe, which --resume goes without.
    """
    options: argparse.Namespace = parser.parse_args(argv)
    if options.resume == AUTO:
        if options.out is None or options.overwrite:
            raise Problem(
                "--resume auto starts or continues the run in --out: "
                + ("leave out --overwrite" if options.overwrite else "add --out DIR")
            )
    elif options.resume is not None:
        others = sorted(set(given_settings(options, settings)) | ({"set"} if options.sets else set()))
        if others or options.out is not None or options.overwrite:
            name = "--" + (others[0].replace("_", "-") if others else "out or --overwrite")
            raise Problem(
                f"--resume continues a run with its own settings and takes no other setting; leave out {name}"
            )
    return options


def given_settings(options: argparse.Namespace, settings: tuple[str, ...] = SETTINGS) -> dict[str, Any]:
    """The settings that were given, by recipe key; what is not a number stays text, and the recipe refuses it."""
    texts = {key: getattr(options, key) for key in settings if getattr(options, key) is not None}
    numbers = {key: _number(text) if key in NUMBERS else text for key, text in texts.items()}
    percent = _number(str(texts.get("fraction", "")).removesuffix("%"))
    if str(texts.get("fraction")).endswith("%") and not isinstance(percent, str):
        numbers["fraction"] = percent / 100
    return numbers


def _number(text: str) -> int | float | str:
    text = text.strip()
    if _WHOLE.fullmatch(text) and not text.endswith("_") and "__" not in text:
        return int(text)
    return float(text) if len(text) <= 30 and _DECIMAL.fullmatch(text) else text


def _empty(flag: str) -> str:
    return f"{flag}: the value is empty; write {flag} VALUE, or leave out the flag"


# ------------------------------------------------------------------------------------ checks of every verb


def outside(options: argparse.Namespace, **ranges: tuple[int, int]) -> list[str]:
    """A sentence for each flag whose number is below the first or above the second one of its range."""
    given = {name: getattr(options, name) for name in ranges if getattr(options, name) is not None}
    return [
        f"--{name.replace('_', '-')} {value}: must be from {ranges[name][0]} to {ranges[name][1]:,}"
        for name, value in given.items()
        if not ranges[name][0] <= value <= ranges[name][1]
    ]


def check_all(sentences: Iterable[str], *checks: Callable[[], object]) -> None:
    """Raise one `Problem` with all sentences and those of every check that raises one."""
    problems = list(sentences)
    for check in checks:
        try:
            check()
        except Problem as problem:
            problems += problem.sentences
    if problems:
        raise Problem(*problems)
