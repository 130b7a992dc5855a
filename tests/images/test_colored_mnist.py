"""ColoredMNIST: label noise, colours, environments, the blank images of its + form, and what is refused."""

import pytest
import torch
from idx_files import write_mnist

from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import load_data, split_name

GREEN, RED = 1, 0  # channels


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    return write_mnist(tmp_path_factory.mktemp("mnist"), 4000, 2000)


def colours_shown(images, count=None):
    """0 = green, 1 = red, from the pixels."""
    shown = torch.stack([images.read(i).flatten(1).amax(1) for i in range(count or len(images))])  # (n, 3)
    assert (shown[:, 2] == 0).all()
    assert ((shown[:, RED] > 0) ^ (shown[:, GREEN] > 0)).all(), "one colour each"
    return (shown[:, RED] > 0).long()


def share(condition):
    return float(condition.float().mean())


@pytest.mark.parametrize("test", [0, 1, 2])
def test_each_environment_has_its_own_agreement_of_colour_and_label(mnist, test):
    data = load_data(f"colored-mnist:{mnist}?test={test}")
    assert len(data.val) == 2000
    assert not set(data.train.ids) & set(data.val.ids)
    assert len(set(data.train.ids) | set(data.val.ids)) == 6000
    assert set(data.train.environment.tolist()) == {0, 1, 2} - {test}
    assert set(data.val.environment.tolist()) == {test}
    for images in (data.train, data.val):
        agree = colours_shown(images) == images.given
        assert share(images.given == images.main) == pytest.approx(0.75, abs=0.03)
        for environment in set(images.environment.tolist()):
            expected = (0.9, 0.8, 0.1)[environment]
            assert share(agree[images.environment == environment]) == pytest.approx(expected, abs=0.03)
    assert data.classes == ("0-4", "5-9")
    digit = int(data.val.read(0).max()) // 10 - 1
    assert int(data.val.main[0]) == int(digit >= 5)


@pytest.mark.parametrize(("protocol", "expected"), [("random-colours", 0.5), ("10%", 0.1)])
def test_the_other_protocols_colour_the_test_digits_anew(mnist, protocol, expected):
    data = load_data(f"colored-mnist:{mnist}?protocol={protocol}&side=14")
    assert (len(data.train), len(data.val)) == (4000, 2000)
    assert set(data.train.environment.tolist()) == {0, 1}
    assert share(colours_shown(data.val) == data.val.given) == pytest.approx(expected, abs=0.03)
    assert data.train.read(0).shape == (3, 14, 14)


def test_a_third_of_the_images_of_the_plus_form_is_a_plain_colour(mnist):
    data = load_data(f"colored-mnist+:{mnist}?test=2")
    plain = load_data(f"colored-mnist:{mnist}?test=2")
    assert data.classes == ("0-4", "5-9", "green", "red")
    blank = data.train.given >= 2
    assert share(blank) == pytest.approx(0.33, abs=0.03)
    for i in range(200):
        image = data.train.read(i)
        assert (image.max() == 255) == bool(blank[i])
        if blank[i]:
            assert bool((image[GREEN if data.train.given[i] == 2 else RED] == 255).all())
    colours = colours_shown(data.train)
    assert torch.equal(data.train.given[blank], colours[blank] + 2)
    assert torch.equal(data.train.given[~blank], plain.train.given[~blank])
    assert torch.equal(data.val.given, plain.val.given)
    assert data.val.truth.sum(1).eq(2).all()
    assert data.val.truth[torch.arange(2000), colours_shown(data.val) + 2].all()


def test_the_mechanism_check_reads_the_outputs_of_the_image_s_own_colour(mnist):
    data = load_data(f"colored-mnist+:{mnist}?test=2")
    rows = torch.tensor([5, 9, 11, 40])
    own = colours_shown(data.val)[rows]
    outputs = torch.full((4, 4), 0.2)
    outputs[torch.arange(4), 2 + own] = torch.tensor([0.9, 0.7, 0.9, 0.7])
    outputs[torch.arange(3), data.val.given[rows[:3]]] = 0.4
    outputs[3, 1 - data.val.given[40]] = 0.4
    found = data.extra_scores(outputs, rows)
    assert found == pytest.approx({"digit_accuracy": 75.0, "colour_on_digits": 0.8, "other_colour_on_digits": 0.2})


def test_the_draw_decides_and_nothing_else(mnist):
    first, again, other = (load_data(f"colored-mnist+:{mnist}?draw={d}").train for d in (3, 3, 4))
    assert list(first.ids) == list(again.ids)
    assert torch.equal(first.given, again.given)
    assert list(first.ids) != list(other.ids)


def test_what_cannot_be_coloured_is_one_sentence(mnist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MNIST_DIR", raising=False)
    cases = {
        f"colored-mnist:{mnist}?test=3": "test=3 must be one of 0, 1, 2",
        f"colored-mnist:{mnist}?protocol=grey": "must be one of leave-one-out, random-colours, 10%",
        f"colored-mnist:{mnist}?protocol=10%&test=1": "test= is for protocol=leave-one-out",
        f"colored-mnist+:{mnist}?draw=x": "draw=x must be a whole number",
        f"colored-mnist:{mnist}?tests=1": "did you mean test?",
        "colored-mnist+": "MNIST's four idx files are not in data/mnist",
        f"colored-mnist:{write_mnist(tmp_path / 'few', 2, 2)}": "too few for 3 environments",
    }
    for name, part in cases.items():
        with pytest.raises(Problem, match=r".") as caught:
            load_data(name)
        assert part in str(caught.value), name
    with pytest.raises(Problem, match="colored-mnist:DIR"):
        split_name("colored-mnist")


def test_the_real_digits(shared):
    data = load_data(f"colored-mnist:{shared / 'data/mnist'}?test=0&side=14")
    assert (len(data.train), len(data.val)) == (46666, 23334)
    assert share(data.train.given == data.train.main) == pytest.approx(0.75, abs=0.01)
    assert float(data.val.read(0).float().mean()) > 0
