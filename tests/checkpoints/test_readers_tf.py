"""TensorFlow's checkpoints, read without TensorFlow."""

from __future__ import annotations

import importlib.util
import re

import bundles
import numpy as np
import pytest
import torch
from material import SHARED, assert_same, needs_shared, unpack

from finetune_mile.checkpoints.readers import read
from finetune_mile.checkpoints.readers.wire import masked_crc
from finetune_mile.core.problems import Problem


@pytest.fixture(scope="module")
def tf1(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tf1")
    source = SHARED / "simclrv2_tf1_sk1"
    unpack(source / "model.ckpt-1.data-00000-of-00001.zst", folder)
    (folder / "model.ckpt-1.index").write_bytes((source / "model.ckpt-1.index").read_bytes())
    return folder


@needs_shared
def test_tf1_has_every_variable(tf1):
    contents = read(tf1 / "model.ckpt-1")
    assert contents.container == "tf-checkpoint"
    assert contents.full_names == {}
    lines = (SHARED / "simclrv2_tf1_sk1" / "variables.txt").read_text().splitlines()
    wanted = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines}
    assert {key: str(list(value.shape)) for key, value in contents.tree.items()} == wanted
    assert contents.tree["global_step"].dtype == torch.int64
    variance = contents.tree["base_model/batch_normalization/moving_variance"]
    assert (variance > 0).all()
    assert torch.isfinite(contents.tree["base_model/conv2d/kernel"]).all()


@needs_shared
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")
def test_tf1_equals_tensorflow(tf1):
    import tensorflow

    reader = tensorflow.train.load_checkpoint(str(tf1 / "model.ckpt-1"))
    tree = read(tf1 / "model.ckpt-1").tree
    assert tree.keys() == reader.get_variable_to_shape_map().keys()
    for key, value in tree.items():
        assert np.array_equal(value.numpy(), reader.get_tensor(key)), key


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {f"layer_{i}/kernel": rng.standard_normal((3, i + 1)).astype("f4") for i in range(40)}
    made |= {"step": np.array(7, "i8"), "flag": np.array([True, False]), "half": np.ones(3, "f2")}
    return made | {"double": np.ones((2, 2)), "empty": np.zeros((0, 3), "f4")}


@pytest.mark.parametrize("shards", [1, 3])
def test_every_way_to_name_a_checkpoint(tmp_path, shards):
    bundles.write_bundle(tmp_path / "model.ckpt-1", arrays(), shards=shards)
    wanted = {key: torch.from_numpy(value) for key, value in arrays().items()}
    data = f"model.ckpt-1.data-00000-of-{shards:05}"
    for name in ("model.ckpt-1", "model.ckpt-1.index", data, "."):
        contents = read(tmp_path / name)
        assert contents.container == "tf-checkpoint"
        assert_same(contents.tree, wanted)


def test_folder_with_several_checkpoints(tmp_path):
    for step in (1, 2):
        bundles.write_bundle(tmp_path / f"model.ckpt-{step}", {"w": np.array(step, "i4")})
    with pytest.raises(Problem, match=r"model\.ckpt-1, model\.ckpt-2"):
        read(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/far/away/model.ckpt-2"\n')
    assert read(tmp_path).tree["w"] == 2


@pytest.mark.parametrize("listing", ["simclr_v2_tf2_ckpt_sk0", "simclr_v2_tf2_savedmodel_sk1"], ids=lambda s: s[13:])
@needs_shared
def test_object_graph(tmp_path, listing):
    lines = (SHARED / "keys" / f"{listing}.key_to_full_name.txt").read_text().splitlines()
    full_names, shapes = {}, {}
    for line in lines:
        key, full_name, _, shape = line.split(" | ")
        full_names[key] = full_name.removeprefix("full_name=")
        shapes[key] = [min(int(side), 8) for side in re.findall(r"\d+", shape)]
    made = {key: np.full(shape, 0.5, "f4") for key, shape in shapes.items()}
    prefix = tmp_path / "variables" / "variables"
    bundles.write_bundle(prefix, made, full_names=full_names)
    if "savedmodel" in listing:
        (tmp_path / "saved_model.pb").write_bytes(b"")
        contents = read(tmp_path)
        assert contents.container == "tf-savedmodel"
    else:
        contents = read(prefix)
    assert contents.full_names == {key: name for key, name in full_names.items() if name}
    assert contents.tree.keys() == made.keys()
    assert all((value == 0.5).all() for value in contents.tree.values())


def test_checksum_is_crc32c():
    crc = 0xE3069283  # of "123456789", from RFC 3720's polynomial
    assert masked_crc(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
