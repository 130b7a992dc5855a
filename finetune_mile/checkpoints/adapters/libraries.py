"""solo-learn, lightly and VISSL: libraries with many methods, each with one layout for all of them."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from finetune_mile.checkpoints.adapters.adapter import (
    UNIT_RANGE,
    Adapter,
    Tensors,
    Vocabulary,
    below,
    generator,
    in_parts,
    renaming,
    separius,
    separius_sk,
    sequential,
    state_dict_of,
    tops,
    torchvision_or_vit,
)
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.core.problems import Problem

# ------------------------------------------------ solo-learn: Lightning files, `encoder.` in 2021

_SOLO_TRUNKS = ("backbone.", "encoder.")
_SOLO_MARKS = {"projector", "predictor", "momentum_backbone", "momentum_encoder", "head"}
_SOLO_DROPPED = (
    *sorted(_SOLO_MARKS),
    *("momentum_projector", "momentum_predictor", "momentum_classifier", "momentum_head", "momentum_prototypes"),
    *("key_projector", "prototypes", "queue", "queue_ptr", "queue_y", "dino_loss_func", "whitening"),
    *("local_memory_index", "local_memory_embeddings"),
)


def _is_solo(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    marks = tops(weights) & {*_SOLO_MARKS, "classifier"}
    for trunk in _SOLO_TRUNKS if marks else ():
        if any(torchvision_or_vit(below(trunk, key) or "") for key in weights):
            return f"{trunk}* in torchvision names beside {', '.join(sorted(marks))}"
    return None


def _is_certainly_solo(contents: Contents) -> bool:
    """Whether a file is certainly solo-learn's: its names alone are common ones.

    It is a Lightning file without hyper-parameters, the online probe `classifier` is there beside a part of the method,
    and there is a momentum copy, or the convolutions are stored channels last (its default since April 2022).
    """
    weights = state_dict_of(contents)
    parts = tops(weights)
    lightning = "pytorch-lightning_version" in contents.tree and "hyper_parameters" not in contents.tree
    if not lightning or "classifier" not in parts or parts.isdisjoint(_SOLO_DROPPED):
        return False
    if parts & {"momentum_backbone", "momentum_encoder"}:
        return True
    convolutions = [t for k, t in weights.items() if k.startswith(_SOLO_TRUNKS) and t.ndim == 4 and min(t.shape) > 1]
    return bool(convolutions) and all(t.is_contiguous(memory_format=torch.channels_last) for t in convolutions)


SOLO = Adapter(
    recognise=_is_solo,
    unwrap=state_dict_of,
    # the classifier is the online probe: it has seen labels
    rename=renaming(torchvision_or_vit, trunks=_SOLO_TRUNKS, classifier="classifier", dropped=_SOLO_DROPPED),
    method="solo-learn",
    cifar_stem="cifar-pad2",  # on CIFAR its 3x3 stem has a padding of 2
    is_certain=_is_certainly_solo,
    assumes=("ImageNet's mean and deviation (solo-learn's runs on CIFAR had CIFAR's: --set mean=..., --set std=...)",),
    columns_first=True,
    mark=r"(backbone|encoder)\.",
)

# ------------------- lightly: the examples (`Sequential` indices), its own generator, the benchmarks

_LIGHTLY_HEADS = ("projection_head", "prediction_head", "student_projection_head")
_LIGHTLY_MARKS = {*_LIGHTLY_HEADS, "online_classifier"}
_LIGHTLY_DROPPED = (
    *_LIGHTLY_HEADS,
    *("backbone_momentum", "projection_head_momentum", "teacher_backbone", "teacher_projection_head"),
    *("student_backbone", "key_backbone", "key_projection_head", "query_backbone", "query_projection_head"),
    *("prototypes", "queues", "memory_bank", "criterion"),
)


def _lightly(vocabulary: Vocabulary, says: str, *, without: tuple[str, ...] = (), stem_relu: bool = True) -> Adapter:
    def recognise(contents: Contents) -> str | None:
        weights = state_dict_of(contents)
        inner = {below("backbone.", key) or "" for key in weights}
        marks = tops(weights) & _LIGHTLY_MARKS
        has_trunk = any((vocabulary(key) or "").startswith(("layer1.", "blocks.")) for key in inner)
        if not marks or not has_trunk or any(key.startswith(without) for key in inner):
            return None
        return f"backbone.* {says} beside {', '.join(sorted(marks))}"

    probe = "online_classifier.classification_head"  # it has seen labels
    rename = renaming(vocabulary, trunks=("backbone.",), classifier=probe, dropped=_LIGHTLY_DROPPED)
    return Adapter(
        recognise=recognise, unwrap=state_dict_of, rename=rename, method="lightly", stem_relu=stem_relu,
        mark=r"backbone\.",
        # a user brings the vision transformer, of any library and with any number of heads
        is_certain=lambda contents: not any(".blocks." in key for key in state_dict_of(contents)),
    )  # fmt: skip


# 2 and 3, the ReLU and the pooling, have no tensors
LIGHTLY = _lightly(sequential(4), "as the children of a torchvision ResNet", without=("2.", "3."))
# the generator's own forward has a ReLU after bn1, a Sequential of its children has none
LIGHTLY_GENERATOR = _lightly(sequential(2), "as the children of lightly's ResNetGenerator", stem_relu=False)
LIGHTLY_BENCHMARK = _lightly(lambda key: torchvision_or_vit(key) or generator(key), "in torchvision names")

# ------------ VISSL: trunk and heads deep inside `classy_state_dict`, and its zoo's flatter layouts

_VISSL_LAYERS = ("trunk/", "trunk.", "base_model.", "_feature_blocks.", "model.", "module.")


def _classy_model(tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`classy_state_dict.base_model.model`, the mapping of trunk and heads, where there is one."""
    inner: Any = tree
    for part in ("classy_state_dict", "base_model", "model"):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner if isinstance(inner, Mapping) and "trunk" in inner else None


def _vissl_tensors(contents: Contents) -> Tensors:
    if contents.tree.get("type") == "shard_list":
        raise Problem("this VISSL file is a list of FSDP shards without tensors; consolidate it in VISSL first")
    model = _classy_model(contents.tree)
    return state_dict_of(contents) if model is None else in_parts(model, "trunk", "heads")


def _vissl(vocabulary: Vocabulary, needs: str = "", **conventions: Any) -> Adapter:
    """An adapter for trunks in one vocabulary; `needs` is a part of a name that must be there."""

    def inner_name(key: str) -> str | None:
        while key.startswith(_VISSL_LAYERS):
            key = next(key.removeprefix(layer) for layer in _VISSL_LAYERS if key.startswith(layer))
        return vocabulary(key)

    def recognise(contents: Contents) -> str | None:
        if contents.tree.get("type") == "shard_list":
            return "type is shard_list"
        keys = list(_vissl_tensors(contents))
        nested = _classy_model(contents.tree) is not None
        marked = nested or any("_feature_blocks." in key for key in keys)
        if not marked or not any(needs in key for key in keys) or not any(map(inner_name, keys)):
            return None
        where = "classy_state_dict.base_model.model.trunk" if nested else "names below _feature_blocks"
        return where + (f", blocks with {needs}" if needs else "")

    rename = renaming(inner_name, dropped=("heads",))
    mark = "^type$|" + (re.escape(needs) if needs else r"^classy_state_dict$|_feature_blocks\.")
    return Adapter(recognise=recognise, unwrap=_vissl_tensors, rename=rename, mark=mark, **conventions)


VISSL = _vissl(torchvision_or_vit, method="vissl", assumes=("RGB images (VISSL also trains with BGR and Lab)",))
# The zoo's SimCLR-v2 trunks were converted from TensorFlow: its padding and its [0, 1] input.
_SIMCLR = {"method": "simclrv2", "padding": "tf", "preprocess": UNIT_RANGE}
VISSL_SK = _vissl(separius_sk, "mixing_conv", **_SIMCLR)
VISSL_SIMCLRV2 = _vissl(separius, "projection.shortcut.weight", **_SIMCLR)
