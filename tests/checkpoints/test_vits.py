"""Vision transformers, ConvNeXt and Swin as timm, torchvision and transformers write them, with exact features."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torchvision
import upstream
from shortcuts import SHORT_MILE, refused
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torch.nn import functional

import finetune_mile
from finetune_mile.cli import main
from finetune_mile.core.problems import Problem
from finetune_mile.networks.any_size import resample
from finetune_mile.networks.heads import build
from finetune_mile.networks.vits import exported_arch

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
WINDOWS = {"img_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}


def make(name: str = "vit_base_patch16_224", **changes: Any) -> nn.Module:
    """A tiny network of timm with random numbers everywhere, norms and layer scale included."""
    network: nn.Module = timm.create_model(name, **{"num_classes": 3, **changes})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return network.eval()


def features(network: nn.Module, size: int) -> Tensor:
    """The pooled features (2, D) of one of timm's networks."""
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return network.forward_head(network.forward_features(images), pre_logits=True)  # type: ignore[operator]


def loaded(network: nn.Module, size: int) -> Tensor:
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return network(images)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------- flat files, sizes of all kinds


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, "img=32,patch=8,dim=64,depth=2,heads=4"),
        ({"mlp_ratio": 2.5}, "mlp=2.5,heads=4"),
        ({"global_pool": "avg"}, "pool=avg,heads=4"),
        ({"global_pool": "avg", "class_token": False}, "cls=0,pool=avg"),
        ({"global_pool": "avg", "class_token": False, "fc_norm": False}, "cls=0,pool=avg,fcnorm=0"),
        ({"init_values": 1.0}, ""),
        ({"init_values": 1.0, "no_embed_class": True}, "embed=0"),
        ({"init_values": 1.0, "reg_tokens": 4, "no_embed_class": True}, ""),
        ({"reg_tokens": 2, "no_embed_class": True}, "reg=2"),
        ({"reg_tokens": 3, "global_pool": "avg"}, "reg=3"),
    ],
)  # fmt: skip
def test_a_transformer_without_a_name_is_built_from_its_sizes(
    changes: dict[str, Any], options: str, tmp_path: Path
) -> None:
    network = make(**{**SIZES, **changes})
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    found = finetune_mile.load(str(tmp_path / "vit.pth"), arch="vit:heads=4")
    assert set(options.split(",") if options else ()) <= set(found.report.arch.split(":")[-1].split(","))
    torch.testing.assert_close(loaded(found, 32), features(network, 32), rtol=0, atol=1e-6)
    assert found.card.preprocess.size == 32
    assert found.report.classifier == 3


def test_the_number_of_heads_is_asked_for_and_every_printed_answer_loads(tmp_path: Path) -> None:
    networks = {heads: make(**{**SIZES, "num_heads": heads}) for heads in (1, 2)}
    torch.save(networks[2].state_dict(), tmp_path / "vit.pth")
    with refused("attention heads") as caught:
        finetune_mile.load(str(tmp_path / "vit.pth"))
    answers = re.findall(r"--arch (vit:heads=(\d+))", str(caught.value))
    assert len(answers) == 2
    for arch, heads in answers:
        found = finetune_mile.load(str(tmp_path / "vit.pth"), arch=arch)
        networks[int(heads)].load_state_dict(networks[2].state_dict())
        torch.testing.assert_close(loaded(found, 32), features(networks[int(heads)], 32), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({"act_layer": "quick_gelu"}, "vit:heads=4,act=quick_gelu"),
        ({"norm_layer": partial(nn.LayerNorm, eps=0.1)}, "vit:heads=4,eps=N"),
        ({"global_pool": "avg", "fc_norm": False}, "vit:heads=4,pool=avg"),
    ],
)
def test_an_answer_about_the_heads_leaves_the_other_assumptions(
    changes: dict[str, Any], way: str, tmp_path: Path
) -> None:
    network = make(**SIZES, **changes)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    report = finetune_mile.load(str(tmp_path / "vit.pth"), arch="vit:heads=4").report
    assert not report.certain
    assert f"--arch {way})" in " ".join(report.assumed)
    assert "positions of a square grid" in report.assumed
    assert not any("attention heads" in text for text in report.assumed)
    found = finetune_mile.load(str(tmp_path / "vit.pth"), arch=way.replace("eps=N", "eps=0.1"))
    torch.testing.assert_close(loaded(found, 32), features(network, 32), rtol=0, atol=1e-6)


def test_the_names_of_a_library_do_not_show_heads_and_activation(tmp_path: Path) -> None:
    """torchvision's file, transformers' without its config, and a transformer that a user trained with lightly."""
    other = torchvision.models.VisionTransformer(32, 8, 1, 4, 192, 128)
    torch.save(other.state_dict(), tmp_path / "vit.pth")
    trained = nn.ModuleDict(
        {"backbone": make(**SIZES | {"embed_dim": 192, "num_heads": 6}), "projection_head": nn.Linear(192, 8)}
    )
    torch.save(trained.state_dict(), tmp_path / "lightly.pth")
    write_folder("ViT", tmp_path / "hf", hidden_size=192, hidden_act="relu")
    (tmp_path / "hf" / "config.json").unlink()
    for path in (tmp_path / "vit.pth", tmp_path / "hf", tmp_path / "lightly.pth"):
        report = finetune_mile.load(str(path)).report
        assert not report.certain
        for word in ("attention heads", "activation gelu", "epsilon"):
            assert any(word in text for text in report.assumed)


def test_positions_that_are_two_square_grids_are_not_guessed(tmp_path: Path) -> None:
    """A class token, 9 registers and 4 x 4 patches, or a class token and 5 x 5 patches as in DINOv2."""
    network = make(**SIZES, reg_tokens=9)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    with pytest.raises(Problem, match="26 positions are two square grids"):
        finetune_mile.load(str(tmp_path / "vit.pth"), arch="vit:heads=4")
    arch = "timm:vit_base_patch16_224:img=32,patch=8,dim=64,depth=2,heads=4,reg=9"
    found = finetune_mile.load(str(tmp_path / "vit.pth"), arch=arch)
    torch.testing.assert_close(loaded(found, 32), features(network, 32), rtol=0, atol=1e-6)


def test_short_names_must_agree_with_the_file(tmp_path: Path) -> None:
    torch.save(make("vit_tiny_patch16_224", depth=1, num_classes=0).state_dict(), tmp_path / "vit.pth")
    assert finetune_mile.load(str(tmp_path / "vit.pth"), arch="vit_tiny:heads=12").report.arch.endswith("heads=12")
    for arch, sentence in (
        ("vit_small:heads=12", "holds a vision transformer tiny"),
        ("vit_tiny:heads=7", "width 192 cannot have 7 heads"),
        ("vit_tiny:depth=3", "depth is read from the file"),
    ):
        with pytest.raises(Problem, match=sentence):
            finetune_mile.load(str(tmp_path / "vit.pth"), arch=arch)


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_clips_activation_is_asked_for(act: str, tmp_path: Path) -> None:
    name = "vit_base_patch16_clip_224" if act == "gelu" else "vit_base_patch16_clip_quickgelu_224"
    network = make(name, **SIZES)
    torch.save(network.state_dict(), tmp_path / "clip.pth")
    with refused("--arch vit:heads=4,act=quick_gelu", "--arch vit:heads=4,act=gelu"):
        finetune_mile.load(str(tmp_path / "clip.pth"), arch="vit:heads=4")
    with refused(f"--arch vit:act={act},heads=1", f"--arch vit:act={act},heads=2"):
        finetune_mile.load(str(tmp_path / "clip.pth"), arch=f"vit:act={act}")
    found = finetune_mile.load(str(tmp_path / "clip.pth"), arch=f"vit:act={act},heads=4")
    torch.testing.assert_close(loaded(found, 32), features(network, 32), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "size"),
    [
        ("convnext_tiny", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}, 64),
        ("convnextv2_tiny", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}, 64),
        (
            "swin_tiny_patch4_window7_224",
            {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
            224,
        ),
    ],
)
@pytest.mark.parametrize("prefix", ["", "backbone.", "learner.model."])
def test_convnext_and_swin_flat_and_as_solo_learn_writes_them(
    name: str, changes: dict[str, Any], size: int, prefix: str, tmp_path: Path
) -> None:
    network = make(name, **changes)
    state = {
        f"{prefix}{key}": tensor for key, tensor in network.state_dict().items() if not prefix or "head.fc" not in key
    }
    if prefix == "backbone.":
        state |= {f"{part}.weight": torch.zeros(4, 32) for part in ("classifier", "projector.0")}
        state |= {"classifier.bias": torch.zeros(4)}
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    found = finetune_mile.load(str(tmp_path / "last.ckpt"))
    assert found.report.arch.startswith(f"timm:{name}:")
    torch.testing.assert_close(loaded(found, size), features(network, size), rtol=0, atol=1e-6)


def test_a_network_with_names_of_its_own_is_sent_to_python(tmp_path: Path) -> None:
    """torchvision's Swin is timm's under other names, so that --arch timm:NAME does not help."""
    torch.save(torchvision.models.swin_t().state_dict(), tmp_path / "swin.pth")
    for arch in (None, "timm:swin_tiny_patch4_window7_224"):
        with refused("timm's", "finetune_mile.train(init=NETWORK)"):
            finetune_mile.load(str(tmp_path / "swin.pth"), arch=arch)


def test_a_network_of_timm_keeps_query_key_and_value_apart(tmp_path: Path) -> None:
    """CaiT's class attention: in its flat file, by the printed `--arch timm:NAME`, and in our own export of it."""
    network = make("cait_xxs24_224")
    torch.save(network.state_dict(), tmp_path / "cait.pth")
    with refused("--arch timm:NAME"):
        finetune_mile.load(str(tmp_path / "cait.pth"))
    arch = ["--arch", "timm:cait_xxs24_224"]
    assert main(["weights", "convert", str(tmp_path / "cait.pth"), str(tmp_path / "own"), *arch]) == 0
    expected = features(network, 224)
    for found in (
        finetune_mile.load(str(tmp_path / "cait.pth"), arch=arch[1]),
        finetune_mile.load(str(tmp_path / "own")),
    ):
        torch.testing.assert_close(loaded(found, 224), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_torchvisions_transformer(tmp_path: Path) -> None:
    network = torchvision.models.VisionTransformer(32, 8, 2, 2, 64, 128, num_classes=5).eval()
    nn.init.normal_(network.class_token)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    found = finetune_mile.load(str(tmp_path / "vit.pth"), arch="vit:heads=2")
    assert (found.report.format, found.report.classifier) == ("torchvision-vit", 5)
    trunk = copy.deepcopy(network)
    trunk.heads = nn.Identity()
    torch.testing.assert_close(loaded(found, 32), loaded(trunk, 32), rtol=0, atol=1e-6)


def test_msn_loads_the_target_encoder(tmp_path: Path) -> None:
    """The entries of save_checkpoint in facebookresearch/msn; its encoder is a DeiT in timm's names."""
    target, encoder = make(**SIZES, num_classes=0), make(**SIZES, num_classes=0)
    nn.init.ones_(encoder.pos_embed)  # type: ignore[arg-type]
    tree = {
        name: {
            f"module.{key}": tensor
            for key, tensor in {**network.state_dict(), "fc.fc1.weight": torch.ones(8, 64)}.items()
        }
        for name, network in (("encoder", encoder), ("target_encoder", target))
    }
    torch.save({**tree, "prototypes": torch.ones(4, 8), "epoch": 1}, tmp_path / "msn.pth.tar")
    found = finetune_mile.load(str(tmp_path / "msn.pth.tar"), arch="vit:heads=4")
    assert found.report.format == "msn"
    torch.testing.assert_close(loaded(found, 32), features(target, 32), rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------ other image sizes


def test_positions_are_resized_as_timm_and_transformers_do() -> None:
    positions = torch.randn(1, 1 + 16, 8)
    torch.testing.assert_close(
        resample(positions, (4, 4), (7, 7), 1, "timm"), resample_abs_pos_embed(positions, [7, 7])
    )
    grid = positions[:, 1:].view(1, 4, 4, 8).permute(0, 3, 1, 2)
    plain = functional.interpolate(grid, size=(7, 7), mode="bicubic", align_corners=False)
    expected = torch.cat([positions[:, :1], plain.permute(0, 2, 3, 1).view(1, 49, 8)], dim=1)
    torch.testing.assert_close(resample(positions, (4, 4), (7, 7), 1, "plain"), expected)


@pytest.mark.parametrize(
    ("sample", "name"),
    [("dinov2_narrow_plain", "vit_base_patch14_dinov2"), ("dinov2_narrow_reg", "vit_base_patch14_reg4_dinov2")],
)
@pytest.mark.parametrize("way", ["flat", "--arch", "config.json"])
def test_dinov2_in_timms_names_has_its_authors_features(sample: str, name: str, way: str, tmp_path: Path) -> None:
    """timm's own function converts the file; timm itself would resize the positions without registers otherwise."""
    network = timm.create_model(name, embed_dim=192, depth=2, num_heads=3, num_classes=0)
    state = torch.load(upstream.write(sample, tmp_path), weights_only=True)
    network.load_state_dict(checkpoint_filter_fn(state, network))
    path = tmp_path / "timm" / "model.safetensors"
    path.parent.mkdir()
    safetensors.torch.save_file(network.state_dict(), path)
    arch = f"timm:{name}:dim=192,depth=2,heads=3"
    if way == "config.json":
        arguments = {"embed_dim": 192, "depth": 2, "num_heads": 3}
        facts = {"architecture": name, "model_args": arguments, "pretrained_cfg": network.pretrained_cfg}
        (path.parent / "config.json").write_text(json.dumps(facts))
    found = finetune_mile.load(str(path), arch=arch if way == "--arch" else None)
    assert upstream.distance(found, sample).exact
    if way != "config.json":
        assert found.card.preprocess.size == 224
    assert main(["weights", "convert", str(path), str(tmp_path / "own")]) == 0
    own = finetune_mile.load(str(tmp_path / "own"))
    assert upstream.distance(own, sample).exact
    own.set_image_size(224)  # as a run does, once
    torch.testing.assert_close(loaded(own, 224), loaded(found, 224), rtol=0, atol=1e-5)
    if "_reg4_" not in name:
        as_timm = finetune_mile.load(str(path), arch=f"{arch},resize=timm")
        assert upstream.distance(as_timm, sample).upstream > upstream.BESIDE


@pytest.mark.parametrize(
    ("name", "option", "resize"),
    [("vit_small_patch14_dinov2", ":resize=offset", "offset"), ("vit_small_patch14_reg4_dinov2", "", "timm")],
)
def test_dinov2_from_timms_hub_is_resized_as_its_authors_do(
    name: str, option: str, resize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = timm.create_model

    def offline(wanted: str, pretrained: bool, **options: Any) -> nn.Module:
        return create(wanted, pretrained=False, depth=1, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(timm, "create_model", offline)
    network = finetune_mile.load(f"timm:{name}.lvd142m")
    assert network.report.arch == f"timm:{name}.lvd142m{option}"
    assert network.resize == resize
    assert exported_arch(network.report.arch) == f"timm:{name}{option}"  # which a run's export keeps


@pytest.mark.parametrize("changes", [{}, {"reg_tokens": 4, "no_embed_class": True}])
def test_a_transformer_takes_other_image_sizes_as_timms_dynamic_one(changes: dict[str, Any]) -> None:
    reference = make(**SIZES, **changes, num_classes=0, dynamic_img_size=True)
    extra = ",reg=4,embed=0" if changes else ""
    network = build(f"timm:vit_base_patch16_224:img=32,patch=8,dim=64,depth=2,heads=4{extra}").eval()
    network.load_state_dict(reference.state_dict())
    torch.testing.assert_close(loaded(network, 48), loaded(reference, 48), rtol=0, atol=1e-6)
    before = loaded(network, 48)
    network.set_image_size(48)  # type: ignore[operator]
    torch.testing.assert_close(loaded(network, 48), before)
    plain = make(**SIZES | {"img_size": 48}, **changes, num_classes=0)
    plain.load_state_dict(network.state_dict())
    torch.testing.assert_close(loaded(plain, 48), before)
    with pytest.raises(Problem, match=r"size 50 is not a multiple of .* use 48"):
        network.set_image_size(50)  # type: ignore[operator]


# ------------------------------------------------------------------------- transformers' own folders

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
RESNET18 = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
STAGES = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}
Pool = Callable[[Any], Tensor]


def first_token(output: Any) -> Tensor:
    return output.last_hidden_state[:, 0]


def pooled(output: Any) -> Tensor:
    return output.pooler_output.flatten(1)


FOLDERS: dict[str, tuple[str, dict[str, Any], int, Pool]] = {
    "ViT": ("vit", SMALL, 32, first_token),
    "DeiT": ("vit", SMALL, 32, first_token),
    "ViTMSN": ("vit", SMALL, 32, first_token),
    "IJepa": ("vit", SMALL, 32, lambda output: output.last_hidden_state.mean(1)),  # it has no class token
    "Dinov2": ("dinov2", {k: v for k, v in SMALL.items() if k != "intermediate_size"}, 32, first_token),
    "Dinov2WithRegisters": ("dinov2", {k: v for k, v in SMALL.items() if k != "intermediate_size"}, 32, first_token),
    "Swin": (
        "swin", {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, 32,
        pooled,
    ),
    "ConvNext": ("convnext", STAGES, 64, pooled),
    "ConvNextV2": ("convnext", STAGES, 64, pooled),
    "CLIPVision": ("clip", SMALL, 32, pooled),
    "ResNet": ("resnet", RESNET18, 64, pooled),
}  # fmt: skip


def write_folder(family: str, folder: Path, **changes: Any) -> Any:
    """A tiny network of transformers, saved in a folder by it."""
    transformers = pytest.importorskip("transformers", reason="writes the folders that are read here")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(FOLDERS[family][1] if family in FOLDERS else SMALL) | changes)
    network = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    return network


@pytest.mark.parametrize("family", sorted(FOLDERS))
def test_folders_of_transformers(family: str, tmp_path: Path) -> None:
    format, _, size, pool = FOLDERS[family]
    network = write_folder(family, tmp_path / "hf")
    found = finetune_mile.load(str(tmp_path / "hf"))
    assert found.report.format == f"hf-{format}"
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = pool(network(images))
    torch.testing.assert_close(loaded(found, size), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 10**9}, "config.json says hidden_size 1000000000, but model.safetensors has 128"),
        ({"num_hidden_layers": 10**9}, "says num_hidden_layers 1000000000, but"),
        ({"num_attention_heads": 10**9}, "num_attention_heads 1000000000 is not a number from 1 to"),
        ({"num_attention_heads": 5}, "width 128 cannot have 5 heads"),
        ({"image_size": -1}, "image_size -1 is not a number"),
        ({"layer_norm_eps": "x" * 100}, "layer_norm_eps x+ is not a number"),
        ({"hidden_act": ["gelu"] * 50}, r"hidden_act .* is not supported"),
        ({"model_type": ["vit"]}, "model_type .* is not supported"),
    ],
)
def test_a_config_cannot_build_what_the_tensors_are_not(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = upstream.write("hf_vit", tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(Problem, match=sentence):
        finetune_mile.load(str(folder))


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("ConvNext", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("ConvNext", {"layer_norm_eps": 0.5}, "layer_norm_eps 0.5 is not supported; it must be at most 1e-06"),
        ("ConvNextV2", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("Swin", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("Swin", {"layer_norm_eps": 0.5}, "layer_norm_eps 0.5 is not supported; it must be 1e-05"),
        ("ResNet", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("ResNet", {"downsample_in_first_stage": True}, "downsample_in_first_stage true is not supported"),
        ("SiglipVision", {"hidden_size": 192}, "model_type 'siglip_vision_model' is not supported"),
        ("SiglipVision", {"hidden_size": 192, "vision_use_head": False}, "model_type 'siglip_vision_model' is not"),
        ("DPT", {"hidden_size": 192}, "model_type 'dpt' is not supported"),
        ("ChineseCLIPVision", {}, "model_type 'chinese_clip_vision_model' is not supported"),
    ],
)
def test_what_a_config_says_and_the_network_does_not_have_is_refused(
    family: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    write_folder(family, tmp_path, **changes)
    with pytest.raises(Problem, match=sentence):
        finetune_mile.load(str(tmp_path))


# -------------------------------------------------------------------------------- timm's own folders


@pytest.mark.parametrize(
    ("name", "changes", "size"),
    [
        ("vit_base_patch16_224", SIZES, 32),
        ("vit_base_patch16_224", SIZES | {"act_layer": "quick_gelu", "num_heads": 2, "drop_path_rate": 0.1}, 32),
        ("vit_base_patch16_224", SIZES | {"global_pool": "avg", "fc_norm": False}, 32),
        ("vit_base_patch16_siglip_224", SIZES, 32),
        ("beit_base_patch16_224", SIZES, 32),
        ("deit_tiny_distilled_patch16_224", {"depth": 1}, 224),
        ("swinv2_tiny_window8_256", WINDOWS, 32),
        ("resnet18", {"norm_layer": "batchnorm2d"}, 64),
        ("resnet18", {"act_layer": "silu"}, 64),
        ("resnet18", {"global_pool": "max"}, 64),
    ],
)  # fmt: skip
def test_folders_of_timm(name: str, changes: dict[str, Any], size: int, tmp_path: Path) -> None:
    """timm 1.0.31 writes all arguments of the network, and the image size as two numbers."""
    network = make(name, **changes)
    timm.models.save_for_hf(network, str(tmp_path), model_args=changes, safe_serialization=True)
    expected = features(network, size)
    torch.testing.assert_close(
        loaded(finetune_mile.load(str(tmp_path)), size), expected, rtol=0, atol=1e-4 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("resnet18", {"output_stride": 8}, "model_args has output_stride '8', which is not supported"),
        ("efficientnet_b0", {"bn_eps": 0.1}, "model_args has bn_eps '0.1', which is not supported"),
        ("convnext_tiny", {"depths": [1, 1, 1, 1], "norm_eps": 0.5}, "model_args has norm_eps '0.5'"),
        ("vit_base_patch16_224", SIZES | {"act_layer": "hard_swish"}, "model_args has act_layer 'hard_swish'"),
        ("vit_base_patch16_224", SIZES | {"img_size": [16, 64]}, r"model_args has img_size '\[16, 64\]'"),
    ],
)
def test_an_argument_of_timm_without_an_option_is_refused(
    name: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    timm.models.save_for_hf(make(name, **changes), str(tmp_path), model_args=changes, safe_serialization=True)
    with pytest.raises(Problem, match=f"config.json: {sentence}"):
        finetune_mile.load(str(tmp_path))


# ---------------------------------------------------------------------------------------- shards


def write_shards(folder: Path, state: dict[str, Tensor], suffix: str) -> Path:
    """Two shards and their index, by huggingface_hub's own function where there is one."""
    from huggingface_hub import save_torch_state_dict

    size = sum(tensor.nbytes for tensor in state.values())
    folder.mkdir()
    save_torch_state_dict(state, folder, max_shard_size=size // 2 + 1, safe_serialization=suffix == "safetensors")
    (index,) = folder.glob("*.index.json")
    assert len(list(folder.glob("*-of-*"))) > 1
    return index


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_with_an_index_are_one_checkpoint(suffix: str, tmp_path: Path) -> None:
    network = make(**SIZES)
    index = write_shards(tmp_path / "out", network.state_dict(), suffix)
    for init in (index.parent, index):
        found = finetune_mile.load(str(init), arch="vit:heads=4")
        torch.testing.assert_close(loaded(found, 32), features(network, 32), rtol=0, atol=1e-6)
    shard = min(index.parent.glob("*-of-*"))
    with refused("shards", index.name):
        finetune_mile.load(str(shard))
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "metadata": {"total_size": 2**62}}))  # is not read
    finetune_mile.load(str(index), arch="vit:heads=4")
    shard.unlink()
    with refused(f"shard {shard.name}"):
        finetune_mile.load(str(index.parent))


def test_accelerates_folders(tmp_path: Path) -> None:
    """`save_model` with shards and `save_state`; a distributed checkpoint gets the command that merges it."""
    from accelerate import Accelerator

    accelerator, network = Accelerator(cpu=True), make(**SIZES)
    accelerator.save_model(network, tmp_path / "model", max_shard_size="150KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    accelerator.prepare(network)
    accelerator.save_state(str(tmp_path / "state"))
    for folder in ("model", "state"):
        found = finetune_mile.load(str(tmp_path / folder), arch="vit:heads=4")
        torch.testing.assert_close(loaded(found, 32), features(network, 32), rtol=0, atol=1e-6)
    (tmp_path / "fsdp" / "pytorch_model_fsdp_0").mkdir(parents=True)
    (tmp_path / "fsdp" / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(Problem, match="accelerate merge-weights FOLDER OUT"):
        finetune_mile.load(str(tmp_path / "fsdp"))


# ------------------------------------------------------------------------------------------ CLIP

OPENAI = (
    (r"^cls_token$", "class_embedding"), (r"^pos_embed$", "positional_embedding"), (r"^patch_embed\.proj", "conv1"),
    (r"^norm_pre", "ln_pre"), (r"^norm\.", "ln_post."), (r"^blocks\.(\d+)\.norm", r"transformer.resblocks.\1.ln_"),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"transformer.resblocks.\1.attn.in_proj_"),
    (r"^blocks\.(\d+)\.attn\.proj", r"transformer.resblocks.\1.attn.out_proj"),
    (r"^blocks\.(\d+)\.mlp\.fc1", r"transformer.resblocks.\1.mlp.c_fc"),
    (r"^blocks\.(\d+)\.mlp\.fc2", r"transformer.resblocks.\1.mlp.c_proj"),
)  # fmt: skip


@pytest.mark.parametrize("format", ["openai-clip", "open-clip", "clip-visual"])
def test_clips_image_network_in_openais_names(format: str, tmp_path: Path) -> None:
    """The file is one that timm's own converter turns into the network."""
    network = make("vit_base_patch16_clip_quickgelu_224", **SIZES, num_classes=0)
    visual = {}
    for name, tensor in network.state_dict().items():
        for pattern, new in OPENAI:
            name = re.sub(pattern, new, name)
        flattened = {"class_embedding": (64,), "positional_embedding": (17, 64)}.get(name)
        visual[name] = tensor.reshape(flattened) if flattened else tensor
    state = {f"visual.{name}": tensor for name, tensor in visual.items()} | {"visual.proj": torch.ones(64, 8)}
    converted = timm.models.vision_transformer.checkpoint_filter_fn(dict(state), network)
    assert {name: t.shape for name, t in converted.items() if not name.startswith("head")} == {
        name: t.shape for name, t in network.state_dict().items()
    }
    if format == "clip-visual":
        state = visual | {"proj": torch.ones(64, 8)}
    else:
        text = {"transformer.resblocks.0.ln_1.weight": torch.ones(8), "positional_embedding": torch.ones(77, 8)}
        state |= text | {"token_embedding.weight": torch.ones(9, 8), "ln_final.weight": torch.ones(8)}
        state |= {"logit_scale": torch.ones(()), "text_projection": torch.ones(8, 8)}
    if format == "openai-clip":
        state |= {name: torch.tensor(7) for name in ("input_resolution", "context_length", "vocab_size")}
    torch.save(state, tmp_path / "clip.pt")
    asked = "" if format == "openai-clip" else "act=quick_gelu,"
    found = finetune_mile.load(str(tmp_path / "clip.pt"), arch=f"vit:{asked}heads=4")
    assert found.report.format == format
    torch.testing.assert_close(loaded(found, 32), features(network, 32), rtol=0, atol=1e-6)


def test_a_distilled_deit_loads_by_its_name(tmp_path: Path) -> None:
    network = make("deit_tiny_distilled_patch16_224", depth=1)
    torch.save(network.state_dict(), tmp_path / "deit.pth")
    found = finetune_mile.load(str(tmp_path / "deit.pth"), arch="timm:deit_tiny_distilled_patch16_224:depth=1")
    torch.testing.assert_close(loaded(found, 224), features(network, 224), rtol=0, atol=1e-6)
    assert {"head.weight", "head_dist.weight"} <= set(found.report.dropped)


# ------------------------------------------------------------------------------------------ fine-tuned

TUNED = (
    "dino_vit_tiny16_full", "dinov2_teacher_checkpoint", "ibot_vits16_full", "ibot_vits16_student",
    "dinov2_narrow_plain", "dinov2_narrow_reg", "mmpretrain_mae_vit", "mmpretrain_finetuned_vit",
    "mae_vitb_pretrain", "mocov3_vit_conv_small", "mocov3_vit_small", "hf_clip_vision", "hf_convnext",
    "torchvision_vit",
    "ViTMSN", "Swin", "CLIPVision", "ConvNextV2", "Dinov2WithRegisters",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", TUNED)
def test_files_of_upstreams_code_are_fine_tuned_and_read_by_timm(family: str, run_demo: Any, tmp_path: Path) -> None:
    """From a file that upstream's own code or package wrote to an export of a MILe run that timm reads."""
    if family in FOLDERS:
        path = tmp_path / "hf"
        write_folder(family, path)
    else:
        path = upstream.write(family, tmp_path)
    size = 28 if "dinov2" in family else 32
    flags = [*SHORT_MILE, "--init", str(path), "--data", "demo:60", "--set", f"size={size}"]
    out = run_demo("run", *(flag for flag in flags if flag not in ("--arch", "resnet-demo")))
    if family == "mocov3_vit_conv_small":
        return  # timm has no such stem: test_moco_v3s_stem_is_not_exported_to_timm
    assert main(["export", str(out), "--to", "timm", "--out", str(tmp_path / "timm")]) == 0
    read_back = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = torch.rand(2, 3, size, size)
    with torch.inference_mode():
        expected = finetune_mile.load_classifier(str(out))(images)
        torch.testing.assert_close(read_back(images), expected, rtol=0, atol=1e-4)
