"""`finetune-mile weights check FILE`: what the file is, how sure that is, what was assumed, and the line to use it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from finetune_mile.checkpoints.init import Init, parse_init
from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.loading import Opened

TOLERANCE = 1e-4  # largest difference over the largest feature
SHOWN = 4  # classes, names and groups of names in a line


def check_file(args: argparse.Namespace) -> int:
    """Check one file; 0 fine, 1 its features are others than those of --against."""
    init = parse_init(args.init)
    if args.image is not None and not args.image.is_file():
        raise Problem(f"--image {args.image}: there is no such file")
    from finetune_mile.checkpoints.loading import open_trunk

    opened = open_trunk(init, arch=args.arch)
    against = args.against or _beside(init)
    figures = compare(opened, against) if against else {}
    fine = all(figure <= TOLERANCE for figure in figures.values())
    facts = look(opened, args.image) if args.image is not None else {}
    if args.json:
        result = {
            "init": args.init, "ok": fine, "parity": figures, "tolerance": TOLERANCE,
            **({"image": facts} if facts else {}),
            "card": opened.card.model_dump(mode="json"), **opened.report.to_json(),
        }  # fmt: skip
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return 0 if fine else 1
    print_report(opened, names=args.names, where=_where(args.init))
    for size, figure in figures.items():
        verdict = "the same as" if figure <= TOLERANCE else f"DIFFERENT (more than {TOLERANCE:g}) from"
        _say(f"features at {size}: {figure:.1e} of the largest, {verdict} {against}")
    if not figures:
        _say("features: not compared (--against other.pth or expected.npz)")
    if facts:
        _print_look(facts, args.image)
    arch = f" --arch {args.arch}" if args.arch else ""
    _say(f"use it: finetune-mile run --init {shlex.quote(args.init)}{arch} --data folder:photos")
    return 0 if fine else 1


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


def _where(text: str) -> str:
    """What the user named, without what follows `::`."""
    return text.partition("::")[0]


def _beside(init: Init) -> Path | None:
    """`expected.npz` next to the file, where there is one."""
    if init.path is None:
        return None
    beside = (init.path if init.kind == "folder" else init.path.parent) / "expected.npz"
    return beside if beside.is_file() else None


# --------------------------------------------------------------------------------------- the screen


def print_report(opened: Opened, *, names: bool, where: str = "FILE") -> None:
    """Print what was found in a file.

    Args:
        opened: the file.
        names: list every tensor, not only their number.
        where: the file as the user named it, for lines to type.
    """
    report, card = opened.report, opened.card
    _say(f"format: {report.format} ({report.why})")
    features = getattr(opened.network, "num_features", None)
    _say(f"network: {report.arch}, padding {report.padding}" + (f", {features} features" if features else ""))
    sure = "certain" if report.certain else "by the names of the tensors alone"
    _say(f"sure: {sure}")
    for text in report.assumed:
        _say(f"assumed: {text}")
    seen = card.preprocess
    if seen.std == (1.0, 1.0, 1.0) and seen.mean == (0.0, 0.0, 0.0):
        numbers = "RGB in [0, 1], no mean and deviation"
    else:
        numbers = f"RGB in [0, 1], mean {seen.mean}, deviation {seen.std}"
    _say(f"input: {numbers}, {seen.size} px, {seen.interpolation}")
    for prefix, ours in report.mapping.items():
        _say(f"mapping: {prefix!r} -> {ours!r}")
    for part in ("loaded", "reset", "dropped", "stubs"):
        values = getattr(report, part)
        some = ", ".join(values) if names else _groups(values) if part == "dropped" else _few(values)
        _say(f"{part}: {len(values)}" + (f" ({some})" if values else ""))
    for choice in report.others:
        _say(f"other backbone: --init {shlex.quote(f'{where}::{choice}')} ({report.reason})")
    if report.classifier:
        _say(f"classifier: {opened.called or 'fc.weight'}, {report.classifier} classes; not used (see --keep-head)")


def _few(values: tuple[str, ...]) -> str:
    return ", ".join(values[:SHOWN]) + (", ..." if len(values) > SHOWN else "")


def _groups(values: tuple[str, ...]) -> str:
    """Tensors that are not loaded, by the module that they belong to."""
    counts = Counter(_module(value) for value in values)
    shown = [f"{name} {count}" if count > 1 else name for name, count in counts.most_common(SHOWN)]
    return ", ".join(shown) + (", ..." if len(counts) > SHOWN else "")


def _module(path: str) -> str:
    parts = [part for part in path.replace("/", ".").split(".") if part not in ("module", "state_dict", "model")]
    return parts[0] if parts else path


# ------------------------------------------------------------------------------------------ features


def compare(opened: Opened, path: Path) -> dict[str, float]:
    """The largest difference over the largest feature, by image size.

    Args:
        opened: the file.
        path: an `.npz` with `x_<size>` and `features_<size>`, or another checkpoint, which is given two fixed images.
    """
    import numpy as np

    if path.suffix != ".npz":
        return _compare_checkpoints(opened, path)
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {key: file[key] for key in file.files if key.startswith(("x_", "features_"))}
    except (OSError, ValueError) as error:
        raise Problem(f"--against {path} cannot be read: {error}") from error
    sizes = [key.removeprefix("x_") for key in data if key.startswith("x_")]
    missing = [f"features_{size}" for size in sizes if f"features_{size}" not in data]
    if not sizes or missing:
        raise Problem(f"--against {path}: {', '.join(missing) or 'x_<size>'} is missing")
    return {size: _apart(_features(opened, data[f"x_{size}"]), data[f"features_{size}"]) for size in sizes}


def _compare_checkpoints(opened: Opened, path: Path) -> dict[str, float]:
    """Both networks get the same numbers, so that their features can be compared whatever images they expect."""
    import numpy as np

    from finetune_mile.checkpoints.loading import open_trunk

    other = open_trunk(parse_init(str(path), "--against"))
    size = opened.card.preprocess.size
    images = np.random.default_rng(0).standard_normal((2, 3, size, size)).astype(np.float32)
    return {str(size): _apart(_features(opened, images), _features(other, images))}


def _features(opened: Opened, images: Any) -> Any:
    """Images (B, 3, H, W) to features (B, D), as numpy arrays."""
    import torch

    from finetune_mile.compute.passes import show

    return show(opened.network, torch.from_numpy(images).float()).numpy()


def _apart(features: Any, expected: Any) -> float:
    import numpy as np

    if features.shape != expected.shape:
        return float("inf")
    difference = float(np.abs(features - expected).max() / np.abs(expected).max())
    return difference if np.isfinite(difference) else float("inf")


def look(opened: Opened, path: Path) -> dict[str, Any]:
    """What the network makes of one photo: norms of its features, and the classes that a head in the file names."""
    import torch
    from PIL import Image, UnidentifiedImageError

    from finetune_mile.checkpoints.loading import LINEAR, Preprocessor
    from finetune_mile.compute.passes import show

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


def _print_look(facts: dict[str, Any], path: Path) -> None:
    _say(
        f"{path.name}: norm of the features {facts['norm']:.3g}, largest {facts['largest']:.3g}; "
        f"cosine to its mirror image {facts['mirrored']:.2f}, to noise {facts['noise']:.2f}"
    )
    if "classes" in facts:
        _say("its classes: " + ", ".join(f"{name} {share:.0%}" for name, share in facts["classes"]))
