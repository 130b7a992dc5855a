"""Photos that a page shows: the worst, the most doubtful and the best that were scored. N images, C classes."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from finetune_mile.core.problems import BadImage
from finetune_mile.measures.labels import best_and_above
from finetune_mile.measures.metrics import Measured, is_given

if TYPE_CHECKING:
    from finetune_mile.images.sets import ImageSet

WORST, DOUBTFUL, BEST, GUESSED = 12, 12, 6, 6  # photos
SIDE, SMALL = 300, 160  # pixels of the longer side; below SMALL it is enlarged without smoothing
MARKS = {"right": "✓", "wrong": "✗", "missed": "○", "more": "+"}
MOST_LABELS, LEAST = 8, 0.02  # labels of a photo, and the least probability of one


def chosen(measured: Measured) -> dict[str, list[int]]:
    """Rows (of N) of the worst photos, the most doubtful of the others, and the best, with one of a class at most."""
    given, probabilities = measured.given, measured.probabilities.double()
    if given.ndim == 1:
        known = given >= 0
        own = probabilities.gather(1, given.clamp(min=0).unsqueeze(1)).squeeze(1)
        top = probabilities.topk(min(2, probabilities.shape[1]), 1).values
        wrong = known & (probabilities.argmax(1) != given)
        worst = torch.where(wrong, top[:, 0] - own, -torch.inf)
        best = torch.where(known & ~wrong, own, -torch.inf)
        doubt = -(top[:, 0] - top[:, -1])
        kinds = given.tolist()
    else:
        flags = given > 0
        known = flags.any(1)
        p = probabilities.clamp(1e-6, 1 - 1e-6)
        loss = -torch.where(flags, p.log(), (1 - p).log()).mean(1)
        worst, best = torch.where(known, loss, -torch.inf), torch.where(known, -loss, -torch.inf)
        doubt = -(p * p.log() + (1 - p) * (1 - p).log()).sum(1)
        kinds = [*range(len(given))]
    rows = {"worst": first(worst, WORST)}
    rows["doubtful"] = first(doubt, DOUBTFUL, {*rows["worst"]})
    rows["best"] = first(best, BEST, {*rows["worst"], *rows["doubtful"]}, kinds)
    return rows


def first(scores: Tensor, count: int, without: set[int] = frozenset(), kinds: Sequence[int] = ()) -> list[int]:  # type: ignore[assignment]
    """The rows with the highest scores (N,); -inf does not count; of each kind only one."""
    rows: list[int] = []
    taken: set[int] = set()
    for row in scores.argsort(descending=True, stable=True).tolist():
        if len(rows) == count or scores[row] == -torch.inf:
            break
        if row in without or (kinds and kinds[row] in taken):
            continue
        taken |= {kinds[row]} if kinds else set()
        rows.append(row)
    return rows


def surest(measured: Measured, confidence: float) -> dict[str, list[int]]:
    """Rows (of N) of photos without a label: the surest, one of a class at most, and the least sure."""
    top, best = measured.probabilities.max(1)
    sure = top >= confidence
    return {
        "sure": first(top.where(sure, -torch.inf), GUESSED, kinds=best.tolist()),
        "refused": first((-top).where(~sure, -torch.inf), GUESSED),
    }


def photos(
    images: ImageSet,
    indices: Tensor,
    picked: Mapping[str, Sequence[int]],
    measured: Measured,
    classes: Sequence[str],
    threshold: float | Tensor,
) -> dict[str, list[dict[str, Any]]]:
    """What the page shows of each picked photo.

    Args:
        images: that were scored, and others.
        indices: (N,) of the images, in the order of `measured`.
        picked: rows (of N) of each kind.
        measured: of the run.
        classes: C names.
        threshold: of the labels that are shown, one or (C,).
    """
    shown: dict[str, list[dict[str, Any]]] = {}
    for kind, rows in picked.items():
        shown[kind] = []
        for row in rows:
            index = int(indices[row])
            try:
                picture, small = thumbnail(images.read(index))
            except BadImage:  # it could be read before: the file is gone
                continue
            about = labels_of(measured, row, classes, threshold)
            shown[kind].append({"picture": picture, "small": small, "file": images.ids[index], **about})
    return shown


def labels_of(measured: Measured, row: int, classes: Sequence[str], threshold: float | Tensor) -> dict[str, Any]:
    """Given and found labels of a photo; each has its mark: ✓ right, ✗ wrong, + beside the given one."""
    chances = measured.probabilities[row]
    given = is_given(measured.given[row : row + 1], len(classes))[0]
    truth = given if measured.truth is None or not bool(measured.truth[row].any()) else measured.truth[row]
    certain = measured.truth is not None or measured.activation == "softmax"  # else further labels may be right
    own = threshold if isinstance(threshold, Tensor) else torch.full_like(chances, threshold)
    several = measured.activation == "sigmoid" or measured.given.ndim == 2
    least = LEAST if several else 0.1
    order = best_and_above(chances, least)[:MOST_LABELS]
    order += [c for c in truth.nonzero().flatten().tolist() if c not in order]
    labels = []
    for place, c in enumerate(order):
        known = bool(truth.any())
        right = bool(truth[c])
        missed = right and place > 0 and not several  # the best class alone is the answer
        kind = "missed" if missed else "right" if right else "wrong" if known and (certain or place == 0) else "more"
        labels.append({
            "name": classes[c], "p": round(float(chances[c]), 4), "own": round(float(own[c]), 4), "first": place == 0,
            "given": bool(truth[c]), "kind": kind, "mark": MARKS[kind],
            "below": not bool(chances[c] > own[c]),
        })  # fmt: skip
    names = [classes[c] for c in given.nonzero().flatten().tolist()]
    tone = "" if not bool(truth.any()) else "good" if bool(truth[order[0]]) else "bad"
    return {"given": names, "labels": labels, "tone": tone}


def thumbnail(image: Tensor) -> tuple[str, bool]:
    """An image (3, H, W) uint8 as the source of an HTML image, and whether its pixels should be seen."""
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    small = max(picture.size) < SMALL
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    if small:
        picture.save(stream, format="PNG")
    else:
        picture.save(stream, format="JPEG", quality=80)
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}", small
