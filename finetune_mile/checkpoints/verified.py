"""A card's file as it is on this machine: is it what the card says, and a record of what was seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finetune_mile import __version__
from finetune_mile.checkpoints.cards import Card, fetch_card, folder_of, own_cards, shipped_file
from finetune_mile.checkpoints.init import parse_init
from finetune_mile.checkpoints.loading import Opened, open_trunk
from finetune_mile.compute.passes import show
from finetune_mile.core.download import digest
from finetune_mile.core.files import write_json

FEATURE_TOLERANCE = 1e-3  # of the largest feature: another processor rounds otherwise


def verify_card(card: Card) -> tuple[bool, str, dict[str, Any]]:
    """Load a card's file: whether it is as on the card, the same in words, and what to record."""
    path = fetch_card(card)  # compares the hashes that the card has
    opened = open_trunk(parse_init(card.name))
    now, known = first_features(opened), card.features
    off = max((abs(a - b) for a, b in zip(now, known, strict=False)), default=0.0)
    fine = off <= FEATURE_TOLERANCE * max(map(abs, known), default=1.0)
    files = [folder_of(card) / remote.name for remote in card.remote()] if shipped_file(card) is None else []
    files = [file for file in files if file.is_file()] or [path]  # an unpacked archive may be gone
    hashed = card.sha256 or (card.files and all(remote.sha256 for remote in card.files))
    compared = (
        ("features as on the card" if fine else f"FEATURES DIFFER by {off:.2g}") if known else "no features known"
    )
    words = (
        f"{opened.report.arch}, {len(opened.report.loaded)} tensors loaded, "
        f"{'hash as on the card' if hashed else 'the card has no hash'}, {compared}"
    )
    seen = {
        "files": {file.name: {"sha256": digest(file, "sha256"), "bytes": file.stat().st_size} for file in files},
        "features": now, "loaded": len(opened.report.loaded), "arch": opened.report.arch, "ok": fine,
        "finetune_mile": __version__,
    }  # fmt: skip
    return fine, words, seen


def record(card: Card, seen: dict[str, Any]) -> Path:
    """Write what was seen of a card's file beside the user's own cards."""
    path = own_cards() / "verified" / f"{card.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, seen)
    return path


def first_features(opened: Opened) -> tuple[float, ...]:
    """The first eight features of a fixed picture."""
    size = opened.card.preprocess.size
    steps = torch.linspace(-1.5, 1.5, size)
    picture = torch.stack([steps.expand(size, size), steps.unsqueeze(1).expand(size, size), torch.outer(steps, steps)])
    features = show(opened.network, picture.unsqueeze(0))[0, :8]
    return tuple(float(f"{value:.6g}") for value in features.tolist())
