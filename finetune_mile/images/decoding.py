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
        BadImage: where the bytes are no image, or only the beginning of one.
    """
    if data.startswith(_JPEG):
        try:
            # The operator itself: torchvision 0.29's function around it warns of its own end at every call. Where
            # the operator is gone as well, PIL does the work.
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            image: Tensor = torch.ops.image.decode_jpeg(encoded, ImageReadMode.RGB.value, True)
            return image
        except (RuntimeError, AttributeError):  # some rare JPEGs only PIL can read; a broken one it refuses in words
            return _by_pil(data)
    return _by_pil(data)


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
