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
from finetune_mile.images.splits import label_names

if TYPE_CHECKING:
    from finetune_mile.images.sets import Data, ImageSet

UNICODE = " (the same letters in two Unicode forms, as macOS and others write them)"
_Row = tuple[int, str | None, bytes, int, int, Prints | None]


@dataclass(slots=True, kw_only=True)
class Findings:
    """A split, and what reading its images brought to light."""

    images: ImageSet
    bad: dict[int, str] = field(default_factory=dict)  # index to reason
    heights: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    digests: dict[int, bytes] = field(default_factory=dict)  # index to hash of the file
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
            for index, reason, digest, height, width, values in batch:
                if reason is not None:
                    findings.bad[index] = reason
                    continue
                findings.heights.append(height)
                findings.widths.append(width)
                findings.digests[index] = digest
                if len(findings.prints):
                    findings.prints[index] = values
            advance(len(batch))
    return findings


def _examine_batch(images: ImageSet, indices: list[int]) -> list[_Row]:
    """Index, reason why it is bad or None, hash, height, width and print of images.

    The hash is of the file, or of the pixels where there is no file.
    """
    from PIL import Image

    from finetune_mile.images.pipeline import decode

    rows: list[_Row] = []
    for index in indices:
        try:
            content = images.content(index)
            image = decode(content) if isinstance(content, bytes) else content
        except BadImage as error:
            rows.append((index, str(error), b"", 0, 0, None))
        else:
            file = content if isinstance(content, bytes) else content.contiguous().numpy().tobytes()
            digest = hashlib.blake2b(file, digest_size=16).digest()
            photo = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
            rows.append((index, None, digest, image.shape[1], image.shape[2], print_of(photo)))
    return rows


# ------------------------------------------------------------------------------------ copies


def find_copies(data: Data, splits: Mapping[str, Findings]) -> list[Copy]:
    """Images that are exact copies or near-duplicates of an earlier one, of the same split or of one before it."""
    sets = {
        split: [frozenset(labels) for labels in label_names(each.images.given, data.classes)]
        for split, each in splits.items()
    }
    places = [(split, index) for split, each in splits.items() for index in sorted(each.digests)]

    def differ(one: tuple[str, int], other: tuple[str, int]) -> bool:
        first, second = sets[one[0]][one[1]], sets[other[0]][other[1]]
        return bool(first and second) and first != second

    found = []
    known: dict[bytes, list[tuple[str, int]]] = {}
    for place in places:
        same = known.setdefault(splits[place[0]].digests[place[1]], [])
        if same:
            other = next((each for each in same if differ(place, each)), same[0])
            found.append(Copy(*place, *other, exact=True, labels_differ=differ(place, other)))
        same.append(place)
    if len(places) > MOST_COMPARED:
        return found
    single = [same[0] for same in known.values()]
    part = np.array([list(splits).index(split) for split, _ in single])
    numbers = {labels: number for number, labels in enumerate({labels for each in sets.values() for labels in each})}
    label = np.array([numbers[sets[split][index]] for split, index in single])
    labelled = np.array([bool(sets[split][index]) for split, index in single])
    prints = np.stack([splits[split].prints[index] for split, index in single]) if single else np.zeros((0, WIDTH))
    for row, alike in compare(prints.astype(np.float16)):
        near = alike >= NEAR
        other_label = near & labelled[:row] & labelled[row] & (label[:row] != label[row])
        other_part = near & (part[:row] != part[row])
        masks = [mask for mask in (other_label, other_part) if mask.any()] or [near]
        for best in sorted({int(np.where(mask, alike, -1).argmax()) for mask in masks}):
            differs = differ(single[row], single[best])
            found.append(Copy(*single[row], *single[best], exact=False, labels_differ=differs))
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


def report(data: Data, splits: Mapping[str, Findings], copies: Sequence[Copy] | None = None) -> Iterator[str]:
    """The lines to print. `copies`: of `find_copies`, where the caller has them."""
    if copies is None:
        copies = find_copies(data, splits)

    def say(copy: Copy) -> str:
        ends = []
        for split, index in ((copy.split, copy.row), (copy.of_split, copy.of_row)):
            images = splits[split].images
            labels = ", ".join(label_names(images.given[index : index + 1], data.classes)[0])
            ends.append(f"{split} {images.ids[index]}" + (f" ({labels})" if copy.labels_differ else ""))
        return f"  {ends[0]} {'is' if copy.exact else 'looks like'} {ends[1]}"

    def section(title: str, chosen: Sequence[Copy]) -> Iterator[str]:
        yield title
        yield from (say(copy) for copy in chosen[:SHOWN])
        yield from _more(len(chosen))

    wrong = [copy for copy in copies if copy.exact and copy.labels_differ]
    if wrong:
        yield from section(
            f"wrong labels: exact copies that have another label than the original: {len(wrong):,}", wrong
        )
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
        chosen = [copy for copy in within if copy.exact]
        if chosen:
            yield from section(f"exact copies within {split}, with the same labels: {len(chosen):,}", chosen)
        near = len(within) - len(chosen)
        if near:
            yield f"near-duplicates within {split}, with the same labels: {near:,}; --list FILE names them"
    for one, two in itertools.combinations(splits, 2):
        first = {digest: index for index, digest in reversed(splits[one].digests.items())}
        second = {digest: index for index, digest in reversed(splits[two].digests.items())}
        shared = sorted(first.keys() & second.keys(), key=second.__getitem__)
        yield f"exact duplicates across {one} and {two}: {len(shared)}"
        old, new = splits[one].images.ids, splits[two].images.ids
        yield from (f"  {two} {new[second[same]]} is {one} {old[first[same]]}" for same in shared[:SHOWN])
        yield from _more(len(shared))
        chosen = [copy for copy in copies if not copy.exact and (copy.of_split, copy.split) == (one, two)]
        chosen.sort(key=lambda copy: not copy.labels_differ)
        chosen = list({copy.row: copy for copy in chosen}.values())  # each once, rather as a copy with the same label
        if chosen:
            yield from section(f"near-duplicates across {one} and {two}: {len(chosen):,}", chosen)
    chosen = [copy for copy in copies if not copy.exact and copy.labels_differ]
    if chosen:
        yield from section(f"near-duplicates with different labels: {len(chosen):,}; one label may be wrong", chosen)
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
        yield from (f"  {ids[index]}: {reason}" for index, reason in sorted(bad.items())[:SHOWN])
        yield from _more(len(bad))


def _more(count: int) -> Iterator[str]:
    if count > SHOWN:
        yield f"  and {count - SHOWN:,} more; --list FILE writes all of them"


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
    if findings.heights:
        widths, heights = np.array(findings.widths), np.array(findings.heights)
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
