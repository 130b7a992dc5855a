"""timm's side: `timm:NAME`, files in timm's own names, and Hugging Face folders that timm wrote."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from finetune_mile.checkpoints.adapters import Adapted
from finetune_mile.checkpoints.adapters.adapter import Adapter, state_dict_of
from finetune_mile.checkpoints.cards import Card
from finetune_mile.checkpoints.detect import Detected
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.checkpoints.readers.torch_files import leaves
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.networks.heads import build
from finetune_mile.networks.vits import OPTIONS, join_options, split_timm

# arguments of timm's constructors that do not change the features of an image in evaluation; RGB is checked by shape
_WITHOUT_EFFECT = re.compile(
    r"(?:num_classes|in_chans|\w*drop\w*_rate|dynamic_img_\w+|strict_img_size|\w*_init)=.*|norm_layer=batchnorm2d"
)


def make_card(name: str, base: str, config: Mapping[str, Any]) -> Card:
    """The card of a timm network from its `pretrained_cfg`."""
    return Card(
        name=name,
        method="timm",
        arch=f"timm:{base}",
        preprocess=_preprocess(config),
        licence=str(config.get("license") or "unknown"),
        source=str(config.get("hf_hub_id") or config.get("url") or ""),
    )


def timm_facts(config: Mapping[str, Any]) -> tuple[str, Preprocess]:
    """Network and convention from a `config.json` that timm wrote."""
    name = str(config["architecture"]).split(".")[0]
    ours = re.fullmatch(r"(resnet(?:18|34|50|101|152|200))(d?)", name)
    arguments = config.get("model_args")
    options = _options(arguments) if isinstance(arguments, dict) else {}
    if ours and options in ({}, {"pool": "avg"}):
        arch = ours[1] + ("-d" if ours[2] else "")
    else:
        arch = join_options(f"timm:{name}", options)
    return arch, _preprocess(config.get("pretrained_cfg") or {})


def _options(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Arguments of timm's constructor, as a config.json may hold them, as options of a name.

    Raises:
        Problem: an argument changes features, and no option stands for it.
    """
    known = {argument: key for key, (argument, _) in OPTIONS.items()}
    found: dict[str, str] = {}
    for argument, value in arguments.items():
        if value is None or _WITHOUT_EFFECT.fullmatch(f"{argument}={value}"):
            continue
        try:
            key = known[argument]
            if key in ("img", "patch", "window") and isinstance(value, list) and value == value[:1] * 2:
                value = value[0]
            value = not value if key == "embed" else value
            text = "-".join(map(str, value)) if isinstance(value, list) else str(+value if value in (0, 1) else value)
            OPTIONS[key][1](text)
        except (LookupError, ValueError) as error:
            said = f"{argument[:40]} {str(value)[:40]!r}"
            raise Problem(f"config.json: model_args has {said}, which is not supported") from error
        found[key] = text
    return {key: found[key] for key in OPTIONS if key in found}


def _preprocess(config: Mapping[str, Any]) -> Preprocess:
    plain = Preprocess()
    size = config.get("input_size") or (3, plain.size, plain.size)
    interpolation = config.get("interpolation") or plain.interpolation
    return Preprocess(
        mean=tuple(config.get("mean") or plain.mean),
        std=tuple(config.get("std") or plain.std),
        size=size[-1],
        crop=config.get("crop_pct") or plain.crop,
        interpolation=interpolation if interpolation in ("bilinear", "bicubic", "nearest") else "bicubic",
    )


def native(contents: Contents, arch: str, prefix: str | None = None) -> Detected | None:
    """A file in the very names of the timm network that was asked for, where it is one, perhaps below a prefix."""
    mapping: dict[str, str] = {}
    outside: tuple[str, ...] = ()
    if prefix is not None:
        paths = dict(leaves(contents.tree))
        starts = [start for start in (f"{prefix}/", f"{prefix}.", prefix) if any(p.startswith(start) for p in paths)]
        if not starts:
            return None
        inside = {path[len(starts[0]) :]: tensor for path, tensor in paths.items() if path.startswith(starts[0])}
        contents, mapping = replace(contents, tree=inside), {starts[0]: ""}
        outside = tuple(path for path in paths if not path.startswith(starts[0]))
    with torch.device("meta"):
        names = set(build(arch).state_dict())
    weights = state_dict_of(contents)
    if not names <= weights.keys():
        return None
    # the two classifiers of a distilled DeiT see one token each: no linear classifier of its features
    two = ("head.", "head_dist.") if any(key.startswith("head_dist.") for key in weights) else ()
    adapter = Adapter(
        recognise=lambda _: None,
        unwrap=state_dict_of,
        rename=lambda key: None if key.startswith(two) else key,
        method="timm",
        finished=True,
    )
    return Detected(
        format="timm",
        why=f"all {len(names)} tensors of {arch} are there by name",
        adapter=adapter,
        contents=contents,
        mapping=mapping,
        outside=outside,
        arch=arch,
    )


def canonical_head(adapted: Adapted, arch: str) -> Adapted:
    """The classifier of a `timm:NAME` (`head`, `fc`, ...) under the name `fc`, as everywhere else."""
    import timm

    model = split_timm(arch)[0]
    if not timm.is_model(model):
        return adapted  # building it says so
    prefix = timm.get_pretrained_cfg_value(model, "classifier") or "head"
    names = {f"{prefix}.{leaf}": f"fc.{leaf}" for leaf in ("weight", "bias", "hidden.weight", "hidden.bias")}
    return replace(
        adapted,
        tensors={names.get(name, name): tensor for name, tensor in adapted.tensors.items()},
        sources={names.get(name, name): own for name, own in adapted.sources.items()},
    )
