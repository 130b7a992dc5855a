"""Encoded bytes to one kind of tensor, whatever the file: every source decodes here and nowhere else."""

from __future__ import annotations

import io
import struct
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode

_JPEG = b"\xff\xd8\xff"
MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**26)  # 179 million: what PIL refuses by itself is refused for JPEGs too
# Markers of a frame header, which holds the size: SOF0 to SOF15 without DHT (c4), JPG (c8) and DAC (cc).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers that have no length (RST, SOI, EOI, TEM), the scan (SOS), and 0, which is none: no frame header came before.
_ENDS = frozenset([*range(0xD0, 0xDB), 0x00, 0x01])
_REFUSALS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    struct.error,
    Image.DecompressionBombError,
)


class BadImage(Exception):
    """An image that cannot be read or decoded; the text says why."""


def decode(data: bytes) -> Tensor:
    """Any image file to RGB, uint8 (3, H, W), upright.

    Grey becomes three equal channels; CMYK and palettes are converted; 16 bits keep the upper 8; a rotation in the EXIF
    header is carried out; alpha is dropped, as PIL's `convert("RGB")` does; of an animation the first frame is taken.
    JPEGs, by their first bytes and not by their name, go through torchvision, which equals PIL bit for bit.

    Raises:
        BadImage: where the bytes are no image, only the beginning of one, or one of more than `MOST_PIXELS`.
    """
    if data.startswith(_JPEG) and _jpeg_is_clear(data):
        try:
            # The operator itself: torchvision 0.29's function around it warns of its own end at every call. Where
            # the operator is gone as well, PIL does the work.
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            image: Tensor = torch.ops.image.decode_jpeg(encoded, ImageReadMode.RGB.value, True)
            return image
        except (RuntimeError, AttributeError):  # some rare JPEGs only PIL can read; a broken one it refuses in words
            return _by_pil(data)
    return _by_pil(data)


def _jpeg_is_clear(data: bytes) -> bool:
    """Find the size in a JPEG's header, before a decoder that has no limit allocates the pixels.

    Returns False where the header is not a plain list of segments up to the frame header: PIL, which has a limit,
    decodes such files.

    Raises:
        BadImage: there are more than `MOST_PIXELS`.
    """
    at, end = 2, len(data) - 9
    while at < end and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in _FRAMES:
            height, width = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
            if height * width > MOST_PIXELS:
                raise BadImage(f"{width:,} x {height:,} pixels are too many (at most {MOST_PIXELS:,})")
            return True
        elif marker in _ENDS:
            return False
        else:
            length = data[at + 2] << 8 | data[at + 3]
            if length < 2:
                return False
            at += 2 + length
    return False


def _by_pil(data: bytes) -> Tensor:
    if not data:
        raise BadImage("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about EXIF and palettes that are read all the same
            with Image.open(io.BytesIO(data)) as opened:
                opened.load()
                pixels = np.array(_eight_bits(ImageOps.exif_transpose(opened)).convert("RGB"))
    except _REFUSALS as error:
        raise BadImage(str(error).partition("<_io")[0].strip() or type(error).__name__) from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey images of 16 bits, which PIL would clip, by their upper 8."""
    if image.mode.startswith("I"):
        values = np.array(image).astype(np.int64)
        if image.mode != "I" or values.max(initial=0) > 255:
            values = values >> 8
        return Image.fromarray(values.clip(0, 255).astype(np.uint8))
    return image


def from_pil(image: Image.Image) -> Tensor:
    """A PIL image to what `decode` makes of its file: RGB, uint8 (3, H, W), upright."""
    pixels = np.array(_eight_bits(ImageOps.exif_transpose(image)).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
