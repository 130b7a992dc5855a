"""Folders of images: a folder with images in it is a class. `train/` and `val/`, or one tree that is split."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from finetune_mile.core.problems import Problem
from finetune_mile.images.assembly import Listing, check_classes, make_data, number, to_set
from finetune_mile.images.bad_images import count_endings, say_unreadable
from finetune_mile.images.imageset import Data
from finetune_mile.images.reading import Files
from finetune_mile.images.scans import Scan, scan_tree
from finetune_mile.images.sources.options import read_options

VAL_NAMES = ("val", "validation", "valid", "test")


def load(where: str) -> Data:
    """Read the tree at `where`; its classes are named by their path below it, in sorted order.

    Args:
        where: the directory; `DIR?depth=2` names classes by the first two folders, whatever lies deeper, and
            `DIR?val=test` evaluates on that folder beside train/ (else val/, or test/ where there is no val/).
    """
    place, options = read_options("folder", where, ("depth", "val"))
    root, what = Path(place), f"--data folder:{where}"
    depth = _depth(options.get("depth"), what)
    if (root / "train").is_dir():
        names = (options["val"],) if "val" in options else VAL_NAMES
        val_dir = next((root / n for n in names if (root / n).is_dir()), None)
        if val_dir is None:
            raise Problem(f"{what}: there is a train/ but no {names[0]}/ beside it")
        train, val = scan_tree(root / "train", what), scan_tree(val_dir, what)
    else:
        val_dir, train, val = None, scan_tree(root, what), None
    train_names = class_names(train, what, depth)
    classes = sorted(set(train_names))
    train_set = to_set(
        Listing(
            ids=train.names, labels=number(train_names, classes),
            encoded=Files(root / "train" if val_dir else root, train.names),
        )
    )  # fmt: skip
    check_classes(what, classes, train_set.given.numpy())
    unreadable = count_endings([*train.unread, *(val.unread if val is not None else ())])
    if val is None or val_dir is None:
        data = make_data(root.resolve().name, classes, train_set, None, what)
        return dataclasses.replace(data, unreadable=unreadable)
    val_names = class_names(val, f"{what} ({val_dir.name}/)", depth)
    unknown = sorted(set(val_names) - set(classes))
    if unknown:
        raise Problem(f"{what}: {val_dir.name}/ has classes that train/ lacks: {', '.join(unknown[:5])}")
    val_set = to_set(Listing(ids=val.names, labels=number(val_names, classes), encoded=Files(val_dir, val.names)))
    data = make_data(root.resolve().name, classes, train_set, val_set, what)
    return dataclasses.replace(data, unreadable=unreadable)


def class_names(scan: Scan, what: str, depth: int | None = None) -> list[str]:
    """The class of every image of a scan: the folder it lies in."""
    if len(scan.empty) and list(scan.empty) != [""]:
        folder = next(name for name in scan.empty if name)
        unread = count_endings(name for name in scan.unread if name.startswith(folder))
        why = f": {say_unreadable(unread)}" if unread else "; remove the folder or fill it"
        raise Problem(f"{what}: no image in class {folder.rstrip('/')}{why}")
    if not len(scan):
        unread = count_endings(scan.unread)
        why = f": {say_unreadable(unread)}" if unread else " (a folder a class is wanted)"
        raise Problem(f"{what}: no images in class folders below it{why}")
    found = [name.rpartition("/")[0] for name in scan.names]
    if "" in found:
        stray = scan.names[found.index("")]
        raise Problem(f"{what}: {stray} lies outside of the class folders; a folder a class is wanted")
    return found if depth is None else ["/".join(name.split("/")[:depth]) for name in found]


def _depth(text: str | None, what: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text[:9]) < 1:
        raise Problem(f"{what}: depth={text} must be a number of folders, such as depth=1")
    return int(text[:9])
