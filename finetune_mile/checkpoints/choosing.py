"""Cards as people look for them: the best first, all that is known about one; which one to take. No torch here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from finetune_mile.checkpoints.cards import Card, folder_of, is_cached, list_cards, read_card, spdx
from finetune_mile.core.files import config, write_json
from finetune_mile.core.problems import Problem

SHIPPED, DOWNLOADED = "simclr-demo", "dinov2-s"
ENDINGS = (".pth", ".pt", ".pth.tar", ".ckpt", ".safetensors", ".npz")


def choose_cards(*, licence: str | None = None, most_mb: float | None = None, commercial: bool = False) -> list[Card]:
    """The cards that fit the filters, those with the best accuracy on ImageNet first."""
    cards = [read_card(path) for path in list_cards().values()]
    if most_mb is not None and most_mb <= 0:
        raise Problem(f"--max-mb {most_mb:g}: must be above 0")
    licences = sorted({card.licence for card in cards})
    if licence is not None and spdx(licence) not in licences:
        raise Problem(f"--licence {licence}: no card has it; there are {', '.join(licences)}")
    chosen = [
        card
        for card in cards
        if (licence is None or card.licence == spdx(licence))
        and (most_mb is None or (card.size_mb is not None and card.size_mb <= most_mb))
        and (card.commercial or not commercial)
    ]
    return sorted(
        chosen, key=lambda card: (not _has_file(card), card.scores_on != "ImageNet-1k", -(card.linear_top1 or 0))
    )


def _has_file(card: Card) -> bool:
    return bool(card.remote()) or is_cached(card)


def summary(card: Card) -> dict[str, Any]:
    """What scripts need of a card."""
    keys = {"name", "aliases", "method", "arch", "licence", "linear_top1", "knn_top1", "scores_on", "verified"}
    more = {"megabytes": card.size_mb, "size": card.preprocess.size, "cached": is_cached(card)}
    return card.model_dump(mode="json", include=keys) | more


def cells(card: Card) -> dict[str, str]:
    """A card as a row of a table: column to text."""
    return {
        "name": card.name, "method": card.method,
        "network": (card.arch or "").removeprefix("timm:").partition(":")[0], "licence": card.licence,
        "MB": str(card.size_mb or ""), "input": str(card.preprocess.size),
        "linear": "" if card.linear_top1 is None else f"{card.linear_top1:.1f}",
        "k-NN": "" if card.knn_top1 is None else f"{card.knn_top1:.1f}",
        "here": "yes" if is_cached(card) else "" if _has_file(card) else "no file",
        "checked": "yes" if card.verified else "unverified",
    }  # fmt: skip


def cards_table(cards: Sequence[Card], *, wide: bool) -> Table:
    """The cards as a table; not `wide`: without some of its columns."""
    rows = [cells(card) for card in cards]
    titles = [title for title in rows[0] if wide or title not in ("method", "network", "checked")]
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if title in ("MB", "input", "linear", "k-NN") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in titles))
    return table


def facts_of(card: Card) -> list[tuple[str, object]]:
    """All that is known about a card's checkpoint, in lines."""
    hidden = {"files", "urls", "instead"} | (set() if card.knn_top1 is not None else {"knn_k", "knn_temperature"})
    rows: list[tuple[str, object]] = []
    for key, value in card.model_dump(mode="json", exclude=hidden).items():
        several = value if isinstance(value, list) else [value]
        rows += [(key, each) for each in several if each not in (None, "", {})]
    for remote in (*card.remote(), *([card.instead] if card.instead else ())):
        rows += [(remote.name, url) for url in remote.urls]
        rows.append(("hash", remote.sha256 or (f"md5 {remote.md5}..." if remote.md5 else "not published")))
    if not card.verified:
        rows.append(("unverified", "nobody here could load the published file itself"))
    place = f"in {folder_of(card)}" if card.remote() else "comes with the install"
    return [*rows, ("cached", f"{'yes' if is_cached(card) else 'no'}, {place}")]


# ---------------------------------------------------- where none was given: asked once, on a terminal


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
