"""Which family of pre-training a checkpoint is of, as far as that is cheap to know. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune_mile.checkpoints.cards import find_card, split_init
from finetune_mile.checkpoints.readers.contents import Refused
from finetune_mile.checkpoints.readers.wire import message, raw, table, whole
from finetune_mile.core.problems import Problem

_LARGEST_INDEX = 16 * 2**20
_STEM = b"base_model/conv2d/kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How weights were made, and whether their network is more than a plain ResNet of width 1."""

    method: str
    large: bool


def family_of(init: str) -> Family | None:
    """The family behind --init: of a card, or of SimCLR's TensorFlow files; None: not known without reading it all."""
    where, _ = split_init(init)
    path = Path(where).expanduser()
    index = _index(path)
    if index is not None:
        return _of_simclr(index)
    if where == "none" or ":" in where or path.exists():
        return None
    try:
        card = find_card(where)
    except Problem:  # the check of --init tells it, beside all else that is wrong
        return None
    arch = card.arch or ""
    return Family(method=card.method, large=arch.endswith("-sk") or "w" in arch)


def _index(path: Path) -> Path | None:
    """The index of a TensorFlow checkpoint that is named by its folder, its prefix or itself."""
    if path.is_dir():
        found = sorted(path.glob("*.index"))
        return found[0] if len(found) == 1 else None
    named = path if path.suffix == ".index" else path.with_name(f"{path.name}.index")
    return named if named.is_file() else None


def _of_simclr(index: Path) -> Family | None:
    if index.stat().st_size > _LARGEST_INDEX:
        return None
    try:
        entries = table(index.read_bytes())
        if _STEM not in entries:
            return None
        sides = [raw(value) for number, value in message(raw(dict(message(entries[_STEM]))[2])) if number == 2]
        stem = whole(dict(message(sides[-1])).get(1, 0))
    except (Refused, OSError, KeyError, IndexError):  # loading says what is wrong with it
        return None
    convolutions = sum(k.startswith(b"base_model/conv2d") and k.endswith(b"/kernel") for k in entries)
    norms = sum(k.startswith(b"base_model/batch_norm") and k.endswith(b"/gamma") for k in entries)
    method = "simclrv2" if any(k.startswith(b"head_contrastive/") for k in entries) else "simclr"
    return Family(method=method, large=convolutions != norms or stem > 64)
