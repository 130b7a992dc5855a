"""Cards as people look for them: the best first, and all that is known about one. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from finetune_mile.checkpoints.cards import Card, folder_of, is_cached, list_cards, read_card, spdx
from finetune_mile.core.problems import Problem


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
