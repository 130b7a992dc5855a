"""`finetune-mile probe`: which checkpoint suits these images? k-NN and linear probes on features of each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from finetune_mile.checkpoints.init import Init
from finetune_mile.config.flags import Parser, check_all, init_text, outside
from finetune_mile.core.files import write_json
from finetune_mile.training.embedding import Embedding, add_flags, check_flags, probe_checkpoints

EPILOG = """examples:
  finetune-mile probe --init moco.pth.tar --init timm:resnet50.a1_in1k --data folder:photos --fraction 0.1
  finetune-mile probe --init simclr-demo --data demo --fraction 0.05 --seeds 5 --html probe.html

The features are kept in the cache: another fraction, or a run with --trunk frozen, finds them again.
"""
MOST_SEEDS, MOST_NEIGHBOURS = 1000, 10**6


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile probe", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compare checkpoints on your images: weighted k-NN and a linear probe, softmax and sigmoid.",
    )  # fmt: skip
    parser.add_argument("--init", action="append", required=True, help="a checkpoint, as for `run`; may be repeated")
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the labels to use (default: 1)")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the labels (default: %(default)s)")
    parser.add_argument("--k", type=int, default=20, help="neighbours that vote (default: %(default)s)")
    add_flags(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the table as a page")
    return parser


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 it failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    options, inits = check(build_parser().parse_args(argv))
    from finetune_mile.training.processes import stoppable

    how, draws = Embedding.of_flags(options), {name: getattr(options, name) for name in ("fraction", "seeds", "k")}
    return stoppable(lambda *processes: _write(options, probe_checkpoints(inits, how, *processes, **draws)))


def check(options: argparse.Namespace) -> tuple[argparse.Namespace, list[Init]]:
    """Refuse what cannot work; the checkpoints of --init."""
    problems = outside(options, seeds=(1, MOST_SEEDS), k=(1, MOST_NEIGHBOURS))
    if not 0 < options.fraction <= 1:
        problems.append(f"--fraction {options.fraction:g}: must be above 0 and at most 1")
    problems += [
        f"--init {text}: is given twice; leave one out"
        for text in sorted(set(options.init))
        if options.init.count(text) > 1
    ]
    for flag, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            problems.append(f"{flag} {path}: {'is a folder' if path.is_dir() else f'there is no folder {path.parent}'}")
    check_all(problems)
    return options, check_flags(options, [init_text(text, options.format) for text in options.init])


def _write(options: argparse.Namespace, result: dict[str, Any] | None) -> None:
    if result is None:
        return
    show(result)
    if options.json is not None:
        write_json(options.json, result)
    if options.html is not None:
        from finetune_mile.pages.report import write_page

        write_page(options.html, "probe.html", title=f"Checkpoints for {result['data']}", **result)


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
