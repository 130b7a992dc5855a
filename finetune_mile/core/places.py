"""Where things lie: the cards and recipes that come with the install, and the cache for downloads."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(name: str) -> Path:
    """The folder `weights` or `recipes`: at the repository's root, or inside an installed wheel."""
    at_root = _PACKAGE.parent / name
    return at_root if at_root.is_dir() else _PACKAGE / "_shipped" / name


def cache() -> Path:
    """The folder for downloads: FINETUNE_MILE_CACHE, else XDG_CACHE_HOME, else ~/.cache."""
    own = os.environ.get("FINETUNE_MILE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "finetune_mile"
