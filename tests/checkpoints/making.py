"""Shapes without memory: trunks, layers and files for tests, in our names and in other people's.

What is written here goes from our names to a format's: the adapters go the other way, and neither
uses the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from finetune_mile.checkpoints.readers import Contents
from finetune_mile.networks.heads import build

Make = Callable[[str, tuple[int, ...]], Tensor]
Tensors = dict[str, Tensor]


def light(name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of that shape in the memory of one number."""
    kind = torch.int64 if name.endswith("num_batches_tracked") else torch.float32
    return torch.zeros((), dtype=kind).expand(shape)


def trunk(arch: str, make: Make = light, *, counters: bool = True) -> Tensors:
    """The tensors of a trunk in our names."""
    with torch.device("meta"):
        state = build(arch).state_dict()
    return {
        name: make(name, tuple(tensor.shape))
        for name, tensor in state.items()
        if counters or not name.endswith("num_batches_tracked")
    }


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Tensors:
    """A linear layer."""
    found = {f"{name}.weight": light("", (outputs, inputs))}
    return found | ({f"{name}.bias": light("", (outputs,))} if bias else {})


def norm(name: str, size: int) -> Tensors:
    """A batch norm."""
    leaves = ("weight", "bias", "running_mean", "running_var")
    found = {f"{name}.{leaf}": light("", (size,)) for leaf in leaves}
    return found | {f"{name}.num_batches_tracked": light("num_batches_tracked", ())}


def under(prefix: str, tensors: Tensors) -> Tensors:
    """The same behind a prefix."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def torch_file(**tree: object) -> Contents:
    """A torch file with these entries."""
    return Contents(container="torch-zip", tree=dict(tree))


def flat(tensors: Tensors, container: str = "torch-zip", **metadata: str) -> Contents:
    """A file that is nothing but a state dict."""
    return Contents(container=container, tree=dict(tensors), metadata=metadata)  # type: ignore[arg-type]


def as_children(tensors: Tensors, first: int = 4) -> Tensors:
    """`nn.Sequential` indices in place of conv1, bn1, layer1, ..."""
    index = {"conv1": 0, "bn1": 1} | {f"layer{i + 1}": first + i for i in range(4)}
    return {f"{index[n.split('.')[0]]}.{n.split('.', 1)[1]}": t for n, t in tensors.items()}


def as_generator(tensors: Tensors) -> Tensors:
    """lightly's own ResNet says `shortcut`."""
    return {n.replace(".downsample.", ".shortcut."): t for n, t in tensors.items()}


def as_separius(tensors: Tensors, *, sk: bool) -> Tensors:
    """The PyTorch port of SimCLR-v2 (formats.md 1.4)."""
    if sk:
        stem = {"conv1.0": "0", "conv1.1": "1.0", "conv1.3": "2", "conv1.4": "3.0", "conv1.6": "4", "bn1": "5.0"}
        block = {
            "conv1": "net.0", "bn1": "net.1.0", "conv2.conv": "net.2.main_conv.0",
            "conv2.bn": "net.2.main_conv.1.0", "conv2.down": "net.2.mixing_conv.0",
            "conv2.down_bn": "net.2.mixing_conv.1.0", "conv2.up": "net.2.mixing_conv.2",
            "conv3": "net.3", "bn3": "net.4.0",
            "downsample.1": "projection.shortcut.2", "downsample.2": "projection.bn.0",
        }  # fmt: skip
    else:
        stem = {"conv1": "0", "bn1": "1.0"}
        block = {f"conv{i}": f"net.{2 * i - 2}" for i in (1, 2, 3)}
        block |= {f"bn{i}": f"net.{2 * i - 1}.0" for i in (1, 2, 3)}
        block |= {"downsample.0": "projection.shortcut", "downsample.1": "projection.bn.0"}
    result = {}
    for name, tensor in tensors.items():
        module, leaf = name.rsplit(".", 1)
        found = re.fullmatch(r"layer(\d)\.(\d+)\.(.+)", module)
        own = f"net.{found[1]}.blocks.{found[2]}.{block[found[3]]}" if found else f"net.0.{stem[module]}"
        result[f"{own}.{leaf}"] = tensor
    return result


def as_detectron2(tensors: Tensors) -> Tensors:
    """detectron2: stem, res2-res5, norms below their convolutions."""
    result = {}
    for name, tensor in tensors.items():
        new = name if name.startswith("layer") else f"stem.{name}"
        new = re.sub(r"layer(\d)", lambda m: f"res{int(m[1]) + 1}", new)
        new = re.sub(r"\bbn(\d)", r"conv\1.norm", new)
        result[new.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")] = tensor
    return result


TF_LEAVES = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}


def as_tensorflow(tensors: Tensors, *, scope: str = "base_model/") -> Tensors:
    """SimCLR's TF1 variables: numbered in the order in which its code makes them."""
    modules = list(dict.fromkeys(name.rsplit(".", 1)[0] for name in tensors))

    def made(module: str) -> tuple[int, int, int, int]:
        found = re.fullmatch(r"layer(\d)\.(\d+)\.(.+)", module)
        if not found:
            return (0, 0, 0, modules.index(module))
        return (int(found[1]), int(found[2]), 0 if "downsample" in found[3] else 1, modules.index(module))

    convs = sorted((m for m in modules if tensors[f"{m}.weight"].ndim == 4), key=made)
    norms = sorted((m for m in modules if tensors[f"{m}.weight"].ndim == 1), key=made)
    result = {}
    for kind, order in (("conv2d", convs), ("batch_normalization", norms)):
        for number, module in enumerate(order):
            own = f"{scope}{kind}" + (f"_{number}" if number else "")
            if kind == "conv2d":
                result[f"{own}/kernel"] = tensors[f"{module}.weight"].permute(2, 3, 1, 0)
            else:
                result |= {f"{own}/{TF_LEAVES[leaf]}": tensors[f"{module}.{leaf}"] for leaf in TF_LEAVES}
    return result


def as_haiku(tensors: Tensors, net: str = "res_net18") -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """DeepMind's parameters and state; `hidden` differs from `average` on purpose."""
    params: dict[str, Tensors] = {}
    state: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        module, leaf = name.rsplit(".", 1)
        own = f"{net}/~/initial_{'conv' if module == 'conv1' else 'batchnorm'}"
        if found := re.fullmatch(r"layer(\d)\.(\d+)\.(.+)", module):
            inner = {"downsample.0": "shortcut_conv", "downsample.1": "shortcut_batchnorm"}.get(found[3])
            kind = "conv" if found[3].startswith("conv") else "batchnorm"
            inner = inner or f"{kind}_{int(found[3][-1]) - 1}"
            own = f"{net}/~/block_group_{int(found[1]) - 1}/~/block_{found[2]}/~/{inner}"
        if tensor.ndim == 4:
            params.setdefault(own, {})["w"] = tensor.permute(2, 3, 1, 0)
        elif leaf in ("weight", "bias"):
            key = "scale" if leaf == "weight" else "offset"
            params.setdefault(own, {})[key] = tensor.reshape(1, 1, 1, -1)
        else:
            value = tensor.reshape(1, 1, 1, -1)
            kind = "mean_ema" if leaf == "running_mean" else "var_ema"
            state[f"{own}/~/{kind}"] = {
                "hidden": value * 0.5,
                "average": value,
                "counter": torch.tensor(3, dtype=torch.int32),
            }
    return params, state


def byol_convert(tensors: Tensors) -> Contents:
    """byol-convert's flat file: parameters first, then statistics; no counters; permuted views."""
    kept = {n: t for n, t in tensors.items() if not n.endswith("num_batches_tracked")}
    first = {n: t for n, t in kept.items() if ".running_" not in n}
    first = {n: t.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1) if t.ndim == 4 else t for n, t in first.items()}
    rest = {n: t for n, t in kept.items() if ".running_" in n}
    return flat(first | linear("fc", 512, 10) | rest)
