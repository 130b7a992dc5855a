"""Tensors into a network: every name and shape must fit, and what does not is named."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from finetune_mile.checkpoints.adapters import few
from finetune_mile.checkpoints.readers.memory import MappedPages
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import build, get_head
from finetune_mile.networks.resnets import Padding, ResNet

COUNTER = "num_batches_tracked"
"""Batch counters: TensorFlow and haiku have none, and nothing we compute depends on them."""


def build_for(arch: str, padding: Padding, proj: Tensor | None) -> nn.Module:
    """A trunk to be filled: ours has no storage yet (meta device), timm's is built as it is.

    Args:
        arch: the network's name.
        padding: the convention of the weights.
        proj: (D', D) weight of a projection layer that goes between trunk and head.
    """
    if arch.startswith("timm:"):
        if padding != "torch":
            raise Problem(f"--arch {arch}: these weights need {padding!r} padding, which timm does not have")
        return build(arch)
    with torch.device("meta"):
        network = build(arch, padding=padding)
        if proj is not None and isinstance(network, ResNet):
            network.proj = projection(proj.shape[1], proj.shape[0])
            network.num_features = proj.shape[0]
    return network


def projection(inputs: int, outputs: int) -> nn.Sequential:
    """SimCLR-v2's first projection layer: (B, inputs) to (B, outputs), after the ReLU."""
    return nn.Sequential(nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU())


def check_fit(network: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse any name or shape that differs; batch counters may be missing."""
    want = network.state_dict()
    wrong = [f"{k} is missing" for k in want.keys() - tensors.keys() if not k.endswith(COUNTER)]
    wrong += [f"{k} is not in the network" for k in tensors.keys() - want.keys()]
    for name in want.keys() & tensors.keys():
        have, need = tuple(tensors[name].shape), tuple(want[name].shape)
        if have != need and not (name.endswith(COUNTER) and tensors[name].numel() == 1):
            wrong.append(f"{name} is {have}, the network has {need}")
        elif not tensors[name].is_floating_point() and not name.endswith(COUNTER):
            wrong.append(f"{name} holds {tensors[name].dtype}, not floating-point numbers")
    if wrong:
        first = "; ".join(sorted(wrong)[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Problem(f"{source} does not fit the network: {first}{more}")


def fill(network: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> tuple[str, ...]:
    """Put checked tensors into a network, as its own memory; returns the counters it reset."""
    want = network.state_dict()
    pages, state = MappedPages(), {}
    for name in (name for name in want if name in tensors):
        state[name] = _ready(tensors[name], want[name])
        pages.give_back(tensors[name])
    _check_numbers(state, source=source)
    reset = tuple(sorted(want.keys() - state.keys()))
    state |= {name: torch.zeros_like(want[name], device="cpu") for name in reset}
    network.load_state_dict(state, assign=True)
    return reset


def _check_numbers(tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse infinite or undefined numbers, and negative variances."""
    spoilt, negative = [], []
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # One pass that NaN survives, about eight times as fast as torch.isfinite; a sum could overflow.
        least, most = (float(value) for value in tensor.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            spoilt.append(name)
        elif least < 0 and name.endswith("running_var"):
            negative.append(name)
    for names, what in ((spoilt, "infinite or undefined numbers"), (negative, "negative variances")):
        if names:
            verb = "has" if len(names) == 1 else "have"
            raise Problem(f"{source}: {few(names)} {verb} {what}; the file is damaged, use another copy or checkpoint")


def _ready(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy of our own: files are mapped, tensors may be fp16, channels-last or permuted."""
    return tensor.reshape(like.shape).to(
        device="cpu", dtype=like.dtype, copy=True, memory_format=torch.contiguous_format
    )


def check_head_name(classifier: Mapping[str, Tensor], own: str, keep_head: str, *, source: str) -> None:
    """Refuse a file without a linear classifier, or one that has it under another name.

    Args:
        classifier: `fc.weight` (C, D) and `fc.bias` (C,).
        own: what the file calls the weight.
        keep_head: what the user calls the classifier.
        source: the file's name, for messages.
    """
    if set(classifier) != {"fc.weight", "fc.bias"}:
        raise Problem(f"--keep-head {keep_head}: {source} holds no linear classifier")
    if keep_head not in re.split(r"[./]", own):
        raise Problem(f"--keep-head {keep_head}: the classifier in {source} is called {own!r}")


def keep_classifier(network: nn.Module, classifier: Mapping[str, Tensor], keep_head: str, *, source: str) -> None:
    """Copy the file's classifier into the head of a network, which must have as many classes."""
    head = get_head(network)
    if head.weight.shape != classifier["fc.weight"].shape:
        have, need = tuple(classifier["fc.weight"].shape), tuple(head.weight.shape)
        raise Problem(f"--keep-head {keep_head}: the classifier is {have}, this task needs {need}")
    _check_numbers(classifier, source=source)
    with torch.no_grad():
        head.weight.copy_(classifier["fc.weight"])
        head.bias.copy_(classifier["fc.bias"])


def head_names(network: nn.Module) -> tuple[str, str]:
    """The names of the head's weight and bias in the network's state dict."""
    head = get_head(network)
    prefix = next(name for name, module in network.named_modules() if module is head)
    return f"{prefix}.weight", f"{prefix}.bias"
