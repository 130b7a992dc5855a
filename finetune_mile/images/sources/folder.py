"""Folders of images: a folder with images in it is a class. `train/` and `val/`, or one tree that is split."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from finetune_mile.core.problems import Problem
from finetune_mile.images.index import Data, Files, Scan, count_endings, number, say_unreadable, scan_tree, to_set
from finetune_mile.images.sources import read_options
from finetune_mile.images.splits import make_data

VAL_NAMES = ("val", "validation", "valid", "test")


def load(where: str) -> Data:
    """Read the tree at `where`; its classes are named by their path below it, in sorted order.

    Args:
        where: the directory; `DIR?depth=2` names classes by the first two folders, ignoring deeper ones, and
            `DIR?val=test` evaluates on that folder beside train/ (else val/, or test/ where there is no val/).
    """
    place, options = read_options("folder", where, ("depth", "val"))
    root, flag = Path(place), f"--data folder:{where}"
    depth = options.get("depth")
    if depth is not None and (not depth.isdecimal() or int(depth[:9]) < 1):
        raise Problem(f"{flag}: depth={depth} must be a number of folders, such as depth=1")
    folders = [root]
    if (root / "train").is_dir():
        names = (options["val"],) if "val" in options else VAL_NAMES
        folders = [root / "train", *(root / name for name in names if (root / name).is_dir())][:2]
        if len(folders) == 1:
            raise Problem(f"{flag}: there is a train/ but no {names[0]}/ beside it")
    scans = [scan_tree(folder, flag) for folder in folders]
    train_names = class_names(scans[0], flag, depth)
    labels, classes = [train_names], sorted(set(train_names))
    if len(folders) > 1:
        labels.append(class_names(scans[1], f"{flag} ({folders[1].name}/)", depth))
        unknown = sorted(set(labels[1]) - set(classes))
        if unknown:
            raise Problem(f"{flag}: {folders[1].name}/ has classes that train/ lacks: {', '.join(unknown[:5])}")
    sets = [
        to_set(scan.names, number(names, classes), Files(folder, scan.names))
        for folder, scan, names in zip(folders, scans, labels, strict=True)
    ]
    data = make_data(root.resolve().name, classes, sets, flag)
    return dataclasses.replace(data, unreadable=count_endings([name for scan in scans for name in scan.unread]))


def class_names(scan: Scan, flag: str, depth: str | None = None) -> list[str]:
    """The class of every image of a scan: the folder that it is in."""
    folder = next((name for name in scan.empty if name), None)
    if folder is not None:
        unread = count_endings(name for name in scan.unread if name.startswith(folder))
        reason = f": {say_unreadable(unread)}" if unread else "; remove the folder or fill it"
        raise Problem(f"{flag}: no image in class {folder.rstrip('/')}{reason}")
    if not len(scan.names):
        unread = count_endings(scan.unread)
        reason = f": {say_unreadable(unread)}" if unread else " (expected one folder per class: CLASS/IMAGE.jpg)"
        raise Problem(f"{flag}: no images in class folders below it{reason}")
    folders = [name.rpartition("/")[0] for name in scan.names]
    if "" in folders:
        stray = scan.names[folders.index("")]
        raise Problem(f"{flag}: {stray} is not in a class folder; expected one folder per class: CLASS/IMAGE.jpg")
    return folders if depth is None else ["/".join(name.split("/")[: int(depth[:9])]) for name in folders]
