"""Random draws and the order of samples as pure functions of (seed, epoch, sample): no state to save or restore.

The draws are a hash of counters (the splitmix64 finaliser), not a generator with a state. They do not change with the
number of workers or processes, after a restart, or with the release of a library. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, pairwise

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Key = tuple[int, int]  # (epoch, sample)
U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashes(seed: int, epoch: int | Indices, samples: Indices) -> U64:
    """One 64-bit hash per sample, (n,)."""
    state = _mix(np.full(len(samples), seed, np.uint64) + _GOLDEN)
    state = _mix(state + np.asarray(epoch).astype(np.uint64) * _GOLDEN + np.uint64(1))
    return _mix(state + samples.astype(np.uint64) * _GOLDEN + np.uint64(2))


def uniforms(seed: int, epoch: int | Indices, samples: Indices, count: int) -> npt.NDArray[np.float64]:
    """`count` uniform numbers in [0, 1) for each sample, (n, count)."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(hashes(seed, epoch, samples)[:, None] + steps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=4)  # a run draws from at most three pools, an epoch of each at a time
def permutation(seed: int, epoch: int, size: int) -> Indices:
    """The shuffled positions of one epoch, (size,): sorted by their hash. Kept, so not to be changed."""
    return np.argsort(hashes(seed, epoch, np.arange(size)), kind="stable")


@dataclass(frozen=True, slots=True)
class Order:
    """An endless, shuffled walk over a pool. Epochs follow each other without a gap or a short batch."""

    pool: Indices
    seed: int

    def keys(self, start: int, size: int) -> list[Key]:
        """The keys of positions [start, start + size)."""
        count = len(self.pool)
        places = (divmod(position, count) for position in range(start, start + size))
        return [(epoch, int(self.pool[permutation(self.seed, epoch, count)[place]])) for epoch, place in places]


@dataclass(frozen=True, slots=True)
class Mixture:
    """An order of two walks, interleaved: of each block of `of` positions, `some` come from the first walk.

    They are spread evenly, so that any part of a batch has its share, give or take one.
    """

    first: Order
    rest: Order
    some: int = field(kw_only=True)
    of: int = field(kw_only=True)

    def keys(self, start: int, size: int) -> list[Key]:
        taken = [position * self.some // self.of for position in range(start, start + size + 1)]  # by the first walk
        first = iter(self.first.keys(taken[0], taken[-1] - taken[0]))
        rest = iter(self.rest.keys(start - taken[0], size - (taken[-1] - taken[0])))
        return [next(first if after > before else rest) for before, after in pairwise(taken)]


def micro_batches(
    order: Order | Mixture, *, first_step: int, batch_size: int, accumulate: int, rank: int, world: int
) -> Iterator[list[Key]]:
    """This process's part of each global batch, `accumulate` parts a step, without end.

    The global batch of step s is positions [s B, (s + 1) B) of the order, whatever the number of processes. It is cut
    into `accumulate` parts, and each part is divided among the processes.
    """
    size = batch_size // (accumulate * world)
    for step in count(first_step):
        for part in range(accumulate):
            yield order.keys(step * batch_size + (part * world + rank) * size, size)
