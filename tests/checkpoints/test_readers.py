"""Honest files of every container give plain tensors, and say what they hold beside them."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import operator
import pickle
import zipfile

import bundles
import numpy as np
import pytest
import torch
from material import SHARED, assert_same, needs_shared, tensors, unpack
from safetensors.torch import save_file
from shortcuts import refused

from finetune_mile.checkpoints.readers import Contents, Stub, read
from finetune_mile.core.problems import Problem

EDGE = SHARED / "edge_cases"


# torch files


@needs_shared
@pytest.mark.parametrize(
    "packed",
    [
        "mocov2/checkpoint_0000.pth.tar.zst",
        "vissl_swav/model_final_checkpoint_phase99.torch.zst",
        "solo_simclr/solo_simclr_r18-ep=0.ckpt.zst",
        "lightly_simclr/lightly_simclr_r18.ckpt.zst",
    ],
)
def test_upstream_files_equal_torch_load(packed, tmp_path):
    path = unpack(SHARED / packed, tmp_path)
    contents = read(path)
    assert contents.container == "torch-zip"
    assert contents.stubs == ()
    assert_same(contents.tree, torch.load(path, weights_only=True, map_location="cpu"))


EDGES = {
    "defaultdict_counter.pth.tar": (),
    "fp16_weights.pth.tar": (),
    "legacy_nonzip.pth.tar": (),
    "namespace_args.pth.tar": ("argparse.Namespace",),
    "numpy_array.pth.tar": (),
    "numpy_scalars.pth.tar": (),
    "omegaconf_hparams.ckpt": (
        "omegaconf.base.ContainerMetadata",
        "omegaconf.base.Metadata",
        "omegaconf.dictconfig.DictConfig",
        "omegaconf.nodes.AnyNode",
        "typing.Any",
    ),
    "pathlib.ckpt": ("pathlib.PosixPath",),
}


@needs_shared
@pytest.mark.parametrize("name", EDGES)
def test_edge_cases_keep_their_weights_and_name_their_stubs(name):
    contents = read(EDGE / name)
    assert contents.stubs == EDGES[name]
    found = tensors(contents.tree["state_dict"])
    assert found
    assert all(value.isfinite().all() for value in found.values())
    assert contents.container == ("torch-legacy" if "legacy" in name else "torch-zip")
    if name in ("legacy_nonzip.pth.tar", "fp16_weights.pth.tar"):
        assert_same(contents.tree, torch.load(EDGE / name, weights_only=True))


@needs_shared
def test_edge_cases_beside_the_weights():
    assert isinstance(read(EDGE / "numpy_scalars.pth.tar").tree["best_acc1"], float)
    meters = read(EDGE / "numpy_array.pth.tar").tree["meters"]
    assert torch.equal(meters["acc"], torch.tensor([0, 1, 2]))
    args = read(EDGE / "namespace_args.pth.tar").tree["args"]
    assert isinstance(args, Stub)
    assert isinstance(args.state, dict)
    path = read(EDGE / "pathlib.ckpt").tree["path"]
    assert all(isinstance(part, str) for part in path.args)


@needs_shared
def test_whole_module_gives_its_state_dict():
    contents = read(EDGE / "whole_module.pth")
    module = torch.load(EDGE / "whole_module.pth", weights_only=False)
    assert list(contents.tree) == list(module.state_dict())
    assert_same(contents.tree, module.state_dict())
    assert "torch.nn.modules.conv.Conv2d" in contents.stubs


def test_whole_module_under_a_key(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    torch.save({"epoch": 1, "model": module}, tmp_path / "whole.pth")
    assert_same(read(tmp_path / "whole.pth").tree, {"model": module.state_dict()})


class Colour(enum.Enum):
    RED = 1

    def __reduce_ex__(self, protocol):
        """As Python pickles them; some releases of 3.11 do it through getattr, which readers refuse from anybody."""
        return Colour, (self.value,)


class Config(dict):
    pass


class Meter:
    def __init__(self) -> None:
        self.values = [1.0, np.float32(2.5)]
        self.itself = self


DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]
DTYPES += ["bool", "complex64", "uint16", "uint64", "float8_e4m3fn"]


def many_things() -> dict[str, object]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "dtypes": {name: torch.ones(3).to(getattr(torch, name)) for name in DTYPES},
        "transposed": base.T,
        "part": base[1:3, ::2],
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 5),
        "expanded": torch.ones(1).expand(8),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).state_dict(),
        "ordered": collections.OrderedDict(a=torch.zeros(1)),
        "nested": [1, (2, {"x": torch.ones(1)}), {3, 4}, b"bytes", bytearray(b"more"), None, 1 + 2j],
        "text": "ß" * 70_000,
        "long": b"\xff" * 70_000,
        "integer": 2**80,
        "size": base.shape,
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "keys": {1: "a", (1, "b"): 2, None: 3, 2.5: 4},
        "colour": Colour.RED,
        "config": Config(lr=1.0),
        "meter": Meter(),
        "deque": collections.deque([1, 2], maxlen=3),
        "array": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "swapped": np.arange(4, dtype=">i4"),
        "numbers": [np.float64(0.5), np.int32(3), np.bool_(True), np.str_("ab")],
        "no_array": np.zeros((0, 3), np.float32),
        "type": type(None),
    }


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_many_things(tmp_path, new, protocol):
    path = tmp_path / "many.pth"
    things = many_things()
    if not new:  # what torch itself cannot write there
        things["dtypes"] = {k: v for k, v in things["dtypes"].items() if "8_" not in k and k != "uint64"}
        things["dtypes"].pop("uint16")
    torch.save(things, path, _use_new_zipfile_serialization=new, pickle_protocol=protocol)
    tree = read(path).tree
    for part in ("dtypes", "transposed", "part", "scalar", "empty", "parameter", "ordered"):
        assert_same({"x": tree[part]}, {"x": things[part]})
    assert tree["part"].stride() == things["part"].stride()
    assert torch.equal(tree["expanded"], torch.ones(8))
    assert tree["optimizer"]["param_groups"][0]["lr"] == 0.1
    for part in ("text", "long", "integer", "keys"):
        assert tree[part] == things[part]
    assert tree["nested"][0] == 1
    assert tree["nested"][2:] == [{3, 4}, b"bytes", b"more", None, 1 + 2j]
    assert tuple(tree["size"]) == (4, 6)
    assert (tree["dtype"], tree["device"]) == ("torch.float16", "cpu")
    assert tree["colour"].args == (1,)
    assert tree["config"].entries == {"lr": 1.0}
    assert tree["meter"].state["values"] == [1.0, 2.5]
    assert tree["meter"].state["itself"] is tree["meter"]
    assert tree["deque"] == [1, 2]
    assert torch.equal(tree["array"], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    assert torch.equal(tree["swapped"], torch.arange(4, dtype=torch.int32))
    assert tree["numbers"] == [0.5, 3, True, "ab"]
    assert tree["no_array"].shape == (0, 3)


def test_stubs_are_sorted_and_not_called(tmp_path):
    torch.save({"a": Meter(), "b": argparse.Namespace(arch="resnet50"), "c": Config()}, tmp_path / "x")
    contents = read(tmp_path / "x")
    names = [f"{Config.__module__}.Config", f"{Config.__module__}.Meter", "argparse.Namespace"]
    assert list(contents.stubs) == sorted(names)
    assert contents.tree["b"].state == {"arch": "resnet50"}
    assert not isinstance(contents.tree["a"], Meter)


class History:
    def mean(self) -> float:
        return 0.0


def user_function() -> None:
    raise AssertionError("called")


def metric() -> object:
    import torchmetrics  # takes seconds, so not where tests are collected

    return torchmetrics.MeanMetric()


# What people keep beside their weights: settings, metrics, generators, and the methods of mmengine's buffers.
ORDINARY = {
    "partial": lambda: functools.partial(torch.nn.LayerNorm, eps=1e-6),
    "partial of a user's function": lambda: functools.partial(user_function, 3),
    "torch's version": lambda: torch.__version__,
    "torchmetrics": metric,
    "method, as in mmengine's HistoryBuffer": lambda: History.mean,
    "torch generator": torch.Generator,
    "numpy generator": lambda: np.random.default_rng(0),
    "numpy objects": lambda: np.array([None, "a"], dtype=object),
    "numpy text": lambda: np.array(["a", "b"]),
    "ellipsis": lambda: ...,
    "itemgetter": lambda: operator.itemgetter(1),
    "torch function": lambda: torch.nn.functional.relu,
    "sparse": lambda: torch.ones(2, 2).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", sorted(ORDINARY))
def test_ordinary_objects_beside_the_weights_are_inert(tmp_path, name, protocol):
    thing = {"state_dict": {"w": torch.arange(3.0)}, "hyper_parameters": {"x": ORDINARY[name]()}}
    torch.save(thing, tmp_path / "x.ckpt", pickle_protocol=protocol)
    tree = read(tmp_path / "x.ckpt").tree
    assert torch.equal(tree["state_dict"]["w"], torch.arange(3.0))
    assert not callable(tree["hyper_parameters"]["x"])
    assert "Stub" in str(type(tree["hyper_parameters"]["x"]))


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 2))])
def test_torchscript_is_called_torchscript(tmp_path, make):
    make(torch.nn.Linear(2, 3)).save(str(tmp_path / "model.pt"))
    with pytest.raises(Problem, match=r"TorchScript archive.*torch\.save\(torch\.jit\.load"):
        read(tmp_path / "model.pt")
    weights = torch.jit.load(str(tmp_path / "model.pt")).state_dict()  # the way that the sentence prints
    torch.save(weights, tmp_path / "weights.pth")
    assert_same(read(tmp_path / "weights.pth").tree, dict(weights))


@pytest.mark.parametrize("new", [True, False])
def test_a_whole_module_is_its_state_dict_in_both_containers(tmp_path, new):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save(module, tmp_path / "model.pkl", _use_new_zipfile_serialization=new)
    assert_same(read(tmp_path / "model.pkl").tree, module.state_dict())


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("legacy", [False, True])
def test_a_negated_view_is_not_read_with_the_wrong_sign(legacy, tmp_path):
    """torch writes the numbers of its storage, and beside them that they are to be negated."""
    view = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    assert view.is_neg()
    torch.save({"x": view}, tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
    with refused("negated", "tensor.resolve_neg()"):
        read(tmp_path / "x.pth")
    torch.save({"x": view.resolve_neg()}, tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
    assert torch.equal(read(tmp_path / "x.pth").tree["x"], -torch.ones(3))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated since torch 2.15
def test_quantised_weights_are_called_quantised(tmp_path):
    torch.save({"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, tmp_path / "x.pth")
    with pytest.raises(Problem, match="quantised"):
        read(tmp_path / "x.pth")


def test_tied_weights_stay_tied_and_own_their_storage(tmp_path):
    tied = torch.ones(4)
    torch.save({"a": tied, "b": tied.view(2, 2), "c": torch.zeros(1000)}, tmp_path / "tied.pth")
    tree = read(tmp_path / "tied.pth").tree
    assert tree["a"].untyped_storage().data_ptr() == tree["b"].untyped_storage().data_ptr()
    assert tree["c"].untyped_storage().nbytes() == 4000


def test_tensors_may_be_written_to_but_not_the_file(tmp_path):
    torch.save({"a": torch.ones(4)}, tmp_path / "x.pth")
    before = (tmp_path / "x.pth").read_bytes()
    read(tmp_path / "x.pth").tree["a"].zero_()
    assert (tmp_path / "x.pth").read_bytes() == before


def test_unaligned_archive(tmp_path):
    """An archive that another tool has packed anew has no padding."""
    torch.save({"a": torch.arange(5.0), "b": torch.ones(3)}, tmp_path / "x.pth")
    with zipfile.ZipFile(tmp_path / "x.pth") as old, zipfile.ZipFile(tmp_path / "y.pth", "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    assert_same(read(tmp_path / "y.pth").tree, {"a": torch.arange(5.0), "b": torch.ones(3)})


# safetensors


def test_safetensors(tmp_path):
    wanted = {"conv1.weight": torch.randn(4, 3), "bn.num_batches_tracked": torch.tensor(5)}
    save_file(wanted, tmp_path / "any.name", metadata={"format": "pt"})
    contents = read(tmp_path / "any.name")
    assert contents.container == "safetensors"
    assert contents.metadata == {"format": "pt"}
    assert_same(contents.tree, wanted)


def test_safetensors_whose_length_looks_like_a_pickle(tmp_path):
    """A header of 640 bytes begins with the bytes of a protocol-2 pickle."""
    for size in range(400, 640):
        save_file({"a": torch.ones(1)}, tmp_path / "x", metadata={"pad": "x" * size})
        if (tmp_path / "x").read_bytes()[:2] == b"\x80\x02":
            break
    assert read(tmp_path / "x").container == "safetensors"


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_foreign_objects_of_every_protocol(tmp_path, protocol):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"m": Meter(), "c": Config(a=1)}, protocol))
    tree = read(tmp_path / "x.pkl").tree
    assert tree["m"].state["values"] == [1.0, 2.5]
    assert tree["c"].entries == {"a": 1}


# What is no checkpoint

NOT_ONE = {
    "empty.pth": (b"", "empty"),
    "page.pth": (b"\n<!DOCTYPE html><html><body>403</body></html>", "web page"),
    "error.pth": (b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>", "web page"),
    "pointer.pth": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "packed.tar.gz": (b"\x1f\x8b\x08\x00" + bytes(30), "gzip"),
    "packed.zst": (b"\x28\xb5\x2f\xfd" + bytes(30), "zstd"),
    "packed.bz2": (b"BZh91AY", "bzip2"),
    "packed.xz": (b"\xfd7zXZ\x00", "xz"),
    "packed.tar": (b"name".ljust(257, b"\0") + b"ustar\x0000".ljust(300, b"\0"), "tar xf"),
    "keras.h5": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "array.npy": (b"\x93NUMPY\x01\x00", "numpy array"),
    "noise": (b"hello, world", "not a known kind of checkpoint"),
    "byte": (b"x", "not a known kind of checkpoint"),
    "empty.zip": (b"PK\x05\x06" + bytes(18), "empty zip"),
}


@pytest.mark.parametrize("name", NOT_ONE)
def test_what_is_no_checkpoint_gets_its_own_sentence(tmp_path, name):
    raw, words = NOT_ONE[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(Problem, match=words) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)


def test_what_is_not_there(tmp_path):
    with pytest.raises(Problem, match="does not exist"):
        read(tmp_path / "absent.pth")
    with pytest.raises(Problem, match="folder without"):
        read(tmp_path)
    bundles.write_bundle(tmp_path / "model.ckpt", {"w": np.ones(2, "f4")})
    (tmp_path / "model.ckpt.data-00000-of-00001").unlink()
    with pytest.raises(Problem, match="data-00000-of-00001"):
        read(tmp_path / "model.ckpt")
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(Problem, match="SavedModel without"):
        read(tmp_path)


def test_name_of_the_file_does_not_matter(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    assert read(tmp_path / "weights.safetensors").container == "torch-zip"
    save_file({"a": torch.ones(1)}, tmp_path / "weights.pth")
    contents = read(tmp_path / "weights.pth")
    assert isinstance(contents, Contents)
    assert contents.container == "safetensors"
