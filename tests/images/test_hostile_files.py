"""Files among the data that would block for ever or fill the memory: each is a bad image, or one sentence."""

import csv
import gzip
import io
import json
import lzma
import os
import struct

import numpy as np
import pytest
import torch
from photos import make_photos, photo, tar_of, write_folder, write_shards
from PIL import Image
from shortcuts import refused

from finetune_mile.cli import main
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images import name_lists, pipeline
from finetune_mile.images.pipeline import decode
from finetune_mile.images.readers import Files, TarFiles
from finetune_mile.images.sources import load_data

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "photos", make_photos())


def claims(width, height, **how):
    """A small JPEG whose header claims another size."""
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, format="JPEG", **how)
    data = bytearray(stream.getvalue())
    start = data.find(b"\xff\xc2\x00\x11" if how.get("progressive") else b"\xff\xc0\x00\x11")
    struct.pack_into(">HH", data, start + 5, height, width)
    return bytes(data)


RUN = ["--init", "none", "--arch", "resnet-demo", "--method", "sigmoid", "--batch-size", "8", "--steps", "6",
       "--set", "size=16", "--set", "evaluate.labels=false", "--set", "workers=0"]  # fmt: skip


def test_f4_a_fifo_among_the_images_is_a_bad_image(folder, tmp_path):
    os.mkfifo(folder / "train/n01440764/n01440764_3.JPEG")
    (folder / "train/n01443537/n01443537_3.JPEG").symlink_to("/dev/zero")
    (folder / "val/n01484850/huge.JPEG").write_bytes(claims(30_000, 30_000))
    out = tmp_path / "run"
    assert main(["run", "--data", str(folder), *RUN, "--out", str(out)]) == 0
    with (out / "bad_images.csv").open() as stream:
        found = {row["id"].rpartition("/")[2]: row["reason"] for row in csv.DictReader(stream)}
    regular = "cannot be read: not a regular file (a pipe, a device or a socket)"
    assert found == {
        "n01440764_3.JPEG": regular,
        "n01443537_3.JPEG": regular,
        "huge.JPEG": "30,000 x 30,000 pixels are too many (at most 178,956,970)",
    }
    assert json.loads((out / "results.json").read_text())["bad_images"] == 3


def test_f4_doctor_finds_a_fifo(folder, capsys):
    os.mkfifo(folder / "train/n01440764/x.JPEG")
    assert main(["check", "--data", str(folder), "--workers", "0"]) == 1
    assert "1 images cannot be read" in capsys.readouterr().out


def test_f4_a_fifo_among_the_photos_of_mosaics_is_one_sentence(folder):
    os.mkfifo(folder / "train/n01440764/x.JPEG")
    with refused("--data mosaic", "n01440764/x.JPEG", "not a reg"):
        load_data(f"mosaic:{folder}?train=4&val=4")


def test_f4_devices_folders_and_large_files_are_bad_images(tmp_path):
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo.jpg")
    (tmp_path / "folder.jpg").mkdir()
    with (tmp_path / "large.jpg").open("wb") as stream:
        stream.truncate(2**29 + 1)
    read = Files(tmp_path, ["zero.jpg", "fifo.jpg", "folder.jpg", "large.jpg", "missing.jpg"])
    for index, reason in enumerate(
        ("not a regular file", "not a regular file", "Is a directory", "larger than 512 MB", "No such file")
    ):
        with pytest.raises(BadImage, match=f"cannot be read: {reason}"):
            read(index)


# ------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"comment": b"\xff\xc0" * 9}], ids=str)
def test_f4_a_jpeg_that_claims_too_many_pixels_is_a_bad_image(how):
    data = claims(30_000, 30_000, **how)
    exif = data[:2] + b"\xff\xff\xff\xe1\x00\x04xx" + data[2:]  # fill bytes and one more segment
    for each in (data, exif):
        with pytest.raises(BadImage, match="30,000 x 30,000 pixels are too many"):
            decode(each)


def test_f4_a_strange_jpeg_header_is_left_to_pil(monkeypatch):
    """Whatever our own look at the header cannot read must not reach the decoder that has no limit."""
    monkeypatch.setattr(pipeline.torch.ops.image, "decode_jpeg", None)
    data = claims(30_000, 30_000)
    for strange in (data[:2] + b"\x00\x01" + data[2:], data[:20] + b"\xff\xd9" + data[20:], data[:100]):
        with pytest.raises(BadImage):
            decode(strange)


def test_ordinary_jpegs_do_not_go_through_pil(monkeypatch):
    stream = io.BytesIO()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(stream, format="JPEG", progressive=True, exif=exif, comment=b"words", dpi=(72, 72))
    plain = torch.from_numpy(np.array(Image.open(io.BytesIO(photo(1))))).permute(2, 0, 1)
    monkeypatch.setattr(pipeline, "_by_pil", None)
    assert decode(stream.getvalue()).shape == (3, 60, 40)
    assert decode(photo(1)).equal(plain)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "GIF", "BMP"])
def test_f4_other_formats_have_a_limit_too(monkeypatch, kind):
    """PIL's own, which must not be turned off."""
    stream = io.BytesIO()
    Image.new("L", (30, 20)).save(stream, format=kind)
    assert Image.MAX_IMAGE_PIXELS is not None
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    with pytest.raises(BadImage, match="pixels"):
        decode(stream.getvalue())


# ------------------------------------------------------------------------------- tars, tables, lists


def test_f4_a_fifo_as_tar_is_one_sentence(tmp_path):
    root = write_shards(tmp_path / "shards", make_photos())
    os.mkfifo(root / "train-000009.tar")
    with refused("train-000009.tar", "not a regular file"):
        load_data(f"wds:{root}")


def test_f4_a_tar_that_became_a_fifo_gives_bad_images(tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    (tmp_path / "y.tar").write_bytes(b"")
    where = np.zeros(1, dtype=np.int64)
    with pytest.raises(BadImage, match="not a regular file"):
        TarFiles([str(tmp_path / "x.tar")], where, where, where + 5)(0)
    with pytest.raises(BadImage, match="larger than 512 MB"):
        TarFiles([str(tmp_path / "y.tar")], where, where, where + 2**40)(0)


def test_f4_a_device_in_a_table_is_a_bad_image(tmp_path, monkeypatch):
    import datasets
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "good.jpg").write_bytes(photo(1))
    os.mkfifo(tmp_path / "fifo.jpg")
    paths = ["/dev/zero", str(tmp_path / "fifo.jpg"), *[str(tmp_path / "good.jpg")] * 8]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    columns = {"image": [{"bytes": None, "path": path} for path in paths], "label": [0, 1] * 5}
    (tmp_path / "table").mkdir()
    for name in ("train", "validation"):
        table = datasets.Dataset.from_dict(columns, features=features)
        pq.write_table(table.data.table, tmp_path / f"table/{name}-00000-of-00001.parquet")
    images = load_data(f"hf:{tmp_path / 'table'}").train
    for index in range(2):
        with pytest.raises(BadImage, match="not a regular file"):
            images.content(index)


def test_f4_a_device_in_a_csv_is_a_bad_image(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}.jpg").write_bytes(photo(i))
    lines = [f"{i}.jpg,{'ab'[i % 2]},{'train' if i < 6 else 'val'}" for i in range(10)]
    (tmp_path / "list.csv").write_text("\n".join(["file,label,split", "/dev/zero,a,train", *lines]) + "\n")
    images = load_data(f"csv:{tmp_path / 'list.csv'}").train
    with pytest.raises(BadImage, match="not a regular file"):
        images.read(list(images.ids).index("a/zero"))


@pytest.mark.parametrize(
    ("scheme", "file"),
    [("celeba", "list_attr_celeba.txt"), ("webvision", "synsets.txt"), ("imagenet", "LOC_val_solution.csv")],
)
def test_f4_a_fifo_as_list_is_one_sentence(tmp_path, scheme, file):
    (tmp_path / "val").mkdir()
    (tmp_path / "val/ILSVRC2012_val_00000001.JPEG").write_bytes(photo(1))
    os.mkfifo(tmp_path / file)
    with pytest.raises(Problem):
        load_data(f"{scheme}:{tmp_path}")


@pytest.mark.parametrize("text", [b"300000000", b"9" * 5000])
def test_f4_a_class_number_without_bound_is_one_sentence(tmp_path, text):
    members = [(f"{i}.jpg", photo(i)) for i in range(4)] + [(f"{i}.cls", str(i % 2).encode()) for i in range(3)]
    (tmp_path / "train-0.tar").write_bytes(tar_of([*members, ("3.cls", text)]))
    with refused("train-0.tar", "3.cls", "999,999"):
        load_data(f"wds:{tmp_path}")


@pytest.mark.parametrize("label", [300_000_000, -5])
def test_f4_a_label_without_bound_in_a_table_is_one_sentence(tmp_path, monkeypatch, label):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [{"bytes": photo(1), "path": None}] * 3, "label": [0, 1, label]}
    (tmp_path / "table").mkdir()
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "table/train-00000-of-00001.parquet")
    with pytest.raises(Problem, match=rf"label {label}"):
        load_data(f"hf:{tmp_path / 'table'}")


def test_f4_a_note_of_gigabytes_is_one_sentence(tmp_path):
    (tmp_path / "train-0.tar").write_bytes(tar_of([("0.jpg", photo(0)), ("0.json", b" " * (2**20 + 1) + b"{}")]))
    with refused("train-0.tar", "0.json", "1 MB"):
        load_data(f"wds:{tmp_path}")


@pytest.mark.parametrize("ending", ["xz", "gz"])
def test_f4_a_packed_list_that_explodes_is_one_sentence(tmp_path, monkeypatch, ending):
    assert name_lists.LARGEST_LIST == 2**28
    monkeypatch.setattr(name_lists, "LARGEST_LIST", 2**20)
    path = tmp_path / f"list.txt.{ending}"
    path.write_bytes((lzma if ending == "xz" else gzip).compress(bytes(2**22)))
    with refused("--split", f"list.txt.{ending}", "1 MB"):
        name_lists.read_list(path)


def test_a_packed_list_of_several_parts_is_read(tmp_path):
    (tmp_path / "list.txt.xz").write_bytes(lzma.compress(b"a.jpg\n") + lzma.compress(b"b.jpg\n"))
    assert name_lists.read_list(tmp_path / "list.txt.xz") == ["a.jpg", "b.jpg"]


def test_f4_names_with_many_slashes_cost_little(tmp_path):
    (tmp_path / "split.json").write_text(json.dumps({"ids": ["x" + "/" * 50_000]}))
    with refused("1 of 1 images", "lacks: x/") as caught:
        name_lists.find(name_lists.read_list(tmp_path / "split.json"), ["a/1.jpg"], "--split split.json")
    assert len(str(caught.value)) < 300
    (tmp_path / "split.json").write_text("[" * 100_000)
    with pytest.raises(Problem, match=r"not the split\.json of a run"):
        name_lists.read_list(tmp_path / "split.json")


@pytest.mark.parametrize("kind", ["empty", "text", "npz", "lying"])
def test_f13_counts_that_are_no_array_are_one_sentence(folder, tmp_path, kind):
    from finetune_mile.images.truth import with_truth

    path = tmp_path / "counts.npy"
    content = {"empty": b"", "text": b"1 2 3\n", "npz": b"", "lying": b""}[kind]
    path.write_bytes(content)
    if kind == "npz":
        with path.open("wb") as stream:
            np.savez(stream, x=np.zeros(3))
    if kind == "lying":
        with path.open("wb") as stream:
            np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": (2**40, 3)})
    (tmp_path / "index.csv").write_text("file\nx.jpg\n")
    with pytest.raises(Problem, match=r"counts\.npy cannot be read as \.npy"):
        with_truth(load_data(str(folder)), f"counts:{path},{tmp_path / 'index.csv'},0.1")
