"""True label sets, joined by file name: ReaL at its full size, human counts, CSV files."""

import json
import lzma

import numpy as np
import pytest
import torch
from shortcuts import refused

from finetune_mile.core.problems import Problem
from finetune_mile.images.sets import Data, ImageSet, Names
from finetune_mile.images.sources import check_split, check_truth
from finetune_mile.images.sources.imagenet import synsets
from finetune_mile.images.truth import with_real, with_truth


def data_of(val, labels, classes, train=("a/x.jpg",)):
    def images(ids, given):
        return ImageSet(ids=Names.of(ids), given=torch.as_tensor(given), truth=None, content=lambda _: None)

    return Data(name="d", classes=tuple(classes), train=images(train, [0] * len(train)), val=images(val, labels))


def test_real_at_full_size(shared):
    """Whatever the order of the files: sorted by class here, by number in ReaL's own file."""
    paths = json.loads(lzma.decompress((shared / "data/imagenet/imagenet_val_index_to_filepath.json.xz").read_bytes()))
    labels = np.load(shared / "data/imagenet/imagenet_val_original_labels.npy").astype(np.int64)
    ids = [path.removeprefix("val/") for path in paths]
    order = np.random.default_rng(0).permutation(len(ids))
    data = data_of([ids[i] for i in order], labels[order], synsets())
    found = with_real(data, required=True).val
    sizes = found.truth.sum(1)
    assert int((sizes == 0).sum()) == 3163
    assert int((sizes > 1).sum()) == 7443
    known = sizes > 0
    inside = found.truth[torch.arange(len(ids)), found.given][known].double().mean()
    assert f"{100 * float(inside):.2f}" == "90.02"
    raw = json.loads((shared / "data/imagenet/real.json").read_text())
    for i in (0, 17, 49999):
        number = int(ids[order[i]][-13:-5])
        assert found.truth[i].nonzero().flatten().tolist() == sorted(raw[number - 1])


def test_real_of_a_few_classes_and_of_other_data():
    names = [f"n01440764/ILSVRC2012_val_{i:08d}.JPEG" for i in (293, 2138)]
    some = with_real(data_of(names, [0, 0], ["n01440764", "n01443537"]), required=True)
    assert some.val.truth.tolist() == [[True, False]] * 2
    other = data_of(["a/1.jpg"], [0], ["a", "b"])
    assert with_real(other, required=False) is other
    with refused("truth real", "ImageNet's validation images"):
        with_truth(other, "real")


def test_human_counts(tmp_path):
    np.save(tmp_path / "counts.npy", np.array([[9, 1, 0], [0, 5, 5], [48, 2, 0]]))
    (tmp_path / "index.csv").write_text("index,file\n0,test/b/2.jpg\n1,test/a/1.jpg\n2,test/c/3.jpg\n")
    data = data_of(["a/1.jpg", "b/2.jpg", "c/3.jpg", "c/4.jpg"], [0, 1, 2, 2], "abc")
    found = with_truth(data, f"counts:{tmp_path / 'counts.npy'},{tmp_path / 'index.csv'},0.1").val.truth
    assert found.int().tolist() == [[0, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]
    np.save(tmp_path / "counts.npy", np.zeros((3, 2)))
    with refused("(3, 2)", "3 files in index.csv", "3 classes"):
        with_truth(data, f"counts:{tmp_path / 'counts.npy'},{tmp_path / 'index.csv'},0.1")


def test_cifar_10h(shared):
    """numbers of the data's README: 9.0 % of the images have two labels or more at 0.1."""
    here = shared / "data/cifar10"
    lines = (here / "test_index_to_file.csv").read_text().split()[1:]
    ids = sorted(line.split(",")[2].removeprefix("test/") for line in lines)
    classes = sorted({name.partition("/")[0] for name in ids})
    data = data_of(ids, [classes.index(name.partition("/")[0]) for name in ids], classes)
    spec = f"counts:{here / 'cifar10h-counts.npy'},{here / 'test_index_to_file.csv'},0.1"
    truth = with_truth(data, spec).val.truth
    assert f"{100 * float((truth.sum(1) > 1).float().mean()):.1f}" == "9.0"
    assert float(truth[torch.arange(len(ids)), data.val.given].float().mean()) > 0.97


def test_a_csv_of_sets(tmp_path):
    data = data_of(["a/1.jpg", "b/2.jpg"], [0, 1], "abc", train=["a/x.jpg"])
    path = tmp_path / "sets.csv"
    path.write_text("file,labels\n2.jpg,b;c\nx.jpg,a\n")
    assert with_truth(data, f"csv:{path}").val.truth.int().tolist() == [[0, 0, 0], [0, 1, 1]]
    for text, sentence in (
        ("file,labels\n9.jpg,a\n2.jpg,b\n", "1 files are not in the data: 9.jpg"),
        ("file,labels\n2.jpg,b;dog\n", "1 labels are not classes of the data: dog"),
        ("file,label\n2.jpg,b\n", "the column labels is missing"),
        ("file,labels\nx.jpg,a\n", "none of the validation images has a label set"),
    ):
        path.write_text(text)
        with pytest.raises(Problem, match=sentence):
            with_truth(data, f"csv:{path}")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("reel", "write real, csv:FILE"),
        ("csv:nowhere.csv", "there is no file nowhere.csv"),
        ("counts:a.npy", "with a share up to 1"),
        ("counts:a.npy,b.csv,x", "with a share up to 1"),
        ("counts:a.npy,b.csv,0.1", "there is no file a.npy"),
    ],
)
def test_truth_is_checked_before_any_work(spec, sentence):
    with pytest.raises(Problem, match=sentence):
        check_truth(spec)
    with pytest.raises(Problem, match="--split nowhere: there is no such file"):
        check_split("nowhere")
