"""Pseudo-labels of a whole pool in little memory. B images of a batch, M of a block, C classes.

A block is a few small tensors, the same in memory and on disk; which ones they are says how it is written:

- `bits` (M, ceil(C / 8)): hard labels, a bit a class;
- `classes` (sum of labels), `ends` (M): hard labels one after another, where that is smaller than the bits;
- `classes`, `values` (M, K), `rest` (M): soft labels, the K largest in half precision and the mean of all others.

The mean of the others keeps their sum, so that a softmax still sums to one and sigmoids keep their expected count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

TOP = 32  # classes of a soft label that keep their own value
Block = dict[str, Tensor]


def encode(targets: Tensor, *, soft: bool) -> Block:
    """Labels (M, C) in their smallest form; nothing is lost of hard ones.

    Args:
        targets: in [0, 1]; 0 and 1 only unless `soft`.
        soft: keep values, not only which classes.
    """
    num_images, num_classes = targets.shape
    index_type = torch.int16 if num_classes <= torch.iinfo(torch.int16).max else torch.int32
    if soft:
        values, classes = targets.topk(min(TOP, num_classes), dim=1)
        rest = targets.sum(1, dtype=torch.float64) - values.sum(1, dtype=torch.float64)
        rest = rest.clamp(min=0) / max(num_classes - TOP, 1)
        return {"classes": classes.to(index_type), "values": values.half(), "rest": rest.float()}
    found = targets.bool()
    sizes = found.sum(1)
    if int(sizes.sum()) * index_type.itemsize + 4 * num_images >= num_images * -(-num_classes // 8):
        return {"bits": pack_bits(found)}
    return {"classes": found.nonzero()[:, 1].to(index_type), "ends": sizes.cumsum(0).int()}


def decode(block: Block, rows: Tensor, num_classes: int) -> Tensor:
    """Labels (B, C) as floats of some rows (B,) of a block."""
    if "bits" in block:
        return unpack_bits(block["bits"][rows], num_classes)
    if "values" in block:
        targets = block["rest"][rows].unsqueeze(1).repeat(1, num_classes)
        return targets.scatter_(1, block["classes"][rows].long(), block["values"][rows].float())
    ends = block["ends"][rows].long()
    begins = torch.where(rows > 0, block["ends"][(rows - 1).clamp(min=0)].long(), 0)
    sizes = ends - begins
    owner = torch.arange(len(rows)).repeat_interleave(sizes)
    place = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes - begins).repeat_interleave(sizes)
    targets = torch.zeros(len(rows), num_classes)
    targets[owner, block["classes"][place].long()] = 1.0
    return targets


class LabelStore:
    """Pseudo-labels of a whole pool, looked up by sample."""

    def __init__(self, rows: Tensor, blocks: Sequence[Block], block_size: int, num_classes: int) -> None:
        """Keep the labels.

        Args:
            rows: (N,) which row holds sample i; -1 = none.
            blocks: `block_size` rows each, the last one may be shorter.
            block_size: rows of a block.
            num_classes: C.
        """
        self.rows, self.blocks = rows.int(), blocks
        self.block_size, self.num_classes = block_size, num_classes

    def __getitem__(self, index: Tensor) -> Tensor:
        """Label rows (B, C) of samples (B,)."""
        rows = self.rows[index].long()
        if bool((rows < 0).any()):
            raise IndexError("an image outside of the labelled pool was drawn; this is a bug in the pools")
        targets = torch.empty(len(rows), self.num_classes)
        which = rows // self.block_size
        for number in which.unique().tolist():
            here = which == number
            targets[here] = decode(self.blocks[number], rows[here] % self.block_size, self.num_classes)
        return targets


def pack_bits(labels: Tensor) -> Tensor:
    """Multi-hot (B, C) to (B, ceil(C / 8)) bytes."""
    return torch.from_numpy(np.packbits(labels.bool().numpy(), axis=1, bitorder="little"))


def unpack_bits(packed: Tensor, num_classes: int) -> Tensor:
    """The inverse of `pack_bits`, as floats."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=num_classes, bitorder="little")).float()
