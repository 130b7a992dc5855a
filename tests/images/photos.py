"""Small photos, made once, and the same photos in every container that we read."""

import io
import json
import tarfile

import numpy as np
from PIL import Image

CLASSES = ("n01440764", "n01443537", "n01484850")


def photo(seed, size=(48, 40)):
    """JPEG bytes of smooth noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (6, 5, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(stream, format="JPEG", quality=90)
    return stream.getvalue()


def make_photos(per_class=5, val=3):
    """{split: {class: {file name: bytes}}}."""
    found = {"train": {}, "val": {}}
    number = 1
    for k, name in enumerate(CLASSES):
        found["train"][name] = {f"{name}_{7 * i + 2}.JPEG": photo(100 * k + i) for i in range(per_class)}
        found["val"][name] = {}
        for i in range(val):
            found["val"][name][f"ILSVRC2012_val_{number:08d}.JPEG"] = photo(1000 + 100 * k + i)
            number += 3
    return found


def every(photos, split):
    """(class, file, bytes) of a split, in the order of the tree."""
    return [(name, file, data) for name, files in photos[split].items() for file, data in files.items()]


def write_folder(root, photos):
    for split in photos:
        for name, file, data in every(photos, split):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            (root / split / name / file).write_bytes(data)
    return root


def write_csv(root, photos):
    lines = ["file,label,split"]
    for split in photos:
        for name, file, data in reversed(every(photos, split)):
            (root / "pile").mkdir(parents=True, exist_ok=True)
            (root / "pile" / file).write_bytes(data)
            lines.append(f"pile/{file},{name},{split}")
    (root / "list.csv").write_text("\n".join(lines) + "\n")
    return root / "list.csv"


def tar_of(members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def write_tars(root, photos):
    """ImageNet's two tar files as distributed, and Kaggle's list of validation labels."""
    root.mkdir()
    inner = [(f"{name}.tar", tar_of(reversed(files.items()))) for name, files in photos["train"].items()]
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_of(reversed(inner)))
    val = every(photos, "val")
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_of((file, data) for _, file, data in val))
    lines = [f"{file.removesuffix('.JPEG')},{name} 1 2 3 4" for name, file, _ in val]
    (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "\n".join(lines) + "\n")
    return root


def write_parquet(root, photos):
    import datasets

    root.mkdir()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    for split, called in (("train", "train"), ("val", "validation")):
        rows = every(photos, split)[::-1]
        columns = {
            "image": [{"bytes": data, "path": file} for _, file, data in rows],
            "label": [CLASSES.index(name) for name, _, _ in rows],
        }
        datasets.Dataset.from_dict(columns, features=features).to_parquet(root / f"{called}-00000-of-00001.parquet")
    return root


def write_shards(root, photos, *, notes=False):
    """WebDataset: two shards of training images, one of validation images."""
    root.mkdir()
    for split in photos:
        rows = every(photos, split)
        half = len(rows) // 2 if split == "train" else len(rows)
        for shard, part in enumerate([rows[:half], rows[half:]] if half < len(rows) else [rows]):
            members = []
            for name, file, data in part:
                key = f"{name}/{file.removesuffix('.JPEG')}"
                members += [(f"{key}.JPEG", data), (f"{key}.cls", str(CLASSES.index(name)).encode())]
                if notes:
                    members.append((f"{key}.json", json.dumps({"label": name, "id": f"{name}/{file}"}).encode()))
            (root / f"{split}-{shard:06d}.tar").write_bytes(tar_of(members))
    return root
