"""`finetune-mile doctor --data ...`: read every image once, before a run does, and say what is wrong with the data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.config.flags import Parser
from finetune_mile.images.index import check_replaceable, write_list
from finetune_mile.images.sources import check_truth, load_data, split_name

if TYPE_CHECKING:
    from finetune_mile.images.index import Data, ImageSet

SHOWN = 10  # names of each kind; --list writes all bad ones


@dataclass(slots=True, kw_only=True)
class Findings:
    """What reading every image of a split brought to light."""

    bad: dict[int, str] = field(default_factory=dict)  # index to reason
    heights: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    hashes: dict[bytes, int] = field(default_factory=dict)  # of the file to one index that has it
    twice: int = 0  # further images of the split with the same hash


def build_parser() -> Parser:
    """The flags."""
    parser = Parser(
        prog="finetune-mile doctor", allow_abbrev=False,
        description="Read every image once and report bad ones, duplicates, class counts and sizes. Exit code 1: some "
        "image cannot be read, or is in a format that is not read, such as HEIC.",
    )  # fmt: skip
    parser.add_argument("--data", required=True, help="as for run.py: folder:DIR, imagenet:DIR, hf:NAME, csv:FILE, ...")
    parser.add_argument("--truth", help="true label sets to check as well: real, csv:FILE, counts:NPY,CSV,SHARE")
    parser.add_argument("--workers", type=int, help="reading processes (default: the cores)")
    parser.add_argument("--list", type=Path, metavar="FILE", help="write the bad images to this CSV file")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 every image can be read, 1 some cannot, 2 the command or its input was wrong."""
    options = build_parser().parse_args(argv)
    split_name(options.data)
    if options.truth:
        check_truth(options.truth)
    if options.list is not None:
        check_replaceable(options.list, "--list")
    data = load_data(options.data)
    if options.truth:
        from finetune_mile.images.truth import with_truth

        data = with_truth(data, options.truth)
    found = {
        name: examine(images, name, options.workers) for name, images in (("train", data.train), ("val", data.val))
    }
    for line in report(data, found):
        sys.stdout.write(line + "\n")
    if data.unreadable:
        from finetune_mile.images.index import say_unreadable

        sys.stdout.write(f"--data {options.data}: {say_unreadable(data.unreadable)}\n")
    if options.list is not None:
        rows = [(s, _set(data, s).ids[i], why) for s, f in found.items() for i, why in sorted(f.bad.items())]
        write_list(options.list.resolve(), rows)
    return 1 if data.unreadable or any(findings.bad for findings in found.values()) else 0


def examine(images: ImageSet, name: str, workers: int | None) -> Findings:
    """Read and decode every image of a split, in several processes, with a progress bar."""
    from torch.utils.data import DataLoader

    from finetune_mile.images.pipeline import default_workers

    count = default_workers(1) if workers is None else workers
    looked_at: Any = Examined(images)
    loader: Any = DataLoader(looked_at, batch_size=64, num_workers=0 if images.in_memory else count, collate_fn=list)
    found = Findings()
    for index, reason, digest, height, width in _with_bar(loader, f"reading {name}", len(images)):
        if reason is not None:
            found.bad[index] = reason
            continue
        found.heights.append(height)
        found.widths.append(width)
        found.twice += digest in found.hashes
        found.hashes.setdefault(digest, index)
    return found


class Examined:
    """Index to (index, reason or None, hash, height, width); read by loader processes."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, str | None, bytes, int, int]:
        """Look at one image; the hash is of the file, or of the pixels where there is no file."""
        import hashlib

        from finetune_mile.core.problems import BadImage
        from finetune_mile.images.pipeline import decode

        try:
            if self.images.encoded is None:
                image = self.images.read(index)
                data = image.contiguous().numpy().tobytes()
            else:
                data = self.images.encoded(index)
                image = decode(data)
        except BadImage as error:
            return index, str(error), b"", 0, 0
        return index, None, hashlib.blake2b(data, digest_size=16).digest(), image.shape[1], image.shape[2]


def _with_bar(batches: Any, title: str, total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        for batch in batches:
            yield from batch
            bar.advance(task, len(batch))


def _set(data: Data, split: str) -> ImageSet:
    return data.train if split == "train" else data.val


def report(data: Data, found: dict[str, Findings]) -> Iterator[str]:
    """The lines to print."""
    counts = f"{len(data.train):,} training and {len(data.val):,} validation images"
    yield f"{data.name}: {counts}, {len(data.classes)} classes"
    for split, findings in found.items():
        yield from _class_lines(data, split)
        yield from _size_lines(split, findings)
    shared = sorted(found["train"].hashes.keys() & found["val"].hashes.keys(), key=found["val"].hashes.__getitem__)
    yield f"exact duplicates across train and val: {len(shared)}"
    for digest in shared[:SHOWN]:
        here, there = found["val"].hashes[digest], found["train"].hashes[digest]
        yield f"  val {data.val.ids[here]} is train {data.train.ids[there]}"
    if data.val.truth is not None:
        labels = data.val.truth.sum(1)
        empty, several = int((labels == 0).sum()), int((labels > 1).sum())
        yield f"true label sets: {empty:,} empty (not counted in set metrics), {several:,} with several labels"
    for split, findings in found.items():
        yield from _bad_lines(_set(data, split), split, findings)


def _class_lines(data: Data, split: str) -> Iterator[str]:
    import torch

    images = _set(data, split)
    given = images.given
    if given.ndim == 1:
        counts = torch.bincount(given[given >= 0], minlength=len(data.classes))
        unlabelled = int((given < 0).sum())
    else:
        counts, unlabelled = (given > 0).sum(0), int((~(given > 0).any(1)).sum())
    low, high = int(counts.argmin()), int(counts.argmax())
    yield (
        f"{split}: {int(counts[low]):,} ({data.classes[low]}) to {int(counts[high]):,} ({data.classes[high]}) images a "
        f"class, median {int(counts.median()):,}{f'; {unlabelled:,} unlabelled' if unlabelled else ''}"
    )
    missing = [data.classes[k] for k in (counts == 0).nonzero().flatten().tolist()]
    if missing and len(images):
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        yield f"{split}: {len(missing)} classes have no image: {', '.join(missing[:SHOWN])}{more}"


def _size_lines(split: str, findings: Findings) -> Iterator[str]:
    import numpy as np

    if findings.heights:
        wide, high = np.array(findings.widths), np.array(findings.heights)
        short = np.minimum(wide, high)
        yield (
            f"{split}: short side {short.min()} to {short.max()} pixels, median {int(np.median(short))}; "
            f"width {wide.min()} to {wide.max()}, height {high.min()} to {high.max()}"
        )
    if findings.twice:
        yield f"{split}: {findings.twice} images are exact copies of another one in {split}"


def _bad_lines(images: ImageSet, split: str, findings: Findings) -> Iterator[str]:
    from finetune_mile.images.index import allowed

    verdict = "would stop" if len(findings.bad) > allowed(len(images)) else "goes on without them"
    yield f"{split}: {len(findings.bad)} images cannot be read" + (f"; a run {verdict}" if findings.bad else "")
    for index, reason in sorted(findings.bad.items())[:SHOWN]:
        yield f"  {images.ids[index]}: {reason}"
    if len(findings.bad) > SHOWN:
        yield f"  and {len(findings.bad) - SHOWN} more; --list FILE writes all of them"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
