"""A state dict in several files with a JSON index, as transformers and accelerate write it.

The index is not trusted: it may name files of its own folder only, no other index, and its sizes are not read.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune_mile.checkpoints.readers.contents import Contents, Refused, require

INDEX = ".index.json"
_LARGEST, _MOST_SHARDS = 16 * 2**20, 4096
_SHARD = re.compile(r"[^/\\\0:]+\.(?:safetensors|bin|pt|pth)")
_ONE = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")


def read_index(index: Path, read: Callable[[Path], Contents]) -> Contents:
    """Read all shards of an index.

    Args:
        index: the JSON file; its shards are beside it.
        read: reads one shard.
    """
    places = _places(index)
    shards: dict[str, Contents] = {}
    for shard in sorted(set(places.values())):
        file = index.parent / shard
        require(file.is_file(), f"needs the shard {shard}, which is not beside it; fetch all shards")
        try:
            shards[shard] = read(file)
        except Refused as why:
            raise Refused(f"cannot be read: its shard {shard} {why}") from why
    tree: dict[str, Any] = {}
    for name, shard in places.items():
        require(name in shards[shard].tree, f"says that {name[:100]} is in {shard}, which does not have it")
        tree[name] = shards[shard].tree[name]
    for shard, contents in shards.items():
        extra = next((name for name in contents.tree if places.get(name) != shard), None)
        require(extra is None, f"does not list {str(extra)[:100]}, which is in {shard}")
    stubs = tuple(sorted({stub for contents in shards.values() for stub in contents.stubs}))
    return Contents(container=next(iter(shards.values())).container, tree=tree, stubs=stubs)


def _places(index: Path) -> dict[str, str]:
    """The name of every tensor, and the file that it is in."""
    require(index.stat().st_size <= _LARGEST, f"is larger than {_LARGEST // 2**20} MB, too large for an index")
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Refused(f"is not valid JSON: {str(error)[:200]}") from error
    places: Any = content.get("weight_map") if isinstance(content, dict) else None
    require(isinstance(places, dict) and places, "has no weight_map of tensor names to files")
    for name, shard in places.items():
        usable = isinstance(shard, str) and _SHARD.fullmatch(shard) and not shard.startswith(".")
        require(usable, f"puts {name[:100]} into {str(shard)[:100]!r}, which is not a weights file of its own folder")
    require(len(set(places.values())) <= _MOST_SHARDS, f"names more than {_MOST_SHARDS} files")
    return dict(places)


def check_single(path: Path) -> None:
    """Refuse one shard of several, with what to give instead."""
    match = _ONE.fullmatch(path.name)
    if match and int(match[2]) > 1:
        raise Refused(
            f"is one of {int(match[2])} shards of a checkpoint; give the folder, or {match[1]}{match[3]}{INDEX} in it"
        )
