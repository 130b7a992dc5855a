"""Random numbers as a pure function of (seed, epoch, sample): nothing to save, nothing to lose.

A hash of counters (the splitmix64 finaliser) instead of a generator with a state, so that neither the number of workers
or processes, nor a restart, nor a library's release changes what is drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashes(seed: int, epoch: int | npt.NDArray[np.int64], samples: npt.NDArray[np.int64]) -> U64:
    """One 64-bit hash per sample, (n,)."""
    with np.errstate(over="ignore"):
        state = _mix(np.full(len(samples), seed, np.uint64) + _GOLDEN)
        state = _mix(state + np.asarray(epoch).astype(np.uint64) * _GOLDEN + np.uint64(1))
        return _mix(state + samples.astype(np.uint64) * _GOLDEN + np.uint64(2))


def uniforms(
    seed: int, epoch: int | npt.NDArray[np.int64], samples: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.float64]:
    """`count` uniform numbers in [0, 1) for each sample, (n, count)."""
    with np.errstate(over="ignore"):
        steps = (np.arange(1, count + 1, dtype=np.uint64)) * _GOLDEN
        bits = _mix(hashes(seed, epoch, samples)[:, None] + steps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """The order of `size` things in one epoch: they are sorted by their hash."""
    order: npt.NDArray[np.int64] = np.argsort(hashes(seed, epoch, np.arange(size)), kind="stable")
    return order
