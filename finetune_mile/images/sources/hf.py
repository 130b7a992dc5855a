"""Whatever `datasets` loads: names on the hub, and local directories of parquet, arrow, images or WebDataset shards.

`hf:NAME?image=COLUMN&label=COLUMN&train=SPLIT&val=SPLIT&config=NAME`; options left out are detected.
A label column may hold class numbers, names, or lists of either (several labels an image).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune_mile.core.files import LARGEST_IMAGE, read_regular
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images.index import MOST_CLASSES, Data, ImageSet, labels_of, to_set, unique_ids
from finetune_mile.images.sources import read_options
from finetune_mile.images.splits import make_data

OPTIONS = ("image", "label", "train", "val", "config")
LABELS = ("label", "labels", "cls", "fine_label", "class", "category")
VAL_NAMES = ("validation", "val", "valid", "dev", "test")
KEY, NOTE = "__key__", "json"  # columns of WebDataset shards


class Rows:
    """The encoded images of a `datasets.Dataset`, by row."""

    def __init__(self, table: Any, column: str) -> None:
        """Keep the image column, undecoded.

        Args:
            table: a Dataset.
            column: its image column.
        """
        import datasets

        bare = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
        self.rows = bare.with_format("arrow")

    def __call__(self, index: int) -> bytes:
        """The file's content, from the table or from the path that stands there instead."""
        cell = self.rows[index].column(0)[0].as_py() or {}
        if cell.get("bytes") is not None:
            return bytes(cell["bytes"])
        try:
            return read_regular(cell["path"], LARGEST_IMAGE)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise BadImage(f"row {index}: neither bytes nor a readable file ({error})") from error


def load(where: str) -> Data:
    """Load a data set by its name or directory, and list its two halves."""
    place, options = read_options("hf", where, OPTIONS)
    flag = f"--data hf:{where}"
    splits = _open(place, options.get("config"), flag)
    train_name = _split(splits, options.get("train"), ("train", *splits), flag)
    rest = [name for name in VAL_NAMES if name in splits]
    val_name = _split(splits, options.get("val"), rest, flag) if rest or "val" in options else None
    train = splits[train_name]
    image = _image_column(train, options.get("image"), flag)
    label = _label_column(train, options.get("label"), flag)
    tables = [train] if val_name in (None, train_name) else [train, splits[val_name]]
    columns = [_labels(table, label) for table in tables]
    classes, several = _classes(train.features[label], columns, _note_names(tables), flag)
    halves = [_half(table, image, cells, classes, several, flag) for table, cells in zip(tables, columns, strict=True)]
    name = Path(place).name or place
    return make_data(name, classes, halves[0], halves[1] if len(halves) > 1 else None, flag)


def _open(place: str, config: str | None, flag: str) -> Any:
    """A DatasetDict."""
    import datasets

    path = Path(place).expanduser()
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                found = datasets.load_from_disk(str(path))
            else:
                found = datasets.load_dataset(str(path) if path.exists() else place, name=config)
    except Exception as error:  # datasets, the hub and the network have no common base class of errors
        reason = str(error).strip().splitlines()
        raise Problem(f"{flag}: `datasets` cannot load it ({type(error).__name__}: {(reason or [''])[0]})") from error
    finally:
        if not shown:
            datasets.enable_progress_bars()
    return found if isinstance(found, dict) else {"train": found}


def _split(splits: Any, wanted: str | None, fallbacks: Sequence[str], flag: str) -> str:
    if wanted is not None and wanted not in splits:
        raise Problem(f"{flag}: there is no split {wanted!r}; there are {', '.join(splits)}")
    return wanted or next(name for name in fallbacks if name in splits)


def _image_column(table: Any, wanted: str | None, flag: str) -> str:
    import datasets

    if wanted is not None and wanted not in table.features:
        raise Problem(f"{flag}: there is no column {wanted!r}; there are {', '.join(table.features)}")
    found = [name for name, kind in table.features.items() if isinstance(kind, datasets.Image)]
    if wanted is None and len(found) != 1:
        raise Problem(
            f"{flag}: {'several image columns' if found else 'no image column'} among {', '.join(table.features)}; "
            "name it with ?image=COLUMN"
        )
    return wanted or found[0]


def _label_column(table: Any, wanted: str | None, flag: str) -> str:
    import datasets

    if wanted is not None:
        if wanted not in table.features:
            raise Problem(f"{flag}: there is no column {wanted!r}; there are {', '.join(table.features)}")
        return wanted
    named = [name for name in LABELS if name in table.features]
    typed = [name for name, kind in table.features.items() if isinstance(kind, datasets.ClassLabel)]
    found = named or (typed if len(typed) == 1 else [])
    if not found and "label" not in _note_fields(table) and "labels" not in _note_fields(table):
        raise Problem(f"{flag}: no label column among {', '.join(table.features)}; name it with ?label=COLUMN")
    return found[0] if found else NOTE


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


def _note_names(tables: Sequence[Any]) -> dict[int, str] | None:
    """Class number to name, where WebDataset shards carry both; else the folder of the keys, where one-to-one."""
    found: dict[int, set[str]] = {}
    for table in tables:
        if "cls" not in table.features or KEY not in table.features:
            return None
        numbers = table.data.column("cls").to_pylist()
        if "label" in _note_fields(table):
            names = [cell["label"] for cell in table.data.column(NOTE).to_pylist()]
        else:
            names = [key.rpartition("/")[0] for key in table.data.column(KEY).to_pylist()]
        for k, name in zip(numbers, names, strict=True):
            found.setdefault(k, set()).add(str(name))
    names = [next(iter(some)) for some in found.values() if len(some) == 1]
    if len(names) != len(found) or len(set(names)) != len(names) or "" in names or set(found) != set(range(len(found))):
        return None
    return {k: next(iter(some)) for k, some in found.items()}


def _classes(kind: Any, columns: list[list[Any]], noted: dict[int, str] | None, flag: str) -> tuple[list[str], bool]:
    """The class names in their order, and whether images have sets of labels."""
    inner: Any = kind[0] if isinstance(kind, list) else kind
    inner = getattr(inner, "feature", inner)
    several = any(isinstance(cell, list) for cells in columns for cell in cells[:1])
    if hasattr(inner, "names"):
        return list(inner.names), several
    values = {v for cells in columns for cell in cells for v in (cell if isinstance(cell, list) else [cell])}
    values -= {None, -1, ""}
    if noted is not None:
        return [noted[k] for k in range(len(noted))], several
    if all(isinstance(v, int) for v in values):
        if max(values, default=-1) >= MOST_CLASSES:
            raise Problem(f"{flag}: label {max(values)}: class numbers go up to {MOST_CLASSES - 1:,}")
        return [str(k) for k in range(max(values, default=-1) + 1)], several
    return sorted(map(str, values)), several


def _half(table: Any, image: str, cells: list[Any], classes: list[str], several: bool, flag: str) -> ImageSet:
    if not len(table):
        raise Problem(f"{flag}: a split has no images")
    names = [_names(cell, classes, flag) for cell in cells]
    return to_set(_ids(table, image, names, several), labels_of(names, classes, several), Rows(table, image))


def _names(cell: Any, classes: list[str], flag: str) -> list[str]:
    found = []
    for value in cell if isinstance(cell, list) else [cell]:
        if value in (None, -1, ""):
            continue
        if isinstance(value, int) and not 0 <= value < len(classes):
            raise Problem(f"{flag}: label {value} is outside of the {len(classes)} classes")
        found.append(classes[value] if isinstance(value, int) else str(value))
    return found


def _ids(table: Any, image: str, names: list[list[str]], several: bool) -> list[str]:
    """`<class>/<file name>` where rows know their files; else the number of the row."""
    if "id" in _note_fields(table):
        return [cell["id"] for cell in table.data.column(NOTE).to_pylist()]
    if KEY in table.features:
        files = [f"{key}.{image}" for key in table.data.column(KEY).to_pylist()]
    elif table._indices is None:
        import pyarrow.compute as pc

        files = pc.struct_field(table.data.column(image), "path").to_pylist()
    else:
        files = []
    if not files or not all(files):
        return [f"row-{i:09d}" for i in range(len(table))]
    if several:
        bare = [file.rpartition("/")[2] for file in files]
        return bare if len(set(bare)) == len(bare) else files
    return unique_ids([some[0] if some else "unlabelled" for some in names], files)
