"""Files as upstream's code writes them (../shared/checkpoints/upstream; most in parity/): features or a refusal."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import upstream
from making import linear, torch_file, trunk, under
from shortcuts import refused
from torch import nn

import finetune_mile
from finetune_mile.checkpoints.cards import find_card
from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.init import Located, with_choice
from finetune_mile.checkpoints.loading import open_contents, open_with_head
from finetune_mile.checkpoints.readers import read
from finetune_mile.cli import main
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import get_head

# What `--init FILE` makes of a sample: format and network. Building and running the others takes minutes: slow.
QUICK = {
    "barlow_checkpoint": ("barlow-twins", "resnet50"),
    "bolts_simclr_cifar10": ("trunk behind a prefix", "resnet18-cifar"),
    "bolts_simclr_stl10": ("trunk behind a prefix", "resnet18-nopool"),
    "dino_vit_small16_backbone": ("vit", "timm:vit_small_patch16_224"),
    "lightly_bench_mocov2": ("lightly-benchmark", "resnet50"),
    "lightly_cifar_simclr": ("lightly-generator", "resnet18-cifar-norelu"),
    "lightly_smog": ("lightly-generator", "resnet18-cifar-norelu"),
    "mmpretrain_byol": ("openmmlab", "resnet50"),
    "mmpretrain_dinov2_vit": ("openmmlab-vit", "timm:vit_base_patch14_dinov2:dim=192,depth=2,heads=3,resize=plain"),
    "mmpretrain_finetuned_vit": ("openmmlab-vit", "timm:vit_tiny_patch16_224:pool=avg,resize=plain"),
    "mmpretrain_mae_vit": ("openmmlab-mae", "timm:vit_tiny_patch16_224:resize=plain"),
    "mmpretrain_mocov3_vit": ("openmmlab-moco-v3", "timm:vit_small_patch16_224:heads=12,resize=plain"),
    "mocov3_vit_small": ("moco-v3", "timm:vit_small_patch16_224:heads=12"),
    "simsiam_r50": ("simsiam", "resnet50"),
    "solo_all4one_cifar": ("solo-learn", "resnet18-cifar2"),
    "solo_byol_imagenet": ("solo-learn", "resnet18"),
    "solo_mocov2plus_cifar": ("solo-learn", "resnet18-cifar2"),
    "solo_simclr_cifar": ("solo-learn", "resnet18-cifar2"),
    "hf_clip_vision": (
        "hf-clip",
        "timm:vit_base_patch16_clip_quickgelu_224:patch=32,dim=128,depth=4,heads=4,resize=plain",
    ),
    "dinov2_narrow_plain": ("dinov2", "timm:vit_base_patch14_dinov2:dim=192,depth=2,heads=3,resize=offset"),
    "dinov2_narrow_reg": ("dinov2", "timm:vit_base_patch14_reg4_dinov2:dim=192,depth=2,heads=3"),
    "hf_convnext": ("hf-convnext", "timm:convnext_tiny:depths=1-1-2-1,dims=32-64-128-256"),
    "hf_dinov2": ("hf-dinov2", "timm:vit_base_patch14_dinov2:img=224,dim=128,depth=4,heads=4,resize=plain"),
    "hf_resnet18": ("hf-resnet", "resnet18"),
    "hf_vit": ("hf-vit", "timm:vit_base_patch16_224:dim=128,depth=4,heads=4,eps=1e-12,resize=plain"),
    "hf_vitmae": ("hf-vit", "timm:vit_base_patch16_224:dim=128,depth=4,heads=4,eps=1e-12,resize=plain"),
    "solo_byol_vit_tiny_cifar": ("solo-learn", "timm:vit_tiny_patch16_224:img=32,patch=4"),
    "timm_vit_tiny_patch4_32": ("vit", "timm:vit_tiny_patch16_224:img=32,patch=4"),
    "torchvision_vit": ("torchvision-vit", "timm:vit_tiny_patch16_224"),
    "torchvision_resnext50": ("torchvision", "resnext50_32x4d"),
}
SLOW = {
    "bolts_simclr_imagenet": ("trunk behind a prefix", "resnet18"),
    "dino_resnet50_backbone": ("torchvision", "resnet50"),
    "dino_vit_tiny16_full": ("dino", "timm:vit_tiny_patch16_224:resize=offset"),
    "ibot_vits16_full": ("dino", "timm:vit_small_patch16_224:resize=offset"),
    "lightly_bench_simclr": ("lightly-benchmark", "resnet50"),
    "mae_vitb_encoder": ("vit", "timm:vit_base_patch16_224"),
    "mmpretrain_simclr": ("openmmlab", "resnet50"),
    "mocov3_r50": ("moco-v3", "resnet50"),
    "separius_r50_sk0": ("separius", "resnet50"),
    "timm_resnet50": ("torchvision", "resnet50"),
    "timm_vit_tiny_384": ("vit", "timm:vit_tiny_patch16_384"),
    "dinov2_teacher_checkpoint": (
        "dinov2",
        "timm:vit_giant_patch14_dinov2:img=224,dim=384,depth=12,heads=6,resize=offset",
    ),
    "dinov2_vits14_plain": ("dinov2", "timm:vit_small_patch14_dinov2:resize=offset"),
    "dinov2_vits14_reg": ("dinov2", "timm:vit_small_patch14_reg4_dinov2"),
    "ibot_vits16_student": ("vit", "timm:vit_small_patch16_224"),
    "mae_vitb_pretrain": ("mae", "timm:vit_base_patch16_224:resize=plain"),
    "mocov3_vit_conv_small": ("moco-v3", "timm:vit_small_patch16_224:stem=conv,depth=11,heads=12"),
    "vicreg_model": ("vicreg", "resnet50"),
}
# Other outcomes: the padding of a 3x3 stem is asked for; parts inside the backbone are refused; nothing in a flat file
# shows anti-aliasing; the port of SimCLR-v2 pads in its own way.
ASKS = {"solo_extracted_cifar": "resnet18-cifar2", "user_cifar_classifier": "resnet18-cifar"}
STATES = {
    **dict.fromkeys(ASKS, "asks"),
    **dict.fromkeys(("cbam_resnet18", "user_ca_resnet18"), "refused"),
    **dict.fromkeys(("timm_resnetaa50", "timm_resnetblur50"), "assumes"),
    "separius_r50_sk1": "port",
}

Build = Callable[[str], Path]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Write the file of a sample; it is deleted after the test, for together they are gigabytes."""

    def write(name: str) -> Path:
        if name not in upstream.names():
            pytest.skip(f"{name} is not among the samples in the repository; needs ../shared")
        return upstream.write(name, tmp_path / name)

    yield write
    shutil.rmtree(tmp_path)


def assert_as_upstream(network: nn.Module, name: str) -> None:
    """Features are those that upstream's network gives, and those of no misreading."""
    assert upstream.distance(network, name).exact


def test_every_sample_is_expected_to_do_something() -> None:
    known = {*QUICK, *SLOW, *STATES}
    assert {path.name.split(".")[0] for path in upstream.PARITY.glob("*.json.gz")} <= known
    assert upstream.FOLDER == upstream.PARITY or set(upstream.names()) == known


@pytest.mark.parametrize("name", [*sorted(QUICK), *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(SLOW))])
def test_upstream_sample(name: str, build: Build) -> None:
    network = finetune_mile.load(str(build(name)))
    assert (network.report.format, network.report.arch) == (QUICK | SLOW)[name]
    assert_as_upstream(network, name)


def test_the_table_in_the_docs_is_of_these_samples() -> None:
    """`python -m tests.checkpoints.upstream` writes it: nothing silently wrong, no crash, no way that fails."""
    text = upstream.PAGE.read_text().partition(upstream.BEGIN)[2].partition(upstream.END)[0]
    rows = dict(re.findall(r"^\| (\w+) \|[^|]*\|[^|]*\| ([^|]*) \|", text, re.M))
    rows.pop("sample", None)
    assert rows.keys() == {*QUICK, *SLOW, *STATES}
    assert {name for name, state in rows.items() if state == "exact"} == {*QUICK, *SLOW}
    assert {name: rows[name] for name in STATES} == {name: upstream.WORDS[state] for name, state in STATES.items()}
    assert "wrong 0, crash 0, dead end 0" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STATES))
def test_what_a_message_prints_works(name: str, build: Build, tmp_path: Path) -> None:
    """A file that is not loaded at once asks, and every printed way is executed; none is wrong, crashes or misleads."""
    build(name)
    outcome = upstream.try_sample(name, tmp_path / name)
    assert outcome.state == STATES[name], outcome


# ------------------------------------------------------------- what names and shapes do not show


def test_mocov3_vit_small_has_12_heads(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    """The training file's exports, its momentum copy and the flat file of convert_to_deit.py have them too."""
    import timm

    path = build("mocov3_vit_small")
    own, other = path.parent / "own", path.parent / "timm"
    assert main(["weights", "convert", str(path), str(own)]) == 0
    again = finetune_mile.load(str(own / "model.safetensors"))
    assert again.report.arch == "timm:vit_small_patch16_224:heads=12"
    assert_as_upstream(again, "mocov3_vit_small")
    # an export of a network that was fine-tuned with timm's 6 heads stays what its config says
    config = json.loads((own / "config.json").read_text()) | {"arch": "timm:vit_small_patch16_224"}
    write_export(path.parent / "old", again, config)
    assert finetune_mile.load(str(path.parent / "old")).report.arch == "timm:vit_small_patch16_224"
    assert main(["weights", "convert", str(path), str(other), "--to", "timm"]) == 0
    assert_as_upstream(timm.create_model(f"local-dir:{other}", pretrained=True), "mocov3_vit_small")
    assert finetune_mile.load(str(other)).report.arch == again.report.arch
    momentum = finetune_mile.load(f"{path}::state_dict/module.momentum_encoder")
    assert (momentum.report.format, momentum.report.arch) == ("moco-v3", "timm:vit_small_patch16_224:heads=12")
    # convert_to_deit.py: {"model": the encoder without its head, flat}
    state = torch.load(path, weights_only=True)["state_dict"]
    start = "module.base_encoder."
    flat = {k.removeprefix(start): t for k, t in state.items() if k.startswith(start) and ".head." not in k}
    torch.save({"model": flat}, path.parent / "deit.pth")
    assert_as_upstream(finetune_mile.load(str(path.parent / "deit.pth")), "mocov3_vit_small")
    for file in (path, path.parent / "deit.pth"):
        with refused("timm:vit_small_patch16_224:heads=12", "--arch"):
            finetune_mile.load(str(file), arch="timm:vit_small_patch16_224")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("order", "marked", "heads"),
    [
        ("row-col", True, ":heads=12"),
        ("row-col", False, ":heads=12"),
        ("col-row", True, ":heads=12"),
        ("col-row", False, None),
    ],
)
def test_solo_learns_mocov3_vit_small_has_12_heads(order: str, marked: bool, heads: str | None) -> None:
    """Its own small ViTs for MoCo-v3 and MAE have 12 heads, and fixed positions; other people's MAE may have 6."""
    state = under("backbone.", trunk("timm:vit_small_patch16_224")) | linear("classifier", 384, 10)
    state["backbone.pos_embed"] = torch.from_numpy(upstream.BUILDER.sincos((1, 197, 384), order)).float()
    if marked:
        state |= linear("projector.0", 384, 8) | under("momentum_backbone.", trunk("timm:vit_small_patch16_224"))
    contents = torch_file(state_dict=state, **{"pytorch-lightning_version": "2.6.6"})
    located = Located(path=Path("x.ckpt"), name="x")
    if heads is None:
        with refused("--arch vit_small:heads=6", "--arch vit_small:heads=12"):
            open_contents(contents, located)
        for arch, found in (("vit_small:heads=6", ""), ("vit_small:heads=12", ":heads=12")):
            report = open_contents(contents, replace(located, arch=arch)).report
            assert report.arch == f"timm:vit_small_patch16_224{found}"
        return
    report = open_contents(contents, located).report
    assert (report.format, report.arch) == ("solo-learn", f"timm:vit_small_patch16_224{heads}")


def test_openmmlabs_backbone_alone_asks_for_its_heads_where_positions_are_fixed(build: Build) -> None:
    """MoCo-v3's small transformer has 12 heads, others have 6; the rest of a complete file shows whose it is."""
    name = "mmpretrain_mocov3_vit"
    path = build(name)
    state = torch.load(path, weights_only=True)["state_dict"]
    inside = {key: tensor for key, tensor in state.items() if key.startswith("backbone.")}
    for start in ("backbone.", ""):
        torch.save({f"{start}{key.removeprefix('backbone.')}": t for key, t in inside.items()}, path)
        with refused("--arch vit_small:heads=6", "--arch vit_small:heads=12"):
            finetune_mile.load(str(path))
        found = finetune_mile.load(str(path), arch="vit_small:heads=12")
        assert found.report.format == "openmmlab-vit"
        assert_as_upstream(found, name)
    torch.save({**inside, "backbone.layers.0.attn.extra.weight": torch.ones(3)}, path)
    with refused("backbone.layers.0.attn.extra.weight"):
        finetune_mile.load(str(path))


def test_openmmlabs_fine_tuned_transformer_has_a_classifier(build: Build) -> None:
    network = finetune_mile.load(str(build("mmpretrain_finetuned_vit")))
    assert network.report.classifier == 10
    assert not network.report.certain


@pytest.mark.parametrize("name", ["lightly_cifar_simclr", "bolts_simclr_stl10"])
def test_an_export_keeps_what_no_tensor_shows(name: str, build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    path = build(name)
    assert main(["weights", "convert", str(path), str(path.parent / "own")]) == 0
    assert_as_upstream(finetune_mile.load(str(path.parent / "own" / "model.safetensors")), name)
    assert main(["weights", "convert", str(path), str(path.parent / "timm"), "--to", "timm"]) == 2
    assert "timm has no resnet18-" in capsys.readouterr().err
    with pytest.raises(Problem, match=r"holds a resnet18-.*(norelu|nopool), --arch says resnet18"):
        finetune_mile.load(str(path), arch="resnet18-cifar" if "cifar" in name else "resnet18")


@pytest.mark.parametrize(
    ("name", "prefix", "format", "arch"),
    [
        ("lightly_smog", "backbone", "lightly-generator", "resnet18-cifar-norelu"),
        ("solo_all4one_cifar", "state_dict/backbone", "solo-learn", "resnet18-cifar2"),
    ],
)
def test_a_prefix_keeps_the_format_of_the_file(name: str, prefix: str, format: str, arch: str, build: Build) -> None:
    path = build(name)
    for network in (finetune_mile.load(f"{path}::{prefix}"), finetune_mile.load(str(path), prefix=prefix)):
        assert (network.report.format, network.report.arch) == (format, arch)
        assert_as_upstream(network, name)


def test_the_other_backbone_of_a_file_is_offered(build: Build) -> None:
    """The default is the trained network; its moving average is named, and loads."""
    path = build("mmpretrain_byol")
    network = finetune_mile.load(str(path))
    assert network.report.others == ("target_net",)
    other = finetune_mile.load(f"{path}::target_net")
    assert (other.report.format, other.report.others) == ("openmmlab", ("backbone",))
    apart = upstream.distance(other, "mmpretrain_byol")
    assert apart.upstream > upstream.BESIDE
    assert apart.wrong < upstream.TOLERANCE  # what the sample calls the misreading


@pytest.mark.parametrize("name", sorted(ASKS))
def test_the_padding_of_a_3x3_stem_is_asked_for(name: str, build: Build) -> None:
    """No tensor shows it: 1 in torch's own examples, 2 in solo-learn."""
    path = build(name)
    with refused("--arch resnet18-cifar (", "--arch resnet18-cifar2 (") as caught:
        finetune_mile.load(str(path))
    assert len(caught.value.sentences) == 1
    arch = {"resnet18-cifar": "resnet18-cifar", "resnet18-cifar2": "resnet18-cifar2", "solo-learn": "resnet18-cifar2"}
    ways = upstream.printed_ways(str(caught.value))
    assert len(ways) == 5
    for way in ways:
        network = finetune_mile.load(way.pop("init", str(path)), **way)  # type: ignore[arg-type]
        assert network.report.arch == arch[(*way.values(), network.report.arch)[0]]
        assert upstream.distance(network, name).exact == (network.report.arch == ASKS[name])
    if name == "user_cifar_classifier":  # --model and --teacher have no --arch beside them
        assert get_head(open_with_head(f"{path}::resnet18-cifar", "--model").network).out_features == 10
    assert finetune_mile.load(str(path), num_classes=3, arch=ASKS[name]).report.arch == ASKS[name]


def test_attention_inside_the_backbone_is_refused_by_name(build: Build) -> None:
    path = build("user_ca_resnet18")
    with refused("ca.fc1.weight, ca.fc2.weight, ca1.fc1.weight and 1 more"):
        finetune_mile.load(str(path))
    behind = {f"net.{name}": tensor for name, tensor in torch.load(path, weights_only=True).items()}
    torch.save({"state_dict": behind}, path)
    for init in (str(path), f"{path}::state_dict/net"):
        with pytest.raises(Problem, match=r"ca\.fc1\.weight"):
            finetune_mile.load(init)


@pytest.mark.parametrize("method", ["mocov2", "simclr"])
def test_lightlys_cards_take_lightlys_files(method: str, build: Build) -> None:
    """The probe is called online_classifier.classification_head."""
    path = build(f"lightly_bench_{method}")
    located = Located(path=path, name="x", card=find_card(f"lightly-{method}"))
    for choice in (None, "state_dict/backbone"):
        opened = open_contents(read(path), with_choice(located, choice) if choice else located)
        assert opened.report.format == "lightly-benchmark"
    opened = open_contents(read(path), located)
    assert opened.classifier_names["fc.weight"] == "online_classifier.classification_head.weight"
    assert opened.classifier["fc.weight"].shape == (1000, 2048)


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("dino-s16", "dino_vit_small16_backbone"),
        pytest.param("dinov2-s", "dinov2_vits14_plain", marks=pytest.mark.slow),
        pytest.param("dinov2-s-reg", "dinov2_vits14_reg", marks=pytest.mark.slow),
        pytest.param("dino-r50", "dino_resnet50_backbone", marks=pytest.mark.slow),
        pytest.param("ibot-s16", "ibot_vits16_student", marks=pytest.mark.slow),
        pytest.param("mae-b16", "mae_vitb_encoder", marks=pytest.mark.slow),
    ],
)
def test_the_cards_of_strong_weights_take_their_authors_files(card: str, name: str, build: Build) -> None:
    path = build(name)
    opened = open_contents(read(path), Located(path=path, name="x", card=find_card(card)))
    assert opened.report.arch == find_card(card).arch
    assert opened.card.preprocess.size == 224
    assert_as_upstream(opened.network, name)
