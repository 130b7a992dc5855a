"""Datasets of the paper's tables: Multi-MNIST, mosaics, ColoredMNIST and ColoredMNIST+.

All images are put together or coloured when they are read; nothing is stored. The draws depend on the option `draw`,
not on a run's seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images.order import permutation, uniforms
from finetune_mile.images.pipeline import centre_view
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.sources import folder, read_options
from finetune_mile.images.sources.grids import CENTRE, Layout, make_grids
from finetune_mile.paper.idx import find_mnist, read_mnist

if TYPE_CHECKING:
    from finetune_mile.images.order import Indices


# ------------------------------------------------------------------------------------- grids of digits, grids of photos

HALVES = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
MARGIN = 4  # columns on either side of a digit that hold next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class GridOptions:
    """The options that sources of grids share, read from the name of the data."""

    place: str
    layout: Layout
    cell: int  # pixels of a cell's side
    train: int  # grids
    val: int
    draw: int  # another number: other grids
    others: dict[str, str]


def read_grid_options(
    where: str, flag: str, *, cell: int, train: int, val: int, others: tuple[str, ...] = ()
) -> GridOptions:
    """`DIR?rows=2&share=0.55&train=20000`; the defaults are the paper's 3x3 grid, and the sizes given here."""
    place, options = read_options(where, ("rows", "share", "single", "cell", "train", "val", "draw", *others), flag)

    def number(key: str, default: float, low: float, high: float, kind: type[int] | type[float] = int) -> float:
        text = options.get(key)
        try:
            value = default if text is None else kind(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            noun = "whole number" if kind is int else "number"
            raise Problem(f"{flag}: {key}={text} must be a {noun} from {low:g} to {high:g}")
        return value

    return GridOptions(
        place=place,
        layout=Layout(
            rows=int(number("rows", 3, 1, 10)),
            share=number("share", CENTRE, 0, 1, float),
            single=number("single", 0, 0, 1, float),
        ),
        cell=int(number("cell", cell, 4, 512)),
        train=int(number("train", train, 1, 10_000_000)),
        val=int(number("val", val, 1, 10_000_000)),
        draw=int(number("draw", 0, 0, 1_000_000)),
        others={key: options[key] for key in others if key in options},
    )


def shrunk(pictures: Tensor, side: int, width: int | None = None) -> Tensor:
    """Pictures (N, H, W) uint8 averaged down to (N, side, width), a square where there is no width."""
    size = (side, width or side)
    if pictures.shape[-2:] == size:
        return pictures
    small = torch.nn.functional.adaptive_avg_pool2d(pictures.unsqueeze(1).float(), size).squeeze(1)
    return small.round().to(torch.uint8)


def check_choices(options: Mapping[str, str], allowed: Mapping[str, Iterable[str]], flag: str) -> None:
    """Refuse an option whose value is not one of its few allowed words."""
    for key, words in allowed.items():
        if key in options and options[key] not in words:
            raise Problem(f"{flag}: {key}={options[key]} must be one of {', '.join(words)}")


@lru_cache(maxsize=2)
def multi_mnist(where: str, flag: str = "--data multi-mnist") -> Data:
    """Multi-MNIST (the paper, Sec. 4.4): grids of 42x42 pixels, made of MNIST digits, with one given label each.

    The training grids are made of training digits, the validation grids of test digits.

    Args:
        where: a directory with the idx files, and options: `DIR?rows=2&share=0.55&single=0.5&cell=14&train=60000&
            val=10000&draw=1&half=even` (half: which of the test digits), `digits=2` for cells with numbers from 00 to
            99 (100 classes), `download=yes` to let torchvision fetch.
        flag: with its text, for messages.
    """
    choices = {"half": tuple(HALVES), "digits": ("1", "2"), "download": ("yes", "no")}
    options = read_grid_options(where, flag, cell=14, train=60_000, val=10_000, others=tuple(choices))
    check_choices(options.others, choices, flag)
    length = options.others.get("digits", "1")
    mnist = read_mnist(find_mnist("multi-mnist", options.place, flag, options.others.get("download") == "yes"))
    test_part = HALVES[options.others.get("half", "all")]
    sets = []
    for number, name, images, labels, part, count in (
        (1, "train", mnist["train_images"], mnist["train_labels"], slice(None), options.train),
        (2, "val", mnist["test_images"], mnist["test_labels"], test_part, options.val),
    ):
        seed = 2 * options.draw + number
        if length == "2":
            pictures, classes = _two_digits(images[part], labels.numpy()[part], options.cell, seed)
        else:
            pictures, classes = shrunk(images[part], options.cell), labels.numpy()[part]
        grids = make_grids(
            pictures, classes, count,
            num_classes=10 ** int(length), layout=options.layout, seed=seed, name=name,
        )  # fmt: skip
        sets.append(grids)
    names = tuple(f"{number:0{length}}" for number in range(10 ** int(length)))
    return Data(name="multi-mnist", classes=names, train=sets[0], val=sets[1])


def _two_digits(
    images: Tensor, labels: npt.NDArray[np.int64], side: int, seed: int
) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """Each digit (N, 28, 28) with another one to its right, (N, side, side), and the number that they are."""
    second = permutation(seed, 1, len(labels))
    narrow = images[:, :, MARGIN:-MARGIN]
    left, right = shrunk(narrow, side, side // 2), shrunk(narrow, side, side - side // 2)
    return torch.cat([left, right[second]], -1), 10 * labels + labels[second]


@lru_cache(maxsize=2)
def mosaic(where: str, flag: str) -> Data:
    """Grids of the photos in class folders, one given label each; those for training are made of training photos alone.

    Args:
        where: what `folder:` takes, and options: `DIR?rows=2&share=0.6&single=0.2&cell=32&train=20000&val=5000&draw=1`,
            also the folder's own `depth` and `val_from` (its `val`).
        flag: with its text, for messages.
    """
    options = read_grid_options(where, flag, cell=32, train=20_000, val=5_000, others=("depth", "val_from"))
    query = "&".join(f"{key.removesuffix('_from')}={value}" for key, value in options.others.items())
    photos = folder.load(f"{options.place}?{query}" if query else options.place, flag)
    sets = [
        make_grids(
            _small_photos(images, options.cell), images.given.numpy(), count,
            num_classes=len(photos.classes), layout=options.layout, seed=2 * options.draw + number, name=name,
        )
        for number, name, images, count in (
            (1, "train", photos.train, options.train), (2, "val", photos.val, options.val)
        )
    ]  # fmt: skip
    return Data(name=f"mosaic-{photos.name}", classes=photos.classes, train=sets[0], val=sets[1])


def _small_photos(images: ImageSet, side: int) -> Tensor:
    """Every photo's central square (N, 3, side, side), in memory."""
    preprocess = Preprocess(size=side, crop=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    squares = []
    for index, name in enumerate(images.ids):
        try:
            squares.append(centre_view(images.read(index), preprocess))
        except BadImage as error:
            raise Problem(f"--data mosaic: {name} cannot be used ({error}); remove it") from error
    return torch.stack(squares)


# ---------------------------------------------------------------------------------------------------- coloured digits

AGREES = (0.9, 0.8, 0.1)  # environments: how often the colour is the label's (DomainBed's +90 %, +80 %, -90 %)
FLIPPED = 0.25
BLANK = 0.33  # ColoredMNIST+: share of training images that are a plain colour, which is their label
DIGITS, COLOURS = ("0-4", "5-9"), ("green", "red")  # colour c goes with label c
CHANNELS = (1, 0)  # of green and red in RGB
AT_TEST = {"random-colours": 0.5, "10%": 0.1}  # protocols besides leave-one-out: how often the colour is the label's


def colored_mnist(where: str, flag: str) -> Data:
    """ColoredMNIST (Arjovsky et al.; DomainBed): is the digit below five? Its colour tells too, but not at test time.

    A label is flipped with probability 0.25, so a classifier of the shape alone cannot score above 75 %.

    Args:
        where: `DIR?protocol=leave-one-out|random-colours|10%&test=0|1|2&side=14|28&draw=0&download=yes`. `test` is the
            environment that leave-one-out holds out; another `draw` gives other labels, colours and environments.
        flag: with its text, for messages.
    """
    return _coloured("colored-mnist", where, flag, blank=0.0)


def colored_mnist_plus(where: str, flag: str) -> Data:
    """ColoredMNIST+ (the paper's own): a third of the training images show no digit, only a colour, which is the label.

    It has two more classes, the colours. All validation images show digits.
    """
    return _coloured("colored-mnist+", where, flag, blank=BLANK)


def _coloured(scheme: str, where: str, flag: str, *, blank: float) -> Data:
    """Digits of two environments to train on, and of the protocol's other one to evaluate on.

    Leave-one-out deals all of MNIST to three environments, as DomainBed does. The other protocols deal MNIST's training
    images to the environments of 90 % and 80 %, and colour its test images anew.
    """
    place, options = _colour_options(where, flag)
    mnist = read_mnist(find_mnist(scheme, place, flag, options["download"] == "yes"))
    small = min(len(mnist["train_images"]), len(mnist["test_images"]))
    if small < len(AGREES):
        raise Problem(f"{flag}: {small} images are too few for {len(AGREES)} environments")
    step = 2 if options["side"] == "14" else 1
    train, test = (images[:, ::step, ::step] for images in (mnist["train_images"], mnist["test_images"]))
    pictures = torch.cat([train, test]).contiguous()  # (N, s, s) uint8
    clean = (torch.cat([mnist["train_labels"], mnist["test_labels"]]) >= 5).long()
    names = [f"{part}-{i:05d}" for part, images in (("train", train), ("test", test)) for i in range(len(images))]
    draw, protocol = int(options["draw"]), options["protocol"]
    if protocol == "leave-one-out":
        environment = permutation(draw, 1, len(pictures)) % 3
        agrees = np.array(AGREES)[environment]
        held_out = environment == int(options["test"])
    else:
        environment = permutation(draw, 1, len(pictures)) % 2
        held_out = np.arange(len(pictures)) >= len(train)
        environment[held_out] = 2
        agrees = np.array([*AGREES[:2], AT_TEST[protocol]])[environment]
    draws = uniforms(draw, 0, np.arange(len(pictures)), 3)
    labels = clean ^ torch.from_numpy(draws[:, 0] < FLIPPED).long()
    colours = labels ^ torch.from_numpy(draws[:, 1] >= agrees).long()
    classes = DIGITS + COLOURS if blank else DIGITS

    def image_set(rows: Indices, share: float) -> ImageSet:
        """Some of the pictures; a `share` of them is blank, with the colour as label."""
        empty = torch.from_numpy(draws[rows, 2] < share)
        colour_classes = len(DIGITS) + colours[rows]
        given, truth = torch.where(empty, colour_classes, labels[rows]), None
        if blank:  # colours are classes, so that the true sets are known
            truth = torch.zeros(len(rows), len(classes), dtype=torch.bool)
            truth.scatter_(1, torch.stack([given, colour_classes], 1), True)
        return ImageSet(
            ids=[names[i] for i in rows], given=given, truth=truth, main=None if share else clean[rows],
            content=partial(_paint, pictures[rows], colours[rows].tolist(), empty.tolist()), in_memory=True,
            environment=torch.from_numpy(environment[rows]),
        )  # fmt: skip

    val = np.flatnonzero(held_out)
    return Data(
        name=scheme, classes=classes, train=image_set(np.flatnonzero(~held_out), blank), val=image_set(val, 0.0),
        extra_scores=partial(_digit_scores, labels[val], colours[val]) if blank else None,
    )  # fmt: skip


def _colour_options(where: str, flag: str) -> tuple[str, dict[str, str]]:
    """The place and all options, checked, with defaults for those that were not given."""
    defaults = {"protocol": "leave-one-out", "test": "2", "draw": "0", "side": "28", "download": "no"}
    place, given = read_options(where, tuple(defaults), flag)
    protocols = ("leave-one-out", *AT_TEST)
    allowed = {"protocol": protocols, "test": ("0", "1", "2"), "side": ("14", "28"), "download": ("yes", "no")}
    check_choices(given, allowed, flag)
    options = defaults | given
    if not options["draw"].isdecimal():
        raise Problem(f"{flag}: draw={options['draw']} must be a whole number, 0 or more")
    if "test" in given and options["protocol"] != "leave-one-out":
        has = f"{options['protocol']} has one test set"
        raise Problem(f"{flag}: test= is for protocol=leave-one-out; {has}")
    return place, options


def _paint(pictures: Tensor, colours: list[int], empty: list[bool], index: int) -> Tensor:
    """An image set's `content`: (3, s, s) uint8, a digit in its colour on black, or the colour alone."""
    image = pictures.new_zeros((3, *pictures.shape[1:]))
    image[CHANNELS[colours[index]]] = 255 if empty[index] else pictures[index]
    return image


def _digit_scores(labels: Tensor, colours: Tensor, probabilities: Tensor, rows: Tensor) -> dict[str, float]:
    """Scores of a network with colour classes on images that show a digit.

    Accuracy (%) among the two digit classes, and mean outputs (0-1) of the image's own and the other colour. The paper
    explains its gain by a student that names the colour of such an image too: `colour_on_digits` shows it.
    """
    own = colours[rows].unsqueeze(1)
    of_digits, of_colours = probabilities.split(len(DIGITS), 1)
    right = of_digits.argmax(1) == labels[rows]
    return {
        "digit_accuracy": 100 * float(right.double().mean()),
        "colour_on_digits": float(of_colours.gather(1, own).mean()),
        "other_colour_on_digits": float(of_colours.gather(1, 1 - own).mean()),
    }
