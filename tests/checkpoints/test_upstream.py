"""Files as upstream's code writes them (../shared/checkpoints/upstream; some in parity/): features or a refusal."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import linear, torch_file, trunk, under
from material import SHARED
from torch import nn

import finetune_mile
from finetune_mile.checkpoints.cards import find_card
from finetune_mile.checkpoints.classifier import load_with_head
from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.init import Located
from finetune_mile.checkpoints.loading import open_contents
from finetune_mile.checkpoints.readers import read
from finetune_mile.cli import main
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import get_head

TOLERANCE = 1e-4  # of the largest feature
BESIDE = 0.01  # a misreading is at least so far away

# What `--init FILE` makes of a sample: format and network. Building and running the others takes minutes: slow.
QUICK = {
    "bolts_simclr_cifar10": ("trunk behind a prefix", "resnet18-cifar"),
    "bolts_simclr_imagenet": ("trunk behind a prefix", "resnet18"),
    "bolts_simclr_stl10": ("trunk behind a prefix", "resnet18-nopool"),
    "dino_vit_small16_backbone": ("vit", "timm:vit_small_patch16_224"),
    "lightly_bench_mocov2": ("lightly-benchmark", "resnet50"),
    "lightly_bench_simclr": ("lightly-benchmark", "resnet50"),
    "lightly_cifar_simclr": ("lightly-generator", "resnet18-cifar-norelu"),
    "mocov3_r50": ("moco-v3", "resnet50"),
    "mocov3_vit_small": ("moco-v3", "timm:vit_small_patch16_224:heads=12"),
    "separius_r50_sk0": ("separius", "resnet50"),
    "solo_byol_imagenet": ("solo-learn", "resnet18"),
    "solo_mocov2plus_cifar": ("solo-learn", "resnet18-cifar2"),
    "solo_simclr_cifar": ("solo-learn", "resnet18-cifar2"),
    "timm_resnet50": ("torchvision", "resnet50"),
    "timm_vit_tiny_384": ("vit", "timm:vit_tiny_patch16_384"),
}
SLOW = {
    "dino_resnet50_backbone": ("torchvision", "resnet50"),
    "dino_vit_tiny16_full": ("dino", "timm:vit_tiny_patch16_224"),
    "ibot_vits16_full": ("dino", "timm:vit_small_patch16_224"),
    "mae_vitb_encoder": ("vit", "timm:vit_base_patch16_224"),
    "mmpretrain_simclr": ("trunk behind a prefix", "resnet50"),
    "vicreg_model": ("solo-learn", "resnet50"),
}
ASKED = {  # the file does not show the padding; sample: what --arch has to say
    "solo_extracted_cifar": "resnet18-cifar2",
    "user_cifar_classifier": "resnet18-cifar",
}
PREFIXED = {  # refused as a file, loaded by the prefix of the backbone
    "lightly_smog": ("state_dict/backbone", "lightly-generator", "resnet18-cifar-norelu"),
    "solo_all4one_cifar": ("state_dict/backbone", "solo-learn", "resnet18-cifar2"),
}
REFUSED_QUICK = {"user_ca_resnet18", "cbam_resnet18"}
REFUSED_SLOW = {
    "barlow_checkpoint", "dinov2_teacher_checkpoint", "dinov2_vits14_plain", "hf_clip_vision", "hf_convnext",
    "hf_dinov2", "hf_resnet18", "hf_vit", "hf_vitmae", "ibot_vits16_student", "mae_vitb_pretrain", "mmpretrain_byol",
    "mocov3_vit_conv_small", "simsiam_r50", "solo_byol_vit_tiny_cifar", "timm_vit_tiny_patch4_32",
    "torchvision_resnext50", "torchvision_vit",
}  # fmt: skip
# No plain features to compare with, and flat files whose tensors are those of another network.
LEFT = {"separius_r50_sk1", "timm_resnetaa50", "timm_resnetblur50"}

Build = Callable[[str], Path]
PARITY = Path(__file__).parent / "parity"


@pytest.fixture(scope="module")
def upstream() -> Path:
    """The folder of the samples: all of them in ../shared, a small selection in the repository."""
    everything = SHARED / "upstream"
    return everything if everything.is_dir() else PARITY


@pytest.fixture(scope="module")
def builder(upstream: Path) -> Any:
    """The samples' own build.py."""
    spec = importlib.util.spec_from_file_location("upstream_build", upstream / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(builder: Any, upstream: Path, tmp_path: Path) -> Iterator[Build]:
    """Write the file of a sample; it is deleted after the test, for together they are gigabytes."""

    def write(name: str) -> Path:
        packed, plain = upstream / f"{name}.json.gz", upstream / f"{name}.json"
        if not packed.exists() and not plain.exists():
            pytest.skip(f"{name} is not among the samples in the repository; needs ../shared")
        text = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
        return builder.write(json.loads(text), tmp_path / name)

    yield write
    shutil.rmtree(tmp_path)


@pytest.fixture
def assert_as_upstream(builder: Any, upstream: Path) -> Callable[[nn.Module, str], None]:
    """Features are those that upstream's network gives, and those of no misreading; the repository has the first 64."""

    def check(network: nn.Module, name: str) -> None:
        data = dict(np.load(upstream / f"{name}.npz"))
        sizes = [key.removeprefix("features_") for key in data if key.startswith("features_")]
        assert sizes
        for size in sizes:
            expected = data[f"features_{size}"]
            with torch.inference_mode():
                features = network.eval()(builder.image(int(size))).numpy()[:, : expected.shape[1]]
            scale = np.abs(expected).max()
            assert np.abs(features - expected).max() / scale < TOLERANCE
            for wrong in (key for key in data if re.fullmatch(rf"WRONG_.*features_{size}", key)):
                assert np.abs(features - data[wrong]).max() / scale > BESIDE, wrong

    return check


def test_every_sample_is_expected_to_do_something(upstream: Path) -> None:
    known = {*QUICK, *SLOW, *ASKED, *PREFIXED, *REFUSED_QUICK, *REFUSED_SLOW, *LEFT}
    assert {path.name.split(".")[0] for path in PARITY.glob("*.json.gz")} <= known
    assert upstream == PARITY or {path.stem for path in upstream.glob("*.json")} == known


@pytest.mark.parametrize(
    "name", [*sorted(QUICK), *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SLOW))]
)
def test_upstream_sample(name: str, build: Build, assert_as_upstream: Callable[[nn.Module, str], None]) -> None:
    network = finetune_mile.load(str(build(name)))
    assert (network.report.format, network.report.arch) == (QUICK | SLOW)[name]
    assert_as_upstream(network, name)


@pytest.mark.parametrize(
    "name", [*sorted(REFUSED_QUICK), *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(REFUSED_SLOW))]
)
def test_upstream_sample_is_refused_in_a_sentence(name: str, build: Build) -> None:
    with pytest.raises(Problem) as caught:
        finetune_mile.load(str(build(name)))
    assert len(caught.value.sentences) == 1


# ------------------------------------------------------------- what names and shapes do not show


def test_mocov3_vit_small_has_12_heads(
    build: Build, assert_as_upstream: Callable[[nn.Module, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
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
        with pytest.raises(Problem, match=r"holds a timm:vit_small_patch16_224:heads=12, --arch says"):
            finetune_mile.load(str(file), arch="timm:vit_small_patch16_224")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("order", "marked", "heads"),
    [
        ("row-col", True, ":heads=12"),
        ("row-col", False, ":heads=12"),
        ("col-row", True, ":heads=12"),
        ("col-row", False, ""),
    ],
)
def test_solo_learns_mocov3_vit_small_has_12_heads(order: str, marked: bool, heads: str, builder: Any) -> None:
    """Its own small ViTs for MoCo-v3 and MAE have 12 heads, and fixed positions; other people's MAE may have 6."""
    state = under("backbone.", trunk("timm:vit_small_patch16_224")) | linear("classifier", 384, 10)
    state["backbone.pos_embed"] = torch.from_numpy(builder.sincos((1, 197, 384), order)).float()
    if marked:
        state |= linear("projector.0", 384, 8) | under("momentum_backbone.", trunk("timm:vit_small_patch16_224"))
    contents = torch_file(state_dict=state, **{"pytorch-lightning_version": "2.6.6"})
    located = Located(path=Path("x.ckpt"), name="x")
    report = open_contents(contents, located, choice=None, arch=None, head_from=0).report
    assert (report.format, report.arch) == ("solo-learn", f"timm:vit_small_patch16_224{heads}")


@pytest.mark.parametrize("name", ["lightly_cifar_simclr", "bolts_simclr_stl10"])
def test_an_export_keeps_what_no_tensor_shows(
    name: str, build: Build, assert_as_upstream: Callable[[nn.Module, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = build(name)
    assert main(["weights", "convert", str(path), str(path.parent / "own")]) == 0
    assert_as_upstream(finetune_mile.load(str(path.parent / "own" / "model.safetensors")), name)
    assert main(["weights", "convert", str(path), str(path.parent / "timm"), "--to", "timm"]) == 2
    assert "timm has no resnet18-" in capsys.readouterr().err
    with pytest.raises(Problem, match=r"holds a resnet18-.*(norelu|nopool), --arch says resnet18"):
        finetune_mile.load(str(path), arch="resnet18-cifar" if "cifar" in name else "resnet18")


@pytest.mark.parametrize("name", sorted(PREFIXED))
def test_a_prefix_keeps_the_format_of_the_file(
    name: str, build: Build, assert_as_upstream: Callable[[nn.Module, str], None]
) -> None:
    path = build(name)
    with pytest.raises(Problem):
        finetune_mile.load(str(path))
    prefix, format, arch = PREFIXED[name]
    network = finetune_mile.load(f"{path}::{prefix}")
    assert (network.report.format, network.report.arch) == (format, arch)
    assert_as_upstream(network, name)


@pytest.mark.parametrize("name", sorted(ASKED))
def test_the_padding_of_a_3x3_stem_is_asked_for(
    name: str, build: Build, assert_as_upstream: Callable[[nn.Module, str], None]
) -> None:
    """No tensor shows it: 1 in torch's own examples, 2 in solo-learn."""
    path = build(name)
    with pytest.raises(Problem, match=r"--arch resnet18-cifar \(.*--arch resnet18-cifar2 \(") as caught:
        finetune_mile.load(str(path))
    assert len(caught.value.sentences) == 1
    for arch in ("resnet18-cifar", "resnet18-cifar2"):
        assert finetune_mile.load(str(path), arch=arch).report.arch == arch
        assert finetune_mile.load(f"{path}::{arch}").report.arch == arch
    assert_as_upstream(finetune_mile.load(str(path), arch=ASKED[name]), name)
    if name == "user_cifar_classifier":  # --model and --teacher have no --arch beside them
        assert get_head(load_with_head(f"{path}::resnet18-cifar", "--model")[0]).out_features == 10
    assert finetune_mile.load(str(path), num_classes=3, arch=ASKED[name]).report.arch == ASKED[name]


def test_attention_inside_the_backbone_is_refused_by_name(build: Build) -> None:
    path = build("user_ca_resnet18")
    with pytest.raises(Problem, match=r"ca\.fc1\.weight, ca\.fc2\.weight, ca1\.fc1\.weight and 1 more"):
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
        opened = open_contents(read(path), located, choice=choice, arch=None, head_from=0)
        assert opened.report.format == "lightly-benchmark"
    opened = open_contents(read(path), located, choice=None, arch=None, head_from=0)
    assert opened.classifier_names["fc.weight"] == "online_classifier.classification_head.weight"
    assert opened.classifier["fc.weight"].shape == (1000, 2048)
