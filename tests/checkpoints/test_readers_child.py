"""The process that reads pickles: light, limited, and of no help to a file that wants to change our code."""

from __future__ import annotations

import pickle
import resource
import struct
import subprocess
import sys

import pytest
import torch
from assembling import call, glob, in_dict, legacy_file, proto2, storage, text, zip_file
from safetensors.torch import save_file
from shortcuts import refused

from finetune_mile.checkpoints.readers import read, torch_files
from finetune_mile.core.problems import Problem

STATE = b"(N}" + text("qualified") + text("os.system") + b"st"  # slots: the unpickler sets these as attributes


def test_the_child_is_light(tmp_path):
    """It imports neither torch nor numpy; its start takes less than 0.3 s of the processor."""
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": 1}))
    code = torch_files._CODE.replace(
        "main(*", "import os; os._exit = lambda code: print(*sys.modules, file=sys.stderr); main(*"
    )
    command = [sys.executable, "-I", "-S", "-c", code.format("finetune_mile.checkpoints.readers.sending")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (tmp_path / "x.pkl").open("rb") as stream:
        done = subprocess.run(
            [*command, str(torch_files._ROOT), "pickle", "0", "99"], stdin=stream, capture_output=True, check=False
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    loaded = done.stderr.decode().split()
    assert "finetune_mile.checkpoints.readers.unpickling" in loaded
    assert not {"torch", "numpy", "safetensors"} & set(loaded)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


@pytest.mark.parametrize(
    "target",
    [
        glob("mylab.net", "Net"),
        glob("collections", "OrderedDict"),
        glob("torch", "FloatStorage"),
        glob("torch._utils", "_rebuild_tensor_v2"),
        storage(),
        call(glob("numpy", "dtype"), text("f4"), b"\x89\x88"),
    ],
)
def test_no_state_reaches_an_attribute_of_ours(target, tmp_path):
    for name, raw in {
        "x.pkl": proto2(in_dict(target + STATE + b"b")),
        "x.pth": zip_file(proto2(in_dict(target + STATE + b"b"))),
        "x.legacy": legacy_file(proto2(in_dict(target + STATE + b"b")), ["0"], struct.pack("<q", 4) + bytes(16)),
    }.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(Problem, match="is damaged"):
            read(tmp_path / name)


def test_without_the_resource_module(tmp_path, monkeypatch):
    """As on Windows: files are read, and the clock is the limit."""
    command = list(torch_files._COMMAND)
    command[3] = "import sys; sys.modules['resource'] = None; " + command[3]
    monkeypatch.setattr(torch_files, "_COMMAND", command)
    torch.save({"a": torch.arange(3.0)}, tmp_path / "x.pth")
    assert torch.equal(read(tmp_path / "x.pth").tree["a"], torch.arange(3.0))
    monkeypatch.setattr(torch_files, "_PATIENCE", 0)
    with refused("x.pth", "longer"):
        read(tmp_path / "x.pth")


def test_a_child_that_cannot_start_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_files, "_COMMAND", ["-c", "import nothing_of_this_name"])
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": 1}))
    with refused("x.pkl", "exit code 1"):
        read(tmp_path / "x.pkl")


def test_safetensors_start_no_child(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_files.subprocess, "Popen", None)
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    assert read(tmp_path / "x.safetensors").container == "safetensors"


def test_long_arrays_of_every_protocol_are_writable(tmp_path):
    import numpy as np

    array = np.arange(100_000, dtype="f4").reshape(100, 1000, order="F")
    for protocol in range(6):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": array, "b": array.T[::2]}, protocol))
        tree = read(tmp_path / "x.pkl").tree
        assert torch.equal(tree["a"], torch.from_numpy(array))
        assert torch.equal(tree["b"], torch.from_numpy(array.T[::2].copy()))
        tree["a"].zero_()


def test_a_python_that_does_not_start_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_files.sys, "executable", str(tmp_path / "absent"))
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pth")
    with refused("x.pth", "sys.executable", "not start"):
        read(tmp_path / "x.pth")


@pytest.mark.parametrize(("kept", "sent"), [("float32", "float3"), ("float3", "float32")])
def test_a_child_that_sends_an_unknown_dtype_is_one_sentence(kept, sent, tmp_path, monkeypatch):
    """It was `its pickle is not valid (KeyError)`. `kept` is of the storage, `sent` of a tensor on it."""
    tensor = b"(S'a'\ncx\nTensor\n(S'0'\nS'" + sent.encode() + b"'\nI0\n(I1\nt(I1\nttRd."
    header = pickle.dumps(([], {"0": (kept, 1)}, 0))
    monkeypatch.setattr(torch_files, "_COMMAND", ["-c", f"import os; os.write(1, {header + tensor!r})"])
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pth")
    with refused("x.pth", "holds a tensor of a dtype that is not known"):
        read(tmp_path / "x.pth")
