"""What an adapter is: pure functions that bring one format's tensors into torchvision's names.

First the type, then helpers that find a state dict in a file, then the vocabularies: the ways in which people name
the tensors of one and the same backbone.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from finetune_mile.checkpoints.readers import Contents
from finetune_mile.checkpoints.readers.torch_files import leaves
from finetune_mile.core.types import Preprocess
from finetune_mile.networks.resnets import Padding, Stem

Tensors = dict[str, Tensor]
Rename = Callable[[str], str | None]
Vocabulary = Rename  # a name in its language to ours, None for what is no tensor of a backbone

IMAGENET = Preprocess()
# SimCLR's convention: [0, 1] without mean and deviation, a crop, then a bicubic resize.
UNIT_RANGE = Preprocess(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="bicubic", antialias=False)
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile
_WRAPPED = re.compile(rf"^(?:{'|'.join(map(re.escape, _WRAPPERS))})+")
_HOMES = ("state_dict", "model_state_dict", "model")  # where files keep their state dict


class UnknownKey(LookupError):
    """A name that the format does not have: the load stops."""


class InsideBackbone(UnknownKey):
    """An unknown tensor among those of a backbone: without it the features would be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One format. None of the functions changes its argument or reads anything else.

    Names after `rename` are those of `networks/resnets.py` (or of timm's vision transformers), and two groups that are
    dropped unless somebody asks for them: `fc.*`, a classifier that has seen labels, and `proj.*`, the first layer of
    SimCLR-v2's projection head.
    """

    # Why a file is of this format, or None: from its content, never from a file's name.
    recognise: Callable[[Contents], str | None]
    # The tensors that concern this format, flat, in its own names.
    unwrap: Callable[[Contents], Tensors]
    # Own name to ours; None: known and dropped; raises UnknownKey.
    rename: Rename
    # Own name and tensor to torch's layout, say HWIO to OIHW.
    relayout: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor
    # A regular expression for a line of `names_of`; only files that have it are shown to `recognise`.
    mark: str = ""
    method: str = "unknown"
    padding: Padding = "torch"
    preprocess: Preprocess = IMAGENET
    # The form of a 3x3 stem; None: the names are those of two formats with different ones.
    cifar_stem: Stem | None = "cifar"
    # Is there a ReLU after bn1?
    stem_relu: bool = True
    # An export of ours: its config names the network, and its head and projection layer were trained together.
    own: bool = False
    # The file's names are those of the network itself: its tensors stay as they are.
    finished: bool = False
    # Nothing but the tensors of one network, so that a part of the file has no format either.
    plain: bool = False
    # False: formats that pad differently have the same names.
    padding_known: bool = True
    # Whether a recognised file is certainly of this format; False: its names are common ones.
    is_certain: Callable[[Contents], bool] = lambda _: True
    # What no file of this format shows, for the load report.
    assumes: tuple[str, ...] = ()
    # Attention heads of the tiny and the small vision transformer, where they are not timm's.
    small_vit_heads: int | None = None
    # The same where its positions are MoCo-v3's fixed ones; None: timm's, -1: not known.
    fixed_heads: int | None = 12
    # Options of a vision transformer's name that no tensor shows, see networks/vits.py.
    options: Mapping[str, str] = field(default_factory=dict)
    # Are fixed positions of a vision transformer those of MAE (columns first), with 12 heads as MoCo-v3's?
    columns_first: bool = False


def renaming(
    vocabulary: Vocabulary, *, trunks: tuple[str, ...] = ("",), classifier: str = "", dropped: tuple[str, ...] = ()
) -> Rename:
    """The usual `rename`.

    Args:
        vocabulary: the language of the backbone's names.
        trunks: prefixes of the backbone.
        classifier: the module that becomes `fc`.
        dropped: modules and tensors that are known and not needed; they win over `trunks`, not over `classifier`.

    Modules beside the backbone that are not known are dropped too: its features do not need them.
    """
    beside = re.compile(rf"(?:{'|'.join(map(re.escape, dropped))})(?:[./]|$)") if dropped else None

    def rename(key: str) -> str | None:
        trunk = next((trunk for trunk in trunks if key.startswith(trunk)), None)
        key = f"{trunk}{below(trunk, key)}" if trunk else key  # without wrappers behind the prefix
        module, _, leaf = key.rpartition(".")
        if module == classifier and leaf in ("weight", "bias"):
            return f"fc.{leaf}"
        if trunk is None or (beside and beside.match(key)):
            return None
        name = vocabulary(key[len(trunk) :])
        if name is None:
            raise InsideBackbone(key)
        return name

    return rename


def having(unwrap: Callable[[Contents], Tensors], *names: str, says: str) -> Callable[[Contents], str | None]:
    """A simple `recognise`: all these tensors, or first components of names, are there."""

    def recognise(contents: Contents) -> str | None:
        tensors = unwrap(contents)
        return says if {*names} <= tensors.keys() | tops(tensors) else None

    return recognise


# ------------------------------------------------------------------------------------ state dicts


def names_of(contents: Contents) -> str:
    """What marks are searched for, one a line: container, keys of notes and of the top level, paths of tensors."""
    paths = (path for path, _ in leaves(contents.tree))
    return "\n".join([contents.container, *contents.metadata, *contents.tree, *paths])


def tensors_of(mapping: object) -> Tensors:
    """The tensors directly in a mapping, by name; empty for anything else."""
    if not isinstance(mapping, Mapping):
        return {}
    return {k: v for k, v in mapping.items() if isinstance(k, str) and isinstance(v, Tensor)}


def unwrapped(tensors: Tensors) -> Tensors:
    """Take off, again and again, a leading `module.` or `_orig_mod.` that all names share."""
    for wrapper in _WRAPPERS:
        if tensors and all(key.startswith(wrapper) for key in tensors):
            return unwrapped({key.removeprefix(wrapper): value for key, value in tensors.items()})
    return tensors


def state_dict_of(contents: Contents) -> Tensors:
    """The state dict of a torch file: at the top, or under one of the usual names."""
    homes = [tensors_of(contents.tree.get(home)) for home in _HOMES]
    return unwrapped(next(filter(None, homes), tensors_of(contents.tree)))


def in_entry(name: str) -> Callable[[Contents], Tensors]:
    """An `unwrap`: the state dict in one entry of a file."""
    return lambda contents: unwrapped(tensors_of(contents.tree.get(name)))


def in_parts(mapping: Mapping[str, Any], *parts: str) -> Tensors:
    """The tensors of some entries of a mapping, as `entry/name`."""
    return {f"{part}/{k}": v for part in parts for k, v in unwrapped(tensors_of(mapping.get(part))).items()}


def tops(tensors: Mapping[str, object]) -> set[str]:
    return {key.split(".", 1)[0] for key in tensors}


def below(prefix: str, key: str) -> str | None:
    """What follows `prefix` and any wrappers after it, or None where a name begins otherwise."""
    return _WRAPPED.sub("", key[len(prefix) :]) if key.startswith(prefix) else None


# ----------------------------------------------------------------------------------- vocabularies

_BN = r"(?:weight|bias|running_mean|running_var|num_batches_tracked)"
_TORCHVISION = re.compile(
    rf"""
      conv1\.weight | conv1\.[036]\.weight | conv1\.[14]\.{_BN} | bn1\.{_BN}
    | layer\d{{1,3}}\.\d{{1,3}}\.(?:
          conv[123]\.weight | bn[123]\.{_BN}
        | conv2\.(?:conv|down|up)\.weight | conv2\.(?:bn|down_bn)\.{_BN}
        | downsample\.[012]\.{_BN} )
    """,
    re.VERBOSE,
)
_VIT = re.compile(
    r"""
      cls_token | pos_embed | reg_token | patch_embed\.proj\.(?:weight|bias)
    | (?:norm|norm_pre|fc_norm)\.(?:weight|bias)
    | patch_embed\.proj\.(?: [0369]\.weight | (?:1|4|7|10)\.(?:weight|bias|running_mean|running_var|num_batches_tracked)
        | 12\.(?:weight|bias) )  # MoCo-v3's convolutional stem
    | blocks\.\d{1,3}\.(?: (?:norm[12] | attn\.(?:qkv|proj) | mlp\.fc[12] )\.(?:weight|bias) | ls[12]\.gamma )
    """,
    re.VERBOSE,
)
_CONVNEXT = re.compile(
    r"""
      stem\.[01]\.(?:weight|bias) | head\.norm\.(?:weight|bias) | stages\.\d{1,3}\.downsample\.[01]\.(?:weight|bias)
    | stages\.\d{1,3}\.blocks\.\d{1,3}\.(?: (?: conv_dw | norm | mlp\.fc[12] | mlp\.grn )\.(?:weight|bias) | gamma )
    """,
    re.VERBOSE,
)
_SWIN = re.compile(
    r"""
      patch_embed\.(?:proj|norm)\.(?:weight|bias) | norm\.(?:weight|bias)
    | layers\.\d{1,3}\.downsample\.(?:norm\.(?:weight|bias)|reduction\.weight)
    | layers\.\d{1,3}\.blocks\.\d{1,3}\.(?:
          (?: norm[12] | attn\.(?:qkv|proj) | mlp\.fc[12] )\.(?:weight|bias) | attn\.relative_position_bias_table )
    """,
    re.VERBOSE,
)
_SEPARIUS_BLOCK = re.compile(r"net\.([1-4])\.blocks\.(\d+)\.(.+)")

# stem, main branch and shortcut of a block in Separius' names, without and with selective kernels
_SEPARIUS_STEM = {"net.0.0": "conv1", "net.0.1.0": "bn1"}
_SEPARIUS_PLAIN = {
    "projection.shortcut": "downsample.0",
    "projection.bn.0": "downsample.1",
    "net.0": "conv1",
    "net.1.0": "bn1",
    "net.2": "conv2",
    "net.3.0": "bn2",
    "net.4": "conv3",
    "net.5.0": "bn3",
}
_SEPARIUS_SK = {
    "projection.shortcut.2": "downsample.1",
    "projection.bn.0": "downsample.2",
    "net.0": "conv1",
    "net.1.0": "bn1",
    "net.2.main_conv.0": "conv2.conv",
    "net.2.main_conv.1.0": "conv2.bn",
    "net.2.mixing_conv.0": "conv2.down",
    "net.2.mixing_conv.1.0": "conv2.down_bn",
    "net.2.mixing_conv.2": "conv2.up",
    "net.3": "conv3",
    "net.4.0": "bn3",
}
_SEPARIUS_SK_STEM = {
    "net.0.0": "conv1.0",
    "net.0.1.0": "conv1.1",
    "net.0.2": "conv1.3",
    "net.0.3.0": "conv1.4",
    "net.0.4": "conv1.6",
    "net.0.5.0": "bn1",
}
_D2_STEM = {"stem.conv1": "conv1", "stem.conv1.norm": "bn1"}
_D2_BLOCK = {
    "shortcut": "downsample.0",
    "shortcut.norm": "downsample.1",
    **{f"conv{i}": f"conv{i}" for i in (1, 2, 3)},
    **{f"conv{i}.norm": f"bn{i}" for i in (1, 2, 3)},
}


def torchvision(key: str) -> str | None:
    """Names of torchvision, of timm (ResNet-D too) and our own for selective kernels."""
    return key if _TORCHVISION.fullmatch(key) else None


def vit(key: str) -> str | None:
    """Names of timm for a vision transformer, which DINO, MAE and MoCo-v3 use as well; and DINOv2's."""
    name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", key)  # DINOv2 numbers blocks inside of chunks
    name = name.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")
    name = "reg_token" if name == "register_tokens" else name
    return name if _VIT.fullmatch(name) else None


def convnext(key: str) -> str | None:
    """Names of timm for a ConvNeXt, and those of its authors."""
    name = re.sub(r"^downsample_layers\.0\.", "stem.", key)
    name = re.sub(r"^downsample_layers\.(\d+)\.", r"stages.\1.downsample.", name)
    name = re.sub(r"^stages\.(\d+)\.(\d+)\.", r"stages.\1.blocks.\2.", name)
    name = re.sub(r"^norm\.", "head.norm.", name.replace(".dwconv.", ".conv_dw.").replace(".pwconv", ".mlp.fc"))
    name = name.replace(".grn.gamma", ".mlp.grn.weight").replace(".grn.beta", ".mlp.grn.bias")
    return name if _CONVNEXT.fullmatch(name) else None


def swin(key: str) -> str | None:
    """Names of a Swin transformer, timm's and its authors'."""
    return key if _SWIN.fullmatch(key) else None


def torchvision_or_vit(key: str) -> str | None:
    """Names of the networks that libraries with many backbones offer: ResNets, ViTs, ConvNeXt and Swin."""
    return torchvision(key) or vit(key) or convnext(key) or swin(key)


def sequential(first: int) -> Vocabulary:
    """The children of a ResNet in a row: 0 conv1, 1 bn1, from `first` on the four stages.

    `first` is 4 for torchvision's children (2 is the ReLU, 3 the pooling), 3 where the pooling
    was taken out, 2 for lightly's own ResNetGenerator, which also calls the downsample branch
    `shortcut`.
    """

    def rename(key: str) -> str | None:
        index, _, rest = key.partition(".")
        if index in ("0", "1"):
            return torchvision(f"{'conv1' if index == '0' else 'bn1'}.{rest}")
        if not index.isdigit() or not first <= int(index) < first + 4:
            return None
        return generator(f"layer{int(index) - first + 1}.{rest}")

    return rename


def generator(key: str) -> str | None:
    """ResNetGenerator of lightly: torchvision's names but for `shortcut`."""
    return torchvision(re.sub(r"^(layer\d+\.\d+)\.shortcut\.", r"\1.downsample.", key))


def _separius(key: str, stem: dict[str, str], block: dict[str, str]) -> str | None:
    module, _, leaf = key.rpartition(".")
    match = _SEPARIUS_BLOCK.fullmatch(module)
    if match is None:
        return torchvision(f"{stem[module]}.{leaf}") if module in stem else None
    group, index, inner = match.groups()
    return torchvision(f"layer{group}.{index}.{block[inner]}.{leaf}") if inner in block else None


# SimCLR-v2's PyTorch port without and with selective kernels; VISSL and the MILe code have them too.
separius: Vocabulary = partial(_separius, stem=_SEPARIUS_STEM, block=_SEPARIUS_PLAIN)
separius_sk: Vocabulary = partial(_separius, stem=_SEPARIUS_SK_STEM, block=_SEPARIUS_SK)


def detectron2(key: str) -> str | None:
    """Names of detectron2: `stem`, `res2` to `res5`, the norm below its convolution."""
    module, _, leaf = key.rpartition(".")
    if module in _D2_STEM:
        return torchvision(f"{_D2_STEM[module]}.{leaf}")
    match = re.fullmatch(r"res([2-5])\.(\d+)\.(.+)", module)
    if match is None or match[3] not in _D2_BLOCK:
        return None
    return torchvision(f"layer{int(match[1]) - 1}.{match[2]}.{_D2_BLOCK[match[3]]}.{leaf}")


# What the search behind an unknown prefix tries, in this order.
VOCABULARIES: dict[str, Vocabulary] = {
    "torchvision": torchvision,
    "sequential": sequential(4),
    "sequential without pooling": sequential(3),
    "lightly generator, sequential": sequential(2),
    "lightly generator": generator,
    "separius": separius,
    "separius-sk": separius_sk,
    "vit": vit,
    "convnext": convnext,
    "swin": swin,
}
