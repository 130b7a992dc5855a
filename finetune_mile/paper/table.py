"""`finetune-mile table NAME`: which cells are done, run the others, write the ledger."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune_mile.config.flags import Parser
from finetune_mile.config.resolve import set_settings
from finetune_mile.core.files import locked
from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables.cells import LAUNCH, Job, make_jobs, pick, resolve_all
from finetune_mile.paper.tables.description import find_table, quick_table, read_table
from finetune_mile.paper.tables.running import Order, dry_run, order_for, run_with_progress, shell_lines, slurm_script
from finetune_mile.paper.tables.states import State, states_of
from finetune_mile.paper.tables.writing import EXTRA, write_extra, write_ledger

EPILOG = """examples:
  finetune-mile table ssl --dry-run                        every cell: state, command, settings and their sources
  finetune-mile table mini-ssl --quick                     run the short form, write docs/tables/mini-ssl-quick
  finetune-mile table ssl --commands slurm > ssl.sh        the missing runs as SLURM arrays
  finetune-mile table ssl --format html --format latex     the ledger that is there, as other files
  finetune-mile table ssl --only fine-tuning/byol --launch "accelerate launch --num_processes 8"
"""


def build_parser() -> Parser:
    """Every flag."""
    parser = Parser(
        prog="finetune-mile table", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show which cells of a table are done, run the missing ones, write the ledger.",
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", help="a table below recipes/tables/, or a file")
    parser.add_argument("--dry-run", action="store_true", help="print every cell, run and write nothing")
    parser.add_argument("--quick", action="store_true", help="the short form that the description names")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="run folders (default: as the description says)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the ledger's folder (default: docs/tables/NAME)")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs at the same time (default: one a core, one thread each; one with a GPU or --launch)",
    )
    parser.add_argument("--only", action="append", default=[], metavar="BLOCK[/ROW]", help="run these; may be repeated")
    parser.add_argument("--seeds", metavar="0,1", help="run these seeds only")
    parser.add_argument("--again", action="store_true", help="replace runs whose settings are not the table's any more")
    parser.add_argument("--commands", choices=("shell", "slurm"), help="print the missing runs' commands instead")
    parser.add_argument("--launch", metavar="WORDS", help=f"start each run by itself with these (printed: {LAUNCH})")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
                        help="a setting for every run, such as data=folder:photos")  # fmt: skip
    parser.add_argument("--ledger-only", action="store_true", help="run nothing, write the ledger from what is there")
    parser.add_argument("--format", action="append", choices=tuple(EXTRA), default=[],
                        help="run nothing, write the ledger that is there in this format; may be repeated")  # fmt: skip
    parser.add_argument("--no-prices", action="store_true", help="do not estimate what missing cells would cost here")
    return parser


def main(argv: list[str]) -> int:
    """0 everything asked for is done, 1 a run failed, 2 the command or the description is wrong, 130 stopped."""
    options = build_parser().parse_args(argv)
    path = find_table(options.name)
    table = read_table(path)
    if options.quick:
        table = quick_table(table)
    folder = options.out or Path("docs/tables") / (path.stem + ("-quick" if options.quick else ""))
    if options.format:
        for file in write_extra(folder, table, options.format):
            sys.stdout.write(f"{file}\n")
        return 0
    runs = options.runs or Path(table.runs)
    jobs = make_jobs(table, runs, settings_of(options.sets))
    meanings = resolve_all(jobs)
    states = states_of(jobs, meanings, runs)
    picked = {job.key for job in pick(jobs, options.only, seeds_of(options.seeds))}
    chosen = [s for s in states if s.job.key in picked]
    launch = options.launch or LAUNCH
    if options.dry_run:
        sys.stdout.write(dry_run(chosen, launch) + "\n")
        return 0
    report_stale(chosen, options.again)
    orders = [order_for(s, runs, options.launch) for s in chosen if wanted(s, options.again)]
    if options.commands:
        shell = options.commands == "shell"
        text = shell_lines(orders, launch) if shell else slurm_script(orders, jobs, launch, path.stem)
        sys.stdout.write(text + "\n" if orders else "")
        return 0
    code = 0
    if orders and not options.ledger_only:
        code = run(jobs, orders, runs, options.jobs)
        states = states_of(jobs, meanings, runs)
    write_ledger(folder, options.name, table, states, quick=options.quick, prices=not options.no_prices)
    return code


def settings_of(sets: list[str]) -> dict[str, Any]:
    """`--set KEY=VALUE` arguments as settings of a table."""
    wrong: list[str] = []
    settings = {key: value for key, (value, _) in set_settings(sets, wrong).items()}
    if wrong:
        raise Problem(*wrong)
    return settings


def seeds_of(text: str | None) -> list[int] | None:
    """`0,1` as numbers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise Problem(f"--seeds {text}: write whole numbers with commas, such as 0,1,2") from error


def wanted(state: State, again: bool) -> bool:
    """Is this run to be run now?"""
    return state.status != "done" and (again or state.status != "stale")


def report_stale(states: Sequence[State], again: bool) -> None:
    """Say which runs do not count."""
    for state in states:
        if state.status == "stale":
            fate = "is replaced" if again else "does not count; --again replaces it"
            sys.stderr.write(f"warning: {state.job.folder} was run with other settings ({state.why}): it {fate}\n")


def run(jobs: Sequence[Job], orders: Sequence[Order], runs: Path, parallel: int | None) -> int:
    """Run what is missing; the exit code."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if parallel is not None and parallel < 1:
        raise Problem(f"--jobs {parallel}: at least one run at a time")
    own = os.environ.get("FINETUNE_MILE_THREADS")
    if own and not (own.isdigit() and int(own) > 0):
        raise Problem(f"FINETUNE_MILE_THREADS is {own!r}; it must be a whole number above zero")
    workers = parallel or (1 if _one_at_a_time(orders) else max(cores // int(own or 1), 1))
    threads = int(own) if own else max(cores // workers, 1)
    runs.mkdir(parents=True, exist_ok=True)
    with locked(runs / ".table.lock", f"--runs {runs}: another finetune-mile table is at work there", seconds=0):
        return run_with_progress(jobs, orders, workers=workers, threads=threads)


def _one_at_a_time(orders: Sequence[Order]) -> bool:
    """Runs that are launched as processes of their own, or that want the GPU, would be in each other's way."""
    import torch

    return any(order.launch is not None for order in orders) or torch.cuda.is_available()
