"""`finetune-mile pack SRC OUT`: images resized once, in WebDataset shards, for disks and cores that are the limit.

A shard is a tar of KEY.jpg, KEY.cls (the class number; absent where images have several labels or none) and KEY.json
(`id`, `label` or `labels`). `wds:OUT` reads it back in place with the same ids, `hf:OUT` through `datasets`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.config.flags import Parser
from finetune_mile.core.console import progress
from finetune_mile.core.files import locked, whole_file, write_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.index import write_list
from finetune_mile.images.sources import load_data, split_name
from finetune_mile.images.tars import STATE, read_state

if TYPE_CHECKING:
    from finetune_mile.images.index import Data, ImageSet

LOCK, BAD = ".pack.lock", "bad_images.csv"
BadList = list[tuple[str, str, str]]  # split, id, reason


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 fine, 2 the command or its input was wrong."""
    parser = Parser(
        prog="finetune-mile pack", allow_abbrev=False,
        description="Write resized images into WebDataset shards. Run the same command again to continue.",
        epilog="example: finetune-mile pack folder:photos photos-256        then: --data wds:photos-256",
    )  # fmt: skip
    parser.add_argument("source", metavar="SRC", help="as --data of `run`: folder:DIR, imagenet:DIR, hf:NAME, ...")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory for the shards")
    parser.add_argument("--size", type=int, default=256, help="short side in pixels; smaller images stay (default 256)")
    parser.add_argument("--quality", type=int, default=95, help="JPEG quality of what is resized (default 95)")
    parser.add_argument("--shard", type=int, default=2000, help="images in a tar file (default 2000)")
    parser.add_argument("--workers", type=int, help="threads (default: the cores)")
    options = parser.parse_args(argv)
    for name, low, high in (("size", 8, 8192), ("quality", 1, 100), ("shard", 1, 10**6)):
        if not low <= getattr(options, name) <= high:
            raise Problem(f"--{name} {getattr(options, name)}: must be from {low} to {high}")
    if options.out.exists() and not options.out.is_dir():
        raise Problem(f"{options.out}: is a file; name a directory for the shards")
    split_name(options.source)
    data = load_data(options.source, need_labels=False)
    _check_ours(options.out)
    with alone(options.out):
        sys.stdout.write(_pack(options, data) + "\n")
    return 0


def _check_ours(out: Path) -> None:
    """Refuse a directory that holds other things; what a pack left that was killed at its very beginning is ours."""
    if not out.is_dir() or (out / STATE).is_file():
        return
    if any(path.name not in (f".{STATE}.part", LOCK) for path in out.iterdir()):
        raise Problem(f"{out}: the directory is not empty and has no shards of finetune-mile; choose another directory")


def alone(out: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the directory: two packs would write the same files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(f"{out}: cannot be written ({error.strerror}); choose another directory") from error
    return locked(out / LOCK, f"{out}: another finetune-mile pack is writing there; wait for it", seconds=0)


def _pack(options: argparse.Namespace, data: Data) -> str:
    """Write all shards that are not there yet; returns what to tell the user."""
    from finetune_mile.images.pipeline import default_workers

    out: Path = options.out
    state = _begin(options, data)
    message = f"{out} is complete already"
    if not state["complete"]:
        bad: BadList = []
        workers = default_workers(1) if options.workers is None else options.workers
        for split, images in (("train", data.train), ("val", data.val)):
            bad += write_split(options, split, images, data.classes, workers)
        if bad:
            write_list(out / BAD, bad)
        write_json(out / STATE, state | {"complete": True})
        size = sum(path.stat().st_size for path in out.glob("*.tar"))
        message = (
            f"{len(data.train) + len(data.val) - len(bad):,} images in {size / 1e9:.2f} GB; use them with "
            f"--data {shlex.quote(f'wds:{out}')}{f' ({len(bad)} could not be read: bad_images.csv)' if bad else ''}"
        )
    # What only an unfinished pack needs; the lock too, since nobody writes into a complete one.
    for pattern in ("*.tar.bad.json", ".*.tar.part", f".{STATE}.part", f".{BAD}.part", LOCK):
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)
    return message


def _begin(options: argparse.Namespace, data: Data) -> dict[str, Any]:
    """Write what is packed here, or make sure that what is there came from the same command."""
    from finetune_mile.images.splits import fingerprint

    state: dict[str, Any] = {
        "name": data.name, "classes": list(data.classes),
        "size": options.size, "quality": options.quality, "shard": options.shard,
        "train": [len(data.train), fingerprint(data.train.ids)], "val": [len(data.val), fingerprint(data.val.ids)],
        "complete": False,
    }  # fmt: skip
    path = options.out / STATE
    if path.is_file():
        before = read_state(path)
        if before | {"complete": False} != state:
            raise Problem(f"{options.out}: holds shards of other images or settings; choose another directory")
        return before
    write_json(path, state)
    return state


def write_split(
    options: argparse.Namespace, split: str, images: ImageSet, classes: tuple[str, ...], workers: int
) -> BadList:
    """Write the shards of a split that are not there yet, each complete or not at all; returns the bad images."""
    bad: BadList = []
    title = f"packing {split}"
    with ThreadPoolExecutor(max(workers, 1)) as pool, progress(title, len(images)) as advance:
        for number, first in enumerate(range(0, len(images), options.shard)):
            rows = range(first, min(first + options.shard, len(images)))
            path = options.out / f"{split}-{number:06d}.tar"
            listed = options.out / f"{path.name}.bad.json"
            if path.is_file():
                bad += [tuple(line) for line in json.loads(listed.read_text("utf-8"))] if listed.is_file() else []
                advance(len(rows))
                continue
            packed = pool.map(lambda row: pack_image(images, row, options.size, options.quality), rows)
            with whole_file(path) as part:
                reasons = _write_shard(part, images, classes, zip(rows, packed, strict=True), advance)
                if reasons:
                    write_json(listed, [(split, images.ids[row], reason) for row, reason in reasons.items()])
                else:
                    listed.unlink(missing_ok=True)  # of a pack that was killed here, before the image was mended
            bad += [(split, images.ids[row], reason) for row, reason in reasons.items()]
    return bad


def _write_shard(
    path: Path,
    images: ImageSet,
    classes: tuple[str, ...],
    packed: Iterator[tuple[int, bytes | str]],
    advance: Callable[[int], None],
) -> dict[int, str]:
    """Write one tar; returns which images were bad, and why."""
    bad = {}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for row, content in packed:
            if isinstance(content, str):
                bad[row] = content
            else:
                for name, member in _members(images, row, content, classes):
                    info = tarfile.TarInfo(name)
                    info.size = len(member)
                    archive.addfile(info, io.BytesIO(member))
            advance(1)
    return bad


def _members(images: ImageSet, row: int, jpeg: bytes, classes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
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


def pack_image(images: ImageSet, index: int, size: int, quality: int) -> bytes | str:
    """JPEG bytes with a short side of at most `size`, a small JPEG unchanged; or why the image is bad."""
    from PIL import Image
    from torchvision.transforms.v2 import functional as tv

    from finetune_mile.core.problems import BadImage
    from finetune_mile.images.pipeline import decode

    try:
        content = b"" if images.encoded is None else images.encoded(index)
        image = images.read(index) if images.encoded is None else decode(content)
    except BadImage as error:
        return str(error)
    height, width = image.shape[-2:]
    share = size / min(height, width)
    if share >= 1 and content.startswith(b"\xff\xd8\xff"):
        return content
    if share < 1:
        shape = [max(size, round(height * share)), max(size, round(width * share))]
        image = tv.resize(image, shape, antialias=True)
    stream = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(stream, format="JPEG", quality=quality)
    return stream.getvalue()
