"""How much one file may make us build, so that a small file cannot ask for a large memory."""

from __future__ import annotations

from finetune_mile.checkpoints.readers.contents import Refused

_ALWAYS = 64 * 2**20
_TIMES = 8


class Allowance:
    """Bytes that may be made out of a file: a few times its own size."""

    def __init__(self, file_size: int) -> None:
        self._left = _ALWAYS + _TIMES * file_size

    def spend(self, count: int) -> None:
        """Take `count` bytes before they are made, or refuse."""
        if count < 0 or count > self._left:
            raise Refused("is refused, for its contents would unfold to many times the size of the file")
        self._left -= count
