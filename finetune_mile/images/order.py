"""Which samples a step sees: f(seed, position), without a sampler that has to be saved."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from finetune_mile.images.randomness import permutation

Key = tuple[int, int]  # (epoch, sample)


class Order:
    """An endless, shuffled walk over a pool; epochs follow each other without a gap or a short batch."""

    def __init__(self, pool: npt.NDArray[np.int64], seed: int) -> None:
        self.pool, self.seed = pool, seed
        self._epoch = -1
        self._walk = pool[:0]

    def keys(self, start: int, count: int) -> list[Key]:
        """The (epoch, sample) keys of `count` draws from position `start` on."""
        found: list[Key] = []
        size = len(self.pool)
        while count > 0:
            epoch, offset = divmod(start, size)
            if epoch != self._epoch:
                self._epoch, self._walk = epoch, self.pool[permutation(self.seed, epoch, size)]
            part = self._walk[offset : offset + count]
            found += [(epoch, int(sample)) for sample in part]
            start, count = start + len(part), count - len(part)
        return found


class Mixture:
    """Two walks woven into one: of any `of` positions from a multiple of it on, `some` are the first walk's.

    They are spread evenly, so that any part of a batch has its share, give or take one.
    """

    def __init__(self, first: Order, rest: Order, *, some: int, of: int) -> None:
        self.first, self.rest, self.some, self.of = first, rest, some, of

    def keys(self, start: int, count: int) -> list[Key]:
        """The (epoch, sample) keys of `count` draws from position `start` on."""
        taken = [position * self.some // self.of for position in range(start, start + count + 1)]  # by the first walk
        first = iter(self.first.keys(taken[0], taken[-1] - taken[0]))
        rest = iter(self.rest.keys(start - taken[0], count - (taken[-1] - taken[0])))
        return [next(first if after > before else rest) for before, after in pairwise(taken)]


def micro_batches(
    order: Order | Mixture, *, first_step: int, batch_size: int, accumulate: int, rank: int, world: int
) -> Iterator[list[Key]]:
    """This process's part of each global batch, `accumulate` parts a step, without end.

    The global batch of step s is positions [s B, (s + 1) B) of the order whatever the number of processes; it is cut
    into `accumulate` parts, and each of these among the processes.
    """
    size = batch_size // (accumulate * world)
    step = first_step
    while True:
        for part in range(accumulate):
            start = step * batch_size + (part * world + rank) * size
            yield order.keys(start, size)
        step += 1
