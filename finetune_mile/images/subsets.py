"""Which images keep their labels: stratified, nested, seeded splits. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from finetune_mile.core.problems import Problem
from finetune_mile.images.randomness import hashes

Indices = npt.NDArray[np.int64]


def name_numbers(ids: Sequence[str]) -> Indices:
    """A number per id that depends on the id alone, not on its place in a list."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in ids)
    return np.array([int.from_bytes(d, "little") >> 1 for d in digests], dtype=np.int64)


def stratified(labels: Indices, ids: Sequence[str], fraction: float, seed: int) -> Indices:
    """A share of each class, at least one image each, as sorted indices.

    Within a class the images are ranked by a hash of (seed, id) and the first ones are taken, so a smaller fraction
    lies inside a larger one, and images added later do not reshuffle the others.

    Args:
        labels: (N,) one class per image; -1 = unlabelled, never taken.
        ids: N names.
        fraction: in (0, 1].
        seed: another seed is another draw.
    """
    if not 0 < fraction <= 1:
        raise Problem(f"--fraction {fraction}: must be above 0 and at most 1")
    if fraction == 1:
        return np.flatnonzero(labels >= 0)
    ranks = hashes(seed, 0, name_numbers(ids))
    order = np.lexsort((ranks, labels))  # class by class, and by rank within
    order = order[labels[order] >= 0]
    taken = []
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        taken.append(members[: max(1, round(fraction * len(members)))])
    return np.sort(np.concatenate(taken)) if len(order) else np.zeros(0, dtype=np.int64)


def fingerprint(ids: Sequence[str]) -> str:
    """A hash of a list of ids, in order: two runs with the same one used the same images."""
    digest = hashlib.sha256()
    for name in ids:
        digest.update(name.encode() + b"\n")
    return digest.hexdigest()
