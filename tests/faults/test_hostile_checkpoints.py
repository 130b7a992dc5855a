"""Small checkpoint files that asked for gigabytes, for minutes, or ended in a traceback: one sentence, within bounds.

`python -m tests.faults.strangers` makes the larger ones and measures each as a command of its own.
"""

import io
import json
import pickle
import struct
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from shortcuts import ROOT

from finetune_mile.checkpoints.inspecting import compare
from finetune_mile.checkpoints.loading import open_trunk
from finetune_mile.checkpoints.readers import LONGEST_NAME, MOST_TENSORS, Refused
from finetune_mile.checkpoints.readers import bounded as counted
from finetune_mile.core.problems import LONGEST_LINE, Problem, tell
from finetune_mile.networks.heads import build

sys.path.append(str(ROOT / "tests/checkpoints"))
import bundles

OWN = {"padding": "torch", "mean": [0.5] * 3, "std": [0.2] * 3}


def text(word):
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def named(module, name):
    return f"c{module}\n{name}\n".encode()


def call(target, *parts):
    return target + b"(" + b"".join(parts) + b"tR"


TENSOR = call(
    named("torch._utils", "_rebuild_tensor_v2"),
    b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ", b"K\x00",
    b"(K\x04t", b"(K\x01t", b"\x89", call(named("collections", "OrderedDict")),
)  # fmt: skip


def zipped(path, body):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(16))
    return path


def module(parameters, modules=b"}"):
    return (
        call(named("lab", "Net"))
        + b"}" + text("_parameters") + parameters + b"s" + text("_buffers") + b"}s" + text("_modules") + modules + b"sb"
    )  # fmt: skip


def resnet(**others):
    import torchvision

    weights = torchvision.models.resnet18(weights=None).state_dict()
    weights = {name: tensor.half() for name, tensor in weights.items() if not name.startswith("fc.")}
    return weights | {name.replace("__", "."): tensor for name, tensor in others.items()}


def path_bomb(path):
    keys = b"](" + b"h\x01" * 1000 + b"eq\x020](" + b"h\x02" * 1000 + b"es"
    return zipped(path, b"}" + text("k" * 65000) + TENSOR + b"q\x010" + keys)


def module_bomb(path):
    leaf = b"}(" + b"".join(text(str(i)) + b"h\x01" for i in range(60000)) + b"u"
    return zipped(path, TENSOR + b"q\x010" + module(b"}", b"}" + text("m" * 65000) + module(leaf) + b"s"))


def chained_modules(path):
    inner = module(b"}" + text("w") + b"h\x01s")
    for _ in range(300):
        inner = module(b"}", b"}" + text("m" * 400) + inner + b"s")
    return zipped(path, TENSOR + b"q\x010" + inner)


def wide_keys(path):
    """A key of nested tuples, which as text would unfold without end."""
    laughs = b"(K\x01tq\x05" + b"".join(b"0(" + b"h%c" % (5 + i) * 30 + b"tq%c" % (6 + i) for i in range(5))
    return zipped(path, b"}" + text("a") + b"}" + laughs + TENSOR + b"ss")


def long_number(path):
    return zipped(path, b"}" + b"\x8b" + struct.pack("<I", 3000) + b"\x7f" * 3000 + TENSOR + b"s")


def blob_utf8(path):
    return zipped(path, b"}" + text("a") + b"X" + struct.pack("<I", 70000) + b"\xff" * 70000 + b"s")


def wrappers(path):
    return zipped(path, b"}" + text("module." * 9000 + "x") + TENSOR + b"s")


def safe(tensors, header=None):
    def write(path):
        save_file(tensors(), path, None if header is None else {"finetune_mile": json.dumps(header)})
        return path

    return write


def many_tensors(path):
    entries = (f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(200_000))
    header = ("{" + ",".join(entries) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def tensorflow(entries):
    def write(path):
        path.mkdir()
        (path / "m.index").write_bytes(bundles.table({b"": bundles.header(), **entries}))
        (path / "m.data-00000-of-00001").write_bytes(bytes(16))
        return path / "m"

    return write


def key_bomb(path):
    """Keys of a LevelDB table share prefixes: a few bytes each, 4,096 once they are written out."""
    head, varint = bundles.header(), bundles.varint
    out = bytearray(varint(0) + varint(0) + varint(len(head)) + head) + varint(0) + varint(4093) + varint(0)
    out += b"k" * 4090 + bytes(3)
    for i in range(1, 60_000):
        tail = struct.pack(">I", i)[1:]
        out += varint(4090) + varint(3) + varint(0) + tail
    block = bytes(out) + struct.pack("<II", 0, 1)
    index = [(b"z", varint(0) + varint(len(block)))]
    path.mkdir()
    (path / "m.index").write_bytes(bundles.with_index(bundles.finish(block), index))
    (path / "m.data-00000-of-00001").write_bytes(bytes(16))
    return path / "m"


def leaf(count):
    return {
        b"head_contrastive/nl_0/batch_normalization/foo": bundles.entry(1, (4,), 0, 0, 16),
        **{
            b"base_model/%s%s/%s" % (kind, b"_%d" % i if i else b"", last): bundles.entry(1, shape, 0, 0, 0)
            for kind, last, shape in ((b"conv2d", b"kernel", (0,) * 4), (b"batch_normalization", b"gamma", (0,)))
            for i in range(count)
        },
    }


def haiku(path):
    weights = {"res_net18/~/initial_conv": {"w": np.ones((1, 2, 3), np.float32)}}
    path.write_bytes(pickle.dumps({"online_params": weights, "online_state": {}}, 2))
    return path


def beside(config):
    def write(path):
        path.mkdir()
        save_file(resnet(), path / "model.safetensors")
        (path / "config.json").write_text(config)
        return path

    return write


def vit(path):
    tensors = {"pos_embed": torch.ones(1, 0, 192), "patch_embed.proj.weight": torch.ones(192, 3, 16, 16)}
    tensors |= {f"blocks.0.norm{i}.{word}": torch.ones(192) for i in (1, 2) for word in ("weight", "bias")}
    save_file(tensors | {"norm.weight": torch.ones(192)}, path)
    return path


NUMBERED = {
    b"base_model/conv2d/kernel": bundles.entry(1, (4,), 0, 0, 16),
    b"base_model/conv2d_300000000/kernel": bundles.entry(1, (0,), 0, 0, 0),
}
FILES = {
    "path_bomb": path_bomb, "module_bomb": module_bomb, "chained_modules": chained_modules, "wide_keys": wide_keys,
    "long_number": long_number, "blob_utf8": blob_utf8, "wrappers": wrappers,
    "layer_1e9": safe(lambda: resnet(layer1000000000__0__conv1__weight=torch.ones(1))),
    "digits": safe(lambda: resnet(**{f"layer{'9' * 900}__0__conv1__weight": torch.ones(1)})),
    "dots": safe(lambda: {"." * 1_000_000: torch.ones(1)}),
    "many_tensors": many_tensors,
    "tf_conv_number": tensorflow(NUMBERED), "tf_kernel_leaf": tensorflow(leaf(53)), "tf_key_bomb": key_bomb,
    "conv1_scalar": safe(lambda: resnet(conv1__weight=torch.tensor(1.0))),
    "vit_no_tokens": vit, "haiku": haiku,
    "own_width": safe(lambda: {"conv1.weight": torch.ones(1)}, {"arch": "resnet50w1000000000000", **OWN}),
    "own_giant": safe(lambda: {"conv1.weight": torch.ones(1)}, {"arch": "timm:swin_large_patch4_window12_384", **OWN}),
    "own_deep": safe(lambda: {"conv1.weight": torch.ones(1)}, {"arch": "timm:vit_tiny_patch16_224:depth=9999", **OWN}),
    "cfg_mean": beside('{"architecture":"resnet18","pretrained_cfg":{"mean":"abc"}}'),
    "cfg_nan": beside('{"architecture":"resnet18","pretrained_cfg":{"mean":[NaN,0,0]}}'),
    "cfg_deep": beside("[" * 200_000),
    "cfg_unknown": beside('{"architecture":"../../x"}'),
    "ansi": safe(lambda: {"\x1b[31mRED\x1b]0;title\x07": torch.ones(1)}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_checkpoint_is_refused_in_one_line(name, tmp_path, bounded, capsys):
    path = FILES[name](tmp_path / f"{name}.pth")
    with pytest.raises(Problem) as caught:
        open_trunk(str(path))
    assert tell(caught.value) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) <= LONGEST_LINE
    assert line.isprintable()


def test_names_are_counted_as_they_are_written_out():
    assert len(list(counted(("n", None) for _ in range(MOST_TENSORS)))) == MOST_TENSORS
    for names in (
        ("n" for _ in range(MOST_TENSORS + 1)),
        ["n" * (LONGEST_NAME + 1)],
        ("n" * 999 for _ in range(20_000)),
    ):
        with pytest.raises(Refused):
            list(counted((name, None) for name in names))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "demo.safetensors"
    save_file(build("resnet-demo").state_dict(), path, {"finetune_mile": json.dumps({"arch": "resnet-demo", **OWN})})
    return open_trunk(str(path))


def npz(**arrays):
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


SPOILT = {
    "empty": lambda: b"", "text": lambda: b"hello", "cut": lambda: npz(x_8=np.zeros((2, 3, 8, 8), "f"))[:-30],
    "bomb": lambda: npz(x_8=np.zeros(2**28, "b")),
    "flat": lambda: npz(x_8=np.zeros(9, "f"), features_8=np.zeros(9, "f")),
    "channels": lambda: npz(x_8=np.zeros((1, 4, 8, 8), "f"), features_8=np.zeros((1, 128), "f")),
    "whole numbers": lambda: npz(x_8=np.zeros((1, 3, 8, 8), "i8"), features_8=np.zeros((1, 128), "f")),
    "objects": lambda: npz(x_8=np.array([None]), features_8=np.zeros((1, 128), "f")),
    "alone": lambda: npz(x_8=np.zeros((1, 3, 8, 8), "f")),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_expected_features_of_a_stranger_are_bounded(name, opened, tmp_path, bounded):
    """`expected.npz` beside a file is read unasked."""
    (tmp_path / "expected.npz").write_bytes(SPOILT[name]())
    with pytest.raises(Problem, match=r"--against .*expected\.npz"):
        compare(opened, tmp_path / "expected.npz")


def test_expected_features_are_compared(opened, tmp_path):
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        features = opened.network.eval()(images)
    (tmp_path / "expected.npz").write_bytes(npz(x_8=images.numpy(), features_8=features.numpy()))
    assert compare(opened, tmp_path / "expected.npz") == {"8": 0.0}
