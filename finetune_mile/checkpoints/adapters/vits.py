"""Vision transformers, ConvNeXt and Swin in the names of their own repositories, of torchvision, CLIP and transformers.

Names after `rename` are timm's. Query, key and value in three tensors are `attn.q`, `attn.k`, `attn.v` until `finish`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from finetune_mile.checkpoints.adapters.adapter import (
    Adapter,
    InsideBackbone,
    Tensors,
    UnknownKey,
    Vocabulary,
    convnext,
    in_entry,
    renaming,
    state_dict_of,
    swin,
    tensors_of,
    torchvision,
    unwrapped,
    vit,
)
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.core.types import Preprocess

_BICUBIC = Preprocess(interpolation="bicubic")
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_CLIP = Preprocess(mean=_CLIP_MEAN, std=_CLIP_STD, interpolation="bicubic", crop=1.0)
_ANCHORS = {"pos_embed", "blocks.0.attn.qkv.weight"}
_MAE_DECODER = ("mask_token", "decoder_embed", "decoder_pos_embed", "decoder_blocks", "decoder_norm", "decoder_pred")
# what pre-training leaves beside a backbone: tokens for masked patches, MAE's decoder
_DROPPED = ("head", "masked_embed", *_MAE_DECODER)


def _has(weights: Tensors, vocabulary: Vocabulary, anchors: set[str], prefixes: tuple[str, ...] = ("",)) -> str | None:
    """The first prefix behind which these names of ours are."""
    for prefix in prefixes:
        names = {vocabulary(key.removeprefix(prefix)) for key in weights if key.startswith(prefix)}
        if anchors <= names:
            return prefix
    return None


def _named(vocabulary: Vocabulary, anchors: set[str], says: str) -> Callable[[Contents], str | None]:
    """A `recognise`: the state dict has these names of ours."""
    return lambda contents: None if _has(state_dict_of(contents), vocabulary, anchors) is None else f"names of {says}"


# ------------------------------------------------------- plain names: timm, DINO, iBOT, MAE, DeiT; DINOv2


VIT = Adapter(
    recognise=_named(vit, _ANCHORS, "a vision transformer"),
    unwrap=state_dict_of,
    rename=renaming(vit, classifier="head", dropped=_DROPPED),
    method="vit",
    plain=True,
    mark=r"blocks\.",
)


def _is_mae(contents: Contents) -> str | None:
    weights = state_dict_of(contents)
    if "decoder_embed.weight" not in weights or _has(weights, vit, _ANCHORS) is None:
        return None
    return "a vision transformer beside decoder_*"


MAE = Adapter(
    recognise=_is_mae,
    unwrap=state_dict_of,
    rename=renaming(vit, dropped=_DROPPED),
    method="mae",
    preprocess=_BICUBIC,
    options={"resize": "plain"},
    mark="decoder_embed",
)

_DINOV2_TRUNKS = ("teacher.backbone.", "backbone.", "")


def _dinov2(contents: Contents) -> Tensors:
    """DINOv2's released backbones are flat; its training writes `teacher`, or `model` with teacher and student."""
    return unwrapped(tensors_of(contents.tree.get("teacher"))) or state_dict_of(contents)


def _is_dinov2(contents: Contents) -> str | None:
    weights = _dinov2(contents)
    for prefix in _DINOV2_TRUNKS:
        anchors = {*_ANCHORS, "blocks.0.ls1.gamma"}
        if f"{prefix}mask_token" in weights and _has(weights, vit, anchors, (prefix,)) is not None:
            return f"a vision transformer with layer scale beside {prefix}mask_token"
    return None


def _rename_dinov2(key: str) -> str | None:
    prefix = next(prefix for prefix in _DINOV2_TRUNKS if key.startswith(prefix))
    if key == f"{prefix}mask_token":
        return None
    name = vit(key.removeprefix(prefix))
    beside = ("teacher", "student", "dino_head", "ibot_head", "dino_loss", "ibot_patch_loss")
    if name is None and (prefix or key.split(".")[0] not in beside):
        raise UnknownKey(key)
    return name


DINOV2 = Adapter(
    recognise=_is_dinov2,
    unwrap=_dinov2,
    rename=_rename_dinov2,
    method="dinov2",
    preprocess=_BICUBIC,
    options={"resize": "offset"},
    mark="mask_token",
)


_msn_target = in_entry("target_encoder")


def _is_msn(contents: Contents) -> str | None:
    weights = _msn_target(contents)
    both = isinstance(contents.tree.get("encoder"), Mapping) and "prototypes" in contents.tree
    found = both and _has(weights, vit, _ANCHORS) is not None
    return "entries encoder, target_encoder and prototypes" if found else None


# its evaluation uses target_encoder; `fc` is the projection head
MSN = Adapter(
    recognise=_is_msn, unwrap=_msn_target, rename=renaming(vit, dropped=("fc", "pred", "head")), method="msn",
    mark="^target_encoder$",
)  # fmt: skip

# ---------------------------------------------------------------------- torchvision, OpenMMLab, CLIP


def _substitute(rules: tuple[tuple[str, str], ...], known: Vocabulary) -> Vocabulary:
    """A vocabulary by regular expressions on complete names; the first that fits is used."""
    compiled = [(re.compile(pattern), new) for pattern, new in rules]

    def rename(key: str) -> str | None:
        for pattern, new in compiled:
            if pattern.fullmatch(key):
                return known(pattern.sub(new, key))
        return None

    return rename


def _vit_or_parts(key: str) -> str | None:
    """Names of timm, and those for `finish`."""
    return key if re.fullmatch(r"(?:layers\.\d+\.)?blocks\.\d+\.attn\.[qkv]\.(?:weight|bias)", key) else vit(key)


_torchvision_vit = _substitute(
    (
        (r"class_token", "cls_token"),
        (r"conv_proj\.(\w+)", r"patch_embed.proj.\1"),
        (r"encoder\.pos_embedding", "pos_embed"),
        (r"encoder\.layers\.encoder_layer_(\d+)\.ln_([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_(\w+)", r"blocks.\1.attn.qkv.\2"),
        (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
        (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:linear_1|0)\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:linear_2|3)\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (r"encoder\.ln\.(\w+)", r"norm.\1"),
    ),
    vit,
)

TORCHVISION_VIT = Adapter(
    recognise=_named(_torchvision_vit, _ANCHORS, "torchvision's vision transformer"),
    unwrap=state_dict_of,
    rename=renaming(_torchvision_vit, classifier="heads.head", dropped=("heads",)),
    method="torchvision",
    mark="encoder_layer_0",
)

_openmmlab = _substitute(
    (
        (r"(cls_token|pos_embed)", r"\1"),
        (r"patch_embed\.projection\.(\w+)", r"patch_embed.proj.\1"),
        (r"pre_norm\.(\w+)", r"norm_pre.\1"),
        (r"layers\.(\d+)\.ln([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (r"layers\.(\d+)\.attn\.(qkv|proj)\.(\w+)", r"blocks.\1.attn.\2.\3"),
        (r"layers\.(\d+)\.(?:attn|ffn)\.gamma([12])\.weight", r"blocks.\1.ls\2.gamma"),
        (r"layers\.(\d+)\.ffn\.(?:layers\.0\.0|w12)\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (r"layers\.(\d+)\.ffn\.(?:layers\.1|w3)\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (r"ln1\.(\w+)", r"norm.\1"),
        (r"ln2\.(\w+)", r"fc_norm.\1"),  # after the mean of the patches
    ),
    vit,
)


def _rename_openmmlab(key: str) -> str | None:
    if key in ("head.fc.weight", "head.fc.bias"):
        return key.removeprefix("head.")
    name = _openmmlab(key.removeprefix("backbone."))
    if name is None and key.startswith(("backbone.", "layers.", "patch_embed.")):
        raise InsideBackbone(key)
    return name


def _openmmlab_vit(mark: str, says: str, fixed_heads: int | None) -> Adapter:
    """MMSelfSup's and MMPretrain's vision transformer, beside tensors whose names begin with `mark`."""

    def recognise(contents: Contents) -> str | None:
        weights = state_dict_of(contents)
        found = _has(weights, _openmmlab, _ANCHORS, ("backbone.", ""))
        if found is None or not any(key.startswith(mark) for key in weights):
            return None
        return f"names of OpenMMLab's vision transformer{says}"

    return Adapter(
        recognise=recognise,
        unwrap=state_dict_of,
        rename=_rename_openmmlab,
        method="openmmlab",
        preprocess=_BICUBIC,
        options={"resize": "plain"},
        fixed_heads=fixed_heads,
        mark=r"layers\.0\.attn\.qkv\.",
    )


# All of them have MoCo-v3's fixed positions; only MoCo-v3's small transformer has 12 heads.
OPENMMLAB_MAE = _openmmlab_vit("neck.decoder_", " beside MAE's decoder", None)
OPENMMLAB_MOCO_V3 = _openmmlab_vit("momentum_encoder.", " beside MoCo-v3's momentum_encoder", 12)
OPENMMLAB_VIT = _openmmlab_vit("", "", -1)

_clip = _substitute(
    (
        (r"class_embedding", "cls_token"),
        (r"positional_embedding", "pos_embed"),
        (r"conv1\.weight", "patch_embed.proj.weight"),
        (r"ln_pre\.(\w+)", r"norm_pre.\1"),
        (r"ln_post\.(\w+)", r"norm.\1"),
        (r"transformer\.resblocks\.(\d+)\.ln_([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(\w+)", r"blocks.\1.attn.qkv.\2"),
        (r"transformer\.resblocks\.(\d+)\.attn\.out_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
        (r"transformer\.resblocks\.(\d+)\.mlp\.c_fc\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (r"transformer\.resblocks\.(\d+)\.mlp\.c_proj\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
    ),
    vit,
)
_CLIP_ANCHORS = {*_ANCHORS, "norm_pre.weight"}
_CLIP_SCALARS = ("input_resolution", "context_length", "vocab_size")


def _is_clip(contents: Contents) -> str | None:
    found = _has(state_dict_of(contents), _clip, _CLIP_ANCHORS, ("visual.",))
    return None if found is None else "names of CLIP's image network below visual."


def _is_openai(contents: Contents) -> str | None:
    """OpenAI's files keep three numbers of the model beside the weights; open_clip's do not."""
    why = _is_clip(contents)
    return f"{why}, beside input_resolution" if why and set(_CLIP_SCALARS) <= state_dict_of(contents).keys() else None


def _shaped(name: str, tensor: Tensor) -> Tensor:
    if name == "cls_token" and tensor.ndim == 1:
        return tensor.view(1, 1, -1)
    if name == "pos_embed" and tensor.ndim == 2:
        return tensor.unsqueeze(0)
    if ".grn." in name:
        return tensor.flatten()
    return tensor


OPEN_CLIP = Adapter(
    recognise=_is_clip,
    unwrap=state_dict_of,
    rename=renaming(_clip, trunks=("visual.",), dropped=("visual.proj",)),  # the text network is beside it
    method="clip",
    preprocess=_CLIP,
    mark=r"ln_pre\.",
)
OPENAI_CLIP = replace(OPEN_CLIP, recognise=_is_openai, options={"act": "quick_gelu"})
CLIP_VISUAL = replace(
    OPEN_CLIP, recognise=_named(_clip, _CLIP_ANCHORS, "CLIP's image network"), rename=renaming(_clip, dropped=("proj",))
)

# ------------------------------------------------------- ConvNeXt and Swin, in timm's and their own names

CONVNEXT = Adapter(
    recognise=_named(convnext, {"stem.0.weight", "stages.0.blocks.0.conv_dw.weight"}, "a ConvNeXt"),
    unwrap=state_dict_of,
    rename=renaming(convnext, classifier="head.fc", dropped=("head.fc", "head.weight", "head.bias")),
    method="convnext",
    plain=True,
    preprocess=_BICUBIC,
    mark="conv_dw|dwconv",
)
_SWIN_ANCHORS = {"patch_embed.proj.weight", "layers.0.blocks.0.attn.relative_position_bias_table"}
SWIN = Adapter(
    recognise=_named(swin, _SWIN_ANCHORS, "a Swin transformer"),
    unwrap=state_dict_of,
    rename=renaming(swin, classifier="head.fc", dropped=("head",)),
    method="swin",
    plain=True,
    preprocess=_BICUBIC,
    mark="relative_position_bias_table",
)

# ------------------------------------------------------------------ transformers: `save_pretrained` folders

_MODELS = re.compile(
    r"(?:vit|deit|dinov2|dinov2_with_registers|vision_model|convnext|convnextv2|swin|resnet|ijepa)\.(?=embe|enc|lay|p)"
)
_BESIDE = re.compile(
    r"(?:classifier|cls_classifier|distillation_classifier|pooler|decoder|text_model|text_projection|visual_projection|"
    r"logit_scale|embeddings\.mask_token|.*relative_position_index|.*position_ids)(?:\.|$)"
)
_LAYER = r"encoder\.layers?\.(\d+)\."
_hf_vit = _substitute(
    (
        (r"embeddings\.(?:cls_token|class_embedding)", "cls_token"),
        (r"embeddings\.(?:register_tokens|distillation_token)", "reg_token"),
        (r"embeddings\.(?:position_embeddings|position_embedding\.weight)", "pos_embed"),
        (r"embeddings\.(?:patch_embeddings\.projection|patch_embedding)\.(\w+)", r"patch_embed.proj.\1"),
        (rf"{_LAYER}attention\.attention\.([qkv])(?:uery|ey|alue)\.(\w+)", r"blocks.\1.attn.\2.\3"),
        (rf"{_LAYER}self_attn\.([qkv])_proj\.(\w+)", r"blocks.\1.attn.\2.\3"),
        (rf"{_LAYER}(?:attention\.output\.dense|self_attn\.out_proj)\.(\w+)", r"blocks.\1.attn.proj.\2"),
        (rf"{_LAYER}(?:intermediate\.dense|mlp\.fc1|mlp\.weights_in)\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (rf"{_LAYER}(?:output\.dense|mlp\.fc2|mlp\.weights_out)\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (rf"{_LAYER}(?:layernorm_before|norm1|layer_norm1)\.(\w+)", r"blocks.\1.norm1.\2"),
        (rf"{_LAYER}(?:layernorm_after|norm2|layer_norm2)\.(\w+)", r"blocks.\1.norm2.\2"),
        (rf"{_LAYER}layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
        (r"(?:layernorm|post_layernorm)\.(\w+)", r"norm.\1"),
        (r"pre_layrnorm\.(\w+)", r"norm_pre.\1"),
    ),
    _vit_or_parts,
)
_STAGE = r"encoder\.stages\.(\d+)\."
_hf_convnext = _substitute(
    (
        (r"embeddings\.patch_embeddings\.(\w+)", r"stem.0.\1"),
        (r"embeddings\.layernorm\.(\w+)", r"stem.1.\1"),
        (rf"{_STAGE}downsampling_layer\.([01])\.(\w+)", r"stages.\1.downsample.\2.\3"),
        (rf"{_STAGE}layers\.(\d+)\.dwconv\.(\w+)", r"stages.\1.blocks.\2.conv_dw.\3"),
        (rf"{_STAGE}layers\.(\d+)\.layernorm\.(\w+)", r"stages.\1.blocks.\2.norm.\3"),
        (rf"{_STAGE}layers\.(\d+)\.pwconv([12])\.(\w+)", r"stages.\1.blocks.\2.mlp.fc\3.\4"),
        (rf"{_STAGE}layers\.(\d+)\.grn\.(\w+)", r"stages.\1.blocks.\2.mlp.grn.\3"),
        (rf"{_STAGE}layers\.(\d+)\.layer_scale_parameter", r"stages.\1.blocks.\2.gamma"),
        (r"layernorm\.(\w+)", r"head.norm.\1"),
    ),
    convnext,
)
_BLOCK = r"encoder\.layers\.(\d+)\.blocks\.(\d+)\."
_hf_swin = _substitute(
    (
        (r"embeddings\.patch_embeddings\.projection\.(\w+)", r"patch_embed.proj.\1"),
        (r"embeddings\.norm\.(\w+)", r"patch_embed.norm.\1"),
        (rf"{_BLOCK}attention\.self\.([qkv])(?:uery|ey|alue)\.(\w+)", r"layers.\1.blocks.\2.attn.\3.\4"),
        (
            rf"{_BLOCK}attention\.self\.relative_position_bias_table",
            r"layers.\1.blocks.\2.attn.relative_position_bias_table",
        ),
        (rf"{_BLOCK}attention\.output\.dense\.(\w+)", r"layers.\1.blocks.\2.attn.proj.\3"),
        (rf"{_BLOCK}intermediate\.dense\.(\w+)", r"layers.\1.blocks.\2.mlp.fc1.\3"),
        (rf"{_BLOCK}output\.dense\.(\w+)", r"layers.\1.blocks.\2.mlp.fc2.\3"),
        (rf"{_BLOCK}layernorm_before\.(\w+)", r"layers.\1.blocks.\2.norm1.\3"),
        (rf"{_BLOCK}layernorm_after\.(\w+)", r"layers.\1.blocks.\2.norm2.\3"),
        (r"encoder\.layers\.(\d+)\.downsample\.(norm|reduction)\.(\w+)", r"layers.\1.downsample.\2.\3"),
        (r"layernorm\.(\w+)", r"norm.\1"),
    ),
    lambda key: _vit_or_parts(key) or swin(key),
)


def _hf_resnet(key: str) -> str | None:
    kinds = {"convolution": ("conv1", "downsample.0"), "normalization": ("bn1", "downsample.1")}
    stem = re.fullmatch(r"embedder\.embedder\.(convolution|normalization)\.(\w+)", key)
    if stem:
        return torchvision(f"{kinds[stem[1]][0]}.{stem[2]}")
    block = re.fullmatch(
        rf"{_STAGE}layers\.(\d+)\.(?:layer\.([012])|shortcut)\.(convolution|normalization)\.(\w+)", key
    )
    if block is None:
        return None
    stage, number, layer, kind, leaf = block.groups()
    inner = kinds[kind][1] if layer is None else f"{'conv' if kind == 'convolution' else 'bn'}{int(layer) + 1}"
    return torchvision(f"layer{int(stage) + 1}.{number}.{inner}.{leaf}")


def _transformers(vocabulary: Vocabulary, anchors: set[str], says: str, classifier: str = "") -> Adapter:
    def inner(key: str) -> str | None:
        return vocabulary(_MODELS.sub("", key, count=1))

    def rename(key: str) -> str | None:
        module, _, leaf = key.rpartition(".")
        if module == classifier and leaf in ("weight", "bias"):
            return f"fc.{leaf}"
        name = inner(key)
        if name is None and not _BESIDE.match(_MODELS.sub("", key, count=1)) and not _BESIDE.match(key):
            raise UnknownKey(key)
        return name

    recognise = _named(inner, anchors, f"transformers' {says}")
    return Adapter(recognise=recognise, unwrap=state_dict_of, rename=rename, method="transformers", mark=r"encoder\.")


_PARTS = {"pos_embed", "blocks.0.attn.q.weight"}
HF_CLIP = _transformers(_hf_vit, {*_PARTS, "norm_pre.weight"}, "CLIP")
HF_DINOV2 = _transformers(_hf_vit, {*_PARTS, "blocks.0.ls1.gamma"}, "DINOv2")  # its classifier sees two tokens
HF_VIT = _transformers(_hf_vit, _PARTS, "ViT", classifier="classifier")
HF_SWIN = _transformers(_hf_swin, {"layers.0.blocks.0.attn.q.weight"}, "Swin", classifier="classifier")
HF_CONVNEXT = _transformers(_hf_convnext, {"stages.0.blocks.0.conv_dw.weight"}, "ConvNeXt", classifier="classifier")
HF_RESNET = _transformers(_hf_resnet, {"conv1.weight", "layer1.0.conv1.weight"}, "ResNet", classifier="classifier.1")

# ------------------------------------------------------------------------------- after the renaming


def finish(tensors: Tensors) -> Tensors:
    """What concerns several tensors of a backbone at once; other tensors stay.

    Query, key and value become one tensor. With registers, timm keeps no position for the class token: DINOv2's is
    added to the token. Swin's authors downsample at the end of a stage, timm at the beginning of the next.
    """
    new = {name: _shaped(name, tensor) for name, tensor in tensors.items()}
    for name in [name for name in new if re.search(r"attn\.q\.(weight|bias)$", name)]:
        parts = [re.sub(r"attn\.q\.", f"attn.{part}.", name) for part in "qkv"]
        if all(part in new for part in parts) and len({new[part].shape for part in parts}) == 1:
            new[re.sub(r"attn\.q\.", "attn.qkv.", name)] = torch.cat([new.pop(part) for part in parts])
    token, positions, registers = new.get("cls_token"), new.get("pos_embed"), new.get("reg_token")
    if token is not None and positions is not None and registers is not None and positions.ndim == registers.ndim == 3:
        tokens, others = positions.shape[1] - 1, registers.shape[1]
        squares = [round(max(count, 0) ** 0.5) ** 2 == count > 0 for count in (tokens, tokens - others)]
        if squares == [True, False] and others > 1:  # two squares: the size cannot be read, see sizes.py
            new["cls_token"], new["pos_embed"] = token + positions[:, :1], positions[:, 1:]
    if any(name.startswith("layers.0.downsample.") for name in new):
        later = r"layers\.(\d+)\.downsample\."
        new = {re.sub(later, lambda m: f"layers.{int(m[1]) + 1}.downsample.", name): t for name, t in new.items()}
    return new
