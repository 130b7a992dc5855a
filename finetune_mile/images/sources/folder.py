"""Folders of images: a folder with images in it is a class. `train/` and `val/`, perhaps `test/`, or one tree.

Images without labels: a folder of nothing but images, any tree with `?labels=none`, and `unlabelled/` beside the
others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from finetune_mile.core.problems import Problem
from finetune_mile.images.alike import listed, same_name
from finetune_mile.images.index import Data, Files, Scan, count_endings, number, say_unreadable, scan_tree, to_set
from finetune_mile.images.sources import read_options
from finetune_mile.images.splits import join_unlabelled, make_data

VAL_NAMES = ("val", "validation", "valid", "test")
UNLABELLED = ("unlabelled", "unlabeled")


def load(where: str, flag: str) -> Data:
    """Read the tree at `where`; its classes are named by their path below it, in sorted order.

    Args:
        where: the directory; `DIR?depth=2` names classes by the first two folders, ignoring deeper ones, and
            `DIR?val=test` evaluates on that folder beside train/ (else val/, or test/ where there is no val/). A test/
            of class folders that is not evaluated on is the data's `test`.
            `DIR?labels=none` takes all images without a label, whatever folder they are in.
        flag: with its text, for messages.
    """
    place, options = read_options(where, ("depth", "val", "labels"), flag)
    if options.get("labels", "none") != "none":
        raise Problem(f"{flag}: labels={options['labels']} must be none, or left out")
    root, depth = Path(place), options.get("depth")
    if depth is not None and (not depth.isdecimal() or int(depth[:9]) < 1):
        raise Problem(f"{flag}: depth={depth} must be a number of folders, such as depth=1")
    labelled, folders, extra, problems = "labels" not in options, [root], None, []
    if (root / "train").is_dir():
        names = (options["val"],) if "val" in options else VAL_NAMES
        folders = [root / "train", *(root / name for name in names if (root / name).is_dir())][:2]
        if len(folders) == 1 and labelled:
            problems.append(f"{flag}: there is a train/ but no {names[0]}/ beside it; add it")
        if len(folders) == 2 and folders[1].name != "test" and labelled and (root / "test").is_dir():
            folders.append(root / "test")
        extra = next((root / name for name in UNLABELLED if (root / name).is_dir()), None)
    stop = bool(problems)
    scans = [scan_tree(folder, flag) for folder in folders]
    if len(folders) == 3 and not _in_folders(scans[2]):
        folders, scans = folders[:2], scans[:2]  # no labels to score
    if folders == [root] and len(scans[0].names) and not _in_folders(scans[0]):
        labelled = False  # nothing but images
    if labelled:
        for folder, scan in zip(folders, scans, strict=True):
            problems += _faults(scan, flag if folder == folders[0] else f"{flag} ({folder.name}/)")
        labels = [_folders(scan, depth) for scan in scans]
    else:
        labels = [_no_labels(scan, flag) for scan in scans]
    if folders == [root]:
        tops = tuple(f"{name}/" for name in UNLABELLED)
        labels = [["" if file.startswith(tops) else name for file, name in zip(scans[0].names, labels[0], strict=True)]]
    classes = sorted(set(labels[0]) - {""})
    strange = [sorted(set(names) - {*classes, ""}) for names in labels[1:]]
    renamed = [_twins(folder.name, names, classes) for folder, names in zip(folders[1:], strange, strict=True)]
    if strange:
        problems += [f"{flag}: {sentence}" for sentence in renamed[0].values()]
        new = [name for name in strange[0] if name not in renamed[0]]
        problems += [f"{flag}: {folders[1].name}/ has classes that train/ lacks: {listed(new)}"] if new else []
    if len(classes) == 1:
        problems.append(
            f"{flag}: only one class ({classes[0]}); two are needed (for images without labels write "
            f"folder:{place}?labels=none)"
        )
    if stop or len(classes) == 1 or not all(len(scan.names) for scan in scans):
        raise Problem(*problems)
    if strange:
        classes = sorted({*classes, *strange[0]})
    files: list[Sequence[str]] = [scan.names for scan in scans]
    notes: tuple[str, ...] = ()
    if len(folders) == 3 and strange[1]:  # a run does not stop for images that nothing depends on
        known = [place for place, name in enumerate(labels[2]) if name in {*classes, ""}]
        notes = (
            *renamed[1].values(),
            f"test/ has {len(labels[2]) - len(known):,} images of classes that train/ lacks, which are not scored: "
            f"{', '.join(strange[1][:5])}",
        )
        files[2], labels[2] = ([each[place] for place in known] for each in (files[2], labels[2]))
    sets = [
        to_set(names, number(given, classes), Files(folder, names))
        for folder, names, given in zip(folders, files, labels, strict=True)
    ]
    try:
        data = make_data(root.resolve().name, classes, sets[:2], flag)
    except Problem as problem:
        raise Problem(*problems, *problem.sentences) from problem
    test = sets[2] if len(sets) == 3 and len(sets[2]) else None
    data = dataclasses.replace(data, test=test, notes=(*data.notes, *notes), problems=tuple(problems))
    if extra is not None:
        scans.append(scan_tree(extra, flag))
        no_labels = number(_no_labels(scans[-1], f"{flag} ({extra.name}/)"), ())
        more = to_set(scans[-1].names, no_labels, Files(extra, scans[-1].names))
        data = dataclasses.replace(data, train=join_unlabelled(data.train, more))
    return dataclasses.replace(data, unreadable=count_endings([name for scan in scans for name in scan.unread]))


def _twins(folder: str, names: Sequence[str], classes: Sequence[str]) -> dict[str, str]:
    """Class names of a folder that train/ spells in another way, each with a sentence that says so."""
    twins = {name: same_name(name, classes) for name in names}
    return {
        name: f"{folder}/ has class {name}, train/ has {known[0]}: likely the same; rename one"
        for name, known in twins.items()
        if known
    }


def _in_folders(scan: Scan) -> bool:
    return any("/" in name for name in (*scan.names, *scan.empty))


def _no_labels(scan: Scan, flag: str) -> list[str]:
    """An empty class name for every image of a scan."""
    if not len(scan.names):
        unread = count_endings(scan.unread)
        raise Problem(f"{flag}: no images{f': {say_unreadable(unread)}' if unread else ''}")
    return [""] * len(scan.names)


def class_names(scan: Scan, flag: str) -> list[str]:
    """The class of every image of a scan: the folder that it is in."""
    problems = _faults(scan, flag)
    if problems:
        raise Problem(*problems)
    return _folders(scan, None)


def _folders(scan: Scan, depth: str | None) -> list[str]:
    folders = [name.rpartition("/")[0] for name in scan.names]
    return folders if depth is None else ["/".join(name.split("/")[: int(depth[:9])]) for name in folders]


def _faults(scan: Scan, flag: str) -> list[str]:
    """What is wrong with class folders: empty ones, images beside them, no image at all."""
    found, empty = [], []
    for name in scan.empty:
        unread = count_endings(file for file in scan.unread if name and file.startswith(name))
        if unread:
            found.append(f"{flag}: no image in class {name.rstrip('/')}: {say_unreadable(unread)}")
        elif name:
            empty.append(name.rstrip("/"))
    if len(empty) == 1:
        found.append(f"{flag}: no image in class {empty[0]}; remove the folder or fill it")
    elif empty:
        found.append(f"{flag}: no image in classes {listed(empty)}; remove these folders or fill them")
    if not len(scan.names):
        unread = count_endings(scan.unread)
        reason = f": {say_unreadable(unread)}" if unread else " (expected one folder per class: CLASS/IMAGE.jpg)"
        found.append(f"{flag}: no images in class folders below it{reason}")
    strays = [name for name in scan.names if "/" not in name]
    if strays:
        others = (
            f", nor {'is 1 other' if len(strays) == 2 else f'are {len(strays) - 1:,} others'}" if strays[1:] else ""
        )
        found.append(
            f"{flag}: {strays[0]} is not in a class folder{others}; expected one folder per class: CLASS/IMAGE.jpg "
            "(images without labels go into unlabelled/, or are given with --unlabelled DIR)"
        )
    return found
