"""Our own exports: the header of `model.safetensors` carries the config, padding included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_mile.checkpoints.adapters.adapter import Adapter, Tensors, tensors_of
from finetune_mile.checkpoints.init import read_header

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents


def _recognise(contents: Contents) -> str | None:
    config = read_header(contents.metadata)
    return None if config is None else f"the header names a finetune_mile export of {config['arch']}"


def _unwrap(contents: Contents) -> Tensors:
    return tensors_of(contents.tree)


def _rename(key: str) -> str | None:
    return key  # ours already; the network says which names there are


OWN = Adapter(recognise=_recognise, unwrap=_unwrap, rename=_rename, method="finetune_mile", own=True, plain=True)
