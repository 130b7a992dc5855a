"""`finetune-mile plan`: time a few real steps here, then say what a recipe or a whole table would take."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from finetune_mile.config.flags import Parser, parse
from finetune_mile.config.resolve import resolve_anywhere
from finetune_mile.core.problems import Problem

EPILOG = """examples:
  finetune-mile plan --init simclrv2-sk1 --fraction 0.01      all flags of finetune-mile run; ImageNet need not be here
  finetune-mile plan --table ssl                              every cell of a table, and their sum
"""


def build_parser() -> Parser:
    """The parser of plan's own flags; all others are run.py's."""
    parser = Parser(
        prog="finetune-mile plan", allow_abbrev=False, epilog=EPILOG,
        usage="finetune-mile plan [flags of finetune-mile run | --table NAME]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Time a few steps of each kind on this machine; print steps, disk, memory, hours and warnings.",
    )  # fmt: skip
    parser.add_argument("--table", metavar="NAME", help="a table below recipes/tables/, or a file")
    parser.add_argument("--quick", action="store_true", help="with --table: its short form")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="with --table: where its run folders are")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
                        help="a setting of the recipe, or of every run of the table")  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    options, rest = build_parser().parse_known_args(argv)
    if options.table is not None:
        if rest:
            raise Problem(f"{rest[0]}: not available with --table. Use --quick, --runs DIR or --set KEY=VALUE.")
        code: int = importlib.import_module("finetune_mile.paper.table_plan").plan_table(options)
        return code
    if options.quick or options.runs:
        raise Problem("--quick and --runs belong to --table NAME")
    resolved, _ = resolve_anywhere(parse(rest).given, options.sets)
    from finetune_mile.training.pricing import describe, estimate
    from finetune_mile.training.processes import use_threads

    use_threads()
    sys.stdout.write(describe(resolved, estimate(resolved.recipe)))
    return 0
