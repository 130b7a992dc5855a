"""The command line of run.py: frozen by a test. No torch here."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NoReturn, get_args

from finetune_mile.config.schema import Variant
from finetune_mile.core.problems import Problem, did_you_mean, nearest
from finetune_mile.methods import METHODS

SETTINGS = (
    "recipe", "init", "fraction", "split", "truth", "method", "variant", "data", "arch", "semi", "teacher",
    "k_t", "k_s", "rho", "steps", "epochs", "batch_size", "lr", "seed", "keep_head", "track",
)  # fmt: skip
NUMBERS = ("fraction", "k_t", "k_s", "rho", "steps", "epochs", "batch_size", "lr", "seed")
_WHOLE = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")

EPILOG = """examples:
  accelerate launch finetune_mile/run.py                                   the demo, about a minute on two cores
  accelerate launch finetune_mile/run.py --init simclrv2-sk1 --fraction 0.01       ImageNet, 1 % of the labels
  accelerate launch finetune_mile/run.py --init moco.pth.tar --data folder:photos --fraction 0.1
  accelerate launch finetune_mile/run.py --resume runs/demo-1              go on with a run that was stopped
"""


class Parser(argparse.ArgumentParser):
    """Raises `Problem` instead of printing usage and exiting. Every verb reads its words with it.

    `-` and `_` are the same in a flag, an empty value is an error, and an unknown flag or choice is answered with the
    nearest one.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options; words that no flag takes are refused."""
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            raise Problem(*self.strangers(rest))
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
        """Say what is wrong in one sentence."""
        raise Problem(f"{message} (--help lists the flags)")


def build_parser() -> Parser:
    """Every flag of run.py."""
    parser = Parser(
        prog="finetune_mile/run.py", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Fine-tune a self-supervised checkpoint with MILe, or train from scratch, on one Accelerate loop.",
    )  # fmt: skip
    what = parser.add_argument_group("what to train")
    what.add_argument("--recipe", metavar="FILE", help="a recipe file, or its name below recipes/")
    what.add_argument("--init", help="card name, file, directory, timm:NAME, or none (from scratch)")
    what.add_argument("--data", help="demo, folder:DIR, imagenet:DIR, hf:NAME_OR_DIR, csv:FILE, wds:DIR, "
                      "webvision:DIR, celeba:DIR, multi-mnist:DIR, mosaic:DIR, colored-mnist:DIR, colored-mnist+:DIR; "
                      "a bare directory is folder:")  # fmt: skip
    what.add_argument("--fraction", help="share of the labels to use, such as 0.01")
    what.add_argument("--split", metavar="FILE", help="a list of the labelled images, or the split.json of a run")
    what.add_argument("--truth", help="true label sets for evaluation: real, csv:FILE, counts:FILE.npy,INDEX.csv,0.1")
    what.add_argument("--method", help=" | ".join(METHODS))
    what.add_argument("--variant", help=" | ".join(get_args(Variant)) + ": where paper and published code differ")
    what.add_argument("--arch", help="network, such as resnet50, resnet50-sk, timm:NAME")
    what.add_argument("--semi", help="none | all | unlabelled: images that imitation draws from")
    what.add_argument("--teacher", help="for distill: a run folder or a checkpoint file")
    what.add_argument("--keep-head", metavar="NAME", help="keep this head of the file (it may know the labels)")
    how = parser.add_argument_group("how")
    how.add_argument("--k-t", metavar="AMOUNT", help="interaction: 200 (steps), '2 epochs', '5 %%' of the budget")
    how.add_argument("--k-s", metavar="AMOUNT", help="imitation, in the same units")
    how.add_argument("--rho", help="pseudo-label threshold on the teacher's sigmoids, or auto")
    how.add_argument("--steps", help="optimiser steps, teacher's and student's together, over all processes")
    how.add_argument("--epochs", help="the same in epochs of the labelled images")
    how.add_argument("--batch-size", help="global batch, over all processes")
    how.add_argument("--lr", help="base learning rate")
    how.add_argument("--seed", help="of split, order, augmentation and head")
    how.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
                     help="any other setting of the recipe, such as optimizer.momentum=0.8")  # fmt: skip
    where = parser.add_argument_group("where")
    where.add_argument("--out", type=Path, help="run folder (default: runs/<recipe>-<number>)")
    where.add_argument("--overwrite", action="store_true", help="replace a run that is in --out")
    where.add_argument("--resume", type=Path, metavar="DIR", help="go on with a run; takes no other setting")
    where.add_argument("--track", help="none | tensorboard | wandb")
    where.add_argument("--explain", action="store_true", help="print what would be done, and stop")
    where.add_argument("--json", action="store_true", help="with --explain: every setting and who set it, for scripts")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags of run.py."""
    return read_flags(build_parser(), argv, SETTINGS)


def read_flags(parser: Parser, argv: list[str], settings: tuple[str, ...]) -> argparse.Namespace:
    """Read flags, and refuse other settings beside --resume.

    Args:
        parser: with --resume, --out, --overwrite and --set among its flags.
        argv: the words.
        settings: flags that are keys of the recipe, which --resume goes without.
    """
    options: argparse.Namespace = parser.parse_args(argv)
    if options.resume is not None:
        others = sorted(set(given_settings(options, settings)) | ({"set"} if options.sets else set()))
        if others or options.out is not None or options.overwrite:
            name = "--" + (others[0].replace("_", "-") if others else "out or --overwrite")
            raise Problem(f"--resume goes on with a run as it was and takes no other setting; leave out {name}")
    return options


def given_settings(options: argparse.Namespace, settings: tuple[str, ...] = SETTINGS) -> dict[str, Any]:
    """The settings that were given, by recipe key; what is not a number stays text, and the recipe refuses it."""
    found = {key: getattr(options, key) for key in settings if getattr(options, key) is not None}
    return {key: _number(text) if key in NUMBERS else text for key, text in found.items()}


def _number(text: str) -> int | float | str:
    text = text.strip()
    if _WHOLE.fullmatch(text) and not text.endswith("_") and "__" not in text:
        return int(text)
    return float(text) if len(text) <= 30 and _DECIMAL.fullmatch(text) else text


def _empty(flag: str) -> str:
    return f"{flag}: the value is empty; write {flag} VALUE, or leave out the flag"
