"""The formats we read, in the order in which they are tried: the clearest mark first."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from finetune_mile.checkpoints.adapters import byol, libraries, repositories, simclr, vits
from finetune_mile.checkpoints.adapters.adapter import Adapter, InsideBackbone, Tensors, UnknownKey
from finetune_mile.checkpoints.adapters.behind import way
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.checkpoints.readers.torch_files import leaves
from finetune_mile.core.problems import LONGEST_SHOWN, Problem, inert
from finetune_mile.core.types import Preprocess

ADAPTERS: dict[str, Adapter] = {
    "finetune-mile": repositories.OWN,
    "simclr-tf": simclr.SIMCLR_TF,
    "byol": byol.BYOL,
    "vissl-sk": libraries.VISSL_SK,
    "vissl-simclrv2": libraries.VISSL_SIMCLRV2,
    "vissl": libraries.VISSL,
    "separius": simclr.SEPARIUS,
    "separius-sk": simclr.SEPARIUS_SK,
    "detectron2": repositories.DETECTRON2,
    "openmmlab": repositories.OPENMMLAB,
    "openmmlab-mae": vits.OPENMMLAB_MAE,
    "openmmlab-moco-v3": vits.OPENMMLAB_MOCO_V3,
    "openmmlab-vit": vits.OPENMMLAB_VIT,
    "moco": repositories.MOCO,
    "moco-v3": repositories.MOCO_V3,
    "swav": repositories.SWAV,
    "paws": repositories.PAWS,
    "dino": repositories.DINO,
    "dinov2": vits.DINOV2,
    "mae": vits.MAE,
    "msn": vits.MSN,
    "mile": repositories.MILE,
    "mile-simclrv2-sk": repositories.MILE_SIMCLRV2_SK,
    "mile-simclrv2": repositories.MILE_SIMCLRV2,
    "barlow-twins": repositories.BARLOW,
    "vicreg": repositories.VICREG,
    "simsiam": repositories.SIMSIAM,
    "solo-learn": libraries.SOLO,
    "lightly": libraries.LIGHTLY,
    "lightly-generator": libraries.LIGHTLY_GENERATOR,
    "lightly-benchmark": libraries.LIGHTLY_BENCHMARK,
    "tonylins": simclr.TONYLINS,
    "byol-convert": byol.BYOL_CONVERT,
    "torchvision": repositories.TORCHVISION,
    "vit": vits.VIT,
    "torchvision-vit": vits.TORCHVISION_VIT,
    "openai-clip": vits.OPENAI_CLIP,
    "clip-visual": vits.CLIP_VISUAL,
    "open-clip": vits.OPEN_CLIP,
    "convnext": vits.CONVNEXT,
    "swin": vits.SWIN,
    "hf-clip": vits.HF_CLIP,
    "hf-dinov2": vits.HF_DINOV2,
    "hf-vit": vits.HF_VIT,
    "hf-swin": vits.HF_SWIN,
    "hf-convnext": vits.HF_CONVNEXT,
    "hf-resnet": vits.HF_RESNET,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A file's tensors in our names, and what became of the others."""

    tensors: Tensors
    sources: dict[str, str]  # our name: the file's own
    used: frozenset[int] = frozenset()  # ids of the file's own tensors
    dropped: tuple[str, ...] = ()  # own names; of what is outside the format, the full path


def adapt(
    contents: Contents, adapter: Adapter, *, source: str, place: str = "", prefixes: Iterable[str] = ()
) -> Adapted:
    """Bring a file's tensors into our names; an unknown name, or two for one, stops the load.

    Args:
        contents: the file, or the part of it that is loaded.
        adapter: of its format.
        source: the file's name, for messages.
        place: the file as it can be given to --init, for messages.
        prefixes: of the backbone, for messages.
    """
    own = adapter.unwrap(contents)
    names, inside, unknown = rename_all(adapter, own)
    sources: dict[str, str] = {}
    for key, name in names.items():
        if name is not None and sources.setdefault(name, key) != key:
            raise Problem(f"{source}: {sources[name]} and {key} are both {name}; remove one of them from the file")
    if inside:
        below = ".".join(each.rstrip("./") for each in prefixes if each)
        init = f"{way(place, below)} " if below else ""
        raise Problem(
            f"{source}: the backbone has parts that a plain ResNet or vision transformer does not have "
            f"({few(inside)}), and without them its features would be wrong. If timm has this network, use "
            f"{init}--arch timm:NAME. If they belong to a head, remove them from the file"
        )
    if unknown:
        raise Problem(
            f"{source}: {len(unknown)} tensors do not belong to this format, first {few(unknown[:1])} "
            f"{tuple(own[unknown[0]].shape)}; remove them from the file to load it"
        )
    tensors = {name: adapter.relayout(key, own[key]) for name, key in sources.items()}
    if not adapter.finished and "layer1.0.conv1.weight" not in tensors:  # a ResNet's are as they should be
        tensors = vits.finish(tensors)
    seen = {id(tensor) for tensor in own.values()}
    outside = [path for path, tensor in leaves(contents.tree) if id(tensor) not in seen]
    return Adapted(
        tensors=tensors,
        sources=sources | {name: name for name in tensors if name not in sources},  # those are made of several tensors
        used=frozenset(id(own[key]) for key in sources.values()),
        dropped=(*(key for key, name in names.items() if name is None), *outside),
    )


def rename_all(adapter: Adapter, keys: Iterable[str]) -> tuple[dict[str, str | None], list[str], list[str]]:
    """What an adapter makes of a file's names: ours, or None; those inside a backbone that it does not know; others."""
    names: dict[str, str | None] = {}
    inside, unknown = [], []
    for key in keys:
        try:
            names[key] = adapter.rename(key)
        except InsideBackbone:
            inside.append(key)
        except UnknownKey:
            unknown.append(key)
    return names, inside, unknown


def few(names: Sequence[str]) -> str:
    """Join the first three names and the number of the others."""
    return ", ".join(inert(name, LONGEST_SHOWN) for name in names[:3]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


def is_dinov2(arch: str) -> bool:
    """Is this timm's name of a published DINOv2, with its 37 x 37 positions (518 pixels)?"""
    return re.match(r"timm:vit_[a-z]+_patch14_(?:reg4_)?dinov2\b(?!.*[:,](?:img|patch)=)", arch) is not None


def input_of(adapter: Adapter, tensors: Mapping[str, Tensor], arch: str) -> Preprocess:
    """A format's convention; a vision transformer sees images of the size that its positions were learnt at."""
    patches = {"pos_embed", "patch_embed.proj.weight"} <= tensors.keys()
    if not patches or not arch.startswith("timm:") or adapter.method == "dinov2":
        return adapter.preprocess
    if is_dinov2(arch):  # in timm's names
        return vits.DINOV2.preprocess
    # the class token does not matter here
    side = math.isqrt(tensors["pos_embed"].shape[1]) * tensors["patch_embed.proj.weight"].shape[-1]
    return adapter.preprocess.model_copy(update={"size": side})
