"""The files of single repositories, most of them in torchvision's names; plain torchvision and timm; and our own."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from finetune_mile.checkpoints.adapters.adapter import (
    Adapter,
    Rename,
    Tensors,
    Vocabulary,
    detectron2,
    having,
    in_entry,
    renaming,
    separius,
    separius_sk,
    state_dict_of,
    tensors_of,
    tops,
    torchvision,
    torchvision_or_vit,
)
from finetune_mile.checkpoints.init import HEADER, read_header
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.core.types import IMAGENET_MEAN, Preprocess
from finetune_mile.networks.resnets import Padding

# --------------- our own exports: the header of `model.safetensors` has the config, padding included


def _is_own(contents: Contents) -> str | None:
    config = read_header(contents.metadata)
    return None if config is None else f"the header names a finetune_mile export of {config['arch']}"


OWN = Adapter(
    recognise=_is_own,
    unwrap=lambda contents: tensors_of(contents.tree),
    rename=lambda key: key,  # ours already; the network says which names there are
    method="finetune_mile",
    own=True,
    finished=True,
    plain=True,
    mark=f"^{HEADER}$",
)

# ----------------------------------------------------------------- flat torchvision or timm names


def _is_torchvision(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    has_trunk = any(torchvision(key) for key in weights if key.startswith("layer1."))
    if has_trunk and all(torchvision(key) or key.startswith("fc.") for key in weights):
        return "torchvision names and nothing else"
    return None


TORCHVISION = Adapter(
    recognise=_is_torchvision,
    unwrap=state_dict_of,
    rename=renaming(torchvision, classifier="fc", dropped=("fc",)),  # an MLP in the classifier's place is dropped
    method="torchvision",
    cifar_stem=None,  # an extracted backbone of solo-learn has the same names
    plain=True,
    padding_known=False,
    mark=r"layer1\.",
)
# --------------------- MoCo v1 and v2 (`encoder_q`) and v3 (`base_encoder`), as their scripts save


def _rename_moco(encoder: str, *dropped: str) -> Rename:
    # `fc` is the projection to the embedding (v1: one layer, v2 and v3: an MLP), never a classifier
    projections = (f"{encoder}.fc", f"{encoder}.head")
    return renaming(torchvision_or_vit, trunks=(f"{encoder}.",), dropped=(*projections, *dropped))


MOCO = Adapter(
    recognise=having(state_dict_of, "encoder_q", says="names begin with encoder_q"),
    unwrap=state_dict_of,
    rename=_rename_moco("encoder_q", "encoder_k", "queue", "queue_ptr"),
    method="moco",
    mark="encoder_q",
)
MOCO_V3 = Adapter(
    recognise=having(
        state_dict_of, "base_encoder", "momentum_encoder", says="names begin with base_encoder and momentum_encoder"
    ),
    unwrap=state_dict_of,
    rename=_rename_moco("base_encoder", "momentum_encoder", "predictor"),
    method="mocov3",
    small_vit_heads=12,
    mark="base_encoder",
)


DETECTRON2 = Adapter(
    recognise=having(in_entry("model"), "stem.conv1.weight", says="detectron2's names, stem and res2"),
    unwrap=in_entry("model"),
    rename=renaming(detectron2, dropped=("fc", "stem.fc")),
    method="moco",
    mark=r"^model/stem\.conv1\.weight$",
)

# -------------------- SwAV, DeepCluster-v2 and SeLa-v2: flat release files and training files; PAWS


def _is_swav(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    marks = tops(weights) & {"prototypes", "projection_head"}
    return f"torchvision names beside {' and '.join(sorted(marks))}" if marks and "conv1.weight" in weights else None


SWAV = Adapter(
    recognise=_is_swav,
    unwrap=state_dict_of,
    rename=renaming(torchvision, dropped=("prototypes", "projection_head")),
    method="swav",
    # their pre-training and their evaluation both divide the red channel by 0.228, not by 0.229
    preprocess=Preprocess(mean=IMAGENET_MEAN, std=(0.228, 0.224, 0.225)),
    mark="prototypes|projection_head",
)


PAWS = Adapter(
    recognise=having(in_entry("encoder"), "conv1.weight", says="entry encoder in torchvision names"),
    unwrap=in_entry("encoder"),
    rename=renaming(torchvision, classifier="fc", dropped=("fc", "pred")),
    method="paws",
    mark="^encoder$",
)

# --------------------- DINO's training files: the teacher is what it releases, the student is dropped


def _is_dino(contents: Contents) -> str | None:
    both = all(tensors_of(contents.tree.get(name)) for name in ("teacher", "student"))
    return "entries teacher and student" if both else None


DINO = Adapter(
    recognise=_is_dino,
    unwrap=in_entry("teacher"),
    rename=renaming(torchvision_or_vit, trunks=("backbone.",), dropped=("head", "backbone.masked_embed")),
    method="dino",
    options={"resize": "offset"},
    mark="^teacher$",
)

# ------------------- Barlow Twins, VICReg, SimSiam: training files; what they release is flat torchvision


def _has_statistics_alone(tensors: Tensors, norm: str) -> bool:
    """Is there a batch norm without weight and bias, as few people make one?"""
    return f"{norm}.running_mean" in tensors and f"{norm}.weight" not in tensors


def _is_barlow(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    if tops(weights) != {"backbone", "projector", "bn"} or not _has_statistics_alone(weights, "bn"):
        return None
    return "backbone.* and projector.* beside a bn.* that only has statistics"


def _is_vicreg(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    layers = {key.removeprefix("projector.") for key in weights if re.fullmatch(r"projector\.\d+\.(weight|bias)", key)}
    made = {f"{n}.{leaf}" for n in (0, 1, 3, 4) for leaf in ("weight", "bias")} | {"6.weight"}
    if not {"epoch", "model", "optimizer"} <= contents.tree.keys():
        return None
    if tops(weights) != {"backbone", "projector"} or layers != made:
        return None
    return "entries epoch, model, optimizer; backbone.* beside a projector.* whose last layer has no bias"


def _is_simsiam(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    if tops(weights) != {"encoder", "predictor"} or not _has_statistics_alone(weights, "encoder.fc.7"):
        return None
    return "encoder.* with a projection encoder.fc.* that ends in statistics alone, beside predictor.*"


BARLOW = Adapter(
    recognise=_is_barlow,
    unwrap=state_dict_of,
    rename=renaming(torchvision, trunks=("backbone.",)),
    method="barlowtwins",
    cifar_stem=None,
    mark="projector",
)
VICREG = replace(BARLOW, recognise=_is_vicreg, method="vicreg")
SIMSIAM = Adapter(
    recognise=_is_simsiam,
    unwrap=state_dict_of,
    rename=renaming(torchvision, trunks=("encoder.",), dropped=("encoder.fc",)),
    method="simsiam",
    cifar_stem=None,
    mark="predictor",
)

# ------------ OpenSelfSup, MMSelfSup, MMPretrain: backbone, neck and head, and a momentum copy, with `meta`

_MM_VERSIONS = ("openselfsup", "mmselfsup", "mmpretrain", "mmcls", "mmengine", "mmcv")


def _is_openmmlab(contents: Contents) -> str | None:
    meta = contents.tree.get("meta")
    who = next((name for name in _MM_VERSIONS if isinstance(meta, Mapping) and f"{name}_version" in meta), None)
    if who is None or not any(key.startswith("backbone.layer1.") for key in state_dict_of(contents)):
        return None
    return f"meta names {who}'s version; names begin with backbone"


OPENMMLAB = Adapter(
    recognise=_is_openmmlab,
    unwrap=state_dict_of,
    rename=renaming(torchvision, trunks=("backbone.",), classifier="head.fc"),
    method="openmmlab",
    cifar_stem=None,
    mark=r"backbone\.layer1\.",
)

# ------------------------------------------------------------------------- the published MILe code


def _mappings(tree: Any) -> Iterator[Tensors]:
    """The tensors of every mapping in a tree."""
    if isinstance(tree, Mapping):
        yield tensors_of(tree)
        for value in tree.values():
            yield from _mappings(value)


def _mile_model(contents: Contents) -> Tensors:
    """The state dict with `backbone.module.`, and perhaps `teacher.module.`, anywhere in the file."""
    for tensors in _mappings(contents.tree):
        if tops(tensors) <= {"backbone", "teacher"} and any(k.startswith("backbone.module.") for k in tensors):
            return tensors
    return {}


def _mile(vocabulary: Vocabulary, says: str, padding: Padding) -> Adapter:
    def recognise(contents: Contents) -> str | None:
        keys = [key.removeprefix("backbone.module.") for key in _mile_model(contents)]
        if any("mixing_conv" in key for key in keys) != (vocabulary is separius_sk):
            return None
        stages = [name for key in keys if (name := vocabulary(key)) and name.startswith("layer1.")]
        return f"backbone.module.* in {says}" if len(stages) > 5 else None

    rename = renaming(vocabulary, trunks=("backbone.",), classifier="backbone.fc", dropped=("teacher",))
    return Adapter(
        recognise=recognise, unwrap=_mile_model, rename=rename, method="mile", padding=padding,
        mark=r"backbone\.module\.",
    )  # fmt: skip


MILE = _mile(torchvision, "torchvision names", "torch")
# That code runs SimCLR-v2's networks as its PyTorch port does, padding mistakes included, and was trained so.
MILE_SIMCLRV2_SK = _mile(separius_sk, "the names of SimCLR-v2's port, selective kernels", "port")
MILE_SIMCLRV2 = _mile(separius, "the names of SimCLR-v2's port", "port")
