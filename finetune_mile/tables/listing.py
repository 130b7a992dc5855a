"""What a table would run: `--dry-run` for a reader, `--commands` for a cluster. No torch here."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from finetune_mile.tables.cells import Job, Key, head, yaml_value
from finetune_mile.tables.running import Order
from finetune_mile.tables.states import State


def dry_run(states: Sequence[State], launch: str) -> str:
    """Every cell: state of its seeds, command, settings that the table gives and where values come from."""
    lines = []
    cells: dict[str, list[State]] = {}
    for state in states:
        cells.setdefault(state.job.key.cell, []).append(state)
    for number, (cell, mine) in enumerate(cells.items(), 1):
        first = mine[0]
        lines += [f"{number}. {cell}" + (" (prerequisite)" if first.job.hidden else "") + f": {_status(mine)}"]
        lines += [f"   {first.job.command(launch)}"]
        if len(mine) > 1:
            lines += [f"   and --seed {', '.join(str(s.job.key.seed) for s in mine[1:])}{_own_settings(mine)}"]
        lines += [f"   needs {name}: {need.cell}" for name, need in first.job.needs.items()]
        lines += [f"     {line}" for line in settings_and_sources(first)]
        lines += [""]
    done = sum(s.status == "done" for s in states)
    return "\n".join([*lines, f"{len(cells)} cells, {len(states)} runs, {done} of them done"])


def _own_settings(states: Sequence[State]) -> str:
    """Settings that depend on the seed, as the second one has them."""
    first, second = (state.meaning.tree for state in states[:2])
    own = [key for key, value in second.items() if key != "seed" and value != first.get(key)]
    return "".join(f"; {key} is their own, such as {yaml_value(second[key])}" for key in own)


def _status(states: Iterable[State]) -> str:
    parts = []
    for status, same in groupby(sorted(states, key=lambda s: s.status), key=lambda s: s.status):
        found = list(same)
        why = next((s.why for s in found if s.why), "")
        seeds = ", ".join(str(s.job.key.seed) for s in found)
        parts.append(f"{status} (seed {seeds})" + (f" [{why}]" if why else ""))
    return "; ".join(parts)


def settings_and_sources(state: State) -> list[str]:
    """Settings that flags gave, or whose source the recipe names: `key = value   who said it; where it is from`."""
    resolved = state.meaning.resolved
    if resolved is None:
        return [f"{key} = {yaml_value(value)}" for key, value in state.meaning.tree.items()]
    sources = resolved.sources
    lines = [f"recipe = {resolved.path.stem}   {resolved.why}"]
    for key, value in state.meaning.tree.items():
        speaker = resolved.said_by.get(key, "")
        source = sources.get(key) or sources.get(key.rpartition(".")[0], "")
        if key == "seed" or (key == "data" and not state.meaning.data_here):
            continue
        if speaker.startswith("--") or source:
            lines.append(f"{key} = {yaml_value(value)}   " + "; ".join(part for part in (speaker, source) if part))
    if not state.meaning.data_here:
        lines.append("data = imagenet   found by IMAGENET_DIR when it is run; it is not on this machine")
    return lines


# -------------------------------------------------------------------------------------------- commands


def shell_lines(orders: Sequence[Order], launch: str) -> str:
    """A line a run, in an order that works."""
    return "\n".join(_line(order, launch) for order in orders)


def _line(order: Order, launch: str) -> str:
    return f"{head(order.verb, launch)} {shlex.join(order.arguments)}"


def slurm_script(orders: Sequence[Order], jobs: Sequence[Job], launch: str, name: str) -> str:
    """A script that submits one array a level: a level needs nothing but the levels before it."""
    level = levels(jobs, [order.key for order in orders])
    groups: dict[int, list[Order]] = {}
    for order in orders:
        groups.setdefault(level[order.key], []).append(order)
    lines = [
        "#!/bin/bash", f"# Runs of the table {name}: bash THIS_FILE submits {len(groups)} array(s), in order.",
        "# SBATCH_OPTIONS takes more options, such as '--gres=gpu:1 --time=24:00:00 --cpus-per-task=8'.",
        "set -euo pipefail", "after=",
    ]  # fmt: skip
    for number, group in sorted(groups.items()):
        lines += [
            "",
            f"job=$(sbatch --parsable --job-name={shlex.quote(Path(name).stem)}-{number} --array=0-{len(group) - 1} "
            "${after:+--dependency=afterok:$after} ${SBATCH_OPTIONS:-} <<'RUNS'",
            "#!/bin/bash",
            "case $SLURM_ARRAY_TASK_ID in",
            *(f"  {i}) {_line(order, launch)} ;;" for i, order in enumerate(group)),
            "esac",
            "RUNS",
            ")",
            "after=$job",
        ]
    return "\n".join(lines)


def levels(jobs: Sequence[Job], wanted: Sequence[Key]) -> dict[Key, int]:
    """How many wanted runs stand one behind the other before each: 0 for those that wait for nothing."""
    chosen, found = set(wanted), dict[Key, int]()
    for job in jobs:  # prerequisites come first
        below = [found[need] + (need in chosen) for need in job.needs.values() if need in found]
        found[job.key] = max(below, default=0)
    return {key: found[key] for key in wanted}
