"""The formats we read, in the order in which they are tried: the clearest mark first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from finetune_mile.checkpoints.adapters.adapter import Adapter, InsideBackbone, Tensors, UnknownKey, leaves
from finetune_mile.checkpoints.adapters.byol import BYOL, BYOL_CONVERT
from finetune_mile.checkpoints.adapters.lightly import LIGHTLY, LIGHTLY_BENCHMARK, LIGHTLY_GENERATOR
from finetune_mile.checkpoints.adapters.moco import MOCO, MOCO_V3
from finetune_mile.checkpoints.adapters.others import DETECTRON2, DINO, MILE, MILE_SIMCLRV2, MILE_SIMCLRV2_SK, PAWS
from finetune_mile.checkpoints.adapters.own import OWN
from finetune_mile.checkpoints.adapters.plain import TONYLINS, TORCHVISION, VIT
from finetune_mile.checkpoints.adapters.separius import SEPARIUS, SEPARIUS_SK
from finetune_mile.checkpoints.adapters.simclr_tf import SIMCLR_TF
from finetune_mile.checkpoints.adapters.solo import SOLO
from finetune_mile.checkpoints.adapters.swav import SWAV
from finetune_mile.checkpoints.adapters.vissl import VISSL, VISSL_SIMCLRV2, VISSL_SK
from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

ADAPTERS: dict[str, Adapter] = {
    "finetune-mile": OWN,
    "simclr-tf": SIMCLR_TF,
    "byol": BYOL,
    "vissl-sk": VISSL_SK,
    "vissl-simclrv2": VISSL_SIMCLRV2,
    "vissl": VISSL,
    "separius": SEPARIUS,
    "separius-sk": SEPARIUS_SK,
    "detectron2": DETECTRON2,
    "moco": MOCO,
    "moco-v3": MOCO_V3,
    "swav": SWAV,
    "paws": PAWS,
    "dino": DINO,
    "mile": MILE,
    "mile-simclrv2-sk": MILE_SIMCLRV2_SK,
    "mile-simclrv2": MILE_SIMCLRV2,
    "solo-learn": SOLO,
    "lightly": LIGHTLY,
    "lightly-generator": LIGHTLY_GENERATOR,
    "lightly-benchmark": LIGHTLY_BENCHMARK,
    "tonylins": TONYLINS,
    "byol-convert": BYOL_CONVERT,
    "torchvision": TORCHVISION,
    "vit": VIT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A file's tensors in our names, and what became of the others."""

    tensors: Tensors
    sources: dict[str, str]  # our name: the file's own
    dropped: tuple[str, ...]  # own names; of what lies outside the format, the whole path


def adapt(contents: Contents, adapter: Adapter, *, source: str) -> Adapted:
    """Bring a file's tensors into our names; an unknown name, or two for one, stops the load."""
    own = adapter.unwrap(contents)
    sources: dict[str, str] = {}
    tensors: Tensors = {}
    dropped, unknown, inside = [], [], []
    for key, tensor in own.items():
        try:
            name = adapter.rename(key)
        except InsideBackbone:
            inside.append(key)
            continue
        except UnknownKey:
            unknown.append(key)
            continue
        if name is None:
            dropped.append(key)
            continue
        if name in tensors:
            raise Problem(f"{source}: {sources[name]} and {key} are both {name}; which one is meant is unclear")
        tensors[name], sources[name] = adapter.relayout(key, tensor), key
    if inside:
        raise Problem(
            f"{source}: the backbone has parts that a plain ResNet or vision transformer does not have "
            f"({few(inside)}), and without them its features would be wrong; if they belong to a head, "
            "remove them from the file"
        )
    if unknown:
        raise Problem(
            f"{source}: {len(unknown)} tensors do not belong to this format, first {unknown[0]} "
            f"{_shape(own[unknown[0]])}; name the trunk, as in --init FILE::PREFIX, to load it "
            "alone"
        )
    seen = {id(tensor) for tensor in own.values()}
    outside = [path for path, tensor in leaves(contents.tree) if id(tensor) not in seen]
    return Adapted(tensors=tensors, sources=sources, dropped=(*dropped, *outside))


def few(names: Sequence[str]) -> str:
    """Join the first three names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
