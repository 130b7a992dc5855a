"""ImageNet (ILSVRC 2012) in its usual layouts: class folders, the flat validation folder, or the two tar files.

Classes are the synsets in sorted order, which is the order of every published classifier. True label sets are ReaL's.
"""

from __future__ import annotations

import io
import json
import pkgutil
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from finetune_mile.core.problems import Problem
from finetune_mile.images.name_lists import locate
from finetune_mile.images.readers import Files, TarFiles
from finetune_mile.images.scans import scan_tar, scan_tree
from finetune_mile.images.sets import Data, number, to_set
from finetune_mile.images.sources import read_options
from finetune_mile.images.sources.folder import class_names
from finetune_mile.images.sources.lists import read_lines, read_rows
from finetune_mile.images.splits import make_data

TAR = "ILSVRC2012_img_%s.tar"
BELOW = ("", "ILSVRC/Data/CLS-LOC")  # the second is Kaggle's
KAGGLE, TENSORFLOW = "LOC_val_solution.csv", "imagenet_2012_validation_synset_labels.txt"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")


def load(where: str, flag: str) -> Data:
    """Find out which layout is at `where`, and list it.

    Args:
        where: the directory; `DIR?labels=FILE` names the labels of a flat validation folder or tar: a CSV with the
            columns file,label (synsets), or a text file with a synset a line, in the order of the file names.
        flag: with its text, for messages.
    """
    from finetune_mile.images.truth import with_real

    place, options = read_options(where, ("labels",), flag)
    root = Path(place)
    train, val = _find(root, "train", flag), _find(root, "val", flag)
    if val is None:
        raise Problem(
            f"{flag}: found neither train/ and val/ folders nor {TAR % 'train'} and {TAR % 'val'} there; "
            "at least the validation images are needed"
        )
    names, files, encoded = val
    train_names, train_files, train_encoded = train or ([], [], encoded)  # evaluation needs no training images
    classes = sorted(set(train_names)) or list(synsets())
    train_set = to_set(train_files, number(train_names, classes), train_encoded)
    names = names or _val_labels(root, files, options.get("labels"), flag)
    unknown = sorted(set(names) - set(classes))
    if unknown:
        raise Problem(f"{flag}: validation images have classes that the training images lack: {', '.join(unknown[:5])}")
    ids = [f"{label}/{file.rpartition('/')[2]}" for label, file in zip(names, files, strict=True)]
    val_set = to_set(ids, number(names, classes), encoded)
    return with_real(make_data("imagenet", classes, (train_set, val_set), flag), required=False)


def synsets() -> tuple[str, ...]:
    """The 1,000 synsets in the order of the classes, as timm ships them."""
    return tuple(_shipped_by_timm("imagenet_synsets.txt").decode().split())


def real_labels() -> dict[str, list[int]]:
    """ReaL (Beyer et al. 2020): `ILSVRC2012_val_00000001` to the classes in the image; 3,163 images have none."""
    rows = json.loads(_shipped_by_timm("imagenet_real_labels.json"))
    return {f"ILSVRC2012_val_{i:08d}": row for i, row in enumerate(rows, start=1)}


def _shipped_by_timm(name: str) -> bytes:
    data = pkgutil.get_data("timm.data", f"_info/{name}")
    if data is None:
        raise Problem(f"timm does not ship {name}; install timm 1.0.12 or later")
    return data


def _find(root: Path, split: str, flag: str) -> tuple[list[str], list[str], Files | TarFiles] | None:
    """Class names ([]: validation images in a flat folder or tar), file names and reader; None: no such images."""
    folders = [root / below / split for below in BELOW]
    if split == "val":
        folders.append(root / "ILSVRC2012_img_val")
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is not None:
        scan = scan_tree(folder, flag)
        flat = split == "val" and len(scan.names) > 0 and "/" not in scan.names[0]
        return [] if flat else class_names(scan, flag), list(scan.names), Files(folder, scan.names)
    tar = root / (TAR % split)
    if not tar.is_file():
        return None
    scan = scan_tar(tar, nested=split == "train")
    if not len(scan.names):
        raise Problem(f"{flag}: no images in {tar.name}")
    which = np.zeros(len(scan.names), dtype=np.int64)
    names = [name.rpartition("/")[0] for name in scan.names] if split == "train" else []
    return names, list(scan.names), TarFiles([str(tar)], which, scan.numbers["offset"], scan.numbers["size"])


# ------------------------------------------------------------------------------------ labels of a flat folder or tar


def _val_labels(root: Path, files: list[str], given: str | None, flag: str) -> list[str]:
    """The synset of each file of a flat validation folder or tar.

    Args:
        root: the data's directory, where label files are searched.
        files: N file names.
        given: a label file that the user named, or None.
        flag: how a message begins.
    """
    places = [Path(given)] if given else [root / n for n in (KAGGLE, TENSORFLOW, DEVKIT) if (root / n).is_file()]
    if not places:
        raise Problem(
            f"{flag}: the validation images are in one flat folder or tar, which says nothing of their classes. Put "
            f"{DEVKIT}, {KAGGLE} or {TENSORFLOW} into {root}, or name a label file: imagenet:{root}?labels=FILE"
        )
    path = places[0]
    if not path.is_file():
        raise Problem(f"{flag}: there is no label file {path}")
    if path.suffix == ".csv":
        table = _from_csv(path, flag)
    else:
        lines = _from_devkit(path, flag) if path.name.endswith(".tar.gz") else " ".join(read_lines(path, flag)).split()
        table = {f"ILSVRC2012_val_{i:08d}.JPEG": synset for i, synset in enumerate(lines, start=1)}
    known = set(synsets())
    strange = [label for label in table.values() if label not in known]
    if strange:
        raise Problem(f"{flag}: {path.name} gives {len(strange)} files an unknown class ({strange[0]!r})")
    names = list(table)
    positions, missing = locate(files, names)
    if missing:
        raise Problem(
            f"{flag}: {path.name} has no label for {len(missing)} of {len(files)} images: {', '.join(missing[:3])}"
        )
    return [table[names[i]] for i in positions]


def _from_csv(path: Path, flag: str) -> dict[str, str]:
    file, label, ending = ("ImageId", "PredictionString", ".JPEG") if path.name == KAGGLE else ("file", "label", "")
    rows = read_rows(path, (file, label), f"{flag}: {path.name}")
    return {row[file].strip() + ending: row[label].strip().partition(" ")[0] for row in rows}


def _from_devkit(path: Path, flag: str) -> list[str]:
    """The development kit numbers classes in its own way; its meta.mat says which synset has which number."""
    from scipy.io import loadmat

    try:
        with tarfile.open(path) as archive:
            inside = {Path(m.name).name: m for m in archive.getmembers()}
            files = [
                archive.extractfile(inside[name]) for name in ("meta.mat", "ILSVRC2012_validation_ground_truth.txt")
            ]
            meta, truth = (file.read() for file in files if file is not None)
        table: Any = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        leaves = {int(row[0]): str(row[1]) for row in table if int(row[4]) == 0}
        return [leaves[int(n)] for n in truth.split()]
    except (OSError, KeyError, ValueError, EOFError, tarfile.TarError) as error:
        raise Problem(f"{flag}: {path.name} cannot be read as the development kit ({error!r})") from error
