"""Every source: the same photos are the same tensors in the same order, and what is wrong is one sentence."""

import io
import os
import pickle
import shutil
import tarfile
import time
import zipfile

import numpy as np
import pytest
import torch
from photos import (
    CLASSES,
    every,
    make_photos,
    photo,
    tar_of,
    write_csv,
    write_folder,
    write_parquet,
    write_shards,
    write_tars,
)
from shortcuts import refused

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images import scans
from finetune_mile.images.order import Order, micro_batches
from finetune_mile.images.pipeline import Augmentation, Views, batches
from finetune_mile.images.sets import Names
from finetune_mile.images.sources import load_data, split_name
from finetune_mile.images.splits import fingerprint, make_pools


@pytest.fixture(scope="session")
def photos():
    return make_photos()


@pytest.fixture(scope="session")
def containers(tmp_path_factory, photos):
    """--data of the same photos in every container."""
    base = tmp_path_factory.mktemp("containers")
    folder = write_folder(base / "folder", photos)
    return {
        "folder": f"folder:{folder}",
        "imagenet": f"imagenet:{folder}",
        "tar": f"imagenet:{write_tars(base / 'tars', photos)}",
        "csv": f"csv:{write_csv(base / 'csv', photos)}",
        "imagefolder": f"hf:{folder}",
        "parquet": f"hf:{write_parquet(base / 'parquet', photos)}",
        "webdataset": f"hf:{write_shards(base / 'shards', photos)}",
        "wds": f"wds:{base / 'shards'}",
        "wds with notes": f"wds:{write_shards(base / 'notes', photos, notes=True)}",
    }


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    import datasets

    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(place))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


KINDS = ("imagenet", "tar", "csv", "imagefolder", "parquet", "webdataset", "wds", "wds with notes")


def drawn(data, workers, steps=5, rank=0, world=1):
    """The first training batches: pixels, labels, names."""
    how, augmentation = Preprocess(size=16), Augmentation(crop="random-resized", scale=(0.2, 1), shift=0, flip=True)
    views = Views(data.train, how, augmentation, 3)
    keys = micro_batches(
        Order(np.arange(len(data.train)), 5), first_step=0, batch_size=8, accumulate=1, rank=rank, world=world
    )
    found = [next(keys) for _ in range(steps)]
    return [
        (b.images, b.labels, [data.train.ids[i] for i in b.samples])
        for b in batches(views, found, workers=workers, pin=False)
    ]


def same(a, b):
    return all(x[0].equal(y[0]) and x[1].equal(y[1]) and x[2] == y[2] for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_photos_are_the_same_data(containers, kind):
    one, other = load_data(containers["folder"]), load_data(containers[kind])
    assert other.classes == one.classes == CLASSES
    for ours, theirs in ((one.train, other.train), (one.val, other.val)):
        assert list(ours.ids) == list(theirs.ids) == sorted(ours.ids)
        assert ours.given.equal(theirs.given)
        assert ours.given.dtype == theirs.given.dtype
    assert fingerprint(one.train.ids) == fingerprint(other.train.ids)
    reference = drawn(one, 0)
    assert same(drawn(other, 0), reference)
    again = pickle.loads(pickle.dumps(other.train))
    assert again.read(3).equal(one.train.read(3))


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet", "wds"])
def test_loader_processes_change_nothing(containers, kind):
    data = load_data(containers[kind])
    assert same(drawn(data, 2), drawn(data, 0))


def test_two_processes_see_the_halves_of_the_batch(containers):
    data = load_data(containers["tar"])
    whole = drawn(load_data(containers["folder"]), 0)
    halves = [drawn(data, 0, rank=rank, world=2) for rank in range(2)]
    for (images, labels, names), first, second in zip(whole, *halves, strict=True):
        assert torch.cat([first[0], second[0]]).equal(images)
        assert torch.cat([first[1], second[1]]).equal(labels)
        assert first[2] + second[2] == names


def test_one_tree_is_split_the_same_way_whatever_its_form(tmp_path, photos):
    tree = {"": photos["train"]}
    folder = write_folder(tmp_path / "tree", tree)
    lines = ["file,label"] + [f"{name}/{file},{name}" for name, file, _ in every(tree, "")]
    (folder / "list.csv").write_text("\n".join(lines))
    one, other = load_data(str(folder)), load_data(f"csv:{folder / 'list.csv'}")
    assert len(one.train) == 12
    assert len(one.val) == 3
    assert list(one.val.ids) == list(other.val.ids)
    assert one.train.read(4).equal(other.train.read(4))


def test_a_flat_validation_folder_takes_its_labels_from_a_file(tmp_path, photos, containers):
    for name, file, data in every(photos, "train"):
        (tmp_path / "train" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name / file).write_bytes(data)
    (tmp_path / "val").mkdir()
    for _, file, data in every(photos, "val"):
        (tmp_path / "val" / file).write_bytes(data)
    with refused("flat folder or tar", "devkit", "LOC_val_solution.csv", "labels=FILE"):
        load_data(f"imagenet:{tmp_path}")
    rows = every(photos, "val")
    labels = tmp_path / "mine.csv"
    labels.write_text("file,label\n" + "".join(f"{file},{name}\n" for name, file, _ in rows[::-1]))
    flat, folders = load_data(f"imagenet:{tmp_path}?labels={labels}"), load_data(containers["imagenet"])
    assert list(flat.val.ids) == list(folders.val.ids)
    assert flat.val.given.equal(folders.val.given)
    assert flat.val.read(5).equal(folders.val.read(5))
    labels.write_text("file,label\n" + "".join(f"{file},{name}\n" for name, file, _ in rows[1:]))
    with refused("label", "1 of 9 images", "ILSVRC2012_val_00000001.JPEG"):
        load_data(f"imagenet:{tmp_path}?labels={labels}")
    labels.write_text("file,label\n" + "".join(f"{file},dog\n" for _, file, _ in rows))
    with pytest.raises(Problem, match="9 files an unknown class"):
        load_data(f"imagenet:{tmp_path}?labels={labels}")


def test_nested_folders_are_classes_by_their_path(tmp_path):
    for name in ("Fruit/Apple/Red", "Fruit/Apple/Green", "Fruit/Plum", "Milk"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / name / f"{i}.jpg").write_bytes(photo(i))
    data = load_data(f"folder:{tmp_path}")
    assert data.classes == ("Fruit/Apple/Green", "Fruit/Apple/Red", "Fruit/Plum", "Milk")
    assert "Fruit/Plum/1.jpg" in [*data.train.ids, *data.val.ids]
    assert load_data(f"folder:{tmp_path}?depth=2").classes == ("Fruit/Apple", "Fruit/Plum", "Milk")
    assert load_data(f"folder:{tmp_path}?depth=1").classes == ("Fruit", "Milk")


def test_a_csv_of_several_labels_and_true_sets(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.jpg").write_bytes(photo(i))
    rows = [("a;b", "a"), ("b", "b;c"), ("a", ""), ("c;a", "c"), ("b", "a"), ("c", "a;c")]
    lines = [f"{i}.jpg,{'train' if i < 4 else 'val'},{labels},{truth}" for i, (labels, truth) in enumerate(rows)]
    (tmp_path / "list.csv").write_text("file,split,labels,truth\n" + "\n".join(lines))
    data = load_data(f"csv:{tmp_path / 'list.csv'}")
    assert data.classes == ("a", "b", "c")
    assert data.train.given.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1]]
    assert data.val.truth.tolist() == [[True, False, False], [True, False, True]]
    pools = make_pools(data.train, 1.0, 0)
    assert len(pools.indices["labelled"]) == 4


def test_hub_style_lists_of_labels(tmp_path):
    import datasets

    features = datasets.Features(
        {
            "photo": datasets.Image(),
            "tags": datasets.List(datasets.ClassLabel(names=["x", "y", "z"])),
            "n": datasets.Value("int32"),
        }
    )
    columns = {
        "photo": [{"bytes": photo(i), "path": None} for i in range(4)],
        "tags": [[0], [1, 2], [], [2]],
        "n": [1] * 4,
    }
    (tmp_path / "sets").mkdir()
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "sets/train.parquet")
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "sets/test.parquet")
    with refused("label column", "photo, tags, n", "?label=COLUMN"):
        load_data(f"hf:{tmp_path / 'sets'}")
    data = load_data(f"hf:{tmp_path / 'sets'}?label=tags")
    assert data.classes == ("x", "y", "z")
    assert data.train.given.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0], [0, 0, 1]]
    assert data.train.read(1).equal(data.val.read(1))


def test_saved_to_disk_arrow_and_names_as_labels(tmp_path):
    import datasets

    columns = {
        "image": [{"bytes": photo(i), "path": f"{i}.jpg"} for i in range(6)], "kind": ["dog", "cat"] * 3
    }  # fmt: skip
    table = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    datasets.DatasetDict(train=table, validation=table).save_to_disk(tmp_path / "saved")
    data = load_data(f"hf:{tmp_path / 'saved'}?label=kind")
    assert data.classes == ("cat", "dog")
    assert list(data.train.ids) == ["cat/1.jpg", "cat/3.jpg", "cat/5.jpg", "dog/0.jpg", "dog/2.jpg", "dog/4.jpg"]


def test_webvision(tmp_path):
    for path in ("google/q0001/a.jpg", "google/q0002/b.jpg", "flickr/q0001/a.jpg", "val_images_256/val1.jpg"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(photo(len(path)))
    (tmp_path / "info").mkdir()
    (tmp_path / "info/synsets.txt").write_text("n01440764 tench\nn01443537 goldfish, red\nn01484850 shark\n")
    (tmp_path / "info/train_filelist_google.txt").write_text("google/q0001/a.jpg 0\ngoogle/q0002/b.jpg 1\n")
    (tmp_path / "info/train_filelist_flickr.txt").write_text("flickr/q0001/a.jpg 2\n")
    (tmp_path / "info/val_filelist.txt").write_text("val1.jpg 1\n")
    data = load_data(f"webvision:{tmp_path}")
    assert data.classes == CLASSES
    assert len(data.train) == 3
    mini = load_data(f"webvision:{tmp_path}?classes=2&parts=google")
    assert mini.train.given.tolist() == [0, 1]
    assert mini.val.read(0).shape == (3, 40, 48)
    with pytest.raises(Problem, match="did you mean classes"):
        load_data(f"webvision:{tmp_path}?clases=2")


def test_celeba(tmp_path):
    (tmp_path / "img_align_celeba").mkdir()
    for i in range(1, 4):
        (tmp_path / f"img_align_celeba/{i:06d}.jpg").write_bytes(photo(i))
    (tmp_path / "list_attr_celeba.txt").write_text(
        "3\nBald Smiling\n000001.jpg -1  1\n000002.jpg  1  1\n000003.jpg -1 -1\n"
    )
    (tmp_path / "list_eval_partition.txt").write_text("000001.jpg 0\n000002.jpg 1\n000003.jpg 2\n")
    data = load_data(f"celeba:{tmp_path}")
    assert data.classes == ("Bald", "Smiling")
    assert data.train.given.tolist() == [[0, 1]]
    assert data.val.given.tolist() == [[1, 1]]
    assert load_data(f"celeba:{tmp_path}?val=test").val.given.tolist() == [[0, 0]]


def test_real_data(shared, tmp_path):
    with zipfile.ZipFile(shared / "data/coco_mini/coco_mini_free.zip") as archive:
        archive.extractall(tmp_path)
    data = load_data(f"csv:{tmp_path / 'labels.csv'}?separator=|")
    assert len(data.train) + len(data.val) == 57
    several = (torch.cat([data.train.given, data.val.given]) > 0).sum(1) > 1
    assert int(several.sum()) == 53
    assert data.train.read(0).shape[0] == 3


# ------------------------------------------------------------------------------------ scans


def test_a_scan_is_remembered_and_notices_change(tmp_path, monkeypatch, photos):
    monkeypatch.setattr(scans, "WORTH_KEEPING", 1)
    folder = write_folder(tmp_path / "photos", photos)
    old = time.time() - 100
    for path in [*folder.rglob("*")]:
        os.utime(path, (old, old))
    first = load_data(str(folder))
    walk = scans._walk
    monkeypatch.setattr(scans, "_walk", lambda *_: pytest.fail("it was to be remembered"))
    again = load_data(str(folder))
    assert list(again.train.ids) == list(first.train.ids)
    assert again.train.read(0).equal(first.train.read(0))
    monkeypatch.setattr(scans, "_walk", walk)
    (folder / "train" / CLASSES[0] / "more.jpg").write_bytes(photo(7))
    assert len(load_data(str(folder)).train) == len(first.train) + 1
    (folder / "train" / CLASSES[0] / "more.jpg").unlink()
    assert len(load_data(str(folder)).train) == len(first.train)
    for kept in scans.cache().rglob("*.npz"):
        kept.write_bytes(kept.read_bytes()[:100])
    assert len(load_data(str(folder)).train) == len(first.train), "a damaged cache is looked past"


def test_names_in_one_block():
    names = ["a/1.jpg", "b/ü.jpg", "", "c"]
    packed = Names.of(names)
    assert list(packed) == names
    assert [packed[i] for i in range(4)] == names
    assert packed[-1] == "c"
    assert packed[1:3] == ["b/ü.jpg", ""]
    assert list(pickle.loads(pickle.dumps(packed))) == names
    with pytest.raises(IndexError):
        packed[4]


# ------------------------------------------------------------------------------------ what is wrong


def class_folders(root, **counts):
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.jpg").write_bytes(photo(i))
    return root


def test_folders_that_cannot_work(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    stray = class_folders(tmp_path / "stray", a=2, b=2)
    (stray / "x.jpg").write_bytes(photo(1))
    cases = {
        str(tmp_path / "empty"): "no images in class folders",
        str(class_folders(tmp_path / "one", a=3)): r"only one class \(a\); two are needed",
        str(class_folders(tmp_path / "hole", a=3, b=0)): "no image in class b; remove the folder or fill it",
        str(class_folders(tmp_path / "single", a=1, b=1)): "one image per class cannot be split",
        str(class_folders(tmp_path / "half" / "train", a=1, b=1).parent): "no val/ beside it",
        str(stray): "x.jpg is not in a class folder",
        f"{stray}?dept=1": "did you mean depth",
        f"{stray}?depth=x": "must be a number of folders",
    }
    for place, sentence in cases.items():
        with pytest.raises(Problem, match=sentence):
            load_data(f"folder:{place}")
    class_folders(tmp_path / "half" / "test", a=2)
    assert len(load_data(f"{tmp_path / 'half'}?val=test").val) == 2
    with pytest.raises(Problem, match="no vla/ beside it"):
        load_data(f"{tmp_path / 'half'}?val=vla")
    class_folders(tmp_path / "half" / "val", c=1)
    with pytest.raises(Problem, match="val/ has classes that train/ lacks: c"):
        load_data(str(tmp_path / "half"))

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(scans.os, "scandir", refuse)
    with refused("folder", "one", "Permission denied"):
        load_data(str(tmp_path / "one"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name,label\n1.jpg,a\n", "the column file is missing; the header is name,label"),
        ("file,kind\n1.jpg,a\n", r"the column label \(or labels\) is missing; there are file, kind"),
        ("file,label\n", "no line below the header"),
        ("", "the column file is missing"),
        ("file,label\n1.jpg,a\n2.jpg\n", "line 3: expected 2 columns"),
        ("file,label\n1.jpg,\n2.jpg,\n", "none of its 2 images has a label"),
        ("file,label\n1.jpg,a\n2.jpg,a\n", "only one class"),
        ("file,label,split\n1.jpg,a,train\n2.jpg,b,train\n", "names no val image"),
        ("file,label,split\n1.jpg,a,train\n2.jpg,b,vla\n", "'vla' is not train, val or test"),
        ("file,label\n1.jpg,a\n1.jpg,a\n2.jpg,b\n", "a/1.jpg is listed twice|1.jpg is listed twice"),
    ],
)
def test_lists_that_cannot_work(text, sentence, tmp_path):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(Problem, match=sentence):
        load_data(f"csv:{tmp_path / 'list.csv'}")


@pytest.mark.parametrize("cut", [0.3, 0.6, "mark"])
def test_a_tar_that_is_cut_off(cut, tmp_path, photos):
    root = write_tars(tmp_path / "tars", photos)
    path = root / "ILSVRC2012_img_train.tar"
    data = path.read_bytes()
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512 if cut == "mark" else int(len(data) * cut)
    path.write_bytes(data[:end])
    with refused("ILSVRC2012_img_train.tar", "cut off"):
        load_data(f"imagenet:{root}")


def test_shards_that_cannot_work(tmp_path, photos):
    with pytest.raises(Problem, match=r"there is no .tar file"):
        load_data(f"wds:{tmp_path}")
    (tmp_path / "train.tar").write_bytes(tar_of([("a.txt", b"1")]))
    with pytest.raises(Problem, match="no images in the shards"):
        load_data(f"wds:{tmp_path}")
    (tmp_path / "train.tar").write_bytes(tar_of([("a.jpg", photo(1)), ("a.cls", b"one")]))
    with pytest.raises(Problem, match=r"a.cls holds 'one', not a class number"):
        load_data(f"wds:{tmp_path}")
    shards = write_shards(tmp_path / "cut", photos)
    whole = (shards / "train-000001.tar").read_bytes()
    (shards / "train-000001.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Problem, match="cut off"):
        load_data(f"wds:{shards}")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("foldr:x", r"did you mean folder:\?"),
        ("imagenet:nowhere", "no directory 'nowhere'"),
        ("csv:nowhere.csv", "no file 'nowhere.csv'"),
        ("hf:", "needs a dataset name or a directory"),
        ("hf:./nowhere", "no directory"),
        ("wds:nowhere", "no directory"),
        ("imagenet", "use imagenet:DIR, or set IMAGENET_DIR"),
    ],
)
def test_names_are_checked_before_any_work(data, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("IMAGENET_DIR", raising=False)
    with pytest.raises(Problem, match=sentence):
        split_name(data)


def test_what_datasets_cannot_load_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(Problem, match="`datasets` cannot load it"):
        load_data(f"hf:{tmp_path / 'nothing'}")


def test_imagenet_where_there_is_none(tmp_path):
    with refused("train/", "val/", "ILSVRC2012_img_train.tar"):
        load_data(f"imagenet:{tmp_path}")


def test_the_development_kit_gives_the_labels(tmp_path, photos):
    """Its class numbers are its own: meta.mat says which synset has which."""
    from scipy.io import savemat

    root = write_tars(tmp_path / "tars", photos)
    (root / "LOC_val_solution.csv").unlink()
    kinds = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "f8")]
    rows = [(3 - k, name, "w", "g", 0) for k, name in enumerate(CLASSES)] + [(9, "n00001740", "w", "g", 5)]
    mat = io.BytesIO()
    savemat(mat, {"synsets": np.array(rows, dtype=kinds).reshape(-1, 1)})
    numbers = {file: 3 - CLASSES.index(name) for name, file, _ in every(photos, "val")}
    last = int(max(numbers)[15:23])
    truth = [str(numbers.get(f"ILSVRC2012_val_{i:08d}.JPEG", 1)) for i in range(1, last + 1)]
    with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        for name, data in (
            ("meta.mat", mat.getvalue()),
            ("ILSVRC2012_validation_ground_truth.txt", "\n".join(truth).encode()),
        ):
            info = tarfile.TarInfo(f"ILSVRC2012_devkit_t12/data/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    data = load_data(f"imagenet:{root}")
    assert list(data.val.ids) == sorted(f"{name}/{file}" for name, file, _ in every(photos, "val"))


def test_a_folder_with_val_and_test_keeps_test_apart(tmp_path):
    for part, count in (("train", 3), ("validation", 2), ("test", 1)):
        class_folders(tmp_path / part, a=count, b=count)
    data = load_data(str(tmp_path))
    assert [len(images) for images in (data.train, data.val, data.test)] == [6, 4, 2]
    assert list(data.test.ids) == ["a/0.jpg", "b/0.jpg"]
    other = load_data(f"{tmp_path}?val=test")
    assert (len(other.val), other.test) == (2, None)
    assert load_data(f"{tmp_path}?labels=none", need_labels=False).test is None
    class_folders(tmp_path / "test", c=1)
    data = load_data(str(tmp_path))
    assert list(data.test.ids) == ["a/0.jpg", "b/0.jpg"]
    assert data.notes == ("test/ has 1 images of classes that train/ lacks, which are not scored: c",)
    shutil.rmtree(tmp_path / "test")
    shutil.copytree(tmp_path / "train" / "a", tmp_path / "test")
    assert load_data(str(tmp_path)).test is None, "images in no class folder have no label"
    shutil.rmtree(tmp_path / "validation")
    shutil.rmtree(tmp_path / "test")
    class_folders(tmp_path / "test", a=1, b=1)
    assert (len(load_data(str(tmp_path)).val), load_data(str(tmp_path)).test) == (2, None)
