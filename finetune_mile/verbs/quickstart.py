"""`finetune-mile quickstart DIR`: what works on these photos, in minutes, on one page (docs/own-photos.md)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from finetune_mile.checkpoints.choosing import DOWNLOADED, choose_init
from finetune_mile.config.flags import Flags, check_all, init_text, verb_parser
from finetune_mile.core.files import check_empty
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import split_name
from finetune_mile.training.embedding import FLAGS as FEATURE_FLAGS
from finetune_mile.training.embedding import Embedding
from finetune_mile.training.folder import claim_folder
from finetune_mile.training.minutes import Clock, wrong_minutes

ABOUT = (
    "Compare methods on features of your photos, make a model in the time that you have, and write one page about it."
)
EPILOG = """examples:
  finetune-mile quickstart photos                         photos/CLASS/IMAGE.jpg, or photos/train/... and photos/val/...
  finetune-mile quickstart photos --init moco.pth.tar --minutes 30

Without --init it takes a checkpoint file in DIR, or a card that was downloaded before. Otherwise it asks once, on a
terminal, whether to download dinov2-s (--download agrees). Otherwise it takes the small network of the package.
"""


FLAGS: Flags = {
    "data": {"metavar": "DIR", "help": "a folder of photos, or any --data of `run`"},
    "--init": {"help": "the checkpoint, as for `run`"},
    "--minutes": {"type": float, "default": 10.0, "help": "time to use (default: %(default)g)"},
    "--download": {"action": "store_true", "help": f"without --init: download {DOWNLOADED}, no question"},
    **{name: FEATURE_FLAGS[name] for name in ("--arch", "--format", "--size", "--workers")},
    "--out": {"type": Path, "help": "a new folder (default: runs/quickstart-N)"},
}


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 it failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options = verb_parser("quickstart", FLAGS, description=ABOUT, epilog=EPILOG).parse_args(argv)
    check_all(wrong_minutes(options.minutes))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Problem("quickstart is one process: start it without accelerate launch or torchrun")
    if options.out is not None:
        check_empty(options.out, "--out")
    split_name(options.data)  # before a question about the checkpoint
    if options.init is None and options.format is None:
        text, reason = choose_init(options.data, download=options.download)
    else:
        text, reason = init_text(options.init, options.format), "--init"
    how = Embedding.of_flags(options, [text])
    out = options.out or claim_folder(Path("runs"), "quickstart")
    clock = Clock(options.minutes)
    from finetune_mile.training.processes import stoppable
    from finetune_mile.training.quickstart import Quickstart

    return stoppable(
        lambda accelerator, signals: show(
            Quickstart(how=how, reason=reason, out=out, clock=clock, accelerator=accelerator, signals=signals).work(),
            out / "quickstart.html",
        )
    )


def show(facts: dict[str, Any], page: Path) -> None:
    """Print what the page says first."""
    from rich.table import Table

    from finetune_mile.training.display import duration, wide_console

    measure = "mAP" if facts["measure"] == "map" else "accuracy"
    title = f"{facts['name']}: {facts['labels']:,} labelled photos, {measure} on {facts['images']:,} validation photos"
    table = Table("on features of the checkpoint", measure, "95 % interval", title=title, title_justify="left")
    table.add_row(facts["floor"]["name"], f"{facts['floor']['mean']:.1f}", "")
    for row in facts["rows"]:
        table.add_row(row["name"], f"{row['mean']:.1f}", f"{row['low']:.1f} to {row['high']:.1f}")
    table.add_section()
    for step in facts["model"]["steps"]:
        name = f"{facts['best']}, {step['name']}" + (" (kept)" if step["name"] == facts["model"]["kept"] else "")
        table.add_row(name, f"{step['score']:.1f}", f"{step['low']:.1f} to {step['high']:.1f}")
    out = wide_console()
    out.print(table)
    left_out = [f"{method} was left out: {sentence}" for method, sentence in facts["refused"].items()]
    for sentence in [*facts["choice"], *facts["verdicts"], *left_out]:
        out.print(sentence, soft_wrap=True, markup=False)
    out.print(f"Next:  {facts['commands']['predict']}", soft_wrap=True, markup=False)
    if "fine-tune" in facts["commands"]:
        time_needed = duration(facts["model"]["left_out"][0]["seconds"])
        out.print(f"Or, in about {time_needed}:  {facts['commands']['fine-tune']}", soft_wrap=True, markup=False)
    sys.stdout.write(f"\n{page}\n")
