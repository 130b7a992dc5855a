"""Our own exports: the header of `model.safetensors` carries the config, padding included."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.adapters.adapter import Adapter, Tensors, tensors_of
from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

HEADER = "finetune_mile"
"""The key in a safetensors file's `__metadata__` under which the export's config lies as JSON."""


def config_of(contents: Contents) -> dict[str, Any] | None:
    """The config in an export's header, or None where the file is not ours."""
    text = contents.metadata.get(HEADER)
    if text is None:
        return None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise Problem(f"the header of this finetune_mile export is damaged: {error}") from error
    if not isinstance(config, dict) or "arch" not in config:
        raise Problem("the header of this finetune_mile export has no arch; export it again")
    return config


def _recognise(contents: Contents) -> str | None:
    config = config_of(contents)
    return None if config is None else f"the header names a finetune_mile export of {config['arch']}"


def _unwrap(contents: Contents) -> Tensors:
    return tensors_of(contents.tree)


def _rename(key: str) -> str | None:
    return key  # ours already; the network says which names there are


OWN = Adapter(recognise=_recognise, unwrap=_unwrap, rename=_rename, method="finetune_mile")
