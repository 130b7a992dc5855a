"""`finetune-mile probe`: which checkpoint suits these images? k-NN and linear probes on features of each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from finetune_mile.config.flags import Flags, Parser, init_text, verb_parser
from finetune_mile.core.files import write_json
from finetune_mile.training.embedding import FLAGS, Probing

EPILOG = """examples:
  finetune-mile probe --init moco.pth.tar --init timm:resnet50.a1_in1k --data folder:photos --fraction 0.1
  finetune-mile probe --init simclr-demo --data demo --fraction 0.05 --seeds 5 --html probe.html

The features are kept in the cache: another fraction, or a run with --trunk frozen, finds them again.
"""
OWN_FLAGS: Flags = {
    "--init": {"action": "append", "required": True, "help": "a checkpoint, as for `run`; may be repeated"},
    "--fraction": {"type": float, "default": 1.0, "help": "share of the labels to use (default: 1)"},
    "--seeds": {"type": int, "default": 3, "help": "draws of the labels (default: %(default)s)"},
    "--k": {"type": int, "default": 20, "help": "neighbours that vote (default: %(default)s)"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write the table as JSON"},
    "--html": {"type": Path, "metavar": "FILE", "help": "write the table as a page"},
}


def build_parser() -> Parser:
    text = "Compare checkpoints on your images: weighted k-NN and a linear probe, softmax and sigmoid."
    return verb_parser("probe", OWN_FLAGS | FLAGS, description=text, epilog=EPILOG)


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 it failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options = build_parser().parse_args(argv)
    probing = check(options)
    from accelerate import Accelerator

    from finetune_mile.training.processes import Signals, stoppable

    def work(accelerator: Accelerator, signals: Signals) -> None:
        result = probing.compare(accelerator, signals)
        if result is None:
            return
        show(result)
        if options.json is not None:
            write_json(options.json, result)
        if options.html is not None:
            from finetune_mile.pages.report import write_page

            write_page(options.html, "probe.html", title=f"Checkpoints for {result['data']}", **result)

    return stoppable(work)


def check(options: argparse.Namespace) -> Probing:
    """The flags as a value; what cannot work is refused."""
    problems = [
        f"--init {text}: is given twice; leave one out"
        for text in sorted(set(options.init))
        if options.init.count(text) > 1
    ]
    if not 0 < options.fraction <= 1:
        problems.append(f"--fraction {options.fraction:g}: must be above 0 and at most 1")
    for flag, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            problems.append(f"{flag} {path}: {'is a folder' if path.is_dir() else f'there is no folder {path.parent}'}")
    return Probing.of_flags(options, [init_text(text, options.format) for text in options.init], *problems)


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.table import Table

    from finetune_mile.training.display import wide_console

    score = "mAP" if result["measure"] == "map" else "accuracy"
    title = (
        f"{result['data']}: {result['labels']:,} labels ({100 * result['fraction']:g} %), "
        f"{result['seeds']} draw{'s' if result['seeds'] > 1 else ''}, {score} on {result['images']:,} images"
    )
    table = Table("checkpoint", "k-NN", "softmax", "sigmoid", "behind the first", title=title, title_justify="left")
    for row in result["probes"]:
        cells = [f"{each['mean']:.1f} ({each['low']:.1f} to {each['high']:.1f})" for each in row["accuracy"].values()]
        behind = row.get("behind")
        gap = "" if behind is None else f"{behind['difference']:.1f} ({behind['low']:.1f} to {behind['high']:.1f})"
        table.add_row(row["init"], *cells, gap)
    out = wide_console()
    out.print(table)
    out.print(
        f"95 % intervals over the {'classes' if result['measure'] == 'map' else 'images'} in parentheses. Without "
        f"training, {result['floor']}: {result['majority']:.1f}.",
        soft_wrap=True,
    )
