"""From the bytes of an image to batches: decode, crop, resize, batch. uint8 until `normalise`.

B batch, H and W height and width.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import signal
import struct
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode

from finetune_mile.core.cores import usable_cores
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.core.types import Batch, Policy, Preprocess
from finetune_mile.images.order import Indices, Key, uniforms

if TYPE_CHECKING:
    from finetune_mile.images.sets import ImageSet

Box = tuple[int, int, int, int]  # top, left, height, width

MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**26)  # 179 million: PIL's own limit, applied to JPEGs too
# Markers of a frame header, which holds the size: SOF0 to SOF15 without DHT (c4), JPG (c8) and DAC (cc).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers that have no length (RST, SOI, EOI, TEM), the scan (SOS), and 0, which is none: no frame header came before.
_ENDS = frozenset([*range(0xD0, 0xDB), 0x00, 0x01])
_FILL = 0xFF  # a byte between two segments
_SEGMENT = struct.Struct(">xBHxHH")  # marker and length; of a frame header also height and width
PIL_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, struct.error, Image.DecompressionBombError,
)  # fmt: skip

# What the draws of a view are for, in their order. Draw number n does not depend on how many there are.
TRIES = 10  # at a place for a crop, or for what is erased
FLIP = 4 * TRIES
JITTER = FLIP + 1
POLICY = JITTER + 5
ERASE = POLICY + 6
DRAWS = ERASE + 1 + 4 * TRIES

CROP_ASPECT = (3 / 4, 4 / 3)  # width by height
ERASED = (0.02, 0.33)  # share of the area, as torchvision has it
ERASED_ASPECT = (1 / 3.3, 1 / 0.3)  # width by height
WEAK_SEED = 2**32  # added to a run's seed, which is below it
STAND_INS = 100  # bad images in a row that end a run
PR_SET_PDEATHSIG = 1  # prctl: the signal that a process gets when its parent ends
_LOADERS: weakref.WeakSet[Any] = weakref.WeakSet()  # loader processes of this process
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LOADERS.clear)
NOTHING = -1  # in `bad`: no image was found to stand in


# ------------------------------------------------------------------------------------ decoding


def decode(data: bytes) -> Tensor:
    """Any image file to RGB, uint8 (3, H, W), upright.

    Grey becomes three equal channels; CMYK and palettes are converted; 16 bits keep the upper 8; a rotation in the EXIF
    header is carried out; alpha is dropped, as PIL's `convert("RGB")` does; of an animation the first frame is taken.
    JPEGs, by their first bytes and not by their name, go through torchvision, which equals PIL bit for bit.

    Raises:
        BadImage: the bytes are not an image, are cut off, or have more than `MOST_PIXELS`.
    """
    if data.startswith(b"\xff\xd8\xff") and _jpeg_size_is_safe(data):
        with suppress(RuntimeError, AttributeError):  # some rare JPEGs only PIL can read; for a broken one it says why
            # The operator itself: torchvision 0.29's function around it warns at every call that it will be removed.
            # If the operator is removed too, PIL decodes.
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            image: Tensor = torch.ops.image.decode_jpeg(encoded, ImageReadMode.RGB.value, True)
            return image
    return _by_pil(data)


def _jpeg_size_is_safe(data: bytes) -> bool:
    """Find the size in a JPEG's header, before a decoder that has no limit allocates the pixels.

    Returns False if the header is not a plain list of segments up to the frame header: PIL, which has a limit,
    decodes such files.

    Raises:
        BadImage: there are more than `MOST_PIXELS`.
    """
    at = 2
    while at < len(data) - 9 and data[at] == 0xFF:
        marker, length, height, width = _SEGMENT.unpack_from(data, at)
        if marker in _FRAMES:
            if height * width > MOST_PIXELS:
                raise BadImage(f"{width:,} x {height:,} pixels are too many (at most {MOST_PIXELS:,})")
            return True
        if marker in _ENDS or (marker != _FILL and length < 2):
            return False
        at += 1 if marker == _FILL else 2 + length
    return False


def _by_pil(data: bytes) -> Tensor:
    if not data:
        raise BadImage("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about EXIF and palettes that are read all the same
            with Image.open(io.BytesIO(data)) as opened:
                opened.load()
                return from_pil(opened)
    except PIL_ERRORS as error:
        raise BadImage(str(error).partition("<_io")[0].strip() or type(error).__name__) from error


def from_pil(image: Image.Image) -> Tensor:
    """The tensor that `decode` gives for the file of a PIL image: RGB, uint8 (3, H, W), upright."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # grey of 16 bits, which PIL would clip: keep the upper 8
        values = np.array(image).astype(np.int64)
        if image.mode != "I" or values.max(initial=0) > 255:
            values = values >> 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def to_pixels(image: object) -> Tensor:
    """An image in memory as RGB, uint8 (3, H, W), upright.

    Args:
        image: a PIL image, an array uint8 (H, W), (H, W, 3) or (H, W, 4), or a tensor uint8 (3, H, W).

    Raises:
        BadImage: it is something else.
    """
    shape, kind = tuple(getattr(image, "shape", ())), str(getattr(image, "dtype", "")).removeprefix("torch.")
    empty = 0 in (image.size if isinstance(image, Image.Image) else shape)
    if isinstance(image, np.ndarray) and kind == "uint8" and (len(shape) == 2 or shape[2:] in ((3,), (4,))):
        image = Image.fromarray(image) if not empty else image
    if isinstance(image, Image.Image) and not empty:
        return from_pil(image)
    if isinstance(image, Tensor) and kind == "uint8" and len(shape) == 3 and shape[0] == 3 and not empty:
        return image
    found = f"{type(image).__name__} {kind} {shape}" if kind else type(image).__name__
    raise BadImage(f"expected a PIL image, a uint8 array (H, W, 3) or a uint8 tensor (3, H, W), found {found}")


# ------------------------------------------------------------------------------------ one view of an image


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Random changes of training images."""

    crop: Literal["random-resized", "shift", "none"]
    scale: tuple[float, float]
    shift: int
    flip: bool
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # brightness, contrast, saturation, hue
    policy: Policy = "none"
    magnitude: int = 9  # for `rand`
    erase: float = 0.0  # how likely


def centre_view(image: Tensor, preprocess: Preprocess) -> Tensor:
    """The evaluation view (3, size, size): a central crop of a share of the short side, resized."""
    top, left, side, _ = box = centre_box(image.shape[-2], image.shape[-1], preprocess.crop)
    if side == preprocess.size:
        return image[:, top : top + side, left : left + side]
    return resized(image, box, preprocess)


def centre_box(height: int, width: int, share: float) -> Box:
    """The square in the middle of an image whose side is a share of the short side."""
    side = max(1, round(min(height, width) * share))
    return (height - side) // 2, (width - side) // 2, side, side


def resized(image: Tensor, box: Box, preprocess: Preprocess) -> Tensor:
    """A part of a uint8 image (3, H, W), resized to (3, size, size).

    The same pixels as torchvision's `resized_crop`; with the channels last in memory torch resizes a third faster.
    """
    top, left, height, width = box
    part = image[:, top : top + height, left : left + width].unsqueeze(0)
    return interpolate(
        part.contiguous(memory_format=torch.channels_last), preprocess.size, mode=preprocess.interpolation,
        antialias=preprocess.antialias and preprocess.interpolation != "nearest",
    ).squeeze(0)  # fmt: skip


def random_box(
    height: int, width: int, scale: tuple[float, float], aspect: tuple[float, float], draws: Sequence[float]
) -> Box | None:
    """A part of an image with its share of the area in `scale` and width by height in `aspect`; None: none fits."""
    for try_ in range(TRIES):
        area_draw, ratio_draw, top_draw, left_draw = draws[4 * try_ : 4 * try_ + 4]
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        ratio = exp(log(aspect[0]) + (log(aspect[1]) - log(aspect[0])) * ratio_draw)
        w, h = round(sqrt(area * ratio)), round(sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(top_draw * (height - h + 1)), int(left_draw * (width - w + 1)), h, w
    return None


def random_view(image: Tensor, preprocess: Preprocess, augmentation: Augmentation, draws: Sequence[float]) -> Tensor:
    """A training view (3, size, size) of an image (3, H, W), decided by `draws` (DRAWS of them) alone."""
    if augmentation.crop == "random-resized":
        height, width = image.shape[-2:]
        box = random_box(height, width, augmentation.scale, CROP_ASPECT, draws) or centre_box(height, width, 1.0)
        image = resized(image, box, preprocess)
    else:
        image = centre_view(image, preprocess)
    if augmentation.crop == "shift":
        reach = augmentation.shift
        top, left = (int(d * (2 * reach + 1)) for d in draws[:2])
        image = pad(image, (reach,) * 4)[:, top : top + preprocess.size, left : left + preprocess.size]
    if augmentation.flip and draws[FLIP] < 0.5:
        image = image.flip(-1)
    if any(augmentation.jitter) or augmentation.policy != "none":
        from finetune_mile.images.augment import by_policy, jittered  # torchvision's transforms, only where needed

        image = jittered(image, augmentation.jitter, draws[JITTER:POLICY])
        if augmentation.policy != "none":
            image = by_policy(image, augmentation.policy, augmentation.magnitude, draws[POLICY:ERASE])
    if draws[ERASE] < augmentation.erase:
        image = erased(image, preprocess.mean, draws[ERASE + 1 :])
    return image


def erased(image: Tensor, mean: Sequence[float], draws: Sequence[float]) -> Tensor:
    """An image (3, H, W) with a random part in the mean colour, which `normalise` turns into zeros."""
    box = random_box(image.shape[-2], image.shape[-1], ERASED, ERASED_ASPECT, draws)
    if box is None:
        return image
    top, left, height, width = box
    colour = torch.tensor([min(max(round(255 * part), 0), 255) for part in mean], dtype=torch.uint8).view(3, 1, 1)
    image = image.clone()  # it may be the data set's own memory
    image[:, top : top + height, left : left + width] = colour
    return image


# ------------------------------------------------------------------------------------ batches


@dataclass(eq=False)
class Views(Dataset[tuple[Batch, dict[int, str]]]):
    """The views of an image set; a whole batch of keys (epoch, sample) is read at once.

    A training image that cannot be read is replaced by the next one of its pool, with the draws of its own key: the
    replacement depends neither on workers nor on processes. An evaluation image that cannot be read is black, and the
    caller leaves out the samples in `bad`, which are there once the batch has come out of `batches`.
    """

    images: ImageSet  # all of a split
    preprocess: Preprocess  # the input that the network expects
    augmentation: Augmentation | None  # for training; None: the evaluation view
    seed: int  # of the augmentation
    pool: Indices | None = field(
        default=None, kw_only=True
    )  # sorted samples that a bad one is replaced from; None: all
    # Told, in the process that takes the batches, of samples that could not be read.
    on_bad: Callable[[Mapping[int, str]], None] | None = field(default=None, kw_only=True)
    weak: Augmentation | None = field(default=None, init=False)  # of a second view with draws of its own, `Batch.weak`
    bad: dict[int, str] = field(default_factory=dict, init=False)

    def read(self, keys: list[Key]) -> tuple[Batch, dict[int, str]]:
        """The batch of `keys`, and the samples that could not be read, with the reason.

        The reasons are returned because a loader process has no other way to report them.
        """
        bad: dict[int, str] = {}
        images, shown = zip(*(self._read(sample, bad) for _, sample in keys), strict=True)
        index = torch.tensor(shown)
        views = self._views(images, keys, self.augmentation, self.seed)
        weak = None if self.weak is None else self._views(images, keys, self.weak, self.seed + WEAK_SEED)
        return Batch(views, self.images.given[index], index, weak), bad

    __getitem__ = read  # what torch's loader calls

    def _views(self, images: Iterable[Tensor], keys: list[Key], augmentation: Augmentation | None, seed: int) -> Tensor:
        if augmentation is None:
            return torch.stack([centre_view(image, self.preprocess) for image in images])
        epochs, samples = np.array(keys).T
        draws = uniforms(seed, epochs, samples, DRAWS).tolist()
        pairs = zip(images, draws, strict=True)
        return torch.stack([random_view(image, self.preprocess, augmentation, draw) for image, draw in pairs])

    def _read(self, sample: int, bad: dict[int, str]) -> tuple[Tensor, int]:
        """The image (3, H, W) of a sample, or of its replacement; and the sample that it is of."""
        for _ in range(STAND_INS):
            try:
                return self.images.read(sample), sample
            except BadImage as error:
                bad[sample] = str(error)
            if self.augmentation is None:
                break
            if self.pool is None:
                sample = (sample + 1) % len(self.images)
            else:
                sample = int(self.pool[np.searchsorted(self.pool, sample, side="right") % len(self.pool)])
        else:
            bad[NOTHING] = "too many bad images in a row"
        return torch.zeros(3, self.preprocess.size, self.preprocess.size, dtype=torch.uint8), sample


def batches(views: Views, keys: Iterable[list[Key]], *, workers: int, pin: bool) -> Iterator[Batch]:
    """Batches for lists of keys, in their order, read ahead by `workers` processes."""
    return _start(
        views,
        DataLoader(
            views, batch_size=None, sampler=keys, num_workers=workers, pin_memory=pin, worker_init_fn=_serve_one_process
        ),
    )


_Kind = tuple[int, Preprocess]  # id of an image set, and how it is shown


class _Requests:
    """The sampler of `Readers`: in each pass, which views and which keys."""

    passed: Iterable[tuple[_Kind, list[Key]]] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.passed)


class _Several(Dataset[tuple[Batch, dict[int, str]]]):
    def __init__(self, known: Mapping[_Kind, Views]) -> None:
        self.known = dict(known)

    def __getitem__(self, request: tuple[_Kind, list[Key]]) -> tuple[Batch, dict[int, str]]:
        kind, keys = request
        return self.known[kind].read(keys)


@dataclass(slots=True, kw_only=True)
class Readers:
    """Loader processes for every pass over plain images; they stay, because starting them takes seconds.

    They know the image sets that were asked for so far; another one starts them anew.
    """

    workers: int  # processes
    pin: bool  # into memory that a GPU copies from while it computes
    batch_size: int  # images that a pass shows at a time
    _known: dict[_Kind, Views] = field(default_factory=dict, init=False)
    _requests: _Requests = field(default_factory=_Requests, init=False)
    _loader: DataLoader[tuple[Batch, dict[int, str]]] | None = field(default=None, init=False)

    def batches(self, views: Views, keys: Iterable[list[Key]]) -> Iterator[Batch]:
        """As the function `batches`; a pass that was not taken to its end is over when the next one begins."""
        if self.workers == 0 or views.augmentation is not None:
            return batches(views, keys, workers=self.workers, pin=self.pin)
        kind = id(views.images), views.preprocess
        if kind not in self._known:
            self._known[kind] = views
            self._loader = DataLoader(
                _Several(self._known), batch_size=None, sampler=self._requests, num_workers=self.workers,
                pin_memory=self.pin, worker_init_fn=_serve_one_process, persistent_workers=True,
            )  # fmt: skip
        assert self._loader is not None
        self._requests.passed = ((kind, each) for each in keys)
        return _start(views, self._loader)


def _start(views: Views, loader: DataLoader[tuple[Batch, dict[int, str]]]) -> Iterator[Batch]:
    """The batches of a loader, whose processes start here, not at the first batch."""
    loaded = iter(loader)
    if loader.num_workers:
        _LOADERS.update(loaded._workers)  # type: ignore[attr-defined]
        atexit.unregister(_end_loaders)
        atexit.register(_end_loaders)  # the last is the first to be called, before those of torch and multiprocessing
    return _report_bad(views, loaded)


def _report_bad(views: Views, loaded: Iterator[tuple[Batch, dict[int, str]]]) -> Iterator[Batch]:
    for batch, bad in loaded:
        if bad:
            views.bad.update(bad)
            first = next(iter(bad))
            if NOTHING in bad:
                raise Problem(
                    f"--data: none of {STAND_INS} images in a row can be read; the first is "
                    f"{views.images.ids[first]} ({bad[first]})"
                )
            if views.on_bad is not None:
                views.on_bad(bad)
        yield batch


def _serve_one_process(_worker: int) -> None:
    """Make a loader process end with its training process: neither before it nor after it.

    SLURM, systemd, torchrun and a terminal send their signals to every process of a run. A loader must outlive them, so
    that the run can save. Where the training process is killed, the kernel ends its loaders (on Linux; elsewhere torch
    does so within seconds).
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_loaders() -> None:
    """End the loaders that are left when Python ends, which would send them SIGTERM and wait for ever."""
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises an error where a loader is killed
    for process in _LOADERS:
        if process.is_alive():
            process.kill()


def default_workers(processes: int) -> int:
    """Loader processes for one of the training processes of this node: its share of the cores, at most 16."""
    return max(1, min(16, usable_cores() // processes))


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) to the floats that the network expects; mean and std (3, 1, 1) on the device."""
    floats = images.to(torch.float32, copy=True)  # then in place: new memory each step would cost more than the sums
    return floats.div_(255.0).sub_(mean).div_(std)
