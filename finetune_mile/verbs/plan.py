"""`finetune-mile plan`: time a few real steps here, then say what a recipe or a whole table would take."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_mile.config.flags import Parser, given_settings, parse
from finetune_mile.config.resolve import Resolved, resolve_anywhere
from finetune_mile.core.problems import Problem
from finetune_mile.training.display import duration

if TYPE_CHECKING:
    from finetune_mile.pricing.making import Offer

EPILOG = """examples:
  finetune-mile plan --init simclrv2-sk1 --fraction 0.01      all flags of run.py; ImageNet need not be here
  finetune-mile plan --table ssl                              every cell of a table, and their sum
"""


def build_parser() -> Parser:
    """The flags of its own; all others are run.py's."""
    parser = Parser(
        prog="finetune-mile plan", allow_abbrev=False, epilog=EPILOG,
        usage="finetune-mile plan [flags of run.py | --table NAME]",
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
    """0 fine, 2 the command or its input was wrong."""
    options, rest = build_parser().parse_known_args(argv)
    if options.table is not None:
        if rest:
            raise Problem(f"{rest[0]}: not available with --table. Use --quick, --runs DIR or --set KEY=VALUE.")
        code: int = importlib.import_module("finetune_mile.paper.table_plan").plan_table(options)
        return code
    if options.quick or options.runs:
        raise Problem("--quick and --runs belong to --table NAME")
    given = parse(rest)
    resolved, known = resolve_anywhere(given_settings(given), options.sets)
    from finetune_mile.pricing.making import make_offer
    from finetune_mile.training import processes

    processes.use_threads()
    offer = make_offer(resolved.recipe)
    sys.stdout.write(describe(resolved, offer, known))
    return 0


# ------------------------------------------------------------------------------------------ one recipe


def describe(resolved: Resolved, offer: Offer, known: bool) -> str:
    """An offer as lines for a reader."""
    from finetune_mile.pricing.timing import device_words

    recipe, counts, found = offer.recipe, offer.counts, offer.estimate
    scene, seconds = offer.scene, found.seconds
    away = "" if scene.here and known else "; not on this machine, counted from its description"
    lines = [
        ("recipe", f"{resolved.path.stem} ({resolved.why}): {recipe.method}, {recipe.variant} variant"),
        ("data", f"{recipe.data.partition(':')[0]}: {scene.labelled:,} labelled of {scene.pools['all']:,} images, "
                 f"{scene.val:,} to evaluate on, {scene.classes:,} classes{away}"),
        ("network", _network_words(offer)),
        ("steps", f"{counts.plan.total_steps:,} of batch {recipe.batch_size} = {counts.epochs:.1f} epochs of the "
                  f"labelled images: {counts.interaction_steps:,} interaction, {counts.imitation_steps:,} imitation"),
        ("generations", f"{counts.generations} in {len(counts.plan.phases)} phases"),
        ("forwards", f"{counts.teacher_images:,} images by the teacher, {counts.evaluation_images:,} to evaluate"),
        ("disk", f"{size_words(found.disk_bytes)}: checkpoints {size_words(found.checkpoint_bytes)}, export "
                 f"{size_words(found.export_bytes)}, pseudo-labels {size_words(found.label_bytes)}"),
        ("memory", f"about {size_words(found.memory_bytes)} for weights, optimiser and activations in one process"),
        ("time", f"{duration(seconds.middle)} ({duration(seconds.low)} to {duration(seconds.high)}) on {device_words()}"
                 + ("" if offer.reading_timed else "; reading images is not in it")),
    ]  # fmt: skip
    text = "".join(f"{name:<12}{line}\n" for name, line in lines)
    return text + "".join(f"warning: {sentence}\n" for sentence in all_warnings(offer))


def _network_words(offer: Offer) -> str:
    facts, found = offer.network, offer.estimate
    words = f"{facts.arch} at {facts.size} px, {found.parameters / 1e6:.1f} million numbers"
    if not facts.here:
        words += f"; the weights of {offer.recipe.init} are not here, which changes no timing"
    if offer.teacher is not None:
        words += f"; teacher {offer.teacher.arch}"
    return words


def all_warnings(offer: Offer) -> list[str]:
    """Of the recipe, and of this machine."""
    found = list(offer.warnings)
    free = shutil.disk_usage(".").free
    if offer.estimate.disk_bytes > free:
        found.append(f"the disk has {size_words(free)} left, a run wants {size_words(offer.estimate.disk_bytes)}")
    memory = memory_here()
    if memory is not None and offer.estimate.memory_bytes > memory:
        found.append(
            f"memory: about {size_words(offer.estimate.memory_bytes)} wanted, {size_words(memory)} are here; "
            "set accumulate, or use more processes"
        )
    return found


def memory_here() -> int | None:
    """Bytes of the GPU, else of the machine; None where that cannot be told."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def size_words(count: float) -> str:
    """Bytes in the unit that a reader would use."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
