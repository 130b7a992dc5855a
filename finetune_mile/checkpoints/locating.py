"""From what `--init` says to a file on this machine, and the notes that lie beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_mile.checkpoints.cards import Card, fetch_card, find_card, list_cards, split_init
from finetune_mile.core.problems import Problem

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.safetensors", "checkpoint.ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A checkpoint on the disk."""

    path: Path  # what the reader opens: a file, or the folder of a TensorFlow checkpoint
    name: str  # for a card that is made up on the way
    card: Card | None = None
    config: dict[str, Any] = field(default_factory=dict)  # config.json beside it


def locate(where: str) -> Located:
    """Find (or fetch) the checkpoint behind `--init` without its `::PREFIX`."""
    if where.startswith("hf:"):
        return _in_folder(_from_hub(where.removeprefix("hf:")), name=where)
    path = Path(where).expanduser()
    if where in list_cards():  # a card's name wins over a folder that happens to be called so
        card = find_card(where)
        return Located(path=fetch_card(card), name=card.name, card=card)
    if path.is_dir():
        return _in_folder(path, name=path.resolve().name)
    if path.is_file() or path.with_name(path.name + ".index").is_file():
        return Located(path=path, name=path.name.split(".")[0], config=_config(path.parent))
    card = find_card(where)
    return Located(path=fetch_card(card), name=card.name, card=card)


def fetch_init(init: str) -> None:
    """Fetch what a card's name in `--init` needs, so that a missing network is told before the images are listed."""
    where, _ = split_init(init)
    known = where in list_cards() or (":" not in where and where != "none" and not _exists(Path(where).expanduser()))
    if known:
        fetch_card(find_card(where))


def _exists(path: Path) -> bool:
    return path.exists() or path.with_name(path.name + ".index").is_file()


def _in_folder(folder: Path, name: str) -> Located:
    """One of our run folders, an export, a Hugging Face folder, or a TensorFlow checkpoint."""
    if (folder / "run.json").is_file() and not (folder / "export").is_dir():
        raise Problem(f"--init {folder}: this run has no export/ yet; finish it, or resume it first")
    for place in (folder / "export", folder):
        for weights in _WEIGHT_FILES:
            if (place / weights).is_file():
                return Located(path=place / weights, name=name, config=_config(place))
    return Located(path=folder, name=name)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Problem(f"{path} is not valid JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _from_hub(repo: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo, allow_patterns=[*_WEIGHT_FILES, "config.json"])
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Problem(
            f"--init hf:{repo} could not be fetched ({first}); fetch the repository on another "
            "machine and give its "
            "folder to --init"
        ) from error
    return Path(folder)
