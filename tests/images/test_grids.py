"""Grids of digits and photos: the label rule, the true sets, the main object, and what is refused."""

import gzip
import shutil

import numpy as np
import pytest
import torch

from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import load_data, split_name
from finetune_mile.images.sources.grids import Layout, make_grids
from finetune_mile.paper.datasets import multi_mnist


def idx(values):
    head = bytes([0, 0, 8, values.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in values.shape)
    return head + values.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(tmp_path):
    """Ten digits that are seen at once: digit d is a picture of the value 10 d."""
    for name, count in (("train", 30), ("t10k", 20)):
        labels = np.arange(count) % 10
        images = np.broadcast_to((labels * 10)[:, None, None], (count, 28, 28))
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return tmp_path


def test_a_grid_shows_its_true_set_and_its_label_is_drawn_by_the_rule(mnist):
    data = multi_mnist(f"{mnist}?train=4000&val=500")
    images = data.train
    shown = torch.stack([images.read(i)[0, 7::14, 7::14].flatten() // 10 for i in range(200)]).long()  # (200, 9)
    for cells, truth, main in zip(shown, images.truth, images.main, strict=False):
        assert set(cells.tolist()) == set(truth.nonzero().flatten().tolist())
        assert cells[4] == main
    assert images.truth[torch.arange(4000), images.given].all()
    agree = float((images.given == images.main).float().mean())
    assert agree == pytest.approx(0.6 + 0.4 * 0.1, abs=0.03)  # a digit elsewhere is the centre's one time in ten
    assert images.read(0).shape == (3, 42, 42)


def test_two_rows_have_the_first_cell_as_main_object_and_single_images_show_it_alone(mnist):
    data = multi_mnist(f"{mnist}?rows=2&share=0.55&single=0.5&train=2000&val=100")
    sizes = data.train.truth.sum(1)
    alone = [i for i in range(2000) if not data.train.read(i)[0, :14, 14:].any() and sizes[i] == 1]
    assert 0.4 < len(alone) / 2000 < 0.6
    assert all(data.train.given[i] == data.train.main[i] for i in alone)
    several = int((sizes > 1).nonzero()[0])
    assert int(data.train.read(several)[0, 0, 0]) // 10 == int(data.train.main[several])


def test_another_draw_gives_other_grids_and_the_same_draw_the_same(mnist):
    first, again, other = (multi_mnist.__wrapped__(f"{mnist}?train=50&val=50&draw={d}") for d in (0, 0, 1))
    assert torch.equal(first.train.read(3), again.train.read(3))
    assert not torch.equal(first.train.given, other.train.given)


def test_halves_of_the_test_digits_do_not_meet(mnist):
    even, odd = (multi_mnist(f"{mnist}?train=10&val=200&half={h}").val for h in ("even", "odd"))
    assert set(even.given.tolist()) == {0, 2, 4, 6, 8}
    assert set(odd.given.tolist()) == {1, 3, 5, 7, 9}


def test_two_digits_in_a_cell_are_a_number(mnist):
    data = multi_mnist(f"{mnist}?digits=2&train=300&val=200&half=odd")
    assert (len(data.classes), data.classes[7]) == (100, "07")
    images = data.train
    for i in range(50):
        tens, ones = (images.read(i)[0, 7::14, start::14].flatten() // 10 for start in (0, 10))  # (9,) each
        numbers = (10 * tens + ones).tolist()
        assert set(numbers) == set(images.truth[i].nonzero().flatten().tolist())
        assert numbers[4] == images.main[i]
    assert {n for label in data.val.given.tolist() for n in (label // 10, label % 10)} <= {1, 3, 5, 7, 9}


def test_what_cannot_be_a_grid_is_one_sentence(mnist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MNIST_DIR", raising=False)
    cases = {
        f"multi-mnist:{mnist}?row=2": "did you mean rows?",
        f"multi-mnist:{mnist}?rows=0": "rows=0 must be a whole number from 1 to 10",
        f"multi-mnist:{mnist}?rows=2.7": "rows=2.7 must be a whole number",
        f"multi-mnist:{mnist}?share=1.5": "from 0 to 1",
        f"multi-mnist:{mnist}?half=third": "half=third",
        f"multi-mnist:{mnist}?digits=3": "digits=3 must be one of 1, 2",
        f"multi-mnist:{mnist}?download=maybe": "download=maybe must be one of yes, no",
        "multi-mnist": "MNIST's four idx files are not in data/mnist",
        "mosaic:nowhere": "there is no directory",
    }
    for name, part in cases.items():
        with pytest.raises(Problem, match=r".") as caught:
            load_data(name)
        assert part in str(caught.value), name
    (mnist / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03short")
    with pytest.raises(Problem, match="train-images-idx3-ubyte"):
        multi_mnist.__wrapped__(str(mnist))


def test_the_place_may_come_from_the_environment(mnist, monkeypatch):
    raw = mnist / "MNIST/raw"
    raw.mkdir(parents=True)
    for path in mnist.glob("*ubyte*"):
        shutil.move(path, raw / path.name)
    monkeypatch.setenv("MNIST_DIR", str(mnist))
    assert split_name("multi-mnist")[0] == "multi-mnist"
    assert len(load_data("multi-mnist:?train=5&val=5").train) == 5


def test_mosaics_are_made_of_the_photos_of_their_own_half(tmp_path):
    from PIL import Image

    for split, base in (("train", 0), ("test", 100)):
        for number, name in enumerate("abc"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(4):
                grey = base + 30 * number + i
                Image.new("RGB", (20, 24), (grey, grey, grey)).save(tmp_path / split / name / f"{i}.png")
    data = load_data(f"mosaic:{tmp_path}?rows=2&cell=16&train=40&val=20&val_from=test")
    for images, base in ((data.train, 0), (data.val, 100)):
        assert images.read(0).shape == (3, 32, 32)
        for i in range(len(images)):
            cells = (images.read(i)[0, 8::16, 8::16].flatten().long() - base) // 30
            assert set(cells.tolist()) == set(images.truth[i].nonzero().flatten().tolist())
            assert int(cells[0]) == int(images.main[i])


def test_one_cell_has_no_other_cells():
    pictures = torch.arange(4, dtype=torch.uint8).view(4, 1, 1).expand(4, 8, 8)
    made = make_grids(pictures, np.arange(4), 20, num_classes=4, layout=Layout(rows=1, share=1.0), seed=0, name="x")
    assert torch.equal(made.given, made.main)
    assert int(made.truth.sum()) == 20
