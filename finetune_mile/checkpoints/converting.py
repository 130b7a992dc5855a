"""Other forms of a checkpoint: `weights convert` writes its weights anew, `weights add` gives it a card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import yaml

from finetune_mile.checkpoints.cards import list_cards, own_cards
from finetune_mile.checkpoints.exporting import check_free, write_export, write_timm
from finetune_mile.checkpoints.init import parse_init
from finetune_mile.checkpoints.inspecting import first_features
from finetune_mile.checkpoints.loading import Opened, check_head_name, keep_own_head, open_trunk
from finetune_mile.core.download import digest
from finetune_mile.core.files import write_whole
from finetune_mile.core.problems import Problem


def convert(
    source: str, out: Path, *, called: str, to: Literal["own", "timm"] = "own", arch: str | None = None,
    keep_head: str | None = None, drop_head: bool = False,
) -> str:  # fmt: skip
    """Write safetensors in torchvision names, or in timm's, and a config; returns what to say about it.

    Args:
        source: as --init.
        out: a folder that is new or empty.
        called: the name of the source in the config.
        to: the form.
        arch: where the file does not show it.
        keep_head: keep the classifier of a file that is not ours, by its name there.
        drop_head: leave the classifier out.
    """
    check_free(out)
    opened = open_trunk(parse_init(source), arch=arch)
    if keep_head is not None:
        check_head_name(opened, keep_head, source=source)
    kept, fate = _fate(opened, keep_head, drop_head)
    opened = keep_own_head(opened) if kept else opened
    report, classes = opened.report, list(opened.classes or ()) if kept else []
    config: dict[str, Any] = opened.card.preprocess.model_dump(mode="json") | {
        "arch": report.arch, "padding": report.padding, "method": opened.card.method, "init": called,
        "licence": opened.card.licence, "num_classes": report.classifier if kept else 0, "classes": classes,
    }  # fmt: skip
    if kept and opened.activation is not None:
        config["activation"] = opened.activation
    write = write_timm if to == "timm" else write_export
    write(out, opened.network, config)
    return f"{out}: {report.arch}, {len(report.loaded)} tensors, from {report.format}; {fate}"


def _fate(opened: Opened, keep_head: str | None, drop_head: bool) -> tuple[bool, str]:
    """Whether the classifier of a file is kept, and a few words for the user.

    The classifier of one of our runs is what the run was for, so it is kept. That of another file has seen labels
    which a later fine-tuning may not (SimCLR-v2's saw all of ImageNet's), so it is kept only if asked for by name.
    """
    if not opened.report.classifier:
        return False, "the file has no classifier"
    size = f"{opened.report.classifier} classes"
    if drop_head:
        return False, f"classifier with {size} dropped"
    if keep_head is None and not opened.own:
        parts = re.split(r"[./]", opened.called)[:-1]
        name = next((part for part in parts if part.startswith(("fc", "head", "classifier"))), parts[-1])
        return False, f"classifier {opened.called} with {size} dropped; add --keep-head {name} to keep it"
    return True, f"classifier with {size} kept"


def add_card(
    source: str, name: str, *, arch: str | None = None, method: str | None = None, citation: str = "",
    overwrite: bool = False,
) -> tuple[Opened, Path]:  # fmt: skip
    """Write a card for a file of the user's own; returns the opened file and the card's place.

    Args:
        source: a file, or FILE::PREFIX.
        name: of the card.
        arch: where the file does not show it.
        method: how the weights were made; None: as the file says.
        citation: where they are from.
        overwrite: replace a card of the user's own.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name == "none":
        raise Problem(f"--name {name}: use up to 64 letters, digits, '.', '_' and '-'")
    target, known = own_cards() / f"{name}.yaml", list_cards().get(name)
    if known is not None and known != target:
        raise Problem(f"--name {name}: a card of the package has this name; choose another")
    if known is not None and not overwrite:
        raise Problem(f"--name {name}: you added a card of this name before; replace it with --overwrite")
    init = parse_init(source, "FILE")
    if init.kind != "file" or init.path is None:
        raise Problem(f"{source}: name a checkpoint file; folders and hub names need no card")
    opened = open_trunk(init, arch=arch)
    report, path = opened.report, init.path.resolve()
    card = opened.card.model_copy(
        update={
            "name": name, "aliases": (), "method": method or opened.card.method, "arch": report.arch,
            "padding": report.padding, "format": None, "path": str(path), "choice": init.chosen, "paper": citation,
            "file": None, "urls": (), "files": (), "sha256": digest(path, "sha256"), "bytes": path.stat().st_size,
            "features": first_features(opened), "verified": True,
        }
    )  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, yaml.safe_dump(card.model_dump(mode="json", exclude_defaults=True), sort_keys=False))
    return opened, target
