"""What is wrong with data: images that cannot be read, copies and their labels, class names, class counts and sizes."""

from __future__ import annotations

import hashlib
import itertools
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from finetune_mile.core.console import progress
from finetune_mile.core.files import open_regular
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images.alike import MOST_COMPARED, NEAR, SHOWN, WIDTH, Prints, compare, listed, print_of, same_names
from finetune_mile.images.bad_images import HEADER, allowed, say_unreadable, write_list
from finetune_mile.images.splits import label_counts, label_names, one_label_each

if TYPE_CHECKING:
    from finetune_mile.images.sets import Data, ImageSet

UNICODE = " (the same letters in two Unicode forms, as macOS and others write them)"


@dataclass(slots=True, kw_only=True)
class Findings:
    """A split, and what reading its images brought to light."""

    images: ImageSet
    bad: dict[int, str] = field(default_factory=dict)  # index to reason
    digests: dict[int, bytes] = field(default_factory=dict)  # index to hash of the file
    sizes: list[tuple[int, int]] = field(default_factory=list)  # height and width
    prints: Prints = field(default_factory=lambda: np.zeros((0, WIDTH), dtype=np.float16))  # none where N is too large


def inspect(data: Data, workers: int | None, listed: Path | None = None) -> tuple[list[str], int]:
    """Read all images: the lines to print, and how many images or files cannot be read; all found goes to `listed`."""
    parts = {"train": data.train, "val": data.val, "test": data.test}
    splits = {name: examine(part, name, workers) for name, part in parts.items() if part}
    copies = find_copies(data, splits)
    if listed is not None:
        write_list(listed.resolve(), list_rows(splits, copies))
    bad = sum(len(findings.bad) for findings in splits.values())
    return list(report(data, splits, copies)), bad + sum(data.unreadable.values())


class Copy(NamedTuple):
    """An image that is, or looks like, another one."""

    split: str
    row: int
    of_split: str
    of_row: int
    exact: bool
    labels_differ: bool  # both have labels


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
    if len(images) <= MOST_COMPARED:
        findings.prints = np.zeros((len(images), WIDTH), dtype=np.float16)
    with progress(f"reading {split}", len(images)) as advance:
        for batch in loader:
            for index, found in batch:
                if isinstance(found, str):
                    findings.bad[index] = found
                    continue
                findings.digests[index], size, values = found
                findings.sizes.append(size)
                if len(findings.prints):
                    findings.prints[index] = values
            advance(len(batch))
    return findings


def _examine_batch(images: ImageSet, indices: list[int]) -> list[tuple[int, Any]]:
    return [(index, _examine(images, index)) for index in indices]


def _examine(images: ImageSet, index: int) -> str | tuple[bytes, tuple[int, int], Prints]:
    """Hash of an image's file (of its pixels where there is none), its size and its print; or why it cannot be read."""
    from PIL import Image

    from finetune_mile.images.pipeline import decode

    try:
        content = images.content(index)
        image = decode(content) if isinstance(content, bytes) else content
    except BadImage as error:
        return str(error)
    file = content if isinstance(content, bytes) else content.contiguous().numpy().tobytes()
    photo = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    return hashlib.blake2b(file, digest_size=16).digest(), (image.shape[1], image.shape[2]), print_of(photo)


# ------------------------------------------------------------------------------------ copies


def find_copies(data: Data, splits: Mapping[str, Findings]) -> list[Copy]:
    """Images that are exact copies or near-duplicates of an earlier one, of the same split or of one before it."""
    places = [(split, index) for split, each in splits.items() for index in sorted(each.digests)]
    names = {split: label_names(each.images.given, data.classes) for split, each in splits.items()}
    labels = [frozenset(names[split][index]) for split, index in places]

    def copy(row: int, of: int, *, exact: bool) -> Copy:
        return Copy(*places[row], *places[of], exact=exact, labels_differ=differ(row, of))

    def differ(row: int, other: int) -> bool:
        return bool(labels[row] and labels[other]) and labels[row] != labels[other]

    found = []
    known: dict[bytes, list[int]] = {}
    for row, (split, index) in enumerate(places):
        same = known.setdefault(splits[split].digests[index], [])
        if same:
            found.append(copy(row, next((each for each in same if differ(row, each)), same[0]), exact=True))
        same.append(row)
    if len(places) > MOST_COMPARED:
        return found
    single = [same[0] for same in known.values()]
    part = np.array([list(splits).index(places[row][0]) for row in single])
    numbers = {each: number for number, each in enumerate(set(labels))} | {frozenset(): -1}
    label = np.array([numbers[labels[row]] for row in single])
    prints = [splits[split].prints[index] for split, index in (places[row] for row in single)]
    for row, alike in compare(np.array(prints, dtype=np.float16).reshape(-1, WIDTH)):
        near = alike >= NEAR
        other_label = near & (label[:row] >= 0) & (label[row] >= 0) & (label[:row] != label[row])
        other_part = near & (part[:row] != part[row])
        masks = [mask for mask in (other_label, other_part) if mask.any()] or [near]
        for best in sorted({int(np.where(mask, alike, -1).argmax()) for mask in masks}):
            found.append(copy(single[row], single[best], exact=False))
    return found


def list_rows(splits: Mapping[str, Findings], copies: Sequence[Copy]) -> list[tuple[str, str, str]]:
    """Everything found as (split, id, reason): bad images, then copies, those with different labels first."""
    bad = [(split, each.images.ids[i], why) for split, each in splits.items() for i, why in sorted(each.bad.items())]
    ordered = sorted(copies, key=lambda copy: (not copy.labels_differ, not copy.exact))
    return bad + [
        (
            copy.split,
            splits[copy.split].images.ids[copy.row],
            f"{'exact copy' if copy.exact else 'near-duplicate'} of {copy.of_split} "
            f"{splits[copy.of_split].images.ids[copy.of_row]}{', labels differ' if copy.labels_differ else ''}",
        )
        for copy in ordered
    ]


# ------------------------------------------------------------------------------------ the report


def report(data: Data, splits: Mapping[str, Findings], copies: Sequence[Copy]) -> Iterator[str]:
    """The lines to print. `copies`: of `find_copies`."""

    def section(title: str, chosen: Sequence[Copy], end: str = "") -> Iterator[str]:
        if chosen:
            yield f"{title}: {len(chosen):,}{end}"
            yield from _first([_say_copy(copy, data, splits) for copy in chosen])

    wrong = [copy for copy in copies if copy.exact and copy.labels_differ]
    yield from section("wrong labels: exact copies that have another label than the original", wrong)
    kinds = {"training": data.train, "validation": data.val, "test": data.test}
    *counts, last = [f"{len(images):,} {kind}" for kind, images in kinds.items() if images is not None]
    yield f"{data.name}: {', '.join(counts)} and {last} images, {len(data.classes)} classes"
    if data.unreadable:
        yield f"{data.name}: {say_unreadable(data.unreadable)}"
    for group in same_names(data.classes):
        forms = "" if len({unicodedata.normalize("NFC", name) for name in group}) == len(group) else UNICODE
        yield f"classes {' and '.join(group)} are likely the same{forms}; rename or merge them"
    for split, findings in splits.items():
        yield from _class_lines(findings.images, data.classes, split)
        yield from _size_lines(findings, split)
        within = [copy for copy in copies if copy.split == copy.of_split == split and not copy.labels_differ]
        exact = [copy for copy in within if copy.exact]
        yield from section(f"exact copies within {split}, with the same labels", exact)
        if len(within) > len(exact):
            near = f"{len(within) - len(exact):,}, named only in the file of --list"
            yield f"near-duplicates within {split}, with the same labels: {near}"
    for one, two in itertools.combinations(splits, 2):
        yield from _shared(one, splits[one], two, splits[two])
        across = [copy for copy in copies if not copy.exact and (copy.of_split, copy.split) == (one, two)]
        across.sort(key=lambda copy: not copy.labels_differ)
        once = {copy.row: copy for copy in across}  # rather as a copy with the same label
        yield from section(f"near-duplicates across {one} and {two}", [*once.values()])
    doubtful = [copy for copy in copies if not copy.exact and copy.labels_differ]
    yield from section("near-duplicates with different labels", doubtful, "; one label may be wrong")
    if sum(len(findings.digests) for findings in splits.values()) > MOST_COMPARED:
        yield f"near-duplicates were not searched: there are more than {MOST_COMPARED:,} images"
    yield from data.notes
    if data.val.truth is not None:
        labels = data.val.truth.sum(1)
        empty, several = int((labels == 0).sum()), int((labels > 1).sum())
        yield f"true label sets: {empty:,} empty (not counted in set metrics), {several:,} with several labels"
    for split, findings in splits.items():
        bad, ids = findings.bad, findings.images.ids
        verdict = "would stop" if len(bad) > allowed(len(ids)) else "would skip them"
        yield f"{split}: {len(bad)} images cannot be read" + (f"; a run {verdict}" if bad else "")
        yield from _first([f"  {ids[index]}: {reason}" for index, reason in sorted(bad.items())])


def _first(lines: Sequence[str]) -> Iterator[str]:
    """The first lines, and how many more there are."""
    yield from lines[:SHOWN]
    if len(lines) > SHOWN:
        yield f"  and {len(lines) - SHOWN:,} more; --list FILE writes all of them"


def _say_copy(copy: Copy, data: Data, splits: Mapping[str, Findings]) -> str:
    ends = []
    for split, index in ((copy.split, copy.row), (copy.of_split, copy.of_row)):
        images = splits[split].images
        labels = ", ".join(label_names(images.given[index : index + 1], data.classes)[0])
        ends.append(f"{split} {images.ids[index]}" + (f" ({labels})" if copy.labels_differ else ""))
    return f"  {ends[0]} {'is' if copy.exact else 'looks like'} {ends[1]}"


def _shared(one: str, old: Findings, two: str, new: Findings) -> Iterator[str]:
    """Photos that two splits share: each once, the first of its copies in either."""
    first, second = ({digest: index for index, digest in reversed(each.digests.items())} for each in (old, new))
    shared = sorted(first.keys() & second.keys(), key=second.__getitem__)
    yield f"exact duplicates across {one} and {two}: {len(shared)}"
    yield from _first([f"  {two} {new.images.ids[second[d]]} is {one} {old.images.ids[first[d]]}" for d in shared])


def _class_lines(images: ImageSet, classes: Sequence[str], split: str) -> Iterator[str]:
    if not len(classes):
        yield f"{split}: {len(images):,} images without labels"
        return
    counts, unlabelled = label_counts(images.given, len(classes)), int((one_label_each(images.given) < 0).sum())
    low, high = int(counts.argmin()), int(counts.argmax())
    few, many, rest = int(counts[low]), int(counts[high]), f"; {unlabelled:,} unlabelled" if unlabelled else ""
    if few == many:
        yield f"{split}: {few:,} images in every class{rest}"
    else:
        yield (
            f"{split}: {few:,} ({classes[low]}) to {many:,} ({classes[high]}) images per class, "
            f"median {int(counts.median()):,}{rest}"
        )
    missing = [classes[k] for k in (counts == 0).nonzero().flatten().tolist()]
    if missing and len(images):
        yield f"{split}: {len(missing)} classes have no image: {listed(missing)}"


def _size_lines(findings: Findings, split: str) -> Iterator[str]:
    if findings.sizes:
        heights, widths = np.array(findings.sizes).T
        short = np.minimum(widths, heights)
        yield (
            f"{split}: short side {short.min()} to {short.max()} pixels, median {int(np.median(short))}; "
            f"width {widths.min()} to {widths.max()}, height {heights.min()} to {heights.max()}"
        )


def check_replaceable(path: Path, flag: str) -> None:
    """Refuse to write a list of images over another file, or into a folder that does not exist."""
    if not path.parent.is_dir():
        raise Problem(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if not path.exists():
        return
    header = ",".join(HEADER).encode()
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            ours = stream.readline(len(header) + 2).rstrip(b"\r\n") == header
    except OSError:
        ours = False
    if not ours:
        raise Problem(f"{flag} {path}: this file exists and is not a list of bad images; choose another name")
