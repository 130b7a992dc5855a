"""Which class an ILSVRC 2012 validation image has: by its file name, from the files that people have beside it."""

from __future__ import annotations

import io
import json
import pkgutil
import re
import tarfile
from pathlib import Path
from typing import Any

from finetune_mile.core.files import open_text
from finetune_mile.core.problems import Problem
from finetune_mile.images.names import locate
from finetune_mile.images.sources.csv_file import read_rows

KAGGLE, TENSORFLOW = "LOC_val_solution.csv", "imagenet_2012_validation_synset_labels.txt"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")


def synsets() -> tuple[str, ...]:
    """The 1,000 synsets in the order of the classes, as timm ships them."""
    return tuple(_shipped_by_timm("imagenet_synsets.txt").decode().split())


def real_labels() -> dict[str, list[int]]:
    """ReaL (Beyer et al. 2020): `ILSVRC2012_val_00000001` to the classes in the image; none of them for 3,163."""
    rows = json.loads(_shipped_by_timm("imagenet_real_labels.json"))
    return {f"ILSVRC2012_val_{i:08d}": row for i, row in enumerate(rows, start=1)}


def _shipped_by_timm(name: str) -> bytes:
    data = pkgutil.get_data("timm.data", f"_info/{name}")
    if data is None:
        raise Problem(f"timm does not ship {name}; install timm 1.0.12 or later")
    return data


def val_labels(root: Path, files: list[str], given: str | None, what: str) -> list[str]:
    """The synset of each file of a flat validation folder or tar.

    Args:
        root: the data's directory, where label files are looked for.
        files: N file names.
        given: a label file that the user named, or None.
        what: how a message begins.
    """
    path = (
        Path(given) if given else next((root / n for n in (KAGGLE, TENSORFLOW, DEVKIT) if (root / n).is_file()), None)
    )
    if path is None:
        raise Problem(
            f"{what}: the validation images are in one flat folder or tar, which says nothing of their classes; put "
            f"{DEVKIT}, {KAGGLE} or {TENSORFLOW} into {root}, or name a label file: imagenet:{root}?labels=FILE"
        )
    if not path.is_file():
        raise Problem(f"{what}: there is no label file {path}")
    if path.suffix == ".csv":
        table = _from_csv(path, what)
    else:
        lines = _from_devkit(path, what) if path.name.endswith(".tar.gz") else _words(path, what)
        table = {f"ILSVRC2012_val_{i:08d}.JPEG": synset for i, synset in enumerate(lines, start=1)}
    known = set(synsets())
    strange = [(file, label) for file, label in table.items() if label not in known]
    if strange:
        raise Problem(f"{what}: {path.name} gives {len(strange)} files an unknown class ({strange[0][1]!r})")
    names = list(table)
    _, missing = locate(files, names)
    if missing:
        raise Problem(
            f"{what}: {path.name} has no label for {len(missing)} of {len(files)} images: {', '.join(missing[:3])}"
        )
    return [table[names[i]] for i in locate(files, names)[0]]


def _words(path: Path, what: str) -> list[str]:
    try:
        with open_text(path) as stream:
            return stream.read().split()
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{what}: {path.name} cannot be read ({error})") from error


def _from_csv(path: Path, what: str) -> dict[str, str]:
    if path.name == KAGGLE:
        rows = read_rows(path, ("ImageId", "PredictionString"), f"{what}: {path.name}")
        return {f"{row['ImageId']}.JPEG": row["PredictionString"].split()[0] for row in rows}
    rows = read_rows(path, ("file", "label"), f"{what}: {path.name}")
    return {row["file"].strip(): row["label"].strip() for row in rows}


def _from_devkit(path: Path, what: str) -> list[str]:
    """The development kit numbers classes in its own way; its meta.mat says which synset has which number."""
    from scipy.io import loadmat

    try:
        with tarfile.open(path) as archive:
            inside = {Path(m.name).name: m for m in archive.getmembers()}
            meta = archive.extractfile(inside["meta.mat"])
            truth = archive.extractfile(inside["ILSVRC2012_validation_ground_truth.txt"])
            assert meta is not None
            assert truth is not None
            table: Any = loadmat(io.BytesIO(meta.read()), squeeze_me=True)["synsets"]
            numbers = truth.read().split()
        leaves = {int(row[0]): str(row[1]) for row in table if int(row[4]) == 0}
        return [leaves[int(n)] for n in numbers]
    except (OSError, KeyError, ValueError, EOFError, tarfile.TarError) as error:
        raise Problem(f"{what}: {path.name} cannot be read as the development kit ({error!r})") from error
