"""Which network is in a file: from names and shapes, from what else the file shows, compared with every claim."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from finetune_mile.checkpoints.detect import Found, from_simclr
from finetune_mile.core.problems import Problem
from finetune_mile.networks.resnets import DEPTHS, MINI, Arch, Stem, name_arch, parse_arch

if TYPE_CHECKING:
    from finetune_mile.checkpoints.adapters import Adapted
    from finetune_mile.checkpoints.readers import Contents

_UNSEEN = re.compile(r"-nopool|-norelu|:heads=\d+")  # parts of a network's name that no tensor shows
_VIT_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}


def name_network(
    contents: Contents,
    found: Found,
    adapted: Adapted,
    *,
    config: str | None,
    card: str | None,
    arch: str | None,
    source: str,
) -> tuple[Found, str]:
    """Read the architecture from the tensors and compare it with every claim.

    Args:
        contents: the complete file, also where only a part of it is loaded.
        found: its format.
        adapted: the tensors that are loaded, in our names.
        config: what its config says.
        card: what its card says.
        arch: what --arch says.
        source: the file's name, for messages.

    Returns:
        The format, with other conventions if the architecture implies them; and the network's name.
    """
    marks = read_marks(contents, found, adapted, source=source)
    if config is not None and (found.adapter.own or _only_named(config)):
        name = config
    elif found.arch is not None:
        name = found.arch
    else:
        shapes = {n: tuple(t.shape) for n, t in adapted.tensors.items() if not n.startswith(("fc.", "proj."))}
        name = read_arch(shapes, marks, source=source)
    claims = ((config, "its config"), (card, "the card"), (arch, "--arch"))
    for claim, who in claims:
        if claim is None:
            continue
        if not _same_tensors(claim, name) or not _keeps(claim, name):
            raise Problem(f"{source} holds a {name}, {who} says {claim}")
        if marks.heads and ":heads=" not in claim and ":heads=" not in (arch or ""):
            raise Problem(
                f"{source} holds a {claim}:heads={marks.heads}, {who} says {claim}; "
                f"say --arch {claim}:heads={marks.heads} (or another number)"
            )
        name = claim
    shape, silent = parse_arch(name), all(claim is None for claim, _ in claims)
    if marks.cifar_stem is None and silent and "-cifar" in name:
        other = name.replace("-cifar", "-cifar2")
        raise Problem(
            f"{source} holds a ResNet with a 3x3 stem and does not show its padding; say --arch {name} (padding 1, "
            f"the usual) or --arch {other} (padding 2, solo-learn's), or append ::{name} or ::{other} to the file"
        )
    if shape is not None and found.adapter.padding == "torch":
        if shape.sk:
            found = replace(found, adapter=from_simclr(found.adapter))
        elif shape.project_first and silent and not found.adapter.padding_known:
            raise Problem(
                f"{source} holds a ResNet with a shortcut convolution in layer1.0: SimCLR's and "
                "BYOL's have it, and each pads in its own way, which no tensor shows; say whose: "
                f"--init '{source}::tonylins' (SimCLR) or '{source}::byol-convert' (BYOL), "
                f"or --arch {name} for torch's own padding"
            )
    return found, name


def _only_named(arch: str) -> bool:
    """Is this a network that its tensors do not tell: timm's, or one with group norm?"""
    shape = parse_arch(arch)
    return arch.startswith("timm:") or (shape is not None and shape.norm == "group")


def _keeps(claim: str, name: str) -> bool:
    """Does a claim keep what a file shows beside its tensors? It may add to it: a file need not show it."""
    return all(part in claim for part in _UNSEEN.findall(name) if not part.startswith(":"))


def _same_tensors(one: str, other: str) -> bool:
    """Do two names mean networks with the same tensors? A stem's padding, for example, has none."""
    if one == other:
        return True
    plain = [_UNSEEN.sub("", name).replace("-cifar2", "-cifar") for name in (one, other)]
    bases = [name.removeprefix("timm:").split(".")[0] for name in plain]
    if bases[0] == bases[1]:
        return True
    archs = [parse_arch(re.sub(r"^(resnet\d+)d$", r"\1-d", base)) for base in bases]
    return archs[0] is not None and archs[0] == archs[1]


# -------------------------------------------------------------------------------- names and shapes


def read_arch(shapes: Mapping[str, tuple[int, ...]], marks: Marks, *, source: str) -> str:
    """The name of the network whose tensors these are, from names and shapes.

    Args:
        shapes: our names to shapes, without a head.
        marks: what names and shapes do not show.
        source: the file's name, for messages.
    """
    if "patch_embed.proj.weight" in shapes:
        return _read_vit(shapes, source) + (f":heads={marks.heads}" if marks.heads else "")
    blocks = [re.match(r"layer(\d+)\.(\d+)\.", name) for name in shapes]
    found = {(int(m[1]), int(m[2])) for m in blocks if m}
    if not found:
        raise Problem(f"{source}: layer1.0.conv1.weight is missing, and so is every other block")
    stages = max(stage for stage, _ in found)
    layers = tuple(max((b for s, b in found if s == i + 1), default=-1) + 1 for i in range(stages))
    bottleneck = any(".conv3." in name or ".bn3." in name for name in shapes)
    deep = any(name.startswith("conv1.0.") or name.startswith("conv1.3.") for name in shapes)
    small = shapes.get("conv1.weight", (0, 0, 7, 7))[-1] == 3
    cifar_stem = marks.cifar_stem or "cifar"
    if small and (layers, _width(shapes)) == (MINI.layers, MINI.width):
        cifar_stem = MINI.stem
    arch = Arch(
        block="bottleneck" if bottleneck else "basic",
        layers=layers,
        width=_width(shapes),
        stem="deep" if deep else cifar_stem if small else "imagenet",
        sk=any(".conv2.down." in name or ".conv2.conv." in name for name in shapes),
        pooled_shortcut=any(".downsample.2." in name for name in shapes),
        project_first=not bottleneck and any(n.startswith("layer1.0.downsample.") for n in shapes),
        stem_pool=marks.stem_pool or small,
        stem_relu=marks.stem_relu,
    )
    if not any(name.endswith(".running_mean") for name in shapes):
        raise Problem(f"{source}: no batch norm has running statistics; nets with other norms need --arch timm:NAME")
    try:
        return name_arch(arch)
    except LookupError as error:
        known = ", ".join(f"ResNet-{depth} {shape[1]}" for depth, shape in DEPTHS.items())
        raise Problem(f"{source}: a ResNet of {error} is none that we know ({known}; width 64 times n)") from error


def _width(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Channels of the first stage, by majority: a damaged tensor does not mislead."""
    first = ("bn1.weight", "bn1.bias", "layer1.0.conv1.weight", "layer1.0.bn1.weight", "layer1.1.bn1.weight")
    votes = Counter(shapes[name][0] for name in first if shapes.get(name))
    return votes.most_common(1)[0][0] if votes else 64


def _read_vit(shapes: Mapping[str, tuple[int, ...]], source: str) -> str:
    patch = shapes["patch_embed.proj.weight"]
    size = _VIT_SIZES.get(patch[0])
    tokens = shapes.get("pos_embed", (1, 197, 0))[1] - 1
    side = round(tokens**0.5) * patch[-1]
    if size is None or side * side != tokens * patch[-1] ** 2:
        raise Problem(f"{source}: a vision transformer with patches {patch} is none that we know; use --arch timm:NAME")
    return f"timm:vit_{size}_patch{patch[-1]}_{side}"


# ------------------------------------------------------------------------- beside names and shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Properties of a network that none of its tensors shows."""

    cifar_stem: Stem | None = "cifar"  # the form of a 3x3 stem; None: the file does not tell
    stem_pool: bool = True  # max-pooling after a 7x7 stem
    stem_relu: bool = True  # ReLU after bn1
    heads: int | None = None  # attention heads, where they are not those of timm's network of that size


def read_marks(contents: Contents, found: Found, adapted: Adapted, *, source: str) -> Marks:
    """Read the marks of a complete file; arguments as in `name_network`."""
    stem, pool = found.adapter.cifar_stem, True
    if not found.forced and not found.adapter.is_certain(contents):
        stem = None  # many people call their modules backbone and classifier
    kernel = adapted.tensors["conv1.weight"].shape[-1] if "conv1.weight" in adapted.tensors else 7
    bolts = _bolts(contents)
    if bolts is not None and bolts[0] == (kernel == 7):
        first_conv, pool = bolts
        if pool and not first_conv:
            raise Problem(
                f"{source}: its hyper_parameters say first_conv False and maxpool1 True, "
                "but a 3x3 stem with max-pooling is not supported"
            )
        stem, pool = "cifar", pool or not first_conv
    # solo-learn's backbones have no fc: a network that has its own is not one of them
    if stem is None and (found.forced or adapted.sources.get("fc.weight", "").endswith("fc.weight")):
        stem = "cifar"
    return Marks(
        cifar_stem=stem,
        stem_pool=pool,
        stem_relu=found.adapter.stem_relu,
        heads=_heads(contents, found, adapted.tensors.get("pos_embed")),
    )


def _bolts(contents: Contents) -> tuple[bool, bool] | None:
    """Read lightning-bolts' hyper-parameters first_conv (7x7, not 3x3) and maxpool1 (max-pooling after it)."""
    settings = contents.tree.get("hyper_parameters")
    if not isinstance(settings, Mapping):
        return None
    first_conv, pool = settings.get("first_conv"), settings.get("maxpool1")
    return (first_conv, pool) if isinstance(first_conv, bool) and isinstance(pool, bool) else None


def _heads(contents: Contents, found: Found, positions: Tensor | None) -> int | None:
    """Number of attention heads of MoCo-v3's small transformers: 12, where timm's have 3 (tiny) and 6 (small).

    Their positions are fixed, so a converted file shows them too. solo-learn does the same for MAE.
    """
    if positions is None or positions.ndim != 3 or positions.shape[-1] not in (192, 384):
        return None
    adapter = found.adapter
    if adapter.own:  # its config says with how many heads it was trained
        return None
    fixed = _is_sincos(positions, rows_first=True)
    if not fixed and adapter.columns_first and adapter.is_certain(contents):
        fixed = _is_sincos(positions, rows_first=False)
    return 12 if fixed else adapter.small_vit_heads


def _is_sincos(positions: Tensor, *, rows_first: bool) -> bool:
    """Are positions (1, 1 + side * side, D) the fixed sines and cosines of MoCo-v3 (rows first) or MAE (columns)?"""
    tokens, quarter = positions.shape[1] - 1, positions.shape[2] // 4
    side = round(tokens**0.5)
    if side * side != tokens:
        return False
    index = torch.arange(tokens)
    row, column = index // side, index % side
    frequencies = 10000.0 ** -(torch.arange(quarter) / quarter)
    angles = [torch.outer(place.float(), frequencies) for place in ((row, column) if rows_first else (column, row))]
    fixed = torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)
    return bool(torch.allclose(positions[0, 1:].float(), fixed, atol=2e-3))  # half precision is within 5e-4
