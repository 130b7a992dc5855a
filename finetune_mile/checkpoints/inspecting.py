"""What a checkpoint file is, how sure that is, and whether its features are as expected or as on its card."""

from __future__ import annotations

import os
import shlex
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from finetune_mile import __version__
from finetune_mile.checkpoints.adapters import few
from finetune_mile.checkpoints.cards import (
    Card,
    fetch_card,
    find_card,
    folder_of,
    is_cached,
    list_cards,
    own_cards,
    read_card,
    shipped_file,
)
from finetune_mile.checkpoints.init import parse_init
from finetune_mile.checkpoints.loading import LINEAR, Opened, Preprocessor, open_trunk
from finetune_mile.compute.passes import show
from finetune_mile.core.download import digest
from finetune_mile.core.files import open_regular, write_json
from finetune_mile.core.problems import LONGEST_SHOWN, Problem, inert

TOLERANCE = 1e-4  # largest difference over the largest feature
FEATURE_TOLERANCE = 1e-3  # of the largest feature on a card: another processor rounds otherwise
_MOST_NUMBERS = 2**25  # of one array of an .npz
SHOWN = 4  # classes, names and groups of names in a line


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found about a file."""

    init: str  # as the user named it
    opened: Opened
    against: Path | None  # that features were compared with
    parity: dict[str, float]  # `compare`
    photo: dict[str, Any]  # `look`
    photo_name: str

    @property
    def fine(self) -> bool:
        """Are the features as expected, where this is known?"""
        return all(figure <= TOLERANCE for figure in self.parity.values())

    def to_json(self) -> dict[str, Any]:
        photo = {"image": self.photo} if self.photo else {}
        found = {"init": self.init, "ok": self.fine, "parity": self.parity, "tolerance": TOLERANCE, **photo}
        return found | {"card": self.opened.card.model_dump(mode="json"), **self.opened.report.to_json()}

    def say(self, *, names: bool) -> Iterator[str]:
        """All of it in lines; `names`: list every tensor, not only their number."""
        yield from say_report(self.opened, names=names, where=self.init.partition("::")[0])
        for size, figure in self.parity.items():
            verdict = "the same as" if figure <= TOLERANCE else f"DIFFERENT (more than {TOLERANCE:g}) from"
            yield f"features at {size}: {figure:.1e} of the largest, {verdict} {self.against}"
        if not self.parity:
            yield "features: not compared (--against other.pth or expected.npz)"
        if self.photo:
            yield (
                f"{self.photo_name}: norm of the features {self.photo['norm']:.3g}, largest "
                f"{self.photo['largest']:.3g}; cosine to its mirror image {self.photo['mirrored']:.2f}, to noise "
                f"{self.photo['noise']:.2f}"
            )
        if "classes" in self.photo:
            yield "its classes: " + ", ".join(f"{name} {share:.0%}" for name, share in self.photo["classes"])


def inspect(
    source: str, *, arch: str | None = None, against: Path | None = None, photo: Path | None = None
) -> Inspection:
    """Open a file, and compare its features with those `against`, or with `expected.npz` beside it."""
    init = parse_init(source)
    opened = open_trunk(init, arch=arch)
    if against is None and init.path is not None:
        beside = (init.path if init.kind == "folder" else init.path.parent) / "expected.npz"
        against = beside if beside.is_file() else None
    parity = compare(opened, against) if against else {}
    facts = look(opened, photo) if photo else {}
    return Inspection(source, opened, against, parity, facts, photo.name if photo else "")


def say_report(opened: Opened, *, names: bool, where: str = "FILE") -> Iterator[str]:
    """Lines about what was found in a file.

    Args:
        opened: the file.
        names: list every tensor, not only their number.
        where: the file as the user named it, for lines to type.
    """
    report, seen = opened.report, opened.card.preprocess
    yield f"format: {report.format} ({report.why})"
    features = getattr(opened.network, "num_features", None)
    yield f"network: {report.arch}, padding {report.padding}" + (f", {features} features" if features else "")
    yield f"sure: {'certain' if report.certain else 'by the names of the tensors alone'}"
    yield from (f"assumed: {text}" for text in report.assumed)
    plain = seen.std == (1.0, 1.0, 1.0) and seen.mean == (0.0, 0.0, 0.0)
    numbers = "no mean and deviation" if plain else f"mean {seen.mean}, deviation {seen.std}"
    yield f"input: RGB in [0, 1], {numbers}, {seen.size} px, {seen.interpolation}"
    yield from (f"mapping: {prefix!r} -> {ours!r}" for prefix, ours in report.mapping.items())
    modules = Counter(_module(name) for name in report.dropped).most_common()
    dropped = [f"{name} {count}" if count > 1 else name for name, count in modules]  # by module
    for part in ("loaded", "reset", "dropped", "stubs"):
        values = getattr(report, part)
        some = ", ".join(values) if names else _few(dropped if part == "dropped" else values)
        yield f"{part}: {len(values)}" + (f" ({some})" if values else "")
    for choice in report.others:
        yield f"other backbone: --init {shlex.quote(f'{where}::{choice}')} ({report.reason})"
    if report.classifier:
        yield f"classifier: {opened.called or 'fc.weight'}, {report.classifier} classes; not used (see --keep-head)"


def _few(values: Sequence[str]) -> str:
    return ", ".join(inert(value, LONGEST_SHOWN) for value in values[:SHOWN]) + (", ..." if len(values) > SHOWN else "")


def _module(path: str) -> str:
    parts = [part for part in path.replace("/", ".").split(".") if part not in ("module", "state_dict", "model")]
    return parts[0] if parts else path


def compare(opened: Opened, path: Path) -> dict[str, float]:
    """The largest difference over the largest feature, by image size.

    Args:
        opened: the file.
        path: an `.npz` with `x_<size>` and `features_<size>`, or another checkpoint. It is given the same numbers, so
            that features can be compared whatever images the two expect.
    """
    if path.suffix != ".npz":
        other, size = open_trunk(parse_init(str(path), "--against")), opened.card.preprocess.size
        images = np.random.default_rng(0).standard_normal((2, 3, size, size)).astype(np.float32)
        return {str(size): _apart(_features(opened, images), _features(other, images))}
    data = _expected(path)
    sizes = [key.removeprefix("x_") for key in data if key.startswith("x_")]
    missing = [f"features_{size}" for size in sizes if f"features_{size}" not in data]
    if not sizes or missing:
        raise Problem(f"--against {path}: {few(missing) or 'x_<size>'} is missing")
    odd = [key for key, array in data.items() if not _fits(array, images=key.startswith("x_"))]
    if odd:
        raise Problem(f"--against {path}: {few(odd)} must be floats, images (B, 3, H, W) or features (B, D)")
    return {size: _apart(_features(opened, data[f"x_{size}"]), data[f"features_{size}"]) for size in sizes}


def _fits(array: Any, *, images: bool) -> bool:
    """Are these floats that are images (B, 3, H, W), or features (B, D)?"""
    shape = array.ndim == 4 and array.shape[1] == 3 and array.size <= _MOST_NUMBERS if images else array.ndim == 2
    return bool(shape and array.dtype.kind == "f")


def _expected(path: Path) -> dict[str, Any]:
    """The arrays of an `.npz` that are compared; what they take once they are unpacked is looked up first."""
    try:
        with os.fdopen(open_regular(path), "rb") as stream, zipfile.ZipFile(stream) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > 8 * _MOST_NUMBERS:
                raise Problem(f"--against {path}: its arrays take more than {8 * _MOST_NUMBERS // 2**20} MB")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                return {key: file[key] for key in file.files if key.startswith(("x_", "features_"))}
    except (OSError, ValueError, EOFError, LookupError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise Problem(f"--against {path} cannot be read: {error}") from error


def _features(opened: Opened, images: Any) -> Any:
    """Images (B, 3, H, W) to features (B, D), as numpy arrays."""
    return show(opened.network, torch.from_numpy(images).float()).numpy()


def _apart(features: Any, expected: Any) -> float:
    if features.shape != expected.shape:
        return float("inf")
    difference = float(np.abs(features - expected).max() / np.abs(expected).max())
    return difference if np.isfinite(difference) else float("inf")


def look(opened: Opened, path: Path) -> dict[str, Any]:
    """What the network makes of one photo: norms of its features, and the classes that a head in the file names."""
    try:
        with Image.open(path) as image:
            pixels = Preprocessor(opened.card.preprocess)(image)
    except (OSError, UnidentifiedImageError) as error:
        raise Problem(f"--image {path} cannot be read: {error}") from error
    photo, mirrored, noise = show(opened.network, torch.stack([pixels, pixels.flip(-1), torch.randn_like(pixels)]))
    facts: dict[str, Any] = {
        "norm": float(photo.norm()),
        "largest": float(photo.abs().max()),
        "mirrored": float(torch.cosine_similarity(photo, mirrored, dim=0)),
        "noise": float(torch.cosine_similarity(photo, noise, dim=0)),
    }
    if set(opened.classifier) == LINEAR:
        logits = opened.classifier["fc.weight"].float() @ photo + opened.classifier["fc.bias"].float()
        best = logits.softmax(0).topk(min(SHOWN, len(logits)))
        names = opened.classes or [f"class {number}" for number in range(len(logits))]
        facts["classes"] = [(names[i], float(p)) for p, i in zip(best.values, best.indices.tolist(), strict=True)]
    return facts


# ------------------------------------------------------------------------------ as on the card


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


def verify_cards(names: Sequence[str] | None) -> Iterator[tuple[bool, str]]:
    """For each card: is its file as the card says, and a line about it. What was seen is recorded.

    `names` None: all cards whose files are on this machine.
    """
    here = (path.stem for path in list_cards().values() if is_cached(read_card(path)))
    for name in here if names is None else names:
        card = find_card(name, "NAME")
        try:
            fine, words, seen = verify_card(card)
            yield fine, f"{name}: {words}; {record(card, seen)}"
        except Problem as problem:
            yield False, f"{name}: failed: {' '.join(problem.sentences)}"
