"""The ways in which people name the tensors of one and the same trunk.

A vocabulary is a pure function: a name in its language to ours, or None for a name that is no
trunk tensor.
"""

from __future__ import annotations

import re

from finetune_mile.checkpoints.adapters.adapter import Vocabulary

_BN = r"(?:weight|bias|running_mean|running_var|num_batches_tracked)"
_TORCHVISION = re.compile(
    rf"""
      conv1\.weight | conv1\.[036]\.weight | conv1\.[14]\.{_BN} | bn1\.{_BN}
    | layer\d+\.\d+\.(?:
          conv[123]\.weight | bn[123]\.{_BN}
        | conv2\.(?:conv|down|up)\.weight | conv2\.(?:bn|down_bn)\.{_BN}
        | downsample\.[012]\.{_BN} )
    """,
    re.VERBOSE,
)
_VIT = re.compile(
    r"""
      cls_token | pos_embed | patch_embed\.proj\.(?:weight|bias) | norm\.(?:weight|bias)
    | blocks\.\d+\.(?: norm[12] | attn\.(?:qkv|proj) | mlp\.fc[12] )\.(?:weight|bias)
    """,
    re.VERBOSE,
)
_SEPARIUS_BLOCK = re.compile(r"net\.([1-4])\.blocks\.(\d+)\.(.+)")

# main branch and shortcut of a block in Separius' names, without and with selective kernels
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
_SEPARIUS_STEM = {"net.0.0": "conv1", "net.0.1.0": "bn1"}
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
    """Names of timm for a vision transformer, which DINO and MoCo-v3 use as well."""
    return key if _VIT.fullmatch(key) else None


def torchvision_or_vit(key: str) -> str | None:
    """For libraries that take either trunk."""
    return torchvision(key) or vit(key)


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


def separius(key: str) -> str | None:
    """SimCLR-v2's PyTorch port without selective kernels; VISSL and the MILe code have it too."""
    return _separius(key, _SEPARIUS_STEM, _SEPARIUS_PLAIN)


def separius_sk(key: str) -> str | None:
    """The same port with selective kernels."""
    return _separius(key, _SEPARIUS_SK_STEM, _SEPARIUS_SK)


def _separius(key: str, stem: dict[str, str], block: dict[str, str]) -> str | None:
    module, _, leaf = key.rpartition(".")
    found = _SEPARIUS_BLOCK.fullmatch(module)
    if found is None:
        return torchvision(f"{stem[module]}.{leaf}") if module in stem else None
    group, index, inner = found.groups()
    return torchvision(f"layer{group}.{index}.{block[inner]}.{leaf}") if inner in block else None


def detectron2(key: str) -> str | None:
    """Names of detectron2: `stem`, `res2` to `res5`, the norm below its convolution."""
    module, _, leaf = key.rpartition(".")
    if module in _D2_STEM:
        return torchvision(f"{_D2_STEM[module]}.{leaf}")
    found = re.fullmatch(r"res([2-5])\.(\d+)\.(.+)", module)
    if found is None or found[3] not in _D2_BLOCK:
        return None
    return torchvision(f"layer{int(found[1]) - 1}.{found[2]}.{_D2_BLOCK[found[3]]}.{leaf}")


VOCABULARIES: dict[str, Vocabulary] = {
    "torchvision": torchvision,
    "sequential": sequential(4),
    "sequential without pooling": sequential(3),
    "lightly generator, sequential": sequential(2),
    "lightly generator": generator,
    "separius": separius,
    "separius-sk": separius_sk,
    "vit": vit,
}
"""What the search behind an unknown prefix tries, in this order."""
