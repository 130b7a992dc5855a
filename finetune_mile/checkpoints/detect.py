"""Which format a file has, and which network is in it: by content, never by the file's name.

`detect` finds the adapter; `name_network` reads the network from names and shapes, and from what else the file shows,
and compares it with every claim (config, card, --arch).
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from finetune_mile.checkpoints.adapters import ADAPTERS, Adapted, few, rename_all
from finetune_mile.checkpoints.adapters.adapter import Adapter, names_of
from finetune_mile.checkpoints.adapters.behind import (
    TOP,
    behind,
    choose,
    find_trunks,
    from_simclr,
    list_prefixes,
    resolve,
    way,
)
from finetune_mile.checkpoints.init import Located
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.checkpoints.readers.torch_files import leaves
from finetune_mile.checkpoints.sizes import (
    add_options,
    has_shapes,
    merge_claim,
    read_stages,
    read_vit,
    resized_as_authors,
)
from finetune_mile.core.problems import LONGEST_SHOWN, Problem, did_you_mean, inert
from finetune_mile.networks.resnets import DEPTHS, MINI, Arch, Stem, name_arch, parse_arch
from finetune_mile.networks.vits import is_short, join_options, split_options

UNKNOWN = -1  # attention heads
BEHIND_PREFIX = "trunk behind a prefix"
NAMES_ONLY = {  # formats that are the names of a network alone; a config.json says the rest
    *(BEHIND_PREFIX, "torchvision", "vit", "convnext", "swin", "torchvision-vit", "clip-visual", "open-clip"),
    *("hf-clip", "hf-dinov2", "hf-vit", "hf-swin", "hf-convnext", "hf-resnet", "openmmlab-vit"),
}
_ANTIALIASED = {  # timm's networks with the same tensors
    "resnet50": ("resnetaa50", "resnetblur50"),
    "resnet50-d": ("resnetaa50d", "resnetblur50d"),
}
_FIRST = ("conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var")  # of the first stage's width
_UNSEEN = re.compile(r"-nopool|-norelu|-v1|-pool|:heads=\d+$")  # parts of a network's name that no tensor shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """The format of a file."""

    format: str
    why: str
    adapter: Adapter
    contents: Contents  # the file, or the part of it that was asked for
    mapping: dict[str, str] = field(default_factory=dict)  # a prefix that was recognised, and ours
    outside: tuple[str, ...] = ()  # tensors that the asked-for part leaves out
    forced: bool = False  # --format named the format, or `--init FILE::FORMAT`
    arch: str | None = None  # the network, where its own names were recognised


def detect(contents: Contents, located: Located) -> Detected:
    """Find the adapter for a file, or for the one backbone of it that is asked for.

    A format that the user names gives its conventions, and its names if the file has them.
    """
    prefix, format = located.prefix, located.format
    named = None
    if format is not None:
        if format not in ADAPTERS:
            raise Problem(f"--format {format}: unknown; {did_you_mean(format, ADAPTERS)}")
        why = f"--format {format}"
        named = Detected(format=format, why=why, adapter=ADAPTERS[format], contents=contents, forced=True)
    if prefix is not None:
        prefix, part, outside = _part(contents, prefix, located)
        detected = _as_in(named or _recognised(contents), detect(part, replace(located, prefix=None, format=None)))
        why = f"{detected.why}, below {prefix}"
        return replace(
            detected, why=why, outside=outside, mapping={prefix: "", **detected.mapping}, forced=bool(format)
        )
    if named is not None:
        if _explains(named.adapter, contents):
            return named
        return replace(_as_in(named, detect(contents, replace(located, format=None))), why=named.why, forced=True)
    known = _recognised(contents)
    if known is not None:
        explained = _explains(known.adapter, contents)
        if explained or (explained is None and known.adapter.is_certain(contents)):
            return known
    try:
        found = _behind_prefix(contents, located)
    except Problem:
        if known is None:
            raise
        return known  # adapting it says what is wrong
    return found if known is None or _explains(found.adapter, contents) else known


def _recognised(contents: Contents) -> Detected | None:
    names = names_of(contents)
    for name, adapter in ADAPTERS.items():
        why = adapter.recognise(contents) if re.search(adapter.mark, names, re.MULTILINE) else None
        if why is not None:
            return Detected(format=name, why=why, adapter=adapter, contents=contents)
    return None


def _explains(adapter: Adapter, contents: Contents) -> bool | None:
    """Does an adapter know a backbone in the file? None: a part of it. Other faults are told when it is loaded."""
    try:
        names, inside, unknown = rename_all(adapter, adapter.unwrap(contents))
    except Problem:
        return True
    known = adapter.own or any((name or "").startswith(("layer1.", "blocks.")) for name in names.values())
    return None if known and (inside or unknown) else known


def _as_in(complete: Detected | None, part: Detected) -> Detected:
    """Give a part of a file the format and the conventions of the complete file, where that has a format of its own."""
    if complete is None or (complete.adapter.plain and not complete.forced):
        return part
    own = part.adapter
    adapter = replace(
        complete.adapter, recognise=own.recognise, unwrap=own.unwrap, rename=own.rename, relayout=own.relayout,
        stem_relu=own.stem_relu,
    )  # fmt: skip
    return replace(part, format=complete.format, why=complete.why, adapter=adapter)


def _part(contents: Contents, choice: str, located: Located) -> tuple[str, Contents, tuple[str, ...]]:
    """The prefix that was asked for, the tensors below it as a flat file of its own, and the paths of the rest."""
    everything = dict(leaves(contents.tree))
    trunks = list_prefixes(everything)
    for prefix in filter(None, (choice, resolve(choice, everything))):
        for start in ("",) if prefix == TOP else (prefix, f"{prefix}/", f"{prefix}."):
            # a backbone inside the one that was chosen is another one
            others = tuple(each for each in trunks if start in trunks and each != start and each.startswith(start))
            paths = {path: path.startswith(start) and not path.startswith(others) for path in everything}
            if any(paths.values()) and (prefix == TOP or start[-1] in "./"):
                inside = {path[len(start) :]: everything[path] for path, taken in paths.items() if taken}
                rest = tuple(path for path, taken in paths.items() if not taken)
                return prefix, replace(contents, tree=inside, full_names={}, metadata={}), rest
    prefixes = sorted(filter(None, trunks))
    if not prefixes:
        near = few([*map(str, contents.tree)])
        raise Problem(f"{located.source}: no tensor is below {choice!r}; the file has: {near}")
    ways = " or ".join(way(str(located.path), prefix.rstrip("./")) for prefix in prefixes)
    raise Problem(f"{located.source}: no tensor is below {choice!r}; the file has backbones elsewhere: {ways}")


def _behind_prefix(contents: Contents, located: Located) -> Detected:
    paths = dict(leaves(contents.tree))
    language, trunks = find_trunks(paths)
    if not paths:
        raise Problem(f"{located.source}: there is no tensor in this file")
    if not trunks:
        sample = ", ".join(inert(path, LONGEST_SHOWN) for path in sorted(paths)[:3])
        raise Problem(
            f"{located.source}: unknown format, and no ResNet or vision transformer behind any prefix (its "
            f"{len(paths)} tensors are called {sample}, ...). If the names are timm's, say --arch timm:NAME; otherwise "
            "load the network in Python and use finetune_mile.train(init=NETWORK) (docs/python.md). "
            "docs/checkpoints.md lists the formats"
        )
    chosen = choose(trunks, paths)
    if chosen is None:
        ways = " or ".join(way(str(located.path), prefix or TOP) for prefix in sorted(trunks))
        raise Problem(f"{located.source} holds {len(trunks)} backbones; choose one: {ways}")
    prefix, reason = chosen
    nested = any("/" in path[len(prefix) :] for path in trunks[prefix].values())
    return Detected(
        format=BEHIND_PREFIX,
        why=f"{len(trunks[prefix])} tensors are a trunk in {language} names behind {prefix!r}"
        + (f", which is taken because {reason}" if reason else ""),
        adapter=behind(prefix, language, nested=nested),
        contents=contents,
        mapping={prefix: ""},
    )


# ------------------------------------------------------------------------------------ the network


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Properties of a network that none of its tensors shows."""

    cifar_stem: Stem | None = "cifar"  # the form of a 3x3 stem; None: the file does not tell
    stem_pool: bool = True  # max-pooling after a 7x7 stem
    small_pool: bool = False  # max-pooling after a 3x3 stem
    stem_relu: bool = True  # ReLU after bn1
    heads: int | None = None  # attention heads, where they are not those of timm's network of that size
    options: Mapping[str, str] = field(default_factory=dict)  # other options of a vision transformer's name


def name_network(
    contents: Contents,
    detected: Detected,
    adapted: Adapted,
    located: Located,
    *,
    config: str | None,
    options: Mapping[str, str],
) -> tuple[Detected, str]:
    """Read the architecture from the tensors and compare it with every claim: of its config, its card, and --arch.

    Args:
        contents: the complete file, also where only a part of it is loaded.
        detected: its format.
        adapted: the tensors that are loaded, in our names.
        located: where it is, and what is said about it.
        config: the network that its config names.
        options: of a network's name, from its config.

    Returns:
        The format, with other conventions if the architecture implies them; and the network's name.
    """
    source, arch, own = located.source, located.arch, detected.adapter.own
    shapes = {n: tuple(t.shape) for n, t in adapted.tensors.items() if not n.startswith(("fc.", "proj."))}
    given = {**detected.adapter.options, **options}
    if "reg_token" in shapes and given.get("resize") == "offset":
        del given["resize"]  # DINOv2's authors resize the positions of networks with registers as timm does
    if arch is not None and is_short(arch):
        given, arch = merge_claim(arch, given, source=source, shapes=shapes), None
    marks = read_marks(contents, detected, adapted, given)
    said = {"its config": config, "the card": located.card.arch if located.card else None, "--arch": arch}
    claims = {who: claim for who, claim in said.items() if claim is not None}
    if marks.heads == UNKNOWN and claims:
        marks = replace(marks, heads=None)
    # the tensors do not tell timm's networks and those with group norm
    from_config = config is not None and (own or config.startswith("timm:") or "-gn" in config)
    name = (config if from_config else detected.arch) or read_arch(shapes, marks, source=source)
    for who, claim in claims.items():
        if not _agrees(claim, name, shapes):
            advice = "; leave --arch out" if who == "--arch" else ""
            raise Problem(f"{source} holds a {name}, {who} says {claim}{advice}")
        if marks.heads and marks.heads > 0 and "heads=" not in claim and "heads=" not in (arch or ""):
            raise Problem(
                f"{source} holds a {claim}:heads={marks.heads}, {who} says {claim}; "
                f"say --arch {claim}:heads={marks.heads} (or another number)"
            )
        name = add_options(claim, marks.options)
    if name.startswith("timm:") and not own:
        name = resized_as_authors(name)
    shape = parse_arch(name)
    if not claims:
        _check_unseen(name, shape, marks, detected.adapter, located)
    if shape is not None and shape.sk and detected.adapter.padding == "torch":
        detected = replace(detected, adapter=from_simclr(detected.adapter))
    return detected, name


def _agrees(claim: str, name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Can a network that is claimed be the one that the file shows?

    A claim may add to what a file shows beside its tensors, for a file need not show it, but must keep that.
    """
    unseen = [part for part in _UNSEEN.findall(name) if not part.startswith(":")]
    return (_same_tensors(claim, name) or has_shapes(claim, shapes)) and all(part in claim for part in unseen)


def _check_unseen(name: str, shape: Arch | None, marks: Marks, adapter: Adapter, located: Located) -> None:
    """Ask the user where padding, which no tensor shows, is not known and nobody has said which network it is."""
    if marks.cifar_stem is None and "-cifar" in name:
        other, place = name.replace("-cifar", "-cifar2"), str(located.path)
        raise Problem(
            f"{located.source}: a ResNet with a 3x3 stem that does not show its padding. Use --arch {name} "
            f"(padding 1, the usual) or --arch {other} (padding 2, solo-learn's), or --format solo-learn where "
            f"solo-learn made it. Without a flag: {way(place, name)} or {way(place, other)}"
        )
    known = adapter.padding_known or adapter.padding != "torch"
    if shape is not None and shape.project_first and not shape.sk and not known:
        raise Problem(
            f"{located.source} holds a ResNet with a shortcut convolution in layer1.0, as SimCLR's and BYOL's have it. "
            "Each pads in its own way, which no tensor shows. Say whose it is: "
            f"--format tonylins (SimCLR) or --format byol-convert (BYOL), or --arch {name} for torch's own padding"
        )


def is_certain(detected: Detected, contents: Contents) -> bool:
    """Do marks of a file show what made it, so that everything which its tensors do not show is known?"""
    if detected.forced or detected.adapter.own:
        return True
    return detected.format not in NAMES_ONLY and detected.adapter.is_certain(contents)


def assumptions(name: str, short: str | None) -> tuple[str, ...]:
    """What is assumed about a network of this name, each with the way to say otherwise; `short`: --arch, if given."""
    arch = parse_arch(name)
    if arch is None:
        if not name.startswith("timm:vit_"):
            return ("timm's network of that name, its defaults",)
        said = split_options(short)[1] if short else {}
        base, options = split_options(name)
        heads = join_options(base, {**options, "heads": "N"})
        vit = "vit:" + "".join(f"{key}={value}," for key, value in said.items())
        act = options.get("act", "quick_gelu" if "_quickgelu_" in base else "gelu")
        eps = options.get("eps", "1e-05" if "_clip_" in base else "1e-06")
        pooled = "the mean of the patches" if options.get("pool") == "avg" else "the class token"
        other = "" if "pool" in options else f" (the mean of the patches: --arch {vit}pool=avg)"
        instead = "gelu" if act == "quick_gelu" else "quick_gelu"
        texts = {
            "heads": f"attention heads as in {name} (else --arch {heads})",
            "act": f"activation {act} (else, for example, --arch {vit}act={instead})",
            "eps": f"norms before attention and MLP, with epsilon {eps} (another: --arch {vit}eps=N)",
            "pool": f"features are {pooled} after the final norm{other}",
        }
        if base == "timm:vit_giant_patch14_dinov2":  # a gated MLP, which has its own activation
            texts.pop("act")
        return (*(text for key, text in texts.items() if key not in said), "positions of a square grid")
    made = []
    if arch.block == "bottleneck" and not arch.sk and not arch.stride_first:
        made.append(f"stride in the 3x3 convolutions (in the first 1x1: --arch {name}-v1)")
    if arch.stem == "imagenet" and arch.stem_pool:
        made.append(f"3x3 max-pooling after the stem (without: --arch {name}-nopool)")
    elif arch.stem.startswith("cifar"):
        made.append("stride 1 in the 3x3 stem")
        made.append(
            "3x3 max-pooling after it" if arch.small_pool else f"no pooling after it (with: --arch {name}-pool)"
        )
    known = " or ".join(f"--arch timm:{each}" for each in _ANTIALIASED.get(name, ()))
    made.append("no anti-aliasing" + (f" (else {known})" if known else ""))
    made.append("ReLU, and epsilon 1e-5 in the batch norms")
    return (*made, "no dilation", "features are the mean over the last map")


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
    if any(name.startswith(("stages.0.blocks.", "layers.0.blocks.")) for name in shapes):
        return read_stages(shapes, marks.options, source=source)
    if "blocks.0.attn.qkv.weight" in shapes:
        heads = {"heads": str(marks.heads)} if marks.heads else {}
        return read_vit(shapes, {**heads, **marks.options}, source=source)
    blocks = {(int(m[1]), int(m[2])) for name in shapes if (m := re.match(r"layer(\d+)\.(\d+)\.", name))}
    if not blocks:
        raise Problem(f"{source}: layer1.0.conv1.weight is missing, and so is every other block")
    last = dict(sorted(blocks))  # of each stage
    layers = tuple(last.get(stage, -1) + 1 for stage in range(1, max(last) + 1))
    bottleneck = any(".conv3." in name or ".bn3." in name for name in shapes)
    deep = any(name.startswith("conv1.0.") or name.startswith("conv1.3.") for name in shapes)
    small = shapes.get("conv1.weight", (0, 0, 7, 7))[-1] == 3
    cifar_stem = marks.cifar_stem or "cifar"
    if small and (layers, _width(shapes)) == (MINI.layers, MINI.width):
        cifar_stem = MINI.stem
    groups, inner = _inside(shapes) if bottleneck else (1, 64)
    arch = Arch(
        block="bottleneck" if bottleneck else "basic",
        layers=layers,
        width=_width(shapes),
        groups=groups,
        inner=inner,
        stem="deep" if deep else cifar_stem if small else "imagenet",
        sk=any(".conv2.down." in name or ".conv2.conv." in name for name in shapes),
        pooled_shortcut=any(".downsample.2." in name for name in shapes),
        project_first=not bottleneck and any(n.startswith("layer1.0.downsample.") for n in shapes),
        stem_pool=marks.stem_pool or small,
        small_pool=marks.small_pool and small,
        stem_relu=marks.stem_relu,
    )
    if not any(name.endswith(".running_mean") for name in shapes):
        raise Problem(f"{source}: no batch norm has running statistics; nets with other norms need --arch timm:NAME")
    try:
        return name_arch(arch)
    except LookupError as error:
        known = ", ".join(f"ResNet-{depth} {shape[1]}" for depth, shape in DEPTHS.items())
        raise Problem(
            f"{source}: a ResNet of {error} is not supported ({known}; width 64 times n); "
            "if timm has this network, say --arch timm:NAME"
        ) from error


def _width(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Channels of the first stage, by majority: a damaged tensor does not mislead."""
    votes = Counter(shapes[name][0] for name in _FIRST if shapes.get(name))
    return votes.most_common(1)[0][0] if votes else 64


def _inside(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Groups of the 3x3 convolutions in bottlenecks and channels of a group for 64 of the first stage, by majority."""
    votes: Counter[tuple[int, int]] = Counter()
    width = _width(shapes)
    for name, shape in shapes.items():
        match = re.fullmatch(r"layer(\d+)\.\d+\.conv2\.weight", name)
        channels = shapes.get(f"{name.removesuffix('conv2.weight')}bn2.weight", (0,))[0]
        if match and len(shape) == 4 and channels and channels % shape[1] == 0:
            votes[channels // shape[1], shape[1] * 64 // (width * 2 ** (int(match[1]) - 1))] += 1
    return votes.most_common(1)[0][0] if votes else (1, 64)


# ------------------------------------------------------------------------- beside names and shapes


def read_marks(contents: Contents, detected: Detected, adapted: Adapted, options: Mapping[str, str]) -> Marks:
    """Read the marks of a complete file; arguments as in `name_network`."""
    stem, pool, small_pool = detected.adapter.cifar_stem, True, False
    positions = adapted.tensors.get("pos_embed")
    if not detected.forced and not detected.adapter.is_certain(contents):
        stem = None  # many people call their modules backbone and classifier
    settings = contents.tree.get("hyper_parameters")
    if isinstance(settings, Mapping):  # lightning-bolts: first_conv (7x7, not 3x3), maxpool1 (max-pooling after it)
        large, pooled = settings.get("first_conv"), settings.get("maxpool1")
        kernel = adapted.tensors["conv1.weight"].shape[-1] if "conv1.weight" in adapted.tensors else 7
        if isinstance(large, bool) and isinstance(pooled, bool) and large == (kernel == 7):
            stem, pool, small_pool = "cifar", pooled or not large, pooled and not large
    # solo-learn's backbones have no fc: a network that has its own is not one of them
    if stem is None and (detected.forced or adapted.sources.get("fc.weight", "").endswith("fc.weight")):
        stem = "cifar"
    return Marks(
        cifar_stem=stem,
        stem_pool=pool,
        small_pool=small_pool,
        stem_relu=detected.adapter.stem_relu,
        heads=None if positions is None or "heads" in options else _heads(contents, detected, positions),
        options=options,
    )


def _heads(contents: Contents, detected: Detected, positions: Tensor) -> int | None:
    """Number of attention heads of MoCo-v3's small transformers: 12, where timm's have 3 (tiny) and 6 (small).

    Their positions are fixed, so a converted file shows them too. solo-learn does the same for MAE, but others do not:
    UNKNOWN where a file has MAE's positions and does not show that it is solo-learn's.
    """
    if positions.ndim != 3 or positions.shape[-1] not in (192, 384):
        return None
    adapter = detected.adapter
    if adapter.own:  # its config says with how many heads it was trained
        return None
    fixed = _is_sincos(positions, rows_first=True)
    if fixed and adapter.fixed_heads != 12:
        return adapter.fixed_heads
    if not fixed and adapter.columns_first and adapter.is_certain(contents):
        fixed = _is_sincos(positions, rows_first=False)
    if not fixed and adapter.small_vit_heads is None and _is_sincos(positions, rows_first=False):
        return UNKNOWN
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
