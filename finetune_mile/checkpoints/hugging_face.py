"""What `config.json` and `preprocessor_config.json` of transformers say of a network. No torch here.

They are not trusted: sizes are compared with the tensors and never build anything by themselves.
"""

from collections.abc import Mapping
from typing import Any

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess

_HALF = Preprocess(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop=1.0)
_BICUBIC = Preprocess(interpolation="bicubic")
_CLIP = Preprocess(
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    interpolation="bicubic",
    crop=1.0,
)
# model_type: what a config leaves out where it is the default: heads, activation, epsilon; the input
_TYPES: dict[str, tuple[int | None, str, float, Preprocess]] = {
    "vit": (12, "gelu", 1e-12, _HALF),
    "deit": (12, "gelu", 1e-12, _BICUBIC),
    "vit_mae": (12, "gelu", 1e-12, _BICUBIC),
    "vit_msn": (12, "gelu", 1e-6, _BICUBIC),
    "ijepa": (12, "gelu", 1e-12, Preprocess()),
    "dinov2": (12, "gelu", 1e-6, _BICUBIC),
    "dinov2_with_registers": (12, "gelu", 1e-6, _BICUBIC),
    "clip_vision_model": (12, "quick_gelu", 1e-5, _CLIP),
    "swin": (None, "gelu", 1e-5, _BICUBIC),
    "convnext": (None, "gelu", 1e-6, _BICUBIC),
    "convnextv2": (None, "gelu", 1e-6, _BICUBIC),
    "resnet": (None, "relu", 1e-5, _BICUBIC),
}
_ACTIVATIONS = {
    **{name: name for name in ("gelu", "quick_gelu", "relu", "silu")},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    "swish": "silu",
}
_RESAMPLE = {0: "nearest", 2: "bilinear", 3: "bicubic"}
_LARGEST_IMAGE = 4096


def read_transformers(config: Mapping[str, Any], processor: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a card in transformers' configs, and `options` of the network's name; empty for other configs."""
    config = _vision(config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _TYPES:
        return {}
    heads, act, eps, seen = _TYPES[kind]
    options = {}
    word = config.get("hidden_act", act)
    if not isinstance(word, str) or word not in (_ACTIVATIONS if heads is not None else (act,)):
        raise Problem(f"config.json: hidden_act {str(word)[:40]!r} is not supported")
    if heads is not None:
        # DINOv2's gated MLP has its own activation, whatever hidden_act says
        gated = bool(config.get("use_swiglu_ffn"))
        options = {"heads": str(_count(config, "num_attention_heads", heads))}
        options |= {} if gated else {"act": _ACTIVATIONS[word]}
        options |= {} if kind == "dinov2_with_registers" else {"resize": "plain"}
        options["eps"] = f"{_number(config, 'layer_norm_eps', eps):g}"
    elif kind != "resnet":
        # here transformers uses it for some of the norms only: ConvNeXt for the last one, and there 1e-12
        found = _number(config, "layer_norm_eps", eps)
        if found > eps or (kind == "swin" and found != eps):
            limit = f"{eps:g}" if kind == "swin" else f"at most {eps:g}"
            raise Problem(f"config.json: layer_norm_eps {found:g} is not supported; it must be {limit} for {kind}")
    if kind == "swin":
        options["img"] = str(_count(config, "image_size", 224))
    strides = {
        "downsample_in_bottleneck": "the stride is in the 3x3 convolution",
        "downsample_in_first_stage": "the first stage has no stride",
    }
    for key, supported in strides.items() if kind == "resnet" else ():
        if config.get(key):
            raise Problem(f"config.json: {key} true is not supported; {supported}")
    size = _count(config, "image_size", 224)
    return {"options": options, "method": kind, "preprocess": _input(processor, seen.model_copy(update={"size": size}))}


def check_sizes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, source: str) -> None:
    """Refuse a config of transformers whose sizes are not those of the tensors, by timm's names."""
    config = _vision(config)
    if str(config.get("model_type")) not in _TYPES or "blocks.0.norm1.weight" not in shapes:
        return
    blocks = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    found = {
        "hidden_size": shapes["blocks.0.norm1.weight"][0],
        "num_hidden_layers": len(blocks),
        "patch_size": shapes.get("patch_embed.proj.weight", (0,))[-1],
        "intermediate_size": shapes.get("blocks.0.mlp.fc1.weight", (0,))[0],
    }
    for key, real in found.items():
        if key in config and config[key] != real and not (key == "patch_size" and config[key] == [real, real]):
            raise Problem(f"config.json says {key} {str(config[key])[:40]}, but {source} has {real}")


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The image part of a config for images and text."""
    inner = config.get("vision_config")
    return (
        {"model_type": "clip_vision_model", **inner}
        if config.get("model_type") == "clip" and isinstance(inner, dict)
        else config
    )


def _count(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST_IMAGE:
        raise Problem(f"config.json: {key} {str(value)[:40]} is not a number from 1 to {_LARGEST_IMAGE}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise Problem(f"config.json: {key} {str(value)[:40]} is not a number between 0 and 1")
    return float(value)


def _input(processor: Mapping[str, Any], seen: Preprocess) -> Preprocess:
    """The input that a preprocessor_config.json describes; what it leaves out is as in `seen`."""
    new: dict[str, Any] = {}
    for key, ours in (("image_mean", "mean"), ("image_std", "std")):
        values = processor.get(key)
        if isinstance(values, list):
            new[ours] = tuple(values)
    if processor.get("do_normalize") is False:
        new |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    resampling = processor.get("resample")
    if isinstance(resampling, int) and resampling in _RESAMPLE:
        new["interpolation"] = _RESAMPLE[resampling]
    side, cropped = _side(processor.get("size")), _side(processor.get("crop_size"))
    share = processor.get("crop_pct")
    if cropped and processor.get("do_center_crop", True):
        new["size"] = cropped
        new["crop"] = min(cropped / side, 1.0) if side and "shortest_edge" in _as_dict(processor["size"]) else 1.0
    elif side:
        new |= {"size": side, "crop": share if isinstance(share, float) and 0 < share <= 1 and side < 384 else 1.0}
    try:
        return Preprocess.model_validate({**seen.model_dump(), **new})
    except ValueError as error:
        raise Problem(f"preprocessor_config.json is not valid: {str(error).splitlines()[-1].strip()}") from error


def _as_dict(size: object) -> dict[str, Any]:
    return size if isinstance(size, dict) else {"shortest_edge": size}


def _side(size: object) -> int | None:
    """A square's side from 224, {"height": 224, "width": 224} or {"shortest_edge": 256}."""
    if size is None:
        return None
    sides = [value for key, value in _as_dict(size).items() if key in ("height", "width", "shortest_edge")]
    side = sides[0] if sides else None
    if any(other != side for other in sides) or not isinstance(side, int) or not 0 < side <= _LARGEST_IMAGE:
        raise Problem(
            f"preprocessor_config.json: size {str(size)[:60]} is not a square of 1 to {_LARGEST_IMAGE} pixels"
        )
    return side
