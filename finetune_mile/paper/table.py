"""`finetune-mile table NAME`: list the cells of a table, run the missing ones, write the ledger."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.config.flags import Parser
from finetune_mile.config.resolve import set_settings
from finetune_mile.core.cores import usable_cores
from finetune_mile.core.files import locked
from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables.description import EXTRA, find_table, read_table, shipped_tables
from finetune_mile.paper.tables.runs import (
    LAUNCH,
    Job,
    RunKey,
    RunState,
    make_jobs,
    pick,
    resolve_all,
    shell_line,
    states_of,
    yaml_value,
)

if TYPE_CHECKING:
    from finetune_mile.paper.tables.running import Command

EPILOG = """examples:
  finetune-mile table ssl --dry-run                        every cell: state, command, settings and their sources
  finetune-mile table mini-ssl --quick                     run the short form, write docs/tables/mini-ssl-quick
  finetune-mile table ssl --commands slurm > ssl.sh        the missing runs as SLURM arrays
  finetune-mile table ssl --format html --format latex     the existing ledger, as other files
  finetune-mile table ssl --only fine-tuning/byol --launch "accelerate launch --num_processes 8"
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile table", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show which cells of a table are done, run the missing ones, write the ledger.",
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", nargs="?", help="a table below recipes/tables/, or a file")
    parser.add_argument("--list", action="store_true", help="print the names of the tables")
    parser.add_argument("--dry-run", action="store_true", help="print every cell, run and write nothing")
    parser.add_argument("--quick", action="store_true", help="the short form that the description names")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="run folders (default: as the description says)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the ledger's folder (default: docs/tables/NAME)")
    at_once = "runs at the same time (default: one per core, one thread each; one with a GPU or --launch)"
    parser.add_argument("--jobs", type=int, metavar="N", help=at_once)
    parser.add_argument("--only", action="append", default=[], metavar="BLOCK[/ROW]", help="run these; may be repeated")
    parser.add_argument("--seeds", metavar="0,1", help="run these seeds only")
    parser.add_argument("--again", action="store_true", help="replace runs whose settings are not the table's any more")
    parser.add_argument("--commands", choices=("shell", "slurm"), help="print the missing runs' commands instead")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="of each run in --commands slurm (default: 8)")
    parser.add_argument(
        "--launch", metavar="WORDS", help=f"the words before each run's own command (in --commands: {LAUNCH})"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
                        help="a setting for every run, such as data=folder:photos")  # fmt: skip
    parser.add_argument("--ledger-only", action="store_true", help="run nothing, write the ledger of the existing runs")
    parser.add_argument("--format", action="append", choices=tuple(EXTRA), default=[],
                        help="run nothing, write the existing ledger in this format; may be repeated")  # fmt: skip
    parser.add_argument("--no-prices", action="store_true", help="do not estimate the time of missing cells")
    return parser


def main(argv: list[str]) -> int:
    """0: all chosen runs are done, 1: a run failed, 2: the command or the description is wrong, 130: stopped."""
    options = build_parser().parse_args(argv)
    if options.list:
        for each in shipped_tables():
            sys.stdout.write(f"{each.stem:<14}{read_table(each).title}\n")
        return 0
    if options.name is None:
        names = ", ".join(each.stem for each in shipped_tables())
        raise Problem(
            f"the name of a table is missing; give one of {names} (`finetune-mile table --list` has their titles)"
        )
    from finetune_mile.paper.tables.running import command_for  # here: --help must not wait for rich
    from finetune_mile.paper.tables.writing import write_extra, write_ledger

    path = find_table(options.name)
    table = read_table(path, quick=options.quick)
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
    if options.gpus < 1:
        raise Problem(f"--gpus {options.gpus}: must be 1 or more")
    if options.commands == "slurm" and options.launch is None:  # port 0: a free one, as arrays share nodes
        several = "--multi_gpu " if options.gpus > 1 else ""
        launch = f"{LAUNCH} {several}--num_machines 1 --num_processes {options.gpus} --main_process_port 0"
    if options.dry_run:
        sys.stdout.write(dry_run(chosen, launch) + "\n")
        return 0
    for state in chosen:
        if state.status == "stale":
            fate = "is replaced" if options.again else "does not count; --again replaces it"
            sys.stderr.write(f"warning: {state.job.folder} was run with other settings ({state.why}): it {fate}\n")
    missing = [s for s in chosen if s.status != "done" and (options.again or s.status != "stale")]
    commands = [command_for(s, runs, options.launch, requeued=options.commands in (None, "slurm")) for s in missing]
    if options.commands:
        lines = [shell_line(command.verb, command.arguments, launch) for command in commands]
        if commands and options.commands == "slurm":
            lines = slurm_script(commands, jobs, launch, path.stem, options.gpus)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return 0
    code = 0
    if commands and not options.ledger_only:
        code = run(jobs, commands, runs, options.jobs)
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
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError as error:
        raise Problem(f"--seeds {text}: write whole numbers with commas, such as 0,1,2") from error


def run(jobs: Sequence[Job], commands: Sequence[Command], runs: Path, parallel: int | None) -> int:
    import torch

    from finetune_mile.paper.tables.running import run_with_progress

    cores = usable_cores()
    if parallel is not None and parallel < 1:
        raise Problem(f"--jobs {parallel}: must be 1 or more")
    own = os.environ.get("FINETUNE_MILE_THREADS")
    if own and not (own.isdigit() and int(own) > 0):
        raise Problem(f"FINETUNE_MILE_THREADS is {own!r}; it must be a whole number above zero")
    # Runs in processes of their own, and runs on a GPU, would slow each other down.
    alone = torch.cuda.is_available() or any(command.launch is not None for command in commands)
    workers = parallel or (1 if alone else max(cores // int(own or 1), 1))
    threads = int(own) if own else max(cores // workers, 1)
    runs.mkdir(parents=True, exist_ok=True)
    with locked(runs / ".table.lock", f"--runs {runs}: another `finetune-mile table` is running there", seconds=0):
        return run_with_progress(jobs, commands, workers=workers, threads=threads)


# ---------------------------------------------------------------------------------------------------------- --dry-run


def dry_run(states: Sequence[RunState], launch: str) -> str:
    """Every cell: state of its seeds, command, settings that the table gives and where values come from."""
    lines = []
    cells: dict[str, list[RunState]] = {}
    for state in states:
        cells.setdefault(state.job.key.cell, []).append(state)
    for number, (cell, runs) in enumerate(cells.items(), 1):
        job = runs[0].job
        lines += [f"{number}. {cell}" + (" (prerequisite)" if job.hidden else "") + f": {_statuses(runs)}"]
        lines += [f"   {job.command(launch)}"]
        if len(runs) > 1:
            lines += [f"   and --seed {', '.join(str(s.job.key.seed) for s in runs[1:])}{_own_settings(*runs[:2])}"]
        lines += [f"   needs {name}: {need.cell}" for name, need in job.needs.items()]
        lines += [*(f"     {line}" for line in settings_and_sources(runs[0])), ""]
    done = sum(s.status == "done" for s in states)
    return "\n".join([*lines, f"{len(cells)} cells, {len(states)} runs, {done} of them done"])


def _own_settings(first: RunState, second: RunState) -> str:
    """Settings that depend on the seed, as the second one has them."""
    before = {"seed": second.meaning.tree.get("seed")} | {k: v for k, v in first.meaning.tree.items() if k != "seed"}
    own = {key: value for key, value in second.meaning.tree.items() if value != before.get(key)}
    return "".join(f"; {key} is their own, such as {yaml_value(value)}" for key, value in own.items())


def _statuses(states: Sequence[RunState]) -> str:
    parts = []
    for status in sorted({s.status for s in states}):
        group = [s for s in states if s.status == status]
        why = next((f" [{s.why}]" for s in group if s.why), "")
        parts.append(f"{status} (seed {', '.join(str(s.job.key.seed) for s in group)}){why}")
    return "; ".join(parts)


def settings_and_sources(state: RunState) -> list[str]:
    """Settings that flags gave, or whose source the recipe names: `key = value   who set it; where it is from`."""
    resolved, meaning = state.meaning.resolved, state.meaning
    if resolved is None:
        return [f"{key} = {yaml_value(value)}" for key, value in meaning.tree.items()]
    lines = [f"recipe = {resolved.path.stem}   {resolved.why}"]
    for key, value in meaning.tree.items():
        speaker = resolved.said_by.get(key, "")
        source = resolved.sources.get(key) or resolved.sources.get(key.rpartition(".")[0], "")
        if key == "seed" or (key == "data" and not meaning.data_here):
            continue
        if speaker.startswith("--") or source:
            lines.append(f"{key} = {yaml_value(value)}   {'; '.join(part for part in (speaker, source) if part)}")
    if not meaning.data_here:
        lines.append("data = imagenet   found by IMAGENET_DIR when it is run; it is not on this machine")
    return lines


# --------------------------------------------------------------------------------------------------------- --commands


# What a task does. The run is a process group of its own: launchers do not all pass a signal on, and may end first.
# Its exit code comes by a file: bash sometimes loses a child that ends while a trap interrupts `wait`, and says -1.
SLURM_TASK = """\
set -m
ended=$(mktemp)
(trap : TERM USR1; "$@"; echo "$?" > "$ended") &
run=$!
requeue=
trap 'kill -TERM -- "-$run" 2> /dev/null' TERM
trap 'requeue=1; kill -TERM -- "-$run" 2> /dev/null' USR1
while kill -0 -- "-$run" 2> /dev/null; do
  wait "$run"
  sleep 1
done
code=$(cat "$ended")
code=${code:-137}  # empty: killed before it could be written
rm -f "$ended"
if [ -n "$requeue" ] && [ "$code" != 0 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
"""


def slurm_script(commands: Sequence[Command], jobs: Sequence[Job], launch: str, name: str, gpus: int) -> list[str]:
    """The lines of a script that submits an array for the runs that need the same runs, each after those alone."""
    missing, needs = {command.key for command in commands}, {job.key: job.needs.values() for job in jobs}
    groups: dict[tuple[RunKey, ...], list[Command]] = {}
    for command in commands:  # prerequisites come first
        groups.setdefault(tuple(dict.fromkeys(key for key in needs[command.key] if key in missing)), []).append(command)
    lines = [
        "#!/bin/bash", f"# Runs of the table {name}: bash THIS_FILE submits {len(groups)} array(s).",
        "# Five minutes before the time limit a run saves, stops and is queued again; a preempted one continues too.",
        "# SBATCH_OPTIONS takes more options, such as '--time=24:00:00 --cpus-per-task=64 --partition=gpu'.",
        "set -euo pipefail",
    ]  # fmt: skip
    task_of: dict[RunKey, str] = {}
    for number, (before, group) in enumerate(groups.items()):
        task_of |= {command.key: f"${{job{number}}}_{task}" for task, command in enumerate(group)}
        after = "".join(f":{task_of[key]}" for key in before)
        dependency = f"--dependency=afterok{after} --kill-on-invalid-dep=yes " if after else ""
        lines += [
            "",
            f"job{number}=$(sbatch --parsable --job-name={shlex.quote(Path(name).stem)}-{number} "
            f"--array=0-{len(group) - 1} {dependency}--requeue --open-mode=append --signal=B:USR1@300 "
            f"--nodes=1 --ntasks=1 --gres=gpu:{gpus} ${{SBATCH_OPTIONS:-}} <<'RUNS'",
            "#!/bin/bash",
            "case $SLURM_ARRAY_TASK_ID in",
            *(f"  {task}) set -- {_task_line(command, launch)} ;;" for task, command in enumerate(group)),
            "esac",
            *SLURM_TASK.splitlines(),
            "RUNS",
            ")",
        ]  # fmt: skip
    return lines


def _task_line(command: Command, launch: str) -> str:
    """The words of a run. One that is replaced is replaced once, and continued when it is queued again."""
    words = list(command.arguments)
    if "--overwrite" not in words:
        return shell_line(command.verb, words, launch)
    words.remove("--overwrite")
    again = '$([ "${SLURM_RESTART_COUNT:-0}" = 0 ] && echo --overwrite || echo --resume auto)'
    return f"{shell_line(command.verb, words, launch)} {again}"
