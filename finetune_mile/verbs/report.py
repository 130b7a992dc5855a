"""`finetune-mile report`: several finished runs on one page."""

from __future__ import annotations

import sys
from pathlib import Path

from finetune_mile.config.flags import Flags, verb_parser
from finetune_mile.core.problems import Problem

EPILOG = """
examples:
  finetune-mile report runs/mile runs/softmax
  finetune-mile report runs/a runs/b runs/c --out compared.html

each run's own page is RUN/report.html
"""
FLAGS: Flags = {
    "runs": {
        "nargs": "+",
        "metavar": "RUN",
        "help": "two or more folders of finished runs; the first is compared with",
    },
    "--out": {"type": Path, "metavar": "FILE", "default": Path("compared.html"), "help": "default: compared.html"},
    "--overwrite": {"action": "store_true", "help": "replace a page that is there"},
}


def main(argv: list[str]) -> int:
    """The command: 0 fine, 2 the command or its input was wrong."""
    about = "Compare finished runs on one page: scores, paired differences, curves, settings that differ."
    options = verb_parser("report", FLAGS, description=about, epilog=EPILOG).parse_args(argv)
    if len(options.runs) < 2:
        raise Problem(f"report needs two or more runs; the page of one run is {Path(options.runs[0]) / 'report.html'}")
    if options.out.exists() and not options.overwrite:
        raise Problem(f"--out {options.out}: exists; choose another name, or add --overwrite")
    if not options.out.absolute().parent.is_dir():
        raise Problem(f"--out {options.out}: {options.out.parent} is not a folder")
    from finetune_mile.training.comparing import read_run, write_comparison

    write_comparison([read_run(Path(run)) for run in options.runs], options.out)
    sys.stdout.write(f"{options.out}\n")
    return 0
