"""Weights out: one writer for runs and for `weights convert`, and the form that timm loads."""

import io
import json
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from finetune_mile.checkpoints.adapters.adapter import unwrapped
from finetune_mile.checkpoints.init import HEADER
from finetune_mile.compute.passes import show
from finetune_mile.core.files import whole_file, write_whole, writing
from finetune_mile.core.problems import Failed, Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.networks.resnets import ResNet
from finetune_mile.networks.vits import split_timm

THRESHOLD = 0.25  # the probability above which a label counts as found, where a run has no other
WEIGHTS, CONFIG = "model.safetensors", "config.json"
OTHERS = "; `export --to onnx` and `--to torch` take any network, `weights convert` without --to keeps our own form"
_OF_TIMM = re.compile(r"resnet(18|34|50|101|152|200)(-d)?|resnext\d+_\d+x\d+d|wide_resnet\d+_\d+")
_NEEDED = ("arch", "padding", "num_classes", *Preprocess.model_fields)


def write_export(folder: Path, network: nn.Module, config: dict[str, Any]) -> None:
    """Write `model.safetensors` (our names, head `fc`) and `config.json`, each atomically.

    Args:
        folder: is made where it does not exist.
        network: with or without a head; its tensors are copied, contiguous, to the CPU.
        config: arch, padding, num_classes (0: no head), mean, std, size, crop, interpolation, and more. It also goes
            into the header of the weights, so that the file alone is enough.
    """
    full = Preprocess().model_dump(mode="json", include={"antialias"}) | config
    missing = [key for key in _NEEDED if key not in full]
    if missing:
        raise ValueError(f"an export's config lacks {', '.join(missing)}")
    notes = {"format": "pt", HEADER: json.dumps(full, sort_keys=True)}
    _write(folder, portable_state(network), notes, full)


def write_timm(folder: Path, network: nn.Module, config: dict[str, Any], more: dict[str, Any] | None = None) -> str:
    """Write what `timm.create_model("local-dir:FOLDER", pretrained=True)` loads.

    Args:
        folder: is made where it does not exist.
        network: as in `write_export`.
        config: as in `write_export`.
        more: further entries of config.json.

    Returns:
        The arguments with which `timm.create_model` makes this network.
    """
    name = timm_name(network, config)
    import timm

    options, own = split_timm(config["arch"])[1:] if config["arch"].startswith("timm:") else ({}, {})
    if "stem" in own:
        raise Problem(f"--to timm is not possible: timm has no convolutional stem as MoCo-v3's{OTHERS}")
    reference = timm.create_model(name, pretrained=False, num_classes=config["num_classes"], **options)
    state = portable_state(network)
    differ = set(state) ^ set(reference.state_dict())
    if differ:
        raise Problem(f"--to timm is not possible: timm's {name} has other tensors, first {min(differ)}{OTHERS}")
    if "eps" in own:  # timm's constructor does not take it
        reference.load_state_dict(state)
        images = torch.rand(2, 3, config["size"], config["size"], generator=torch.Generator().manual_seed(0))
        check_equal(network.eval(), reference.eval(), images, "--to timm, with timm's own epsilon in the norms")
    defaults = getattr(reference, "default_cfg", {})
    pretrained = {
        **{key: defaults.get(key) for key in ("pool_size", "first_conv", "classifier")},
        "input_size": [3, config["size"], config["size"]],
        "crop_pct": config["crop"],
        "tag": "finetune_mile",
        **{key: config[key] for key in ("mean", "std", "interpolation", "num_classes")},
    }
    optional = {
        "model_args": options,
        "label_names": list(config.get("classes") or ()),
        "activation": config.get("activation"),
        "threshold": config.get("threshold"),
        "thresholds": config.get("thresholds"),
    }
    card = {
        "architecture": name,
        "num_classes": config["num_classes"],
        "num_features": reference.num_features,
        "pretrained_cfg": {key: value for key, value in pretrained.items() if value is not None},
        **{key: value for key, value in optional.items() if value},
        **(more or {}),
    }
    _write(folder, state, {"format": "pt"}, card)
    arguments = {"num_classes": config["num_classes"], **options}
    return ", ".join([f'"{name}"', *(f"{key}={value}" for key, value in arguments.items())])


def timm_name(network: nn.Module, config: dict[str, Any]) -> str:
    """The name timm has for a network, where timm computes the very same."""
    import timm

    arch = str(config["arch"])
    if arch.startswith("timm:"):
        return split_timm(arch)[0]
    name, why = arch.replace("-d", "d"), None
    if config["padding"] != "torch":
        why = f"it needs {config['padding']!r} padding, timm pads symmetrically and would give other features"
    elif isinstance(network, ResNet) and not isinstance(network.proj, nn.Identity):
        why = "it keeps a projection layer"
    elif not _OF_TIMM.fullmatch(arch) or not timm.is_model(name):
        why = f"timm has no {arch}"
    if why:
        raise Problem(f"--to timm is not possible: {why}{OTHERS}")
    return name


# ------------------------------------------------------------------- programs: torch.export and ONNX

TOLERANCE = 1e-4  # of the largest logit, or of 1 where that is less
LARGEST_ONNX = 2**30  # bytes of weights inside model.onnx; its format ends at 2 GB


class OnPixels(nn.Module):
    """A network that normalises: uint8 (B, 3, H, W), or floats from 0 to 255, to logits (B, C)."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.network((pixels.float() / 255.0 - self.mean) / self.std)
        return logits


def traced(network: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """The program of a network in eval mode, for batches of any size. It names no file of this machine."""
    with warnings.catch_warnings(action="ignore"):  # deprecations inside torch
        program = torch.export.export(network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # has the paths of our source files
    return program


def write_torch(path: Path, network: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """Write a .pt2 file for `torch.export.load`; returns what the file computes. `images` are an example."""
    content = io.BytesIO()  # where torch writes into a file itself, a full disk ends the process
    torch.export.save(traced(network, images), content)
    write_whole(path, content.getvalue())
    with warnings.catch_warnings(action="ignore"):
        return torch.export.load(path).module()


def write_onnx(path: Path, network: nn.Module, images: Tensor, notes: dict[str, str]) -> Callable[[Tensor], Tensor]:
    """Write an ONNX file, from `images` to `logits`; returns what onnxruntime computes with it.

    Args:
        path: the file. Weights above 1 GB go into a second one beside it.
        network: in eval mode.
        images: an example of its input.
        notes: the file's metadata.
    """
    import onnxruntime

    large = sum(value.nbytes for value in network.state_dict().values()) > LARGEST_ONNX
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            traced(network, images), input_names=["images"], output_names=["logits"], dynamo=True, verbose=False
        )
    assert program is not None
    program.model.metadata_props.update(notes)
    with writing(path):
        program.save(path, external_data=large)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, {"images": batch.numpy()})[0])


def check_equal(network: nn.Module, other: Callable[[Tensor], Tensor], images: Tensor, flag: str) -> float:
    """The largest difference of the logits (B, C), for all images and for one; an error where it is above 1e-4.

    It is relative to the largest logit, or to 1 where that is less.
    """
    differences = []
    for batch in (images, images[:1]):
        expected = show(network, batch)
        differences.append((other(batch).detach() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    worst = float(torch.stack(differences).max())
    if not worst <= TOLERANCE:  # also if it is not a number
        raise Failed(f"{flag}: the logits differ by {worst:.1e}, more than {TOLERANCE:g}; nothing is written")
    return worst


# ---------------------------------------------------------------------------------------------- files


def portable_state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict as safetensors wants it: no wrappers, contiguous, unshared, on the CPU."""
    state = unwrapped(dict(network.state_dict()))
    return {
        key: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for key, value in state.items()
    }


def check_free(folder: Path) -> None:
    """Refuse a folder that has content, except what an export that was killed has left in it."""
    if not folder.exists():
        return
    parts = [f".{WEIGHTS}.part", f".{CONFIG}.part"]
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else [folder.name]
    ours = {*parts, CONFIG} if parts[0] in names else set(parts)  # the config is put in place first
    if not folder.is_dir() or not set(names) <= ours:
        raise Problem(f"{folder} already exists; give a folder that is new or empty")


def _write(folder: Path, state: dict[str, Tensor], notes: dict[str, str], config: dict[str, Any]) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    content = _sorted_notes(save(state, metadata=notes))
    try:
        with whole_file(folder / WEIGHTS, len(content)) as weights, whole_file(folder / CONFIG) as note:
            weights.write_bytes(content)
            note.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        if not (folder / WEIGHTS).exists():  # the config is put in place first
            (folder / CONFIG).unlink(missing_ok=True)
        raise


def _sorted_notes(content: bytes) -> bytes:
    """Sort the metadata in a safetensors header, which come in random order: the same weights are the same bytes."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > length:  # the same text in another order; a header may end in spaces
        return content
    return b"".join((content[:8], text.ljust(length), memoryview(content)[8 + length :]))
