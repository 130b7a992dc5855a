"""timm's networks by name and options, `timm:NAME:key=value,...`; vision transformers take images of any size.

`vit:heads=4` and `vit_small:heads=12` are short names: a checkpoint adds the sizes, `--init none` takes patches of 16
pixels at 224 pixels.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from finetune_mile.core.problems import Problem

# dim: (size, depth, heads, hidden units of the MLP), as timm names them
SIZES = {
    192: ("tiny", 12, 3, 768),
    384: ("small", 12, 6, 1536),
    768: ("base", 12, 12, 3072),
    1024: ("large", 24, 16, 4096),
    1280: ("huge", 32, 16, 5120),
    1408: ("giant", 40, 16, 6144),
    1664: ("gigantic", 48, 16, 8192),
}
_SHORT = re.compile(rf"vit(?:_({'|'.join(size for size, *_ in SIZES.values())}))?")
# timm's modules whose networks have parameters and norms alone, no tensors that they compute
_PLAIN = ("timm.models.vision_transformer", "timm.models.convnext", "timm.models.deit")
_MOST, _DEEPEST = 2**13, 256  # of any size in a network's name, and of blocks: a config asks for no endless network


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or not 0 <= int(text) <= _MOST:
        raise ValueError
    return int(text)


def _depth(text: str) -> int | tuple[int, ...]:
    depths = _wholes(text)
    if (max(depths) if isinstance(depths, tuple) else depths) > _DEEPEST:
        raise ValueError
    return depths


def _wholes(text: str) -> int | tuple[int, ...]:
    """A number, or one for each stage: 3-3-9-3."""
    parts = tuple(map(_whole, text.split("-")))
    if len(parts) > 8:
        raise ValueError
    return parts if len(parts) > 1 else parts[0]


def _number(text: str) -> float:
    if not 0 < float(text) <= _MOST:
        raise ValueError
    return float(text)


def _word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return parse


# option: the argument of timm's constructor, and how its text is read
OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "heads": ("num_heads", _wholes),
    "img": ("img_size", _whole),
    "patch": ("patch_size", _whole),
    "dim": ("embed_dim", _whole),
    "depth": ("depth", _depth),
    "mlp": ("mlp_ratio", _number),
    "scale": ("init_values", _number),  # layer scale, and its initial value
    "cls": ("class_token", lambda text: bool(_whole(text))),
    "reg": ("reg_tokens", _whole),
    "embed": ("no_embed_class", lambda text: not _whole(text)),  # 0: class token and registers have no position
    "pool": ("global_pool", _word("token", "avg", "max", "avgmax", "map")),
    "fcnorm": ("fc_norm", lambda text: bool(_whole(text))),  # 1: the norm comes after the pooling
    "act": ("act_layer", _word("gelu", "quick_gelu", "gelu_tanh", "relu", "silu")),
    "depths": ("depths", _depth),  # of ConvNeXt and Swin, for each stage
    "dims": ("dims", _wholes),
    "window": ("window_size", _whole),
}
# what timm's constructor does not take
_OWN: dict[str, Callable[[str], Any]] = {
    "eps": _number,  # of all layer norms
    "resize": _word("timm", "plain", "offset"),  # how positions are resized: `any_size.resample`
    "stem": _word("conv"),  # MoCo-v3's convolutional stem
}


def split_options(arch: str) -> tuple[str, dict[str, str]]:
    """Split `timm:NAME:key=value,...` or `vit_small:key=value,...` into the name and its options, not yet parsed."""
    scheme, _, rest = arch.partition(":") if arch.startswith("timm:") else ("", "", arch)
    name, colon, text = rest.partition(":")
    pairs = [pair.partition("=") for pair in text.split(",")] if colon else []
    if not name or any(not equal or not key or not value for key, equal, value in pairs):
        example = "timm:vit_small_patch16_224:heads=12"
        raise Problem(f"--arch {arch}: expected timm:NAME or timm:NAME:key=value,..., as in {example}")
    return f"{scheme}:{name}" if scheme else name, {key: value for key, _, value in pairs}


def split_timm(arch: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Split `timm:NAME:key=value,...` into timm's name, arguments for `timm.create_model`, and options of our own."""
    name, options = split_options(arch)
    arguments, own = {}, {}
    for key, text in options.items():
        try:
            if key in OPTIONS:
                argument, parse = OPTIONS[key]
                arguments[argument] = parse(text)
            elif key in _OWN:
                own[key] = _OWN[key](text)
            else:
                known = ", ".join([*OPTIONS, *_OWN])
                raise Problem(f"--arch {arch}: unknown option {key!r}; known are {known}")
        except ValueError as error:
            raise Problem(f"--arch {arch}: {key}={text} is not a valid value") from error
    return name.removeprefix("timm:"), arguments, own


def join_options(name: str, options: Mapping[str, object]) -> str:
    """The inverse of `split_options`."""
    return name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")


def is_short(arch: str) -> bool:
    """Is this a short name, such as `vit_small:heads=12`, which a checkpoint completes?"""
    return _SHORT.fullmatch(arch.partition(":")[0]) is not None


def expand_short(arch: str) -> str:
    """A short name without a checkpoint: 16-pixel patches at 224 pixels."""
    name, options = split_options(arch)
    size = name.partition("_")[2] or "base"
    patch = 14 if size in ("huge", "giant", "gigantic") else 16
    return join_options(f"timm:vit_{size}_patch{patch}_224", options)


def exported_arch(arch: str) -> str:
    """The name that builds one of timm's networks again: without the tag of its weights."""
    return re.sub(r"^(timm:[^.:]*)\.[^:]*", r"\1", arch)


# ------------------------------------------------------------------------------------------ building


def build_timm(arch: str) -> nn.Module:
    """Build `timm:NAME:key=value,...` without a head."""
    import timm

    from finetune_mile.networks.any_size import ConvStem, allow_any_size

    name, arguments, own = split_timm(expand_short(arch) if is_short(arch) else arch)
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name}*")[:3])
        raise Problem(f"--arch {arch}: timm has no model {name!r}" + (f"; near: {near}" if near else ""))
    if "stem" in own:
        arguments["embed_layer"] = ConvStem
    if torch.get_default_device().type == "meta" and timm.model_entrypoint(name).__module__ == _PLAIN[0]:
        arguments["weight_init"] = "skip"
    try:
        network: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, **arguments)
    except (TypeError, AssertionError, ValueError, RuntimeError) as error:
        if not arguments:
            raise
        heads = f"{arguments['num_heads']} heads" if "num_heads" in arguments else arch.partition(f"{name}:")[2]
        raise Problem(f"--arch {arch}: timm's {name} cannot be built with {heads}") from error
    if "eps" in own:
        for module in network.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = own["eps"]
    allow_any_size(network, own.get("resize", "timm"))
    return network


def build_empty(arch: str, most: int) -> nn.Module:
    """Build a network of timm to be filled: without storage (meta device), where a file holds all of its tensors.

    Some networks compute tensors of their own and are built with random weights, unless they have more than `most`.
    """
    import timm

    try:
        with torch.device("meta"):
            network = build_timm(arch)
    except (RuntimeError, TypeError):  # it computes with its own tensors while it is built
        return build_timm(arch)
    if sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers())) > most:
        return network  # comparing it with the file says what is missing
    computed = {name for name, _ in network.named_buffers()} - network.state_dict().keys()
    plain = timm.model_entrypoint(split_timm(arch)[0]).__module__ in _PLAIN
    return network if plain and not computed else build_timm(arch)
