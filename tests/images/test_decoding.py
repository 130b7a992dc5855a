"""Whatever the file, the tensor is the same kind: RGB, uint8, upright."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from finetune_mile.core.problems import BadImage
from finetune_mile.images.pipeline import decode


def encoded(image, **how):
    stream = io.BytesIO()
    image.save(stream, **how)
    return stream.getvalue()


@pytest.fixture(scope="module")
def photo():
    y, x = np.mgrid[0:40, 0:60]
    return Image.fromarray(np.stack([x * 4, y * 6, (x + y) * 2], -1).astype(np.uint8))


def plain(image):
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_is_what_pil_reads(photo, mode):
    data = encoded(photo.convert(mode), format="JPEG", quality=95)
    image = decode(data)
    assert image.dtype == torch.uint8
    assert image.shape == (3, 40, 60)
    assert image.equal(plain(Image.open(io.BytesIO(data))))


def test_lossless_formats_keep_every_pixel(photo):
    for how in ({"format": "PNG"}, {"format": "WEBP", "lossless": True}, {"format": "BMP"}, {"format": "TIFF"}):
        assert decode(encoded(photo, **how)).equal(plain(photo)), how


def test_a_palette_with_transparency_keeps_its_colours(photo):
    palette = photo.quantize(16)
    data = encoded(palette, format="PNG", transparency=bytes([0, 128] + [255] * 14))
    assert decode(data).equal(plain(palette))
    assert decode(encoded(photo.convert("RGBA"), format="PNG")).equal(plain(photo))


def test_16_bits_keep_the_upper_8():
    values = np.arange(0, 65536, 17, dtype=np.uint16)[:3840].reshape(60, 64)
    image = decode(encoded(Image.fromarray(values), format="PNG"))
    assert image[0].numpy().tolist() == (values >> 8).tolist()
    assert image[0].equal(image[2])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_rotation_is_carried_out(photo, kind):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to see it upright
    data = encoded(photo, format=kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    image = decode(data)
    assert image.shape == (3, 60, 40)
    error = (image.int() - plain(photo.transpose(Image.Transpose.ROTATE_270)).int()).abs().float().mean()
    assert error < (6 if kind == "JPEG" else 0.01)


def test_a_file_goes_by_its_content_not_by_its_name(photo):
    """ImageNet holds a PNG that is called .JPEG."""
    assert decode(encoded(photo, format="PNG")).equal(plain(photo))


@pytest.mark.parametrize("data", [b"", b"no image", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image_is_refused(data):
    with pytest.raises(BadImage):
        decode(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_half_an_image_is_refused(photo, kind):
    data = encoded(photo, format=kind)
    with pytest.raises(BadImage):
        decode(data[: len(data) // 2])
