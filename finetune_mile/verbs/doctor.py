"""`finetune-mile doctor --data ...`: read every image once, before a run does, and say what is wrong with the data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from finetune_mile.config.flags import Parser
from finetune_mile.core.problems import Problem, tell
from finetune_mile.images.index import write_list
from finetune_mile.images.sources import check_truth, load_data, split_name


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 every image can be read, 1 some cannot, 2 the command or its input was wrong."""
    parser = Parser(
        prog="finetune-mile doctor", allow_abbrev=False,
        description="Read every image once and report bad ones, copies and near-duplicates (across splits, and with "
        "different labels), class names, class counts and sizes. Exit code 1: some image cannot be read, or is in a "
        "format that is not read, such as HEIC. Exit code 2: a run would stop.",
        epilog="example: finetune-mile doctor --data folder:photos --list found.csv",
    )  # fmt: skip
    parser.add_argument("--data", required=True, help="as for `run`: folder:DIR, imagenet:DIR, hf:NAME, csv:FILE, ...")
    parser.add_argument("--truth", help="true label sets to check as well: real, csv:FILE, counts:NPY,CSV,SHARE")
    parser.add_argument("--workers", type=int, help="reading processes (default: the cores)")
    parser.add_argument("--list", type=Path, metavar="FILE", help="write bad images and all copies to this CSV file")
    options = parser.parse_args(argv)

    from finetune_mile.images.checks import check_replaceable, examine, find_copies, list_rows, report  # not for --help

    split_name(options.data)
    if options.truth:
        check_truth(options.truth)
    if options.list is not None:
        check_replaceable(options.list, "--list")
    data = load_data(options.data, need_labels=False, strict=False)
    code = tell(Problem(*data.problems)) if data.problems else 0
    if options.truth:
        from finetune_mile.images.truth import with_truth

        data = with_truth(data, options.truth)
    parts = {"train": data.train, "val": data.val, "test": data.test}
    splits = {name: examine(part, name, options.workers) for name, part in parts.items() if part}
    copies = find_copies(data, splits)
    for line in report(data, splits, copies):
        sys.stdout.write(line + "\n")
    if options.list is not None:
        write_list(options.list.resolve(), list_rows(splits, copies))
    return code or (1 if data.unreadable or any(findings.bad for findings in splits.values()) else 0)
