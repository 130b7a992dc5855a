"""What `finetune-mile pack` leaves beside its shards. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune_mile.core.problems import Problem

STATE = "pack.json"


def read_state(path: Path) -> dict[str, Any]:
    """The content of pack.json."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("classes"), list):
        raise Problem(f"{path}: pack.json is damaged; remove {path.parent} and pack again")
    return found
