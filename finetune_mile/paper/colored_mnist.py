"""ColoredMNIST (Arjovsky et al.; DomainBed): is the digit below five? Its colour tells too, and lies at test time.

A label is flipped with probability 0.25, so nobody who looks at the shape can score above 75. Labels and colours are
drawn from `draw` alone and images are coloured when they are read: nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np
import torch

from finetune_mile.core.problems import Problem
from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.randomness import permutation, uniforms
from finetune_mile.images.sources.options import check_choices, read_options
from finetune_mile.paper.idx import Digits, find_mnist, read_mnist

if TYPE_CHECKING:
    from torch import Tensor

    from finetune_mile.images.subsets import Indices

AGREES = (0.9, 0.8, 0.1)  # environments: how often the colour is the label's (DomainBed's +90 %, +80 %, -90 %)
FLIPPED = 0.25
BLANK = 0.33  # ColoredMNIST+: share of training images that are a plain colour, which is their label
DIGITS, COLOURS = ("0-4", "5-9"), ("green", "red")  # colour c goes with label c
CHANNELS = (1, 0)  # of green and red in RGB

Protocol = Literal["leave-one-out", "random-colours", "10%"]
AT_TEST: dict[str, float] = {"random-colours": 0.5, "10%": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options behind the name."""

    place: str
    protocol: Protocol
    test: int  # leave-one-out: the environment that is held out
    draw: int  # another number: other labels, colours and environments
    side: int  # pixels
    download: bool


def load(where: str) -> Data:
    """Digits of two environments to train on, and of the protocol's other one to evaluate on.

    Args:
        where: `DIR?protocol=leave-one-out|random-colours|10%&test=0|1|2&side=14|28&draw=0&download=yes`.
    """
    return load_task("colored-mnist", where, blank=0.0)


def load_task(scheme: str, where: str, *, blank: float) -> Data:
    """Both data sets; `blank` is the share of training images without a digit, with the colours as two more classes."""
    wanted = read_wanted(scheme, where)
    digits = read_mnist(find_mnist(scheme, wanted.place, wanted.download))
    small = min(len(digits.train_images), len(digits.test_images))
    if small < len(AGREES):
        raise Problem(f"--data {scheme}:{where}: {small} images cannot be dealt to {len(AGREES)} environments")
    train, val = _halves(digits, wanted)
    classes = DIGITS + COLOURS if blank else DIGITS
    held_out = val.image_set(len(classes), 0.0)
    return Data(
        name=scheme, classes=classes, train=train.image_set(len(classes), blank), val=held_out,
        extra_scores=_DigitTask(val.labels, val.colours) if blank else None,
    )  # fmt: skip


def read_wanted(scheme: str, where: str) -> Wanted:
    """Read and check the options; leave-one-out of the last environment is what is left out."""
    place, options = read_options(scheme, where, ("protocol", "test", "draw", "side", "download"))
    allowed = {"protocol": get_args(Protocol), "test": ("0", "1", "2"), "side": ("14", "28"), "download": ("yes", "no")}
    check_choices(scheme, where, options, allowed)
    if not options.get("draw", "0").isdecimal():
        raise Problem(f"--data {scheme}:{where}: draw={options['draw']} must be a whole number from 0 on")
    protocol = options.get("protocol", "leave-one-out")
    if "test" in options and protocol != "leave-one-out":
        raise Problem(f"--data {scheme}:{where}: test= is for protocol=leave-one-out; {protocol} has one test set")
    return Wanted(
        place=place, protocol=cast(Protocol, protocol), test=int(options.get("test", "2")),
        draw=int(options.get("draw", "0")), side=int(options.get("side", "28")),
        download=options.get("download") == "yes",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coloured:
    """Digits with labels and colours. n images of N pictures."""

    pictures: Tensor  # (N, s, s) uint8
    names: list[str]  # of the pictures
    rows: Indices  # (n,) which pictures
    labels: Tensor  # (n,) 0 or 1: the noisy label
    clean: Tensor  # (n,) 0 or 1: digit below five, or not
    colours: Tensor  # (n,) 0 or 1
    environment: Tensor  # (n,)
    chances: Indices  # (n,) floats in [0, 1): below the share of blank images, this one is blank

    def image_set(self, num_classes: int, blank: float) -> ImageSet:
        """The images; a blank one has its colour as label. True sets are known where colours are classes.

        Args:
            num_classes: 2, or 4 with the colours.
            blank: share of images without a digit.
        """
        empty = torch.from_numpy(self.chances < blank)
        given = torch.where(empty, len(DIGITS) + self.colours, self.labels)
        truth = None
        if num_classes > len(DIGITS):
            truth = torch.zeros(len(self.rows), num_classes, dtype=torch.bool)
            truth.scatter_(1, given.unsqueeze(1), True)
            truth.scatter_(1, (len(DIGITS) + self.colours).unsqueeze(1), True)
        return ImageSet(
            ids=[self.names[i] for i in self.rows], given=given, truth=truth, main=None if blank else self.clean,
            read=_Paint(self.pictures, self.rows, self.colours, empty), in_memory=True, environment=self.environment,
        )  # fmt: skip


class _Paint:
    """An image set's `read`: a digit in its colour on black, or the colour alone."""

    def __init__(self, pictures: Tensor, rows: Indices, colours: Tensor, empty: Tensor) -> None:
        self.pictures, self.rows = pictures, rows.tolist()
        self.channels, self.empty = [CHANNELS[c] for c in colours.tolist()], empty.tolist()

    def __call__(self, index: int) -> Tensor:
        """Image `index`, (3, s, s) uint8."""
        image = self.pictures.new_zeros((3, *self.pictures.shape[1:]))
        image[self.channels[index]] = 255 if self.empty[index] else self.pictures[self.rows[index]]
        return image


class _DigitTask:
    """What a network with colour outputs says of images that show a digit.

    The paper explains its gain by a student that names the colour of such an image too: `colour_on_digits` shows it.
    """

    def __init__(self, labels: Tensor, colours: Tensor) -> None:
        self.labels, self.colours = labels, colours

    def __call__(self, probabilities: Tensor, rows: Tensor) -> dict[str, float]:
        """Accuracy (%) among the two digit classes, and mean outputs (0-1) of the image's own and the other colour."""
        own = self.colours[rows].unsqueeze(1)
        of_digits, of_colours = probabilities.split(len(DIGITS), 1)
        right = of_digits.argmax(1) == self.labels[rows]
        return {
            "digit_accuracy": 100 * float(right.double().mean()),
            "colour_on_digits": float(of_colours.gather(1, own).mean()),
            "other_colour_on_digits": float(of_colours.gather(1, 1 - own).mean()),
        }


def _halves(digits: Digits, wanted: Wanted) -> tuple[_Coloured, _Coloured]:
    """Training images of two environments, and the images to evaluate on.

    Leave-one-out deals all of MNIST to three environments, as DomainBed does. The other protocols deal MNIST's training
    images to the environments of 90 % and 80 %, and colour its test images anew.
    """
    train, test = (images[:, ::2, ::2] if wanted.side == 14 else images for images in (digits[0], digits[2]))
    pictures = torch.cat([train, test]).contiguous()
    clean = (torch.cat([digits.train_labels, digits.test_labels]) >= 5).long()
    names = [f"{part}-{i:05d}" for part, images in (("train", train), ("test", test)) for i in range(len(images))]
    if wanted.protocol == "leave-one-out":
        environment = permutation(wanted.draw, 1, len(pictures)) % 3
        agrees = np.array(AGREES)[environment]
        held_out = environment == wanted.test
    else:
        environment = permutation(wanted.draw, 1, len(pictures)) % 2
        held_out = np.arange(len(pictures)) >= len(train)
        environment[held_out] = 2
        agrees = np.array([*AGREES[:2], AT_TEST[wanted.protocol]])[environment]
    draws = uniforms(wanted.draw, 0, np.arange(len(pictures)), 3)
    labels = clean ^ torch.from_numpy(draws[:, 0] < FLIPPED).long()
    colours = labels ^ torch.from_numpy(draws[:, 1] >= agrees).long()
    parts = []
    for rows in (np.flatnonzero(~held_out), np.flatnonzero(held_out)):
        parts.append(
            _Coloured(
                pictures=pictures, names=names, rows=rows, labels=labels[rows], clean=clean[rows],
                colours=colours[rows], environment=torch.from_numpy(environment[rows]), chances=draws[rows, 2],
            )
        )  # fmt: skip
    return parts[0], parts[1]
