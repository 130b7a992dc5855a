"""Images resized once, in WebDataset shards, for disks and cores that are the limit: what `pack` does.

A shard is a tar of KEY.jpg, KEY.cls (the class number; absent where images have several labels or none) and KEY.json
(`id`, `label` or `labels`). `wds:OUT` reads it back in place with the same ids, `hf:OUT` through `datasets`.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torchvision.transforms.v2 import functional as tv

from finetune_mile.core.console import progress
from finetune_mile.core.files import locked, whole_file, write_json
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images.bad_images import write_list
from finetune_mile.images.pipeline import decode, default_workers
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.sources.wds import STATE, read_state
from finetune_mile.images.splits import fingerprint

LOCK, BAD = ".pack.lock", "bad_images.csv"
BadList = list[tuple[str, str, str]]  # split, id, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where shards go, and what is in them."""

    out: Path
    size: int = 256  # short side in pixels; smaller images stay
    quality: int = 95  # of the JPEGs that are resized
    shard: int = 2000  # images in a tar file
    workers: int | None = None  # threads; None: the cores

    def pack(self, data: Data) -> str:
        """Write all shards that are not there yet; returns what to tell the user."""
        _check_ours(self.out)
        with alone(self.out):
            state = self._begin(data)
            message = f"{self.out} is complete already"
            if not state["complete"]:
                bad = [*self.write_split("train", data.train, data), *self.write_split("val", data.val, data)]
                if bad:
                    write_list(self.out / BAD, bad)
                write_json(self.out / STATE, state | {"complete": True})
                size = sum(path.stat().st_size for path in self.out.glob("*.tar"))
                unread = f" ({len(bad)} could not be read: bad_images.csv)" if bad else ""
                message = (
                    f"{len(data.train) + len(data.val) - len(bad):,} images in {size / 1e9:.2f} GB; use them with "
                    f"--data {shlex.quote(f'wds:{self.out}')}{unread}"
                )
            # What only an unfinished pack needs; the lock too, since nobody writes into a complete one.
            for pattern in ("*.tar.bad.json", ".*.tar.part", f".{STATE}.part", f".{BAD}.part", LOCK):
                for path in self.out.glob(pattern):
                    path.unlink(missing_ok=True)
        return message

    def _begin(self, data: Data) -> dict[str, Any]:
        """Write what is packed here, or make sure that what is there came from the same command."""
        state: dict[str, Any] = {
            "name": data.name, "classes": list(data.classes),
            "size": self.size, "quality": self.quality, "shard": self.shard,
            "train": [len(data.train), fingerprint(data.train.ids)], "val": [len(data.val), fingerprint(data.val.ids)],
            "complete": False,
        }  # fmt: skip
        path = self.out / STATE
        if not path.is_file():
            write_json(path, state)
            return state
        before = read_state(path)
        if before | {"complete": False} != state:
            raise Problem(f"{self.out}: holds shards of other images or settings; choose another directory")
        return before

    def write_split(self, split: str, images: ImageSet, data: Data) -> BadList:
        """Write the shards of a split that are not there yet, each complete or not at all; returns the bad images."""
        bad: BadList = []
        workers = default_workers(1) if self.workers is None else max(self.workers, 1)
        with ThreadPoolExecutor(workers) as pool, progress(f"packing {split}", len(images)) as advance:
            for number, first in enumerate(range(0, len(images), self.shard)):
                rows = range(first, min(first + self.shard, len(images)))
                path = self.out / f"{split}-{number:06d}.tar"
                listed = self.out / f"{path.name}.bad.json"
                if path.is_file():
                    bad += [tuple(line) for line in json.loads(listed.read_text("utf-8"))] if listed.is_file() else []
                    advance(len(rows))
                    continue
                packed = pool.map(lambda row: pack_image(images, row, self.size, self.quality), rows)
                found: BadList = []
                with whole_file(path) as part:
                    with tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as archive:
                        for row, content in zip(rows, packed, strict=True):
                            if isinstance(content, str):
                                found.append((split, images.ids[row], content))
                            else:
                                _add_members(archive, images, row, content, data.classes)
                            advance(1)
                    write_json(listed, found)
                bad += found
        return bad


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


def _add_members(archive: tarfile.TarFile, images: ImageSet, row: int, jpeg: bytes, classes: tuple[str, ...]) -> None:
    """Add the files of one sample; the key is the number of the image, since ids may be long and have dots."""
    given, note = images.given[row], dict[str, Any](id=images.ids[row])
    members = {"jpg": jpeg}
    if given.ndim:
        note["labels"] = [classes[k] for k in (given > 0).nonzero().flatten().tolist()]
    elif int(given) >= 0:
        note["label"] = classes[int(given)]
        members["cls"] = str(int(given)).encode()
    members["json"] = json.dumps(note).encode()
    for ending, content in members.items():
        info = tarfile.TarInfo(f"{row:09d}.{ending}")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))


def pack_image(images: ImageSet, index: int, size: int, quality: int) -> bytes | str:
    """JPEG bytes with a short side of at most `size`, a small JPEG unchanged; or why the image is bad."""
    try:
        content = images.content(index)
        image = decode(content) if isinstance(content, bytes) else content
    except BadImage as error:
        return str(error)
    height, width = image.shape[-2:]
    share = size / min(height, width)
    if share >= 1 and isinstance(content, bytes) and content.startswith(b"\xff\xd8\xff"):
        return content
    if share < 1:
        shape = [max(size, round(height * share)), max(size, round(width * share))]
        image = tv.resize(image, shape, antialias=True)
    stream = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(stream, format="JPEG", quality=quality)
    return stream.getvalue()
