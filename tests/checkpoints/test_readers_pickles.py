"""Pickles that stand alone: haiku's through dill, detectron's, those of Python 2."""

from __future__ import annotations

import io
import pickle
import sys
import types
import typing

import numpy as np
import pytest
import torch
from material import SHARED, assert_same, needs_shared, tensors, unpack

from finetune_mile.checkpoints.readers import read


@needs_shared
def test_plain_byol_has_every_module(tmp_path):
    contents = read(unpack(SHARED / "byol_plain" / "plain_dict_flavour.pkl.zst", tmp_path))
    assert contents.container == "pickle"
    state = contents.tree["experiment_state"]
    assert {"online_params", "online_state", "target_params"} <= state.keys()
    kernel = state["online_params"]["res_net18/~/initial_conv"]["w"]
    assert (kernel.shape, kernel.dtype) == ((7, 7, 3, 64), torch.float32)
    assert len(tensors(state["online_params"])) > 60


class State(typing.NamedTuple):
    online_params: object
    online_state: object


class FlatMapping:
    def __init__(self, mapping) -> None:
        self.mapping = mapping

    def __reduce__(self):
        return type(self), (self.mapping,)


def _foreign(monkeypatch, module: str, name: str, thing):
    """Let a thing live in a module that is not installed, while it is pickled."""
    thing.__module__, thing.__qualname__, thing.__name__ = module, name, name
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    setattr(sys.modules[module], name, thing)
    return thing


def _official_byol(monkeypatch, haiku: str, jax: tuple[str, str], tree) -> bytes:
    """As dill writes it: hidden named tuples, haiku's mappings, arrays through dill and jax."""
    make_tuple = _foreign(monkeypatch, "dill._dill", "_create_namedtuple", lambda *_: None)
    make_array = _foreign(monkeypatch, "dill._dill", "_create_array", lambda *_: None)
    jax_array = _foreign(monkeypatch, *jax, lambda *_: None)
    flat = _foreign(monkeypatch, *haiku.rsplit(".", 1), type("F", (FlatMapping,), {}))

    class Pickler(pickle.Pickler):
        def reducer_override(self, thing):
            if thing is State:
                return make_tuple, ("_ByolExperimentState", State._fields, "byol.byol_experiment")
            if isinstance(thing, np.ndarray):
                maker = jax_array if thing.dtype == np.uint32 else make_array
                return maker, (*thing.__reduce__(), None)
            return NotImplemented

    def wrap(node):
        return flat({k: wrap(v) for k, v in node.items()}) if isinstance(node, dict) else node

    out = io.BytesIO()
    state = State(wrap(tree), wrap({}))
    rng = np.array([0, 42], np.uint32)
    Pickler(out, 2).dump({"experiment_state": state, "step": 3, "rng": rng})
    return out.getvalue()


@pytest.mark.parametrize("haiku", ["FlatMapping", "FlatMap", "frozendict"])
@pytest.mark.parametrize(
    "jax", [("jax._src.array", "_reconstruct_array"), ("jax._src.device_array", "reconstruct_device_array")]
)
@pytest.mark.parametrize("old_numpy", [True, False])
def test_official_byol(tmp_path, monkeypatch, haiku, jax, old_numpy):
    weights = np.random.default_rng(0).standard_normal((7, 7, 3, 64)).astype("f4")
    large = np.arange(40_000, dtype="f4")
    tree = {"res_net50/~/initial_conv": {"w": weights}, "classifier": {"b": large}}
    raw = _official_byol(monkeypatch, f"haiku._src.data_structures.{haiku}", jax, tree)
    monkeypatch.undo()  # the fake packages go: reading needs none of them
    if old_numpy:
        raw = raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    (tmp_path / "byol.pkl").write_bytes(raw)
    contents = read(tmp_path / "byol.pkl")
    state = contents.tree["experiment_state"]
    assert contents.stubs == ()
    assert list(state) == ["online_params", "online_state"]
    got = state["online_params"]
    assert torch.equal(got["res_net50/~/initial_conv"]["w"], torch.from_numpy(weights))
    assert torch.equal(got["classifier"]["b"], torch.from_numpy(large))
    assert contents.tree["rng"].tolist() == [0, 42]
    assert contents.tree["step"] == 3


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_detectron_pickle_of_every_protocol(tmp_path, protocol):
    model = {f"layer{i}.weight": np.arange(8, dtype="f4").reshape(2, 4) * i for i in range(3)}
    tree = {"model": model, "__author__": "somebody's", "matching_heuristics": True, "n": -(2**70)}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(tree, protocol))
    contents = read(tmp_path / "x.pkl")
    assert contents.container == "pickle"
    assert_same(contents.tree, {"model": {k: torch.from_numpy(v) for k, v in model.items()}})
    assert contents.tree["__author__"] == "somebody's"
    assert contents.tree["matching_heuristics"] is True
    assert contents.tree["n"] == -(2**70)


def test_python_2_strings(tmp_path):
    raw = b"\x80\x02}q\x00U\x05modelq\x01}U\x01aK\x01ssT\x05\x00\x00\x00otherS'q\\x41\\n'\ns."
    (tmp_path / "x.pkl").write_bytes(raw)
    assert read(tmp_path / "x.pkl").tree == {"model": {"a": 1}, "other": "qA\n"}
