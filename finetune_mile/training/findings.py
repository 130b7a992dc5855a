"""The photos of an audit, and what may be wrong with them: lists, most likely first. n photos, C classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from finetune_mile.compute.passes import Outputs
from finetune_mile.core.problems import Problem
from finetune_mile.images.checks import Copy
from finetune_mile.images.groups import file_paths
from finetune_mile.images.sets import Data, ImageSet
from finetune_mile.images.splits import label_names
from finetune_mile.learning.evidence import judge
from finetune_mile.learning.losses import given_matrix
from finetune_mile.measures.advice import say_several, several_classes
from finetune_mile.measures.audit import Judged, judge_labels, judge_sets, outliers, suggested, suspects

KINDS = ("wrong", "missing", "duplicate", "outlier")
FEWEST = 20  # labelled photos
FEWEST_OF_CLASS = 5  # photos, on average, that tell whether photos hold several classes
DOUBTFUL = 0.5  # probability that a label is wrong, from which it is called doubtful
MOST_UNSURE = 100  # photos with a second class that are listed where it cannot be told whether there are any
TOO_FEW = "Cannot tell whether photos hold more than one of the classes: there are fewer than 5 photos a class."
SEVERAL = "Many photos seem to hold more than one of the classes: the list of missing labels has them."


class Finding(NamedTuple):
    """A line of audit.csv: a photo and what may be wrong with it."""

    photo: int  # in the order of all photos: training, then validation
    given: tuple[str, ...]
    suggested: tuple[str, ...]
    probability_given: float
    probability_suggested: float
    kind: str
    probability_wrong: float | None = None  # of a kind that has one
    other: int | None = None  # the photo that this one is a duplicate of


@dataclass(frozen=True, kw_only=True)
class Photos:
    """All training and validation photos of a data set, with what is known about them."""

    data: Data
    features: Outputs  # (n, D)
    copies: list[Copy]

    @cached_property
    def places(self) -> list[tuple[str, int]]:
        """The split and row of each photo."""
        return [("train", row) for row in range(len(self.data.train))] + [
            ("val", row) for row in range(len(self.data.val))
        ]

    @cached_property
    def given(self) -> Tensor:
        return torch.cat([self.data.train.given, self.data.val.given])

    @cached_property
    def known(self) -> Tensor:
        """(n,) has a label, and could be read."""
        return self.features.readable & (self.given >= 0 if self.given.ndim == 1 else (self.given > 0).any(1))

    @cached_property
    def names(self) -> list[tuple[str, ...]]:
        """The given labels of each photo."""
        return [tuple(names) for names in label_names(self.given, self.data.classes)]

    @cached_property
    def groups(self) -> Tensor:
        """(n,) near-duplicates have the same number; -1: alone."""
        number = np.arange(len(self.places))
        for copy in self.copies:
            one, other = number[self.number(copy.split, copy.row)], number[self.number(copy.of_split, copy.of_row)]
            number[number == max(one, other)] = min(one, other)
        return torch.from_numpy(np.where(np.bincount(number, minlength=len(number))[number] > 1, number, -1))

    def number(self, split: str, row: int) -> int:
        return row if split == "train" else len(self.data.train) + row

    def images(self, photo: int) -> tuple[ImageSet, int]:
        """The image set of a photo, and its row there."""
        split, row = self.places[photo]
        return (self.data.train if split == "train" else self.data.val), row

    @cached_property
    def ids(self) -> list[str]:
        return [*self.data.train.ids, *self.data.val.ids]

    @cached_property
    def paths(self) -> list[str]:
        """The file of each photo; its id where it has no file of its own."""
        both = [file_paths(images.content) or list(images.ids) for images in (self.data.train, self.data.val)]
        return [*both[0], *both[1]]


# ------------------------------------------------------------------------------------ the findings


def find_all(photos: Photos, bars: tuple[float, float]) -> tuple[Judged, list[Finding], list[str]]:
    """All findings, most likely first within each kind; and sentences about what they are worth."""
    rows = photos.known.nonzero().flatten()
    if len(rows) < FEWEST:
        raise Problem(f"--data {photos.data.name}: only {len(rows)} photos have labels; an audit needs {FEWEST}")
    features, labels = photos.features.rows[rows], photos.given[rows]
    judged = judge_labels(features, labels, len(photos.data.classes), photos.groups[rows])
    if labels.ndim == 1:
        found = list(_wrong(photos, rows, judged))
        more, notes = _second_classes(photos, rows, judged, bars)
    else:
        found, notes = list(_wrong_in_sets(photos, rows, judged)), []
        more = list(_missing_in_sets(photos, rows, judged))
    return judged, [*found, *more, *_duplicates(photos), *_outliers(photos)], notes


def ranked(rows: Sequence[Finding]) -> Iterator[tuple[int, Finding]]:
    """Each row with its rank within its kind, from 1."""
    count: Counter[str] = Counter()
    for row in rows:
        count[row.kind] += 1
        yield count[row.kind], row


def _wrong(photos: Photos, rows: Tensor, judged: Judged) -> Iterator[Finding]:
    """Photos whose label is more likely wrong than on average, the most likely error first."""
    classes, chances = photos.data.classes, judged.logits.softmax(1)
    labels = photos.given[rows]
    guess = suggested(judged, labels)
    for i in suspects(judged):
        yield Finding(
            photo=int(rows[i]), given=(classes[labels[i]],), suggested=(classes[guess[i]],),
            probability_given=float(chances[i, labels[i]]), probability_suggested=float(chances[i, guess[i]]),
            kind="wrong", probability_wrong=float(judged.wrong[i]),
        )  # fmt: skip


def _wrong_in_sets(photos: Photos, rows: Tensor, judged: Judged) -> Iterator[Finding]:
    """Given labels of sets that are more likely wrong than right."""
    classes, chances = photos.data.classes, judged.logits.sigmoid()
    doubtful = (judged.wrong > DOUBTFUL).nonzero()
    order = (-judged.wrong[doubtful[:, 0], doubtful[:, 1]]).argsort(stable=True)
    for i, label in doubtful[order].tolist():
        rest = tuple(name for name in photos.names[int(rows[i])] if name != classes[label])
        yield Finding(
            photo=int(rows[i]), given=(classes[label],), suggested=rest, probability_given=float(chances[i, label]),
            probability_suggested=1 - float(chances[i, label]), kind="wrong",
            probability_wrong=float(judged.wrong[i, label]),
        )  # fmt: skip


def _missing_in_sets(photos: Photos, rows: Tensor, judged: Judged) -> Iterator[Finding]:
    """Classes that are not given, and more likely there than not: one row per photo and class."""
    classes, chances = photos.data.classes, judged.logits.sigmoid()
    found = (judged.missing > DOUBTFUL).nonzero()
    order = (-judged.missing[found[:, 0], found[:, 1]]).argsort(stable=True)
    for i, label in found[order].tolist():
        names = photos.names[int(rows[i])]
        given = [classes.index(name) for name in names]
        yield Finding(
            photo=int(rows[i]), given=names, suggested=(classes[label],),
            probability_given=float(chances[i, given].min()), probability_suggested=float(chances[i, label]),
            kind="missing", probability_wrong=float(judged.missing[i, label]),
        )  # fmt: skip


def _second_classes(
    photos: Photos, rows: Tensor, judged: Judged, bars: tuple[float, float]
) -> tuple[list[Finding], list[str]]:
    """Photos of one given label that seem to hold another class, too; and whether such photos exist at all.

    The thresholds come from held-out given labels, as those of method auto.
    """
    classes, labels = photos.data.classes, photos.given[rows]
    targets, logits = given_matrix(labels, len(classes)), judged.scores
    verdict = judge(logits, labels, targets.sum(0), generation=0, bars=bars, was_open=False)
    answer = several_classes([asdict(verdict)], bars[1])
    sentence = SEVERAL if answer == "yes" else say_several([asdict(verdict)], bars[1])
    if len(labels) < FEWEST_OF_CLASS * len(classes):
        answer, sentence = "cannot tell", TOO_FEW
    above = logits - torch.tensor(verdict.thresholds)
    above = above.float().nan_to_num(posinf=0.0, neginf=0.0).scatter(1, labels.unsqueeze(1), -1.0)
    places = (above > 0).nonzero() if answer != "no" else torch.zeros(0, 2, dtype=torch.long)
    places = places[(-above[places[:, 0], places[:, 1]]).argsort(stable=True)]
    if answer == "cannot tell" and len(places):
        places = places[:MOST_UNSURE]
        sentence += f" The {len(places):,} most likely ones are listed for you to check."
    chances = judge_sets(logits, targets).logits.sigmoid()
    found = [
        Finding(
            photo=int(rows[i]), given=(classes[labels[i]],), suggested=(classes[label],),
            probability_given=float(chances[i, labels[i]]), probability_suggested=float(chances[i, label]),
            kind="missing",
        )
        for i, label in places.tolist()
    ]  # fmt: skip
    return found, [sentence]


def _duplicates(photos: Photos) -> Iterator[Finding]:
    """Copies and near-duplicates: with different labels first, exact ones before others."""

    def order(copy: Copy) -> tuple[bool, bool, bool]:
        return not copy.labels_differ, not copy.exact, copy.split == copy.of_split

    for copy in sorted(photos.copies, key=order):
        one, other = photos.number(copy.split, copy.row), photos.number(copy.of_split, copy.of_row)
        yield Finding(
            photo=one, given=photos.names[one], suggested=photos.names[other], probability_given=float("nan"),
            probability_suggested=float("nan"), kind="duplicate", other=other,
        )  # fmt: skip


def _outliers(photos: Photos) -> Iterator[Finding]:
    """Photos that are far from all others, the farthest first."""
    rows = photos.features.readable.nonzero().flatten()
    distance, far = outliers(photos.features.rows[rows], photos.groups[rows])
    for i in (-distance).argsort(stable=True)[: int(far.sum())].tolist():
        yield Finding(
            photo=int(rows[i]), given=photos.names[int(rows[i])], suggested=(), probability_given=float("nan"),
            probability_suggested=float("nan"), kind="outlier",
        )  # fmt: skip
