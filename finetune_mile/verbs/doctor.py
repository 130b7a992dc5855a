"""`finetune-mile doctor --data ...`: read every image once, before a run does, and say what is wrong with the data."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.config.flags import Parser
from finetune_mile.core.console import progress
from finetune_mile.images.index import allowed, check_replaceable, say_unreadable, write_list
from finetune_mile.images.sources import check_truth, load_data, split_name

if TYPE_CHECKING:
    from finetune_mile.images.index import Data, ImageSet

SHOWN = 10  # names of each kind; --list writes all bad ones


@dataclass(slots=True, kw_only=True)
class Findings:
    """A split, and what reading its images brought to light."""

    images: ImageSet
    bad: dict[int, str] = field(default_factory=dict)  # index to reason
    heights: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    hashes: dict[bytes, int] = field(default_factory=dict)  # of the file to one index that has it
    copies: int = 0  # further images of the split with the same hash


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 every image can be read, 1 some cannot, 2 the command or its input was wrong."""
    parser = Parser(
        prog="finetune-mile doctor", allow_abbrev=False,
        description="Read every image once and report bad ones, duplicates, class counts and sizes. Exit code 1: some "
        "image cannot be read, or is in a format that is not read, such as HEIC.",
        epilog="example: finetune-mile doctor --data folder:photos --list bad.csv",
    )  # fmt: skip
    parser.add_argument("--data", required=True, help="as for `run`: folder:DIR, imagenet:DIR, hf:NAME, csv:FILE, ...")
    parser.add_argument("--truth", help="true label sets to check as well: real, csv:FILE, counts:NPY,CSV,SHARE")
    parser.add_argument("--workers", type=int, help="reading processes (default: the cores)")
    parser.add_argument("--list", type=Path, metavar="FILE", help="write the bad images to this CSV file")
    options = parser.parse_args(argv)
    split_name(options.data)
    if options.truth:
        check_truth(options.truth)
    if options.list is not None:
        check_replaceable(options.list, "--list")
    data = load_data(options.data, need_labels=False)
    if options.truth:
        from finetune_mile.images.truth import with_truth

        data = with_truth(data, options.truth)
    parts = {"train": data.train, "val": data.val, "test": data.test}
    splits = {name: examine(part, name, options.workers) for name, part in parts.items() if part is not None}
    for line in report(data, splits):
        sys.stdout.write(line + "\n")
    if data.unreadable:
        sys.stdout.write(f"--data {options.data}: {say_unreadable(data.unreadable)}\n")
    if options.list is not None:
        rows = [(name, each.images.ids[i], why) for name, each in splits.items() for i, why in sorted(each.bad.items())]
        write_list(options.list.resolve(), rows)
    return 1 if data.unreadable or any(findings.bad for findings in splits.values()) else 0


def examine(images: ImageSet, split: str, workers: int | None) -> Findings:
    """Read and decode every image of a split, in several processes, with a progress bar."""
    from torch.utils.data import DataLoader

    from finetune_mile.images.pipeline import default_workers

    count = default_workers(1) if workers is None else workers
    indices: Any = range(len(images))
    loader: Any = DataLoader(
        indices, batch_size=64, num_workers=0 if images.in_memory else count, collate_fn=partial(_examine_batch, images)
    )
    findings = Findings(images=images)
    with progress(f"reading {split}", len(images)) as advance:
        for batch in loader:
            for index, reason, digest, height, width in batch:
                if reason is not None:
                    findings.bad[index] = reason
                    continue
                findings.heights.append(height)
                findings.widths.append(width)
                findings.copies += digest in findings.hashes
                findings.hashes.setdefault(digest, index)
            advance(len(batch))
    return findings


def _examine_batch(images: ImageSet, indices: list[int]) -> list[tuple[int, str | None, bytes, int, int]]:
    """Index, reason why it is bad or None, hash, height and width of images.

    The hash is of the file, or of the pixels where there is no file.
    """
    import hashlib

    from finetune_mile.core.problems import BadImage
    from finetune_mile.images.pipeline import decode

    rows: list[tuple[int, str | None, bytes, int, int]] = []
    for index in indices:
        try:
            if images.encoded is None:
                image = images.read(index)
                content = image.contiguous().numpy().tobytes()
            else:
                content = images.encoded(index)
                image = decode(content)
        except BadImage as error:
            rows.append((index, str(error), b"", 0, 0))
        else:
            digest = hashlib.blake2b(content, digest_size=16).digest()
            rows.append((index, None, digest, image.shape[1], image.shape[2]))
    return rows


def report(data: Data, splits: dict[str, Findings]) -> Iterator[str]:
    """The lines to print."""
    counts = f"{len(data.train):,} training and {len(data.val):,} validation images"
    if data.test is not None:
        counts = f"{len(data.train):,} training, {len(data.val):,} validation and {len(data.test):,} test images"
    yield f"{data.name}: {counts}, {len(data.classes)} classes"
    for split, findings in splits.items():
        yield from _class_lines(findings.images, data.classes, split)
        yield from _size_lines(findings, split)
    for first, second in itertools.combinations(splits, 2):
        one, two = splits[first], splits[second]
        shared = sorted(one.hashes.keys() & two.hashes.keys(), key=two.hashes.__getitem__)
        yield f"exact duplicates across {first} and {second}: {len(shared)}"
        for digest in shared[:SHOWN]:
            yield f"  {second} {two.images.ids[two.hashes[digest]]} is {first} {one.images.ids[one.hashes[digest]]}"
    yield from data.notes
    if data.val.truth is not None:
        labels = data.val.truth.sum(1)
        empty, several = int((labels == 0).sum()), int((labels > 1).sum())
        yield f"true label sets: {empty:,} empty (not counted in set metrics), {several:,} with several labels"
    for split, findings in splits.items():
        bad, ids = findings.bad, findings.images.ids
        verdict = "would stop" if len(bad) > allowed(len(ids)) else "would skip them"
        yield f"{split}: {len(bad)} images cannot be read" + (f"; a run {verdict}" if bad else "")
        for index, reason in sorted(bad.items())[:SHOWN]:
            yield f"  {ids[index]}: {reason}"
        if len(bad) > SHOWN:
            yield f"  and {len(bad) - SHOWN} more; --list FILE writes all of them"


def _class_lines(images: ImageSet, classes: Sequence[str], split: str) -> Iterator[str]:
    import torch

    given = images.given
    if not len(classes):
        yield f"{split}: {len(images):,} images without labels"
        return
    if given.ndim == 1:
        counts, unlabelled = torch.bincount(given[given >= 0], minlength=len(classes)), int((given < 0).sum())
    else:
        counts, unlabelled = (given > 0).sum(0), int((~(given > 0).any(1)).sum())
    low, high = int(counts.argmin()), int(counts.argmax())
    yield (
        f"{split}: {int(counts[low]):,} ({classes[low]}) to {int(counts[high]):,} ({classes[high]}) images per "
        f"class, median {int(counts.median()):,}{f'; {unlabelled:,} unlabelled' if unlabelled else ''}"
    )
    missing = [classes[k] for k in (counts == 0).nonzero().flatten().tolist()]
    if missing and len(images):
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        yield f"{split}: {len(missing)} classes have no image: {', '.join(missing[:SHOWN])}{more}"


def _size_lines(findings: Findings, split: str) -> Iterator[str]:
    import numpy as np

    if findings.heights:
        widths, heights = np.array(findings.widths), np.array(findings.heights)
        short = np.minimum(widths, heights)
        yield (
            f"{split}: short side {short.min()} to {short.max()} pixels, median {int(np.median(short))}; "
            f"width {widths.min()} to {widths.max()}, height {heights.min()} to {heights.max()}"
        )
    if findings.copies:
        yield f"{split}: {findings.copies} images are exact copies of another one in {split}"
