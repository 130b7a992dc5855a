"""Threads of torch, by how much there is to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 20_000_000  # multiplications of one operation: some milliseconds of one core


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """One thread for little work; the caller's number for more.

    Several threads wait for each other after each operation. Where other programs use the cores, that takes far longer
    than the work: a probe of 192 images took 11 to 19 s instead of 0.4.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if multiplications < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
