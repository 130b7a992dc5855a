"""Copies of images with their labels drawn on them: `predict --annotate`."""

from __future__ import annotations

import io
from itertools import count
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from finetune_mile.core.files import write_whole
from finetune_mile.core.problems import LONGEST_SHOWN, BadImage, Failed, inert
from finetune_mile.images.scans import ENDINGS
from finetune_mile.images.sets import ImageSet
from finetune_mile.measures.labels import Labels

SMALLEST, MOST_DRAWN = 320, 6  # width of a copy, and labels drawn on it


def target_of(folder: Path, name: str, taken: set[Path]) -> Path:
    """A file for the annotated copy: the image's path below `folder`, with a number where two would be the same."""
    parts = [part for part in Path(name).parts if part not in ("..", Path(name).anchor)]
    path = folder.joinpath(*parts)
    ending = path.suffix if path.suffix.lower() in ENDINGS else f"{path.suffix}.jpg"
    numbered = (path.with_name(f"{path.stem}{f'-{n}' if n > 1 else ''}{ending}") for n in count(1))
    target = next(path for path in numbered if path not in taken)
    taken.add(target)
    return target


def write_copy(images: ImageSet, index: int, labels: Labels, folder: Path, taken: set[Path]) -> None:
    """Write a copy of an image with its labels below `folder`; the files that are `taken` stay."""
    target = target_of(folder, images.ids[index], taken)
    try:
        annotate(images.read(index), labels, target)
    except (OSError, BadImage) as error:
        raise Failed(f"--annotate: {target} cannot be written: {error}") from error


def annotate(image: Tensor, labels: Labels, path: Path) -> None:
    """Write a copy of an image (3, H, W) uint8 with its first labels in the upper left corner; small ones enlarged."""
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    if picture.width < SMALLEST:
        scale = -(-SMALLEST // picture.width)
        picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    size = max(picture.width // 32, 12)
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)  # no Path: Pillow 10.0
    draw = ImageDraw.Draw(picture)
    for row, (label, p, _) in enumerate(labels[:MOST_DRAWN]):
        left, top = size // 2, size // 2 + row * (size * 3 // 2)
        text = f"{inert(label, LONGEST_SHOWN)} {p:.2f}"
        draw.rectangle((left, top, left + draw.textlength(text, font) + size // 2, top + size * 4 // 3), fill="black")
        draw.text((left + size // 4, top), text, fill="white", font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    picture.save(content, Image.registered_extensions()[path.suffix.lower()], quality=92)
    write_whole(path, content.getvalue())
