"""ImageNet (ILSVRC 2012) as it lies on disks: class folders, the flat validation folder, or the two tar files.

Classes are the synsets in sorted order, which is the order of every published classifier. True label sets are ReaL's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finetune_mile.core.problems import Problem
from finetune_mile.images.assembly import Listing, check_classes, make_data, number, to_set
from finetune_mile.images.imageset import Data, ImageSet
from finetune_mile.images.reading import Bytes, Files, TarFiles
from finetune_mile.images.scans import scan_tree
from finetune_mile.images.sources.folder import class_names
from finetune_mile.images.sources.imagenet_labels import synsets, val_labels
from finetune_mile.images.sources.options import read_options
from finetune_mile.images.tars import scan_tar
from finetune_mile.images.truth import with_real

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
BELOW = ("", "ILSVRC/Data/CLS-LOC")  # the second is Kaggle's


def load(where: str) -> Data:
    """Find out which layout lies at `where`, and list it.

    Args:
        where: the directory; `DIR?labels=FILE` names the labels of a flat validation folder or tar: a CSV with the
            columns file,label (synsets), or a text file with a synset a line, in the order of the file names.
    """
    place, options = read_options("imagenet", where, ("labels",))
    root, what = Path(place), f"--data imagenet:{where}"
    train = _train(root, what)
    names, files, encoded = _val(root, what)
    if train is None:
        classes: list[str] = list(synsets())
        train_set = to_set(Listing(ids=[], labels=np.zeros(0, dtype=np.int64), encoded=encoded))
    else:
        train_names, train_files, train_encoded = train
        classes = sorted(set(train_names))
        train_set = to_set(Listing(ids=train_files, labels=number(train_names, classes), encoded=train_encoded))
        check_classes(what, classes, train_set.given.numpy())
    if names is None:
        names = val_labels(root, files, options.get("labels"), what)
    unknown = sorted(set(names) - set(classes))
    if unknown:
        raise Problem(f"{what}: validation images have classes that the training images lack: {', '.join(unknown[:5])}")
    ids = [f"{label}/{file.rpartition('/')[2]}" for label, file in zip(names, files, strict=True)]
    val: ImageSet = to_set(Listing(ids=ids, labels=number(names, classes), encoded=encoded))
    return with_real(make_data("imagenet", classes, train_set, val, what), required=False)


def _train(root: Path, what: str) -> tuple[list[str], list[str], Bytes] | None:
    """Class names, ids and reader of the training images; None where there are none (evaluation needs none)."""
    folder = next((root / b / "train" for b in BELOW if (root / b / "train").is_dir()), None)
    if folder is not None:
        scan = scan_tree(folder, what)
        return class_names(scan, what), list(scan.names), Files(folder, scan.names)
    if (root / TRAIN_TAR).is_file():
        files, reader = _in_tar(root / TRAIN_TAR, what, nested=True)
        return [name.rpartition("/")[0] for name in files], files, reader
    return None


def _val(root: Path, what: str) -> tuple[list[str] | None, list[str], Bytes]:
    """Class names (None: flat, to be looked up), file names and reader of the validation images."""
    folder = next((root / b / "val" for b in BELOW if (root / b / "val").is_dir()), None)
    if folder is None and (root / "ILSVRC2012_img_val").is_dir():
        folder = root / "ILSVRC2012_img_val"
    if folder is not None:
        scan = scan_tree(folder, what)
        flat = len(scan) > 0 and "/" not in scan.names[0]
        return None if flat else class_names(scan, what), list(scan.names), Files(folder, scan.names)
    if (root / VAL_TAR).is_file():
        files, reader = _in_tar(root / VAL_TAR, what, nested=False)
        return None, files, reader
    raise Problem(
        f"{what}: found neither train/ and val/ folders nor {TRAIN_TAR} and {VAL_TAR} there; "
        "at least the validation images are needed"
    )


def _in_tar(path: Path, what: str, *, nested: bool) -> tuple[list[str], TarFiles]:
    scan = scan_tar(path, nested=nested)
    if not len(scan):
        raise Problem(f"{what}: no images in {path.name}")
    which = np.zeros(len(scan), dtype=np.int64)
    return list(scan.names), TarFiles([str(path)], which, scan.numbers["offset"], scan.numbers["size"])
