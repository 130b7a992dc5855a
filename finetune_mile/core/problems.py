"""Problem: what a user can mend, such as bad flags, files, recipes, data. BadImage: one image that is skipped."""

from __future__ import annotations

import difflib
import sys
import unicodedata
from collections.abc import Iterable, Sequence


class Problem(Exception):
    """One clear sentence (or several problems at once) that names the flag or file and the fix.

    The commands print it without a traceback and exit with its code. Anything else that is raised is our own bug.
    """

    code = 2  # the command or its input was wrong

    def __init__(self, *sentences: str) -> None:
        super().__init__("\n".join(sentences))
        self.sentences: Sequence[str] = sentences


class Failed(Problem):
    """The command was right and the run failed all the same, such as one whose loss is not a number any more."""

    code = 1


class BadImage(Exception):
    """One image cannot be read or decoded; the text says why. A run skips it."""


def tell(problem: Problem) -> int:
    """Print each sentence as an error; the exit code."""
    for sentence in problem.sentences:
        sys.stderr.write(f"{inert(f'error: {sentence}')}\n")
    return problem.code


def warn(sentence: str) -> None:
    """Print a warning."""
    sys.stderr.write(f"{inert(f'warning: {sentence}')}\n")


# ----------------------------------------------------- text of strangers on a terminal and in a spreadsheet

LONGEST_LINE, LONGEST_SHOWN = 500, 80  # characters that are printed of a sentence, and of one name in a table
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")  # how a cell begins that a spreadsheet may compute


def inert(text: str, most: int = LONGEST_LINE) -> str:
    """One line of text that cannot control a terminal: other characters escaped, the middle of a long text cut out.

    Names of classes, files and tensors come from strangers: they may hold escape sequences, line ends, marks that turn
    the direction of writing, and bytes that are not UTF-8.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else ascii(c)[1:-1] for c in text)
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 5]} ... {text[-tail:]}"


def cell(text: str) -> str:
    """Text for a CSV cell that no spreadsheet takes for a formula: behind a single quote where it might be one."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def uncell(text: str) -> str:
    """The inverse of `cell`."""
    return text.removeprefix("'")


# ---------------------------------------------------------------------- names that a user probably meant

CUTOFF = 0.5  # share of letters in common, from 0 to 1
MOST_NAMES = 15  # listed in a message
# Names in other tools: ours. One that begins with --set is meant where there is a --set.
ALIASES = {
    "--learning-rate": "--lr", "--bs": "--batch-size", "--batch": "--batch-size", "--output": "--out",
    "--output-dir": "--out", "--config": "--recipe",
    **dict.fromkeys(("--pretrained", "--checkpoint", "--weights"), "--init"),
    **dict.fromkeys(("--img-size", "--image-size", "--input-size", "--resolution"), "--size"),
    **dict.fromkeys(("--freeze", "--frozen", "--freeze-backbone", "--linear-probe"), "--trunk frozen"),
    **dict.fromkeys(("--workers", "--num-workers"), "--set workers="),
    "--weight-decay": "--set optimizer.weight_decay=",
}  # fmt: skip


def nearest(word: str, options: Iterable[str], count: int = 1) -> list[str]:
    """Options that a word may stand for, the nearest first; also by their names in other tools."""
    names = list(options)
    others = {other: ours for other, ours in ALIASES.items() if ours.partition(" ")[0] in names}
    if word.replace("_", "-") in others:
        return [others[word.replace("_", "-")]]
    meant = others | {name: name for name in names}
    return [meant[name] for name in difflib.get_close_matches(word, meant, n=count, cutoff=CUTOFF)]


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one, else those that there are."""
    names = list(options)
    near = nearest(word, names)
    if near:
        return f"did you mean {near[0]}?"
    return f"known: {', '.join(names[:MOST_NAMES]) or 'none'}" + (", ..." if len(names) > MOST_NAMES else "")
