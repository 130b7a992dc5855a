"""Whatever `datasets` loads: names on the hub, and local directories of parquet, arrow, images or WebDataset shards.

`hf:NAME?image=COLUMN&label=COLUMN&train=SPLIT&val=SPLIT&config=NAME`; options left out are detected.
A label column may hold class numbers, names, or lists of either (several labels an image).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from finetune_mile.core.files import LARGEST_IMAGE, read_regular
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images.sets import MOST_CLASSES, Data, ImageSet, labels_of, to_set, unique_ids
from finetune_mile.images.sources import read_options
from finetune_mile.images.splits import make_data

LABELS = ("label", "labels", "cls", "fine_label", "class", "category")
VAL_NAMES = ("validation", "val", "valid", "dev", "test")
KEY, NOTE = "__key__", "json"  # columns of WebDataset shards


class Rows:
    """The encoded images of a `datasets.Dataset`, by row."""

    def __init__(self, table: Any, column: str) -> None:
        import datasets

        undecoded = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
        self.rows = undecoded.with_format("arrow")
        self.files = [file["filename"] for file in table.cache_files]  # where the table is on disk

    def __call__(self, index: int) -> bytes:
        """The file's content, from the table or from the path that the table has instead."""
        cell = self.rows[index].column(0)[0].as_py() or {}
        if cell.get("bytes") is not None:
            return bytes(cell["bytes"])
        try:
            return read_regular(cell["path"], LARGEST_IMAGE)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise BadImage(f"row {index}: neither bytes nor a readable file ({error})") from error

    def path(self, index: int) -> str | None:
        """The file of an image that is not in the table itself."""
        cell = self.rows[index].column(0)[0]
        if not cell.is_valid or cell["bytes"].is_valid:
            return None
        path: str | None = cell["path"].as_py()
        return path


def load(where: str, flag: str) -> Data:
    place, options = read_options(where, ("image", "label", "train", "val", "config"), flag)
    splits = _open(place, options.get("config"), flag)
    return from_splits(Path(place).name or place, splits, options, flag, "name it with ?{}=COLUMN")


def from_splits(name: str, splits: Mapping[str, Any], options: Mapping[str, str], flag: str, fix: str) -> Data:
    """The data of a DatasetDict.

    Args:
        name: of the data.
        splits: each a `datasets.Dataset`.
        options: the columns `image` and `label`, and the splits `train` and `val`, where they are not detected.
        flag: for messages.
        fix: what to do where the column {} is not detected.
    """
    import datasets

    def pick(kind: str, key: str, existing: Mapping[str, Any], defaults: Sequence[str]) -> str | None:
        """The split or column that an option names; else the first default that exists."""
        if key in options and options[key] not in existing:
            raise Problem(f"{flag}: there is no {kind} {options[key]!r}; there are {', '.join(existing)}")
        return options.get(key) or next((name for name in defaults if name in existing), None)

    train_name, val_name = pick("split", "train", splits, ("train", *splits)), pick("split", "val", splits, VAL_NAMES)
    train = splits[str(train_name)]
    features = train.features
    columns = ", ".join(features)
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    image = pick("column", "image", features, images if len(images) == 1 else ())
    if image is None:
        count = "several image columns" if images else "no image column"
        raise Problem(f"{flag}: {count} among {columns}; {fix.format('image')}")
    typed = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    label = pick("column", "label", features, (*LABELS, *(typed if len(typed) == 1 else ())))
    if label is None and not {"label", "labels"} & _note_fields(train).keys():
        raise Problem(f"{flag}: no label column among {columns}; {fix.format('label')}")

    tables = [train] if val_name in (None, train_name) else [train, splits[val_name]]
    cells = [_labels(table, label or NOTE) for table in tables]
    several = any(isinstance(cell, list) for column in cells for cell in column[:1])
    classes = _classes(features[label or NOTE], cells, tables, flag)
    sets = (
        _image_set(table, image, column, classes, several, flag) for table, column in zip(tables, cells, strict=True)
    )
    return make_data(name, classes, sets, flag)


def _open(place: str, config: str | None, flag: str) -> Any:
    """A DatasetDict."""
    import datasets

    path = Path(place).expanduser()
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                loaded = datasets.load_from_disk(str(path))
            else:
                loaded = datasets.load_dataset(str(path) if path.exists() else place, name=config)
    except Exception as error:  # datasets, the hub and the network have no common base class of errors
        reason = str(error).strip().partition("\n")[0]
        raise Problem(f"{flag}: `datasets` cannot load it ({type(error).__name__}: {reason})") from error
    finally:
        if not hidden:
            datasets.enable_progress_bars()
    return loaded if isinstance(loaded, dict) else {"train": loaded}


def _note_fields(table: Any) -> dict[str, Any]:
    kind = table.features.get(NOTE)
    return kind if isinstance(kind, dict) else {}


def _labels(table: Any, column: str) -> list[Any]:
    """A label cell per row: number, name, or list of these; -1 or None = unlabelled."""
    cells: list[Any] = table.data.column(column).to_pylist() if table._indices is None else list(table[column])
    if column == NOTE:
        key = "labels" if "labels" in _note_fields(table) else "label"
        return [cell[key] for cell in cells]
    return cells


def _classes(kind: Any, columns: list[list[Any]], tables: Sequence[Any], flag: str) -> list[str]:
    inner: Any = kind[0] if isinstance(kind, list) else kind
    inner = getattr(inner, "feature", inner)
    if hasattr(inner, "names"):
        return list(inner.names)
    labels = (value for cells in columns for value in chain.from_iterable(map(values, cells)))
    return _shard_names(tables) or classes_of(labels, flag)


def values(cell: Any) -> list[Any]:
    """The labels in a cell: names or numbers; None, "" and -1 are no label."""
    several = isinstance(cell, list | tuple | set)
    return [value for value in (cell if several else [cell]) if value not in (None, -1, "")]


def classes_of(labels: Iterable[Any], flag: str) -> list[str]:
    """The classes of labels: numbers from 0 to the largest, or names in sorted order where a label is not a number."""
    found = set(labels)
    if not all(isinstance(value, int | np.integer) for value in found):
        return sorted(set(map(str, found)))
    wrong = [value for value in found if not 0 <= value < MOST_CLASSES]
    if wrong:
        raise Problem(f"{flag}: label {max(wrong)}: classes are 0 to {MOST_CLASSES - 1:,}")
    return [str(k) for k in range(max(found, default=-1) + 1)]


def _shard_names(tables: Sequence[Any]) -> list[str] | None:
    """The name of each class number, where WebDataset shards have both; else the folder of the keys, if one-to-one."""
    names: dict[int, set[str]] = {}
    for table in tables:
        if "cls" not in table.features or KEY not in table.features:
            return None
        if "label" in _note_fields(table):
            labels = [cell["label"] for cell in table.data.column(NOTE).to_pylist()]
        else:
            labels = [key.rpartition("/")[0] for key in table.data.column(KEY).to_pylist()]
        for k, name in zip(table.data.column("cls").to_pylist(), labels, strict=True):
            names.setdefault(k, set()).add(str(name))
    single = {next(iter(some)) for some in names.values() if len(some) == 1}
    if len(single) != len(names) or "" in single or set(names) != set(range(len(names))):
        return None
    return [next(iter(names[k])) for k in range(len(names))]


def _image_set(table: Any, image: str, cells: list[Any], classes: list[str], several: bool, flag: str) -> ImageSet:
    if not len(table):
        raise Problem(f"{flag}: a split has no images")
    labels = [values(cell) for cell in cells]
    outside = [each for some in labels for each in some if isinstance(each, int) and not 0 <= each < len(classes)]
    if outside:
        raise Problem(f"{flag}: label {outside[0]} is outside of the {len(classes)} classes")
    names = [[classes[each] if isinstance(each, int) else str(each) for each in some] for some in labels]
    return to_set(_ids(table, image, names, several), labels_of(names, classes, several), Rows(table, image))


def _ids(table: Any, image: str, names: list[list[str]], several: bool) -> list[str]:
    """`<class>/<file name>` where rows know their files; else the number of the row."""
    if "id" in _note_fields(table):
        return [cell["id"] for cell in table.data.column(NOTE).to_pylist()]
    files: list[str] = []
    if KEY in table.features:
        files = [f"{key}.{image}" for key in table.data.column(KEY).to_pylist()]
    elif table._indices is None:
        import pyarrow.compute as pc

        files = pc.struct_field(table.data.column(image), "path").to_pylist()
    if not files or not all(files):
        return [f"row-{i:09d}" for i in range(len(table))]
    if several:
        bare = [file.rpartition("/")[2] for file in files]
        return bare if len(set(bare)) == len(bare) else files
    return unique_ids(names, files)
