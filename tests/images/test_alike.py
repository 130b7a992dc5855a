"""Photos that are copies of each other: found after re-saving, resizing, turning and mirroring; nothing else is."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from finetune_mile.cli import main
from finetune_mile.images import checks
from finetune_mile.images.alike import NEAR, WIDTH, compare, print_of, similarity

TURN = Image.Transpose


def saved(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return Image.open(stream)


def half(image):
    return image.resize((image.width // 2, image.height // 2))


COPIES = {
    "jpeg": lambda image: saved(image, "JPEG", quality=50),
    "webp": lambda image: saved(image, "WEBP", quality=75),
    "gif": lambda image: saved(image, "GIF"),
    "png": lambda image: saved(image, "PNG"),
    "half": lambda image: saved(half(image), "JPEG", quality=85),
    "90": lambda image: saved(image.transpose(TURN.ROTATE_90), "JPEG", quality=85),
    "180": lambda image: saved(image.transpose(TURN.ROTATE_180), "JPEG", quality=85),
    "270": lambda image: saved(image.transpose(TURN.ROTATE_270), "JPEG", quality=85),
    "mirror": lambda image: saved(image.transpose(TURN.FLIP_LEFT_RIGHT), "JPEG", quality=85),
    "upside down": lambda image: saved(image.transpose(TURN.FLIP_TOP_BOTTOM), "JPEG", quality=85),
    "transposed": lambda image: saved(image.transpose(TURN.TRANSPOSE), "JPEG", quality=85),
    "transversed": lambda image: saved(image.transpose(TURN.TRANSVERSE), "JPEG", quality=85),
    "all": lambda image: saved(half(image).transpose(TURN.ROTATE_90), "WEBP", quality=50),
}


def scene(seed, size=(160, 128)):
    """Noise at several scales, as photos have it."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(0, 30, (side, side, 3)) for side in (3, 6, 12, 24)]
    layers = [Image.fromarray((part + 128).clip(0, 255).astype(np.uint8)).resize(size, 3) for part in parts]
    mean = np.mean([np.asarray(layer, dtype=float) for layer in layers], 0)
    return Image.fromarray(((mean - 128) * 2 + 128).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_found(kind):
    photos = [scene(seed) for seed in range(20)]
    some = np.stack([print_of(photo) for photo in photos])
    alike = similarity(some, np.stack([print_of(COPIES[kind](photo)) for photo in photos]))
    assert alike.diagonal().min() >= NEAR
    assert (alike - 2 * np.eye(20)).max() < 0.6


def test_photos_without_contrast_are_like_nothing():
    prints = np.stack([print_of(Image.new("RGB", (40, 30), (shade,) * 3)) for shade in (0, 128, 255)])
    assert not prints.any()
    assert list(compare(prints)) == []


def test_each_photo_is_compared_with_all_before_it(monkeypatch):
    monkeypatch.setattr("finetune_mile.images.alike._BLOCK", 3)
    prints = np.stack([print_of(scene(seed)) for seed in (0, 1, 2, 0, 3, 4, 1, 0)])
    found = {row: np.flatnonzero(alike >= NEAR).tolist() for row, alike in compare(prints)}
    assert found == {3: [0], 6: [1], 7: [0, 3]}
    assert list(compare(np.zeros((0, WIDTH), dtype=np.float16))) == []


def test_copies_of_real_photos(shared):
    with zipfile.ZipFile(shared / "data/clothing/clothing_small_short128.zip") as packed:
        names = sorted(name for name in packed.namelist() if name.endswith(".jpg"))[::100]
        photos = [Image.open(io.BytesIO(packed.read(name))).convert("RGB") for name in names]
    prints = np.stack([print_of(photo) for photo in photos])
    assert list(compare(prints)) == []
    for kind, change in COPIES.items():
        alike = similarity(prints, np.stack([print_of(change(photo)) for photo in photos]))
        assert alike.diagonal().min() >= NEAR, kind


@pytest.fixture
def folder(tmp_path):
    for number, place in enumerate(f"{split}/{name}" for split in ("train", "val", "test") for name in ("cat", "dog")):
        (tmp_path / "photos" / place).mkdir(parents=True)
        for i in range(4):
            scene(10 * number + i).save(tmp_path / "photos" / place / f"{i}.jpg", quality=95)
    return tmp_path / "photos"


def test_doctor_names_near_duplicates_across_splits_and_classes(folder, tmp_path, capsys):
    photo = Image.open(folder / "train/cat/1.jpg")
    COPIES["webp"](photo).save(folder / "val/cat/re.webp")
    COPIES["90"](photo).save(folder / "test/cat/turned.png")
    COPIES["mirror"](photo).save(folder / "train/dog/mirror.gif")
    COPIES["half"](Image.open(folder / "train/dog/2.jpg")).save(folder / "train/dog/half.jpg")
    found = tmp_path / "found.csv"
    assert main(["check", "--data", str(folder), "--workers", "0", "--list", str(found)]) == 0
    said = capsys.readouterr().out
    assert "wrong labels" not in said, "that is said of exact copies only"
    assert "near-duplicates across train and val: 1\n  val cat/re.webp looks like train cat/1.jpg\n" in said
    assert "near-duplicates across train and test: 1\n  test cat/turned.png looks like train cat/1.jpg\n" in said
    assert "  train dog/mirror.gif (dog) looks like train cat/1.jpg (cat)\n" in said
    assert "near-duplicates within train, with the same labels: 1," in said
    assert "half.jpg" not in said
    rows = {tuple(line.split(",")[1:3]) for line in found.read_text().splitlines()}
    assert ("dog/half.jpg", "near-duplicate of train dog/2.jpg") in rows
    assert len(rows) == 1 + 4 + 2, "mirror.gif also conflicts with its copies in val and test"


def test_doctor_does_not_compare_too_many_photos(folder, capsys, monkeypatch):
    monkeypatch.setattr(checks, "MOST_COMPARED", 5)
    monkeypatch.setattr(checks, "compare", None)
    assert main(["check", "--data", str(folder), "--workers", "0"]) == 0
    assert "near-duplicates were not searched: there are more than 5 images" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["several labels", "partly unlabelled", "no labels", "unlabelled folder"])
def test_doctor_reads_data_with_several_labels_or_none(kind, folder, tmp_path, capsys):
    (folder / "train/dog/copy.jpg").write_bytes((folder / "train/cat/0.jpg").read_bytes())
    files = sorted(str(path.relative_to(folder)) for path in (folder / "train").rglob("*.jpg"))
    data = folder / "list.csv"
    if kind == "several labels":
        labels = ["cat;dog" if "copy" in path else path.split("/")[1] for path in files]
        said = ["wrong labels: ", "(cat, dog) is ", "4 images in every class", "2 classes"]
    elif kind == "partly unlabelled":
        labels = ["" if path.endswith(("3.jpg", "copy.jpg")) else path.split("/")[1] for path in files]
        said = ["3 unlabelled", "copy.jpg is train train/cat/0.jpg"]
    elif kind == "no labels":
        data, labels = f"folder:{folder}?labels=none", []
        said = ["train: 9 images without labels", "0 classes", "  train dog/copy.jpg is train cat/0.jpg"]
    else:
        (folder / "train/dog/copy.jpg").rename(folder / "copy.jpg")
        (folder / "unlabelled").mkdir()
        (folder / "copy.jpg").rename(folder / "unlabelled/copy.jpg")
        data, labels = folder, []
        said = ["1 unlabelled", "  train unlabelled/copy.jpg is train cat/0.jpg", "8 test images"]
    if labels:
        rows = [f"{path},{label}" for path, label in zip(files, labels, strict=True)]
        data.write_text("\n".join(["file,labels" if "several" in kind else "file,label", *rows]) + "\n")
        data = f"csv:{data}"
    assert main(["check", "--data", str(data), "--workers", "0"]) == 0
    out = capsys.readouterr().out
    assert [words for words in said if words not in out] == [], out
    assert ("wrong labels" in out) == (kind == "several labels")
