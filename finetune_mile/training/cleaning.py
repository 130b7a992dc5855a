"""Ticks of an audit's page to a corrected copy of the data: what `audit --apply` does. The originals stay."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from finetune_mile.core.files import check_empty, whole_file, write_json
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images.groups import file_paths
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.sources import anchored, load_data, scheme_and_place
from finetune_mile.images.sources.lists import read_rows
from finetune_mile.images.splits import label_names
from finetune_mile.measures.audit import errors_left
from finetune_mile.pages.audit import shown_text
from finetune_mile.training.auditing import FACTS, labels_hash, unquoted

TICKED = ("audit", "kind", "split", "id", "given", "suggested", "verdict", "labels")  # columns of ticks.csv
VERDICTS = ("right", "wrong", "unsure", "relabel")
SUMMARY = "clean.json"
SEPARATORS = ";|~^\t"


class Tick(NamedTuple):
    """A line of ticks.csv."""

    kind: str
    split: str
    id: str
    given: list[str]
    verdict: str
    labels: list[str]  # of relabel

    @property
    def is_error(self) -> bool:
        """Is the given label not right?"""
        return self.verdict == "wrong" or (self.verdict == "relabel" and not set(self.given) <= set(self.labels))


class Photo(NamedTuple):
    """A photo of the corrected data."""

    split: str
    images: ImageSet
    row: int
    path: str | None  # of its file
    labels: tuple[str, ...]


@dataclass(slots=True)
class Edits:
    """What the ticks of one photo say."""

    left_out: bool = False
    added: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)

    def add(self, tick: Tick, given: Sequence[str]) -> None:
        self.left_out |= tick.verdict == "wrong"
        if tick.verdict == "relabel":
            self.added |= set(tick.labels) - set(given)
            self.removed |= set(given) - set(tick.labels)


def apply_ticks(ticks: Path, out: Path) -> dict[str, Any]:
    """Write the corrected data into `out`, a new folder or FILE.csv; returns the content of clean.json."""
    folder, read = read_ticks(ticks)
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    where = anchored(facts["request"]["data"], facts["started_in"])
    check_place(where, out)
    data = load_data(where)
    if labels_hash(data) != facts["request"]["labels"]:
        raise Problem(f"{ticks}: the photos or labels have changed since the audit; run finetune-mile audit again")
    photos, changes = corrected(data, read, ticks)
    kinds = {photo.labels for photo in photos}
    if not photos or len({name for names in kinds for name in names}) < 2:
        raise Problem(f"{ticks}: fewer than two classes would be left; change some ticks")
    data_text = write_csv(out, photos) if out.suffix == ".csv" else write_folder(out, photos)
    left = say_left(folder, facts, read)
    summary = {
        "data": data_text, "init": facts["request"]["init"], "audit": str(folder), "ticks": len(read), **changes,
        "photos": len(photos), **left,
    }  # fmt: skip
    if out.suffix != ".csv":
        write_json(out / SUMMARY, summary)
    return summary


# ------------------------------------------------------------------------------------ ticks.csv


def read_ticks(path: Path) -> tuple[Path, list[Tick]]:
    """The folder of the audit, and the ticks."""
    flag = f"--apply {path}"
    if not path.is_file():
        raise Problem(f"{flag}: no such file; export ticks.csv on the page audit.html")
    lines = [{name: unquoted(cell) for name, cell in row.items()} for row in read_rows(path, TICKED, flag)]
    folders = {row["audit"] for row in lines}
    folder = Path(folders.pop())
    if folders or not (folder / FACTS).is_file():
        raise Problem(f"{flag}: the column audit must name one folder with {FACTS}; found {folder}")
    return folder, [_tick(row, f"{flag} line {line}") for line, row in enumerate(lines, start=2)]


def _tick(row: dict[str, str], where: str) -> Tick:
    if row["verdict"] not in VERDICTS:
        raise Problem(f"{where}: verdict {row['verdict']!r} is none of {', '.join(VERDICTS)}")
    lists = []
    for name in ("given", "labels"):
        try:
            names = json.loads(row[name] or "[]")
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise Problem(f'{where}: {name} {row[name]!r} is no list of class names such as ["cat"]')
        lists.append(names)
    if row["verdict"] == "relabel" and not lists[1]:
        raise Problem(f"{where}: relabel needs a class in the column labels")
    return Tick(row["kind"], row["split"], row["id"], lists[0], row["verdict"], lists[1])


def corrected(data: Data, ticks: Sequence[Tick], path: Path) -> tuple[list[Photo], dict[str, int]]:
    """The photos with their labels after the ticks, and how many were changed."""
    edits: dict[tuple[str, str], Edits] = defaultdict(Edits)
    named = {(split, shown_text(name)): row for split, images in _splits(data) for row, name in enumerate(images.ids)}
    given = {split: label_names(images.given, data.classes) for split, images in _splits(data)}
    for tick in ticks:
        place = (tick.split, tick.id)
        if place not in named:
            raise Problem(f"--apply {path}: there is no {tick.split} photo {tick.id} in the data of this audit")
        if unknown := set(tick.labels) - set(data.classes):
            raise Problem(f"--apply {path}: {tick.id} is relabelled {min(unknown)}, which is no class of the data")
        edits[place].add(tick, given[tick.split][named[place]])
    photos: list[Photo] = []
    count = {"left_out": 0, "relabelled": 0}
    for split, images in _splits(data):
        paths = file_paths(images.content)
        for row, (name, labels) in enumerate(zip(images.ids, given[split], strict=True)):
            edit = edits.get((split, shown_text(name)), Edits())
            if edit.left_out:
                count["left_out"] += 1
                continue
            new = [label for label in labels if label not in edit.removed] + sorted(edit.added)
            count["relabelled"] += new != labels
            photos.append(Photo(split, images, row, None if paths is None else paths[row], tuple(new)))
    return photos, count


def _splits(data: Data) -> Iterator[tuple[str, ImageSet]]:
    for name, images in (("train", data.train), ("val", data.val), ("test", data.test)):
        if images is not None:
            yield name, images


def say_left(folder: Path, facts: dict[str, Any], ticks: Sequence[Tick]) -> dict[str, Any]:
    """How many wrong labels are left, from how many of the ticked ones were wrong and how many were expected."""
    table = pq.read_table(folder / "audit.parquet").to_pylist()
    chance = {
        (row["split"], row["id"], row["given"]): row["probability_wrong"] for row in table if row["kind"] == "wrong"
    }
    judged = [tick for tick in ticks if tick.kind == "wrong" and tick.verdict != "unsure"]
    known = np.array([chance.pop((tick.split, tick.id, ";".join(tick.given)), 0.0) for tick in judged])
    errors = np.array([tick.is_error for tick in judged], dtype=bool)
    others = np.array([*([value, 1] for value in chance.values()), *facts["expected"]["others"]]).reshape(-1, 2)
    left, low, high = errors_left(known, errors, others[:, 0], others[:, 1])
    wrong, expected = int(errors.sum()), float(known.sum())
    sentence = (
        f"Judged labels: {len(judged):,}; wrong: {wrong:,}, expected {expected:.0f}. About {left:.0f} wrong "
        f"labels are left among the other {facts['labels'] - len(judged):,} (95 % interval {low:.0f} to {high:.0f}). "
        "With wrong labels between similar classes the number is nearer to the upper end."
    )
    return {
        "judged": len(judged), "wrong": wrong, "expected": expected, "left": left, "left_low": low, "left_high": high,
        "sentence": sentence,
    }  # fmt: skip


# ------------------------------------------------------------------------------------ the corrected data


def check_place(data: str, out: Path) -> None:
    """Refuse a place that holds something, or that is inside of the folder of the photos."""
    if out.suffix == ".csv":
        if os.path.lexists(out) or not out.absolute().parent.is_dir():
            raise Problem(f"--out {out}: must be a new file in a folder that exists")
        return
    check_empty(out, "--out")
    folder = Path(scheme_and_place(data)[1].partition("?")[0])
    if folder.is_dir() and folder.resolve() in out.resolve().parents:
        raise Problem(f"--out {out}: is inside of {folder}, the folder of the photos; choose a place outside of it")


def write_folder(out: Path, photos: Sequence[Photo]) -> str:
    """Write links in class folders, or labels.csv where photos have no label or several; returns --data for it."""
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if all(len(photo.labels) == 1 and _is_folder_name(photo.labels[0]) for photo in photos):
        for photo in photos:
            _place_photo(part / photo.split / photo.labels[0], photo)
        text = f"folder:{out}"
    else:
        files = [photo.path or str(_place_photo(part / photo.split, photo).relative_to(part)) for photo in photos]
        text = f"csv:{out / 'labels.csv'}{_write_list(part / 'labels.csv', files, photos)}"
    if out.is_dir():
        out.rmdir()  # it is empty
    part.replace(out)
    return text


def write_csv(out: Path, photos: Sequence[Photo]) -> str:
    """Write a list of the photos; returns --data for it."""
    files = [photo.path for photo in photos if photo.path is not None]
    if len(files) < len(photos):
        raise Problem(f"--out {out}: these photos are in no files of their own; give a folder, which gets a copy")
    return f"csv:{out}{_write_list(out, files, photos)}"


def _write_list(path: Path, files: Sequence[str], photos: Sequence[Photo]) -> str:
    """Write a CSV file that `csv:` reads; returns the option that goes behind its name."""
    for text in (*files, *(name for photo in photos for name in photo.labels)):
        if text != text.strip() or shown_text(text) != text:
            raise Problem(f"--out {path}: a CSV file cannot hold the name {shown_text(text)!r}; rename it")
    several = any(len(photo.labels) > 1 for photo in photos)
    names = {name for photo in photos for name in photo.labels}
    separator = next((mark for mark in SEPARATORS if not any(mark in name for name in names)), None)
    if several and separator is None:
        raise Problem(f"--out {path}: class names hold all of {SEPARATORS[:-1]}; rename a class")
    with whole_file(path) as part, part.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["file", "labels" if several else "label", "split"])
        table.writerows(
            [file, (separator or ";").join(photo.labels), photo.split]
            for file, photo in zip(files, photos, strict=True)
        )
    return f"?separator={separator}" if several else ""


def _is_folder_name(label: str) -> bool:
    return all(part and not part.startswith(".") for part in label.split("/")) and "\0" not in label


def _place_photo(folder: Path, photo: Photo) -> Path:
    """A link to the photo's file in a folder, or a copy where there is no file or no link can be made."""
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(photo.path or str(photo.images.ids[photo.row])).name
    try:
        content = None if photo.path else photo.images.content(photo.row)
    except BadImage:
        content = b""
    if content is not None and not isinstance(content, bytes):
        from PIL import Image

        stream = io.BytesIO()
        Image.fromarray(content.permute(1, 2, 0).contiguous().numpy()).save(stream, format="PNG")
        content, name = stream.getvalue(), f"{Path(name).stem}.png"
    elif content is not None:
        name = f"{Path(name).stem}{_ending(content)}"
    place, number = folder / name, 1
    while os.path.lexists(place):
        number += 1
        place = folder / f"{Path(name).stem}-{number}{Path(name).suffix}"
    if content is not None:
        place.write_bytes(content)
        return place
    source = Path(str(photo.path))
    try:
        place.symlink_to(source)
    except OSError:
        shutil.copyfile(source, place)
    return place


def _ending(content: bytes) -> str:
    """The file ending of an image."""
    endings = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
    return next((ending for start, ending in endings.items() if content.startswith(start)), ".jpg")


def say_clean(summary: dict[str, Any]) -> str:
    """What the command prints."""
    return (
        f"Photos with other labels: {summary['relabelled']:,}; left out: {summary['left_out']:,}; "
        f"in the corrected data: {summary['photos']:,}.\n{summary['sentence']}\n"
        f"Next:  {shlex.join(['finetune-mile', 'run', '--init', summary['init'], '--data', summary['data']])}\n"
    )
