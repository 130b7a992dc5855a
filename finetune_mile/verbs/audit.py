"""`finetune-mile audit`: labels that are wrong or missing, duplicates and outliers, on one page (docs/audit.md)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from finetune_mile.checkpoints.choosing import choose_init
from finetune_mile.config.flags import Flags, Parser, init_text, verb_parser
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import split_name
from finetune_mile.training.embedding import FLAGS as FEATURE_FLAGS
from finetune_mile.training.embedding import Embedding
from finetune_mile.training.origin import recipe_in

ABOUT = "Find labels that are wrong or missing, duplicates and outliers, and write one page to correct them on."
EPILOG = """examples:
  finetune-mile audit runs/mine                              the data of a run
  finetune-mile audit photos --init dinov2-s                 photos/CLASS/IMAGE.jpg, or any --data of `run`
  finetune-mile audit --apply ticks.csv --out clean          a corrected copy; the originals do not change

in OUT: audit.html (open it in a browser), audit.csv, audit.parquet, audit.json and thumbs/
"""
FLAGS: Flags = {
    "what": {"metavar": "RUN | DATA", "nargs": "?", "help": "a run folder, a folder of photos, or any --data of `run`"},
    "--init": {"help": "the checkpoint, as for `run` (default: that of the run, else as quickstart chooses)"},
    **{name: FEATURE_FLAGS[name] for name in ("--arch", "--format", "--size", "--workers")},
    "--apply": {"type": Path, "metavar": "FILE", "help": "ticks.csv of the page: write corrected data into --out"},
    "--out": {"type": Path, "help": "a new folder (default: RUN/audit, or runs/audit-N); for --apply also FILE.csv"},
}


def build_parser() -> Parser:
    return verb_parser("audit", FLAGS, description=ABOUT, epilog=EPILOG, usage="finetune-mile audit RUN|DATA [flags]")


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 it failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options = build_parser().parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Problem("audit is one process: start it without accelerate launch or torchrun")
    if options.apply is not None:
        if options.what is not None:
            raise Problem("--apply FILE knows its data; leave out the run or data before it")
        from finetune_mile.training.cleaning import say_clean

        sys.stdout.write(say_clean(clean(options)))
        return 0
    how, run = check(options)
    from finetune_mile.training.auditing import audit
    from finetune_mile.training.processes import stoppable

    return stoppable(lambda *processes: show(*audit(how, run, options.out, *processes)))


def clean(options: argparse.Namespace) -> dict[str, Any]:
    """Apply ticks; the content of clean.json."""
    if options.out is None:
        raise Problem("--apply FILE needs --out: a new folder, or FILE.csv")
    from finetune_mile.training.cleaning import apply_ticks

    return apply_ticks(options.apply, options.out)


def check(options: argparse.Namespace, data: str | None = None) -> tuple[Embedding, Path | None]:
    """The flags as a value, and the run; what cannot work is refused. `data`: instead of the run's own."""
    if options.what is None:
        raise Problem("audit needs a run folder or data: finetune-mile audit runs/mine, or finetune-mile audit photos")
    run = Path(options.what) if (Path(options.what) / "recipe.yaml").is_file() else None
    if run is None:
        options.data = options.what
        split_name(options.data)  # before a question about the checkpoint
    else:
        recipe = recipe_in(run)
        options.data = data or recipe["data"]
        if options.init is None:
            options.init, options.arch = recipe["init"], options.arch or recipe.get("arch")
        if options.init == "none":
            raise Problem(
                f"{run}: was trained from scratch and has no checkpoint; name one for its features with --init"
            )
        options.size = options.size or recipe.get("size")
    init = options.init
    if init is None and options.format is None:
        init, reason = choose_init(options.data, download=False)
        sys.stderr.write(f"{init}: the checkpoint ({reason})\n")
        return Embedding.of_flags(options, [init]), run
    return Embedding.of_flags(options, [init_text(init, options.format)]), run


def show(facts: dict[str, Any], folder: Path) -> None:
    """Print what the page says first."""
    sys.stdout.write("".join(f"{sentence}\n" for sentence in [*facts["sentences"], *facts["notes"]]))
    counts = facts["counts"]
    sys.stdout.write(
        f"\nListed: labels that may be wrong {counts['wrong']:,}, that may be missing {counts['missing']:,}, "
        f"duplicates {counts['duplicate']:,}, outliers {counts['outlier']:,}.\n{folder / 'audit.html'}\n"
    )
