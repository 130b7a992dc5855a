"""Folders of images: a folder with images in it is a class. `train/` and `val/`, perhaps `test/`, or one tree.

Images without labels: a folder of nothing but images, any tree with `?labels=none`, and `unlabelled/` beside the
others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune_mile.core.problems import Problem
from finetune_mile.images.alike import listed, same_name
from finetune_mile.images.bad_images import say_unreadable
from finetune_mile.images.readers import Files
from finetune_mile.images.scans import Scan, count_endings, scan_tree
from finetune_mile.images.sets import Data, ImageSet, number, to_set
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
    depth = options.get("depth", "1")
    if not depth.isdecimal() or int(depth[:9]) < 1:
        raise Problem(f"{flag}: depth={depth} must be a number of folders, such as depth=1")
    root = Path(place)
    folders = _splits(root, options) if (root / "train").is_dir() else [root]
    scans = [scan_tree(folder, flag) for folder in folders]
    only_images = folders == [root] and len(scans[0].names) and not _in_folders(scans[0])
    if only_images or "labels" in options:
        sets = [_no_labels(folder, scan, flag) for folder, scan in zip(folders, scans, strict=True)]
        data = make_data(root.resolve().name, (), sets, flag)
    else:
        data = _with_labels(root, folders, scans, options, flag)
    extra = next((root / name for name in UNLABELLED if (root / name).is_dir()), None)
    if extra is not None and folders != [root]:
        scans.append(scan_tree(extra, flag))
        more = _no_labels(extra, scans[-1], f"{flag} ({extra.name}/)")
        data = dataclasses.replace(data, train=join_unlabelled(data.train, more))
    return dataclasses.replace(data, unreadable=count_endings([name for scan in scans for name in scan.unread]))


def _splits(root: Path, options: Mapping[str, str]) -> list[Path]:
    """train/, the folder that is evaluated on, and a test/ beside the two; those that are there."""
    names = (options["val"],) if "val" in options else VAL_NAMES
    folders = [root / "train", *(root / name for name in names if (root / name).is_dir())][:2]
    more = len(folders) == 2 and folders[1].name != "test" and "labels" not in options
    return [*folders, root / "test"] if more and (root / "test").is_dir() else folders


def _with_labels(root: Path, folders: list[Path], scans: list[Scan], options: Mapping[str, str], flag: str) -> Data:
    """Images in class folders. What is wrong with them is the data's `problems`, or raised where nothing is left."""
    if len(folders) == 3 and not _in_folders(scans[2]):
        folders, scans = folders[:2], scans[:2]  # no labels to score
    no_val = len(folders) == 1 and folders != [root]
    problems = [f"{flag}: there is a train/ but no {options.get('val', 'val')}/ beside it; add it"] if no_val else []
    for folder, scan in zip(folders, scans, strict=True):
        problems += _faults(scan, flag if folder == folders[0] else f"{flag} ({folder.name}/)")
    labels = [_folders(scan, options.get("depth")) for scan in scans]
    if folders == [root]:
        tops = tuple(f"{name}/" for name in UNLABELLED)
        labels = [["" if file.startswith(tops) else name for file, name in zip(scans[0].names, labels[0], strict=True)]]
    classes = sorted(set(labels[0]) - {""})
    strange = sorted({name for names in labels[1:2] for name in names} - {*classes, ""})
    if strange:
        problems += _other_classes(folders[1].name, strange, classes, flag)
    if len(classes) == 1:
        problems.append(
            f"{flag}: only one class ({classes[0]}); two are needed (for images without labels write "
            f"{f'folder:{root}?labels=none'!r})"
        )
    if no_val or len(classes) == 1 or not all(len(scan.names) for scan in scans):
        raise Problem(*problems)
    classes = sorted([*classes, *strange])
    sets = [
        to_set(scan.names, number(names, classes), Files(folder, scan.names))
        for folder, scan, names in [*zip(folders, scans, labels, strict=True)][:2]
    ]
    try:
        data = make_data(root.resolve().name, classes, sets, flag)
    except Problem as problem:
        raise Problem(*problems, *problem.sentences) from problem
    data = dataclasses.replace(data, problems=tuple(problems))
    return _with_test(data, folders[2], scans[2].names, labels[2]) if len(folders) == 3 else data


def _other_classes(folder: str, strange: Sequence[str], classes: Sequence[str], flag: str) -> list[str]:
    """Sentences about the classes of a folder that train/ has not."""
    renamed = _twins(folder, strange, classes)
    new = [name for name in strange if name not in renamed]
    lacking = [f"{folder}/ has classes that train/ lacks: {listed(new)}"] if new else []
    return [f"{flag}: {sentence}" for sentence in (*renamed.values(), *lacking)]


def _with_test(data: Data, folder: Path, files: Sequence[str], labels: Sequence[str]) -> Data:
    """The data with its test images. A run does not stop for them: those of unknown classes are left out."""
    strange = sorted(set(labels) - {*data.classes, ""})
    notes = data.notes
    if strange:
        known = [place for place, name in enumerate(labels) if name not in strange]
        notes = (
            *notes,
            *_twins(folder.name, strange, data.classes).values(),
            f"test/ has {len(labels) - len(known):,} images of classes that train/ lacks, which are not scored: "
            f"{', '.join(strange[:5])}",
        )
        files, labels = ([each[place] for place in known] for each in (files, labels))
    test = to_set(files, number(labels, data.classes), Files(folder, files))
    return dataclasses.replace(data, test=test if len(test) else None, notes=notes)


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


def _no_labels(folder: Path, scan: Scan, flag: str) -> ImageSet:
    """The images of a scan, none of them with a label."""
    if not len(scan.names):
        raise Problem(f"{flag}: no images{_say_unread(scan.unread)}")
    return to_set(scan.names, number([""] * len(scan.names), ()), Files(folder, scan.names))


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
    found = _empty_classes(scan, flag) if len(scan.empty) else []
    if not len(scan.names):
        reason = _say_unread(scan.unread) or " (expected one folder per class: CLASS/IMAGE.jpg)"
        found.append(f"{flag}: no images in class folders below it{reason}")
    strays = [name for name in scan.names if "/" not in name]
    if strays:
        others = (
            f", nor {'is 1 other' if len(strays) == 2 else f'are {len(strays) - 1:,} others'}" if strays[1:] else ""
        )
        found.append(
            f"{flag}: {strays[0]} is not in a class folder{others}. Expected one folder per class: CLASS/IMAGE.jpg. "
            "Images without labels go into unlabelled/, or are given with --unlabelled DIR"
        )
    return found


def _say_unread(files: Sequence[str]) -> str:
    """What is wrong with files in formats that we do not read; empty where there are none."""
    return f": {say_unreadable(count_endings(files))}" if len(files) else ""


def _empty_classes(scan: Scan, flag: str) -> list[str]:
    classes = {name.rstrip("/"): [file for file in scan.unread if file.startswith(name)] for name in scan.empty if name}
    found = [f"{flag}: no image in class {name}{_say_unread(files)}" for name, files in classes.items() if files]
    empty = [name for name, files in classes.items() if not files]
    if len(empty) == 1:
        found.append(f"{flag}: no image in class {empty[0]}; remove the folder or fill it")
    elif empty:
        found.append(f"{flag}: no image in classes {listed(empty)}; remove these folders or fill them")
    return found
