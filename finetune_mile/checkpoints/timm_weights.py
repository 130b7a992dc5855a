"""timm's side: `timm:NAME`, files in timm's own names, and Hugging Face folders that timm wrote."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from finetune_mile.checkpoints.adapters import Adapted
from finetune_mile.checkpoints.adapters.adapter import Adapter, state_dict_of
from finetune_mile.checkpoints.cards import Card
from finetune_mile.checkpoints.detect import Detected
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.networks.heads import build, split_timm


def open_timm(name: str, arch: str | None) -> tuple[nn.Module, Card]:
    """A pretrained timm model without its head, and the card that timm's own notes make."""
    import timm

    base = name.split(".")[0]
    if arch is not None and arch.removeprefix("timm:").split(".")[0] != base:
        raise Problem(f"--init timm:{name} is a {name}, --arch says {arch}")
    build(f"timm:{base}")  # an unknown name is answered with the nearest ones
    try:
        network: nn.Module = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Problem(
            f"--init timm:{name} could not be fetched ({first}); fetch its model.safetensors elsewhere and "
            f"use --init FILE --arch timm:{base}"
        ) from error
    return network, make_card(f"timm:{name}", base, getattr(network, "pretrained_cfg", {}))


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


def timm_card(network: nn.Module) -> Card | None:
    """The card of a network that a user made with timm; None for another network."""
    config = getattr(network, "pretrained_cfg", None)
    if not isinstance(config, dict) or not config.get("architecture"):
        return None
    base = str(config["architecture"])
    tag = f".{config['tag']}" if config.get("tag") else ""
    return make_card(f"timm:{base}{tag}", base, config)


def timm_facts(config: Mapping[str, Any]) -> tuple[str, Preprocess]:
    """Network and convention from a `config.json` that timm wrote."""
    name = str(config["architecture"]).split(".")[0]
    ours = re.fullmatch(r"(resnet(?:18|34|50|101|152|200))(d?)", name)
    arch = ours[1] + ("-d" if ours[2] else "") if ours else f"timm:{name}"
    heads = (config.get("model_args") or {}).get("num_heads")
    if isinstance(heads, int):
        arch += f":heads={heads}"
    return arch, _preprocess(config.get("pretrained_cfg") or {})


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


def native(contents: Contents, arch: str) -> Detected | None:
    """A file in the very names of the timm network that was asked for, where it is one."""
    names = set(build(arch).state_dict())
    if not names <= set(state_dict_of(contents)):
        return None
    adapter = Adapter(recognise=lambda _: None, unwrap=state_dict_of, rename=lambda key: key, method="timm")
    why = f"all {len(names)} tensors of {arch} are there by name"
    return Detected(format="timm", why=why, adapter=adapter, contents=contents, arch=arch)


def canonical_head(adapted: Adapted, arch: str) -> Adapted:
    """The classifier of a `timm:NAME` (`head`, `fc`, ...) under the name `fc`, as everywhere else."""
    import timm

    model, _ = split_timm(arch)
    if not timm.is_model(model):
        return adapted  # building it says so
    prefix = timm.get_pretrained_cfg_value(model, "classifier") or "head"
    names = {f"{prefix}.{leaf}": f"fc.{leaf}" for leaf in ("weight", "bias", "hidden.weight", "hidden.bias")}
    return replace(
        adapted,
        tensors={names.get(name, name): tensor for name, tensor in adapted.tensors.items()},
        sources={names.get(name, name): own for name, own in adapted.sources.items()},
    )
