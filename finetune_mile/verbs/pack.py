"""`finetune-mile pack SRC OUT`: images resized once, in WebDataset shards, for disks and cores that are the limit.

A shard is a tar of KEY.jpg, KEY.cls (the class number; absent where images have several labels or none) and KEY.json
(`id`, `label` or `labels`). `wds:OUT` reads it back in place with the same ids, `hf:OUT` through `datasets`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.config.flags import Parser
from finetune_mile.core.files import locked, write_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import load_data, split_name
from finetune_mile.images.sources.wds import STATE, read_state

if TYPE_CHECKING:
    from finetune_mile.images.index import Data, ImageSet

LOCK, BAD = ".pack.lock", "bad_images.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What becomes of an image."""

    size: int  # short side
    quality: int  # of JPEGs that are written anew
    shard: int  # images in a tar


def build_parser() -> Parser:
    """The flags."""
    parser = Parser(
        prog="finetune-mile pack", allow_abbrev=False,
        description="Write images, resized to a short side, into WebDataset shards. Run again to go on after a stop.",
    )  # fmt: skip
    parser.add_argument("source", metavar="SRC", help="as --data of run.py: folder:DIR, imagenet:DIR, hf:NAME, ...")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory for the shards")
    parser.add_argument("--size", type=int, default=256, help="short side in pixels; smaller images stay (default 256)")
    parser.add_argument("--quality", type=int, default=95, help="JPEG quality of what is resized (default 95)")
    parser.add_argument("--shard", type=int, default=2000, help="images in a tar file (default 2000)")
    parser.add_argument("--workers", type=int, help="threads (default: the cores)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 fine, 2 the command or its input was wrong."""
    options = build_parser().parse_args(argv)
    _check(options)
    split_name(options.source)
    how = How(size=options.size, quality=options.quality, shard=options.shard)
    data = load_data(options.source)
    _check_ours(options.out)
    with alone(options.out):
        return _pack(options, data, how)


def _pack(options: argparse.Namespace, data: Data, how: How) -> int:
    state = begin(options.out, data, how)
    if state["complete"]:
        _clean(options.out)
        sys.stdout.write(f"{options.out} is complete already\n")
        return 0
    bad: list[tuple[str, str, str]] = []
    from finetune_mile.images.pipeline import default_workers

    workers = default_workers(1) if options.workers is None else options.workers
    for split, images in (("train", data.train), ("val", data.val)):
        bad += write_split(options.out, split, images, data.classes, how, workers)
    if bad:
        from finetune_mile.images.index import write_list

        write_list(options.out / BAD, bad)
    write_json(options.out / STATE, state | {"complete": True})
    _clean(options.out)
    size = sum(path.stat().st_size for path in options.out.glob("*.tar"))
    sys.stdout.write(
        f"{len(data.train) + len(data.val) - len(bad):,} images in {size / 1e9:.2f} GB; use them with "
        f"--data wds:{options.out}{f' ({len(bad)} could not be read: bad_images.csv)' if bad else ''}\n"
    )
    return 0


def _check(options: argparse.Namespace) -> None:
    for name, low, high in (("size", 8, 8192), ("quality", 1, 100), ("shard", 1, 10**6)):
        if not low <= getattr(options, name) <= high:
            raise Problem(f"--{name} {getattr(options, name)}: must be from {low} to {high}")
    if options.out.exists() and not options.out.is_dir():
        raise Problem(f"{options.out}: is a file; name a directory for the shards")


def _check_ours(out: Path) -> None:
    """Refuse a directory that holds other things; what a pack left that was killed at its very beginning is ours."""
    if not out.is_dir() or (out / STATE).is_file():
        return
    if any(path.name not in (f".{STATE}.part", LOCK) for path in out.iterdir()):
        raise Problem(f"{out}: is not empty and holds no shards of ours; choose another directory")


def alone(out: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the directory: two packs would write the same files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(f"{out}: cannot be written ({error.strerror}); choose another directory") from error
    return locked(out / LOCK, f"{out}: another finetune-mile pack is writing there; wait for it", seconds=0)


def _clean(out: Path) -> None:
    """Remove what only an unfinished pack needs; the lock too, since nobody writes into a complete one."""
    patterns = ("*.tar.bad.json", ".*.tar.part", f".{STATE}.part", f".{BAD}.part", LOCK)
    for path in [path for pattern in patterns for path in out.glob(pattern)]:
        path.unlink(missing_ok=True)


def begin(out: Path, data: Data, how: How) -> dict[str, Any]:
    """Write what is packed here, or make sure that what is there came from the same command."""
    from finetune_mile.images.splits import fingerprint

    state: dict[str, Any] = {
        "name": data.name, "classes": list(data.classes), "size": how.size, "quality": how.quality, "shard": how.shard,
        "train": [len(data.train), fingerprint(data.train.ids)], "val": [len(data.val), fingerprint(data.val.ids)],
        "complete": False,
    }  # fmt: skip
    path = out / STATE
    if path.is_file():
        found = read_state(path)
        if found | {"complete": False} != state:
            raise Problem(f"{out}: holds shards of other images or settings; choose another directory")
        return dict(found)
    write_json(path, state)
    return state


def write_split(
    out: Path, split: str, images: ImageSet, classes: tuple[str, ...], how: How, workers: int
) -> list[tuple[str, str, str]]:
    """Write the shards of a split that are not there yet, each whole or not at all; returns what was bad."""
    from rich.console import Console
    from rich.progress import Progress

    bad: list[tuple[str, str, str]] = []
    with ThreadPoolExecutor(max(workers, 1)) as pool, Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"packing {split}", total=len(images))
        for number, first in enumerate(range(0, len(images), how.shard)):
            rows = range(first, min(first + how.shard, len(images)))
            path = out / f"{split}-{number:06d}.tar"
            listed = out / f"{path.name}.bad.json"
            if path.is_file():
                bad += [tuple(line) for line in json.loads(listed.read_text("utf-8"))] if listed.is_file() else []
                bar.advance(task, len(rows))
                continue
            part = path.with_name(f".{path.name}.part")
            found: list[tuple[str, str, str]] = []
            with tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as archive:
                for row, packed in zip(rows, pool.map(lambda i: pack_image(images, i, how), rows), strict=True):
                    if isinstance(packed, str):
                        found.append((split, images.ids[row], packed))
                    else:
                        for name, content in members(images, row, packed, classes):
                            info = tarfile.TarInfo(name)
                            info.size = len(content)
                            archive.addfile(info, io.BytesIO(content))
                    bar.advance(task)
            if found:
                write_json(listed, found)
            else:
                listed.unlink(missing_ok=True)  # of a pack that was killed here, before the image was mended
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.replace(path)
            bad += found
    return bad


def pack_image(images: ImageSet, index: int, how: How) -> bytes | str:
    """JPEG bytes with the short side resized; a small JPEG as it is; or why the image is bad."""
    from finetune_mile.core.problems import BadImage
    from finetune_mile.images.pipeline import decode

    try:
        data = b"" if images.encoded is None else images.encoded(index)
        image = images.read(index) if images.encoded is None else decode(data)
    except BadImage as error:
        return str(error)
    height, width = image.shape[-2:]
    if min(height, width) <= how.size and data.startswith(b"\xff\xd8\xff"):
        return data
    return encode(image, how)


def encode(image: Any, how: How) -> bytes:
    """A tensor (3, H, W) to JPEG, its short side at most `how.size`."""
    from PIL import Image
    from torchvision.transforms.v2 import functional as tv

    height, width = image.shape[-2:]
    share = how.size / min(height, width)
    if share < 1:
        shape = [max(how.size, round(height * share)), max(how.size, round(width * share))]
        image = tv.resize(image, shape, antialias=True)
    stream = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(stream, format="JPEG", quality=how.quality)
    return stream.getvalue()


def members(images: ImageSet, row: int, jpeg: bytes, classes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """The files of one sample; the key is the number of the image, since ids may be long and have dots."""
    key, given = f"{row:09d}", images.given[row]
    note: dict[str, Any] = {"id": images.ids[row]}
    yield f"{key}.jpg", jpeg
    if given.ndim:
        note["labels"] = [classes[k] for k in (given > 0).nonzero().flatten().tolist()]
    elif int(given) >= 0:
        note["label"] = classes[int(given)]
        yield f"{key}.cls", str(int(given)).encode()
    yield f"{key}.json", json.dumps(note).encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
