"""Where the shared test material is, and how trees of tensors are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zstandard

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "checkpoints"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="shared test material is not here")


def unpack(path: Path, folder: Path) -> Path:
    out = folder / path.name.removesuffix(".zst")
    with path.open("rb") as packed, out.open("wb") as plain:
        zstandard.ZstdDecompressor(max_window_size=2**27).copy_stream(packed, plain)
    return out


def leaves(tree, prefix=""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}/{key}")
    elif isinstance(tree, list | tuple):
        for key, value in enumerate(tree):
            yield from leaves(value, f"{prefix}/{key}")
    else:
        yield prefix, tree


def tensors(tree) -> dict[str, torch.Tensor]:
    return {key: value for key, value in leaves(tree) if isinstance(value, torch.Tensor)}


def assert_same(got, wanted):
    """Two trees hold the same tensors, bit by bit."""
    got, wanted = tensors(got), tensors(wanted)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), key
