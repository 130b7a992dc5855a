"""Which checkpoint to take where none was given: asked once, on a terminal. No torch here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from finetune_mile.checkpoints.cards import Card, is_cached, list_cards, read_card
from finetune_mile.core.files import config, write_json
from finetune_mile.core.problems import Problem

SHIPPED, DOWNLOADED = "simclr-demo", "dinov2-s"
ENDINGS = (".pth", ".pt", ".pth.tar", ".ckpt", ".safetensors", ".npz")


def choose_init(data: str, *, download: bool) -> tuple[str, str]:
    """A checkpoint for the photos of --data, and why this one.

    A file beside the photos, else the best card on this machine, else one that the user agrees to `download`, else the
    one that comes with the package.
    """
    folder = Path(data.removeprefix("folder:"))
    files = sorted(p for p in folder.iterdir() if p.name.endswith(ENDINGS)) if folder.is_dir() else []
    if len(files) > 1:
        raise Problem(f"{folder} holds {len(files)} checkpoints; choose one with --init {shlex.quote(str(files[0]))}")
    if files:
        return str(files[0]), "it is beside the photos"
    cards = [read_card(path) for path in list_cards().values()]
    cached = [card for card in cards if is_cached(card) and card.name != SHIPPED]
    if cached:
        best = max(cached, key=lambda card: (card.scores_on == "ImageNet-1k", card.linear_top1 or 0.0))
        return best.name, "it is on this machine"
    if download:
        return DOWNLOADED, "--download"
    memory = config() / "quickstart.json"
    if memory.is_file():
        return SHIPPED, f"it comes with the package; you declined {DOWNLOADED} before, --download downloads it"
    if sys.stdin.isatty() and sys.stderr.isatty() and _agreed(read_card(list_cards()[DOWNLOADED]), memory):
        return DOWNLOADED, "you agreed to its download"
    return SHIPPED, "it comes with the package"


def _agreed(card: Card, memory: Path) -> bool:
    """Ask whether to download a card's file; a no is kept in `memory`."""
    sys.stderr.write(
        f"No checkpoint was given. {card.name} is a good one for photos: {card.size_mb} MB, licence {card.licence}, "
        f"{card.knn_top1:g} % k-NN accuracy on {card.scores_on}. Download it? [Y/n] "
    )
    sys.stderr.flush()
    answer = sys.stdin.readline()  # empty: the end of the input
    if answer.strip().lower() in ("n", "no"):
        try:
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_json(memory, {"download": False})
            sys.stderr.write(f"Not downloaded. {memory} keeps this answer; --download downloads it later.\n")
        except OSError as error:
            sys.stderr.write(f"Not downloaded. This answer could not be kept ({error}).\n")
    return bool(answer) and answer.strip().lower() in ("", "y", "yes")
