"""The names of vision transformers from the shapes of their tensors: timm's own name, or one with sizes."""

import math
import re
from collections.abc import Mapping

import torch

from finetune_mile.checkpoints.adapters import is_dinov2
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import build
from finetune_mile.networks.vits import SIZES, join_options, split_options

Shapes = Mapping[str, tuple[int, ...]]
# what a plain transformer of timm has; its file shows everything but heads, activation and epsilon
_PLAIN = {"cls": 1, "embed": 1, "reg": 0, "pool": "token", "fcnorm": 0, "stem": "", "img": 224, "patch": 16}


def read_vit(shapes: Shapes, marks: Mapping[str, str], *, source: str) -> str:
    """The name of a plain vision transformer.

    Args:
        shapes: timm's names to shapes, without a head.
        marks: options that no tensor shows, from the format, a config or --arch: heads, act, eps, resize, pool.
        source: the file's name, for messages.
    """
    dim, depth, hidden = _block_sizes(shapes, source)
    size, _, usual_heads, _ = SIZES.get(dim, ("", 0, 0, 0))
    if (dim, depth, hidden) == (768, 8, 2304):  # the small one of OpenMMLab and of timm in 2020
        usual_heads = 8
    own = {**_PLAIN, **_embedding(shapes, dim, source), "dim": dim, "depth": depth}
    own["mlp"] = hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim
    own["heads"] = _heads(dim, marks, usual_heads, source)
    if "blocks.0.ls1.gamma" in shapes:
        own["scale"] = "1e-05"
    if "fc_norm.weight" in shapes or not own["cls"]:
        own |= {"pool": "avg", "fcnorm": int("fc_norm.weight" in shapes)}
        if marks.get("pool", "avg") != "avg":
            raise Problem(f"{source}: features are the mean of the patches in this network, not pool={marks['pool']}")
    elif marks.get("pool") == "avg":  # the mean of patches after the norm, which the file has
        own |= {"pool": "avg", "fcnorm": 0}
    base, has = _base(shapes, own, size, marks, source)
    given = {key: marks[key] for key in ("act", "eps", "resize") if key in marks and has.get(key) != marks[key]}
    options = {key: value for key, value in own.items() if key != "fcnorm" and has.get(key) != value}
    if own["pool"] == "avg" and not own["fcnorm"]:  # timm's own choice is a norm after the mean
        options["fcnorm"] = 0
    return join_options(f"timm:{base}", {**options, **given})


def _block_sizes(shapes: Shapes, source: str) -> tuple[int, int, int]:
    """Width, number of blocks, hidden units."""
    blocks = {int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))}
    if blocks != set(range(len(blocks))):
        missing = min(set(range(len(blocks))) - blocks)
        raise Problem(f"{source}: blocks.{missing} is missing, but there are later blocks; the file is not complete")
    names = ("blocks.0.norm1.weight", "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")
    if any(not shapes.get(name) for name in names):
        raise Problem(f"{source}: {next(n for n in names if not shapes.get(n))} is missing")
    hidden = shapes["blocks.0.mlp.fc1.weight"][0]
    return shapes["blocks.0.norm1.weight"][0], len(blocks), hidden


def _embedding(shapes: Shapes, dim: int, source: str) -> dict[str, object]:
    """Tokens, positions and patches."""
    found: dict[str, object] = {"cls": int("cls_token" in shapes)}
    if "reg_token" in shapes:
        found["reg"] = shapes["reg_token"][1]
    patch = shapes.get("patch_embed.proj.weight", (dim, 3, 16, 16))
    if "patch_embed.proj.0.weight" in shapes:
        found["stem"] = "conv"
    if len(patch) != 4 or patch[1] != 3 or patch[2] != patch[3]:
        raise Problem(f"{source}: expected square RGB patches, found {patch}; use --arch timm:NAME")
    positions = shapes.get("pos_embed", ())
    if len(positions) != 3:
        raise Problem(f"{source}: pos_embed is missing; a vision transformer without it needs --arch timm:NAME")
    cls, registers, count = int("cls_token" in shapes), shapes.get("reg_token", (1, 0))[1], positions[1]
    without = {count, count - cls, count - cls - registers}
    sides = {math.isqrt(patches) for patches in without if patches > 0 and math.isqrt(patches) ** 2 == patches}
    if len(sides) > 1:
        raise Problem(
            f"{source}: {count} positions are two square grids, with and without tokens; use --arch timm:NAME"
        )
    if sides:
        (side,) = sides
        embed = int(count != side**2 or not cls + registers)
        return {**found, "patch": patch[-1], "img": side * patch[-1], "embed": embed}
    raise Problem(f"{source}: {positions[1]} positions are not a square grid; use --arch timm:NAME")


def _heads(dim: int, marks: Mapping[str, str], usual: int, source: str) -> int:
    text = marks.get("heads") or (str(usual) if usual else "")
    if text == "-1":
        name = SIZES[dim][0]
        raise Problem(
            f"{source} holds a vision transformer with fixed positions and does not show its number of attention "
            f"heads. Use --arch vit_{name}:heads={usual} (most code) or --arch vit_{name}:heads=12 (MoCo-v3, solo-learn"
            "'s MAE)"
        )
    if not text:
        likely = [heads for heads in (dim // 64, dim // 32) if heads and dim % heads == 0] or [1]
        said = {key: marks[key] for key in ("act",) if key in marks}
        ways = " or ".join(f"--arch {join_options('vit', {**said, 'heads': heads})}" for heads in likely)
        raise Problem(
            f"{source} holds a vision transformer of width {dim} and does not show its number of attention heads. "
            f"Use {ways} (or another number)"
        )
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise Problem(f"{source}: heads={text} is not a number of attention heads")
    if dim % int(text):
        raise Problem(f"{source}: a vision transformer of width {dim} cannot have {text} heads")
    return int(text)


def _base(
    shapes: Shapes, own: Mapping[str, object], size: str, marks: Mapping[str, str], source: str
) -> tuple[str, dict[str, object]]:
    """The nearest network that timm has, and the options that it has by itself."""
    import timm

    has: dict[str, object] = {**_PLAIN}
    gated = shapes["blocks.0.mlp.fc1.weight"][0] == 2 * shapes["blocks.0.mlp.fc2.weight"][-1]
    patch, img = own["patch"], own["img"]
    if gated:  # SwiGLU: only DINOv2's giant
        reg = "_reg4" if own["reg"] else ""
        more = {"reg": 4, "embed": 0} if reg else {}
        has |= {"dim": 1536, "depth": 40, "heads": 24, "mlp": 8192 / 1536, "scale": "1e-05", "patch": 14, "img": 518}
        return f"vit_giant_patch14{reg}_dinov2", has | more | {"act": "silu"}
    if "norm_pre.weight" in shapes:
        if "act" not in marks:
            said = {key: marks[key] for key in ("heads",) if key in marks}
            quick, plain = (f"--arch {join_options('vit', {**said, 'act': act})}" for act in ("quick_gelu", "gelu"))
            raise Problem(
                f"{source} holds CLIP's image network and does not show its activation; say {quick} (OpenAI's) or "
                f"{plain} (most of open_clip's)"
            )
        quick = "_quickgelu" if marks["act"] == "quick_gelu" else ""
        pattern, fallback = f"vit_{{}}_patch{patch}_clip{quick}_{img}", f"vit_base_patch16_clip{quick}_224"
        has |= {"act": "quick_gelu" if quick else "gelu", "eps": "1e-05"}
    elif "scale" in own and own["reg"]:
        pattern, fallback = "vit_{}_patch14_reg4_dinov2", "vit_base_patch14_reg4_dinov2"
        has |= {"scale": "1e-05", "reg": 4, "embed": 0, "patch": 14, "img": 518}
    elif "scale" in own:
        pattern, fallback = "vit_{}_patch14_dinov2", "vit_base_patch14_dinov2"
        has |= {"scale": "1e-05", "patch": 14, "img": 518}
    else:
        pattern, fallback = f"vit_{{}}_patch{patch}_{img}", f"vit_{size}_patch16_224"
    has |= {"act": has.get("act", "gelu"), "eps": has.get("eps", "1e-06")}
    for name in (pattern.format(size), fallback):
        if size and timm.is_model(name):
            exact = name == pattern.format(size)
            if exact and "dinov2" not in name:
                has |= {"patch": patch, "img": img}
            dim = {word: width for width, (word, *_) in SIZES.items()}[re.match(r"vit_([a-z]+)_", name)[1]]  # type: ignore[index]
            return name, has | {"dim": dim, "depth": SIZES[dim][1], "heads": SIZES[dim][2], "mlp": SIZES[dim][3] / dim}
    usual = fallback if timm.is_model(fallback) else "vit_base_patch16_224"
    return usual, has | {"dim": 768, "depth": 12, "heads": 12, "mlp": 4.0}


# ----------------------------------------------------------------------------- ConvNeXt and Swin

_CONVNEXTS = {  # dims of the first stage and depths: timm's name
    (96, "3-3-9-3"): "convnext_tiny",
    (96, "3-3-27-3"): "convnext_small",
    (128, "3-3-27-3"): "convnext_base",
    (192, "3-3-27-3"): "convnext_large",
    (256, "3-3-27-3"): "convnext_xlarge",
}
_SWINS = {  # width, depths, window
    (96, "2-2-6-2", 7): "swin_tiny_patch4_window7_224",
    (96, "2-2-18-2", 7): "swin_small_patch4_window7_224",
    (128, "2-2-18-2", 7): "swin_base_patch4_window7_224",
    (128, "2-2-18-2", 12): "swin_base_patch4_window12_384",
    (192, "2-2-18-2", 7): "swin_large_patch4_window7_224",
    (192, "2-2-18-2", 12): "swin_large_patch4_window12_384",
}


def read_stages(shapes: Shapes, marks: Mapping[str, str], *, source: str) -> str:
    """The name of a ConvNeXt or a Swin transformer. Arguments as in `read_vit`."""
    blocks = {m.groups() for n in shapes if (m := re.match(r"(?:stages|layers)\.(\d+)\.blocks\.(\d+)\.", n))}
    stages = max(int(stage) for stage, _ in blocks) + 1
    if stages > 8:
        raise Problem(f"{source}: a network of {stages} stages is not supported")
    depths = "-".join(str(sum(int(stage) == i for stage, _ in blocks)) for i in range(stages))
    given = {key: marks[key] for key in ("eps",) if key in marks}
    if "stem.0.weight" in shapes:
        return _read_convnext(shapes, stages, depths, given, source)
    return _read_swin(shapes, stages, depths, {**given, **({"img": marks["img"]} if "img" in marks else {})}, source)


def _read_swin(shapes: Shapes, stages: int, depths: str, given: dict[str, str], source: str) -> str:
    tables = [shapes.get(f"layers.{i}.blocks.0.attn.relative_position_bias_table", ()) for i in range(stages)]
    patch = shapes.get("patch_embed.proj.weight", ())
    if any(len(table) != 2 for table in tables) or len(patch) != 4:
        raise Problem(f"{source}: a Swin transformer without all of its position tables; the file is not complete")
    window, dim = (math.isqrt(tables[0][0]) + 1) // 2, patch[0]
    heads = "-".join(str(table[1]) for table in tables)
    hidden = shapes.get("layers.0.blocks.0.mlp.fc1.weight", (4 * dim,))[0]
    own = {"dim": dim, "depths": depths, "heads": heads, "window": window, "patch": patch[-1], "mlp": hidden / dim}
    known = _SWINS.get((dim, depths, window))
    usual = "-".join(str(dim // 32 * 2**i) for i in range(stages))
    img = "384" if window == 12 else "224"
    if known and (heads, patch[-1], hidden) == (usual, 4, 4 * dim):
        own = {}
    else:
        known, img = "swin_tiny_patch4_window7_224", "224"
        tiny = {"dim": 96, "depths": "2-2-6-2", "heads": "3-6-12-24", "window": 7, "patch": 4, "mlp": 4.0}
        own = {key: value for key, value in own.items() if tiny[key] != value}
    has = {"eps": "1e-05", "img": img}
    return join_options(f"timm:{known}", {**own, **{key: value for key, value in given.items() if has[key] != value}})


def _read_convnext(shapes: Shapes, stages: int, depths: str, given: dict[str, str], source: str) -> str:
    second = "v2" if "stages.0.blocks.0.mlp.grn.weight" in shapes else ""
    widths = [shapes.get(f"stages.{i}.blocks.0.conv_dw.weight", (0,))[0] for i in range(stages)]
    if stages != 4 or not all(widths):
        raise Problem(f"{source}: a ConvNeXt of {stages} stages is not supported; it has four")
    usual = [widths[0] * 2**i for i in range(4)]
    known = _CONVNEXTS.get((widths[0], depths)) if widths == usual else None
    given = {key: value for key, value in given.items() if value != "1e-06"}
    if known and not second:
        return join_options(f"timm:{known}", given)
    dims = "-".join(map(str, widths))
    return join_options(f"timm:convnext{second}_tiny", {"depths": depths, "dims": dims, **given})


# ------------------------------------------------------------------------------------------- claims


def merge_claim(claim: str, found: Mapping[str, str], *, source: str, shapes: Shapes) -> dict[str, str]:
    """Options of a short name such as `vit_small:heads=12` over what a file shows beside its tensors."""
    name, options = split_options(claim)
    size = name.partition("_")[2]
    width = shapes.get("blocks.0.norm1.weight", (0,))[0]
    real = SIZES.get(width, (f"of width {width}",))[0]
    if not width:
        raise Problem(f"{source} holds no vision transformer, --arch says {claim}; leave --arch out")
    if size and real != size:
        raise Problem(f"{source} holds a vision transformer {real}, --arch says {claim}; leave --arch out")
    unknown = options.keys() - {"heads", "act", "eps", "resize", "pool"}
    if unknown:
        raise Problem(f"--arch {claim}: {min(unknown)} is read from the file; leave it out")
    if options.get("pool", "avg") not in ("avg", "token"):
        raise Problem(f"--arch {claim}: use pool=avg or pool=token, or --arch timm:NAME")
    return {**found, **options}


def add_options(claim: str, marks: Mapping[str, str]) -> str:
    """A vision transformer's name with the options that no tensor shows and that the name leaves open."""
    if not claim.startswith("timm:vit_"):
        return claim
    name, options = split_options(claim)
    return join_options(name, {**{key: marks[key] for key in ("eps", "resize") if key in marks}, **options})


def has_shapes(arch: str, shapes: Shapes) -> bool:
    """Does a network of timm have exactly these tensors?"""
    if not arch.startswith("timm:"):
        return False
    with torch.device("meta"):
        network = build(arch)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == dict(shapes)


def resized_as_authors(arch: str) -> str:
    """A name with the authors' way of resizing positions: that of DINOv2 without registers is not timm's."""
    if not is_dinov2(arch) or "_reg4_" in arch:
        return arch
    name, options = split_options(arch)
    return join_options(name, {**options, "resize": options.get("resize", "offset")})
