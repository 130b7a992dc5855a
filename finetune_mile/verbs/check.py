"""`finetune-mile check`: is my data sound, does my checkpoint fit, what will the run cost? Before it starts."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_mile.checkpoints.init import parse_init, parse_source
from finetune_mile.config.flags import Flags, build_parser, parse, verb_parser
from finetune_mile.config.resolve import resolve_anywhere
from finetune_mile.core.console import open_console
from finetune_mile.core.problems import LONGEST_LINE, Problem, inert, tell
from finetune_mile.images.sources import check_truth, load_data, split_name

if TYPE_CHECKING:
    from finetune_mile.images.sets import Data
    from finetune_mile.training.checks import Check

EPILOG = """examples:
  finetune-mile check --data folder:photos --list found.csv        read every image: bad ones, copies, labels
  finetune-mile check --data folder:photos --init moco.pth.tar     also the checkpoint, a few steps, time and disk
  finetune-mile check --init moco.pth.tar --images 5000 --classes 12         photos that are elsewhere
  finetune-mile check --init simclrv2-sk1 --fraction 0.01          ImageNet: IMAGENET_DIR; it may be elsewhere
  accelerate launch -m finetune_mile.cli check --init mocov2 --fraction 0.1  a step on every GPU
  finetune-mile check --table ssl                                  every cell of a table, and their sum

Exit code: 0 fine, 1 a check failed, 2 the command or its input is wrong.
"""
MOST_IMAGES = 10**7
IMAGES = 2000  # validation images of the accuracies
ASIDE = ("resume", "explain", "json", "seeds", "minutes")
FLAGS: Flags = {
    "--list": {"type": Path, "metavar": "FILE", "help": "write bad images and all copies to this CSV file"},
    "--workers": {"type": int, "help": "processes that read the data (default: the cores)"},
    "--images": {
        "metavar": "N",
        "help": "with --classes: images of data that is elsewhere; else validation images of the accuracies, or all "
        "(default: 2000)",
    },
    "--classes": {"type": int, "metavar": "N", "help": "classes of data that is elsewhere"},
    "--bank": {
        "metavar": "N",
        "help": "training images for k-NN; all: as published (default: 20000, where no other score can be compared)",
    },
    "--table": {"metavar": "NAME", "help": "the price of a table below recipes/tables/, or of a file; takes --set"},
    "--quick": {"action": "store_true", "help": "with --table: its short form"},
    "--runs": {"type": Path, "metavar": "DIR", "help": "with --table: where its run folders are"},
}
USAGE = "finetune-mile check --data DATA [--init NAME] [flags of finetune-mile run] [flags below]"
LONGEST_REPORT = 2000  # characters of one line about data
ABOUT = (
    "Check the data and, with --init or other flags of a run, everything that the run needs. Takes the flags of the "
    "run (`finetune-mile run --help`)."
)


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 a check failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    parser = verb_parser("check", FLAGS, description=ABOUT, epilog=EPILOG, usage=USAGE)
    options, rest = parser.parse_known_args(argv)
    run_parser = build_parser()
    run_parser.others = FLAGS
    run = parse(rest, run_parser)
    settings, sets = run.given, run.sets
    images, bank = _count("--images", options.images), _count("--bank", options.bank)
    if options.table is not None:
        if settings or run.out:
            raise Problem(f"{rest[0]}: not available with --table. Use --quick, --runs DIR or --set KEY=VALUE.")
        plan = importlib.import_module("finetune_mile.paper.table_plan")
        return int(plan.plan_table(options.table, options.runs, sets, quick=options.quick))
    if options.quick or options.runs:
        raise Problem("--quick and --runs belong to --table NAME")
    for flag in ASIDE:
        if getattr(run, flag):
            raise Problem(f"--{flag}: not available here. Give the flags of a new run.")
    if settings.keys() <= {"truth"} and not sets:
        raise Problem("nothing to check: add --data folder:DIR and, to check a run, --init CHECKPOINT")
    from finetune_mile.images.checks import check_replaceable, inspect  # not for --help

    if options.list is not None:
        check_replaceable(options.list, "--list")
    look = partial(inspect, workers=options.workers, listed=options.list)
    if options.classes is None and settings.keys() <= {"data", "truth"} and not sets:
        return _check_data(settings["data"], settings.get("truth"), look)
    if options.classes is not None and (options.images in (None, "all") or options.classes < 2):
        raise Problem("--classes needs --images N beside it, and at least two classes")
    counts = None if options.classes is None or images is None else (images, options.classes)
    resolved, _ = resolve_anywhere(({} if counts is None else {"data": "folder:elsewhere"}) | settings, sets)
    parse_init(resolved.recipe.init)
    if resolved.recipe.teacher is not None:
        parse_source(resolved.recipe.teacher, "--teacher")
    from finetune_mile.training.checks import check_run
    from finetune_mile.training.processes import Signals, Stopped

    with Signals() as signals:
        try:
            checks = check_run(resolved, look, counts, images or IMAGES, bank, run.out or Path("runs"), signals)
            return _report(checks)
        except Stopped as stopped:
            return 128 + stopped.signum


def _check_data(text: str, truth: str | None, look: Callable[[Data], tuple[list[str], int]]) -> int:
    """Read all images and print what is wrong with them; 2 where a run would stop, 1 where an image cannot be read."""
    split_name(text)
    if truth:
        check_truth(truth)
    data = load_data(text, need_labels=False, strict=False)
    code = tell(Problem(*data.problems)) if data.problems else 0
    if truth:
        from finetune_mile.images.truth import with_truth

        data = with_truth(data, truth)
    lines, bad = look(data)
    sys.stdout.write("".join(f"{inert(line, 4 * LONGEST_LINE)}\n" for line in lines))
    return code or (1 if bad else 0)


def _count(flag: str, text: str | None) -> int | None:
    """A number of images; `all` is more than there are."""
    if text is None or text == "all":
        return None if text is None else MOST_IMAGES
    if not text.isdecimal() or not 1 <= int(text[:20]) <= MOST_IMAGES:
        raise Problem(f"{flag} {text[:80]}: must be from 1 to {MOST_IMAGES:,}, or all")
    return int(text)


def _report(checks: Iterable[Check]) -> int:
    """Print each check when it is done, then what to do about those that failed, and the verdict."""
    from finetune_mile.training.processes import from_first

    alone = os.environ.get("RANK", "0") == "0"
    out = open_console(soft_wrap=True, highlight=False, markup=False, emoji=False, quiet=not alone)
    said = []
    for check in checks:
        out.print(f"{check.name:<9}{check.state:<6}{check.text}")
        said.append(check)
    done = from_first(lambda: said)
    off = [check for check in done if check.state == "off"]
    for check in off:
        out.print(f"{check.name} is off. Check next: {check.advice}")
    slow = ", but reading images will limit the speed" if any(check.state == "slow" for check in done) else ""
    names = ", ".join(check.name for check in off)
    out.print(f'not ready: {names} (docs/imagenet.md, "A number is off")' if off else f"ready{slow}")
    return 1 if off else 0
