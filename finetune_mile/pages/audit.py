"""audit.html: the lists of an audit with thumbnails, to tick and export. It works from file://, without a server.

The page has the rows in files beside it, because pages cannot read files there; scripts they can. Names of files and
classes come into the page as JSON, and are shown as text.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from markupsafe import Markup
from PIL import Image

from finetune_mile.core.console import progress
from finetune_mile.core.cores import usable_cores
from finetune_mile.core.files import whole_file
from finetune_mile.core.problems import BadImage
from finetune_mile.images.pipeline import PIL_ERRORS, from_pil
from finetune_mile.images.sets import ImageSet
from finetune_mile.pages.report import TEMPLATES, write_page

SIDE = 176  # pixels of a thumbnail, at most
QUALITY = 72
IN_FIRST, IN_FILE = 240, 2000  # rows of the file that the page waits for, and of the others
MOST_ROWS = 20_000  # on the page; audit.csv has all
FOLDER = 1000  # thumbnails
BLOCK = 256
SAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class Shown(Protocol):
    """The photos of an audit."""

    @property
    def ids(self) -> Sequence[str]: ...
    @property
    def paths(self) -> Sequence[str]: ...
    @property
    def places(self) -> Sequence[tuple[str, int]]: ...
    def images(self, photo: int) -> tuple[ImageSet, int]: ...


def write_audit_page(
    out: Path, facts: Mapping[str, Any], photos: Shown, rows: Sequence[Mapping[str, Any]], tick: Callable[[], None]
) -> None:
    """Write audit.html, its rows and its thumbnails.

    Args:
        out: the folder.
        facts: the content of audit.json.
        photos: all of them.
        rows: the findings, as dicts of `Finding`, in their order.
        tick: called between thumbnails; it may raise to stop.
    """
    rows = rows[:MOST_ROWS]
    shown = {row["photo"] for row in rows} | {row["other"] for row in rows if row["other"] is not None}
    write_thumbnails(out / "thumbs", photos, sorted(shown), tick)
    kinds, splits = list(facts["counts"]), ["train", "val"]
    number = {name: i for i, name in enumerate(facts["classes"])}
    prefix = prefixes(photos)

    def packed(row: Mapping[str, Any]) -> list[Any]:
        photo, other = row["photo"], row["other"]
        split, name, path = photos.places[photo][0], shown_text(photos.ids[photo]), shown_text(photos.paths[photo])
        return [
            kinds.index(row["kind"]), photo, [number[each] for each in row["given"]],
            [number[each] for each in row["suggested"]], _short(row["probability_given"]),
            _short(row["probability_suggested"]), _short(row["probability_wrong"]), splits.index(split), name,
            "" if prefix[split] + name == path else path, other,
            None if other is None else shown_text(photos.paths[other]),
        ]  # fmt: skip

    cuts = [0, IN_FIRST, *range(IN_FIRST + IN_FILE, len(rows) + IN_FILE, IN_FILE)]
    files: list[str] = []
    for start, end in itertools.pairwise(cuts):
        if start < len(rows):
            files.append(f"rows/{len(files)}.js")
            path = out / files[-1]
            path.parent.mkdir(exist_ok=True)
            with whole_file(path) as part:
                part.write_text(f"rows({as_script([packed(row) for row in rows[start:end]])});\n", encoding="utf-8")
    page = {
        "classes": facts["classes"], "kinds": kinds, "splits": splits, "several": facts["several"], "prefix": prefix,
        "counts": facts["counts"], "shown": {kind: sum(row["kind"] == kind for row in rows) for kind in kinds},
        "about": facts["about"], "files": files[1:], "first": len(files),
        "audit": str(out.resolve()), "store": f"finetune-mile-audit {facts['request']['labels'][:24]}",
    }  # fmt: skip
    script = TEMPLATES.loader.get_source(TEMPLATES, "audit.js")[0] if TEMPLATES.loader else ""
    write_page(
        out / "audit.html", "audit.html", title=f"{shown_text(facts['name'])}: audit", sentences=facts["sentences"],
        facts=facts, facts_json=Markup(as_script(page)), script=Markup(script), first=files[:1],
    )  # fmt: skip


def prefixes(photos: Shown) -> dict[str, str]:
    """For each split what most paths have before the id."""
    found = {"train": "", "val": ""}
    for (split, _), name, path in zip(
        reversed(photos.places), reversed(photos.ids), reversed(photos.paths), strict=True
    ):
        if path.endswith(f"/{name}"):
            found[split] = shown_text(path[: -len(name)])
    return found


def _short(value: float | None) -> float | None:
    return None if value is None or value != value else round(value, 4)


def as_script(value: object) -> str:
    """JSON that may stand in a script element of a page."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escaped in SAFE.items():
        text = text.replace(character, escaped)
    return text


def shown_text(name: str) -> str:
    """A name of a file as text that can be written as UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# ------------------------------------------------------------------------------------ thumbnails


def write_thumbnails(folder: Path, photos: Shown, shown: Sequence[int], tick: Callable[[], None]) -> None:
    """A small JPEG of each photo; those that are there are kept, and photos that cannot be read have none."""
    todo = [photo for photo in shown if not _place(folder, photo).is_file()]
    for number in {photo // FOLDER for photo in todo}:
        (folder / str(number)).mkdir(parents=True, exist_ok=True)

    def write(photo: int) -> None:
        images, row = photos.images(photo)
        try:
            small = thumbnail(images, row)
        except BadImage:
            small = Image.new("RGB", (8, 8), (128, 128, 128))
        with whole_file(_place(folder, photo)) as part:
            small.save(part, format="JPEG", quality=QUALITY)

    with progress("thumbnails", len(todo)) as advance, ThreadPoolExecutor(usable_cores()) as pool:
        for at in range(0, len(todo), BLOCK):
            list(pool.map(write, todo[at : at + BLOCK]))
            advance(len(todo[at : at + BLOCK]))
            tick()


def _place(folder: Path, photo: int) -> Path:
    return folder / str(photo // FOLDER) / f"{photo}.jpg"


def thumbnail(images: ImageSet, row: int) -> Image.Image:
    """A photo, reduced and upright; raises BadImage."""
    content = images.content(row)
    try:
        if isinstance(content, bytes):
            with Image.open(io.BytesIO(content)) as photo:
                photo.draft("RGB", (2 * SIDE, 2 * SIDE))
                pixels = from_pil(photo).permute(1, 2, 0).numpy()
        else:
            pixels = content.permute(1, 2, 0).contiguous().numpy()
        small = Image.fromarray(pixels)
        small.thumbnail((SIDE, SIDE))
    except PIL_ERRORS as error:
        raise BadImage(str(error)) from error
    return small
