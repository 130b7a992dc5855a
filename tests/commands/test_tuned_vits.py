"""Vision transformers from a file to a fine-tuned export that timm reads: tiny ones, a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from shortcuts import SHORT, SHORT_MILE
from torch import nn

import finetune_mile
from finetune_mile.checkpoints.exporting import write_timm
from finetune_mile.cli import main

SIZES = {"img_size": 24, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
SMALL = ["--data", "demo:60", "--steps", "24"]
ARCH = ["--arch", "vit:heads=4"]


def flat(network: nn.Module) -> dict[str, Any]:
    return network.state_dict()


def dino(network: nn.Module) -> dict[str, Any]:
    state = {f"backbone.{key}": tensor for key, tensor in network.state_dict().items()}
    return {"teacher": state, "student": {f"module.{key}": tensor for key, tensor in state.items()}}


def mae(network: nn.Module) -> dict[str, Any]:
    return {
        "model": {**network.state_dict(), "mask_token": torch.zeros(1, 1, 8), "decoder_embed.weight": torch.ones(8, 64)}
    }


def dinov2(network: nn.Module) -> dict[str, Any]:
    return {**network.state_dict(), "mask_token": torch.zeros(1, 64)}


def moco_v3(network: nn.Module) -> dict[str, Any]:
    parts = [(f"module.{part}.", network) for part in ("base_encoder", "momentum_encoder")]
    return {"state_dict": {f"{start}{key}": t for start, part in parts for key, t in part.state_dict().items()}}


FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "vit": (flat, "vit_base_patch16_224", {}),
    "dino": (dino, "vit_base_patch16_224", {}),
    "mae": (mae, "vit_base_patch16_224", {}),
    "mean": (flat, "vit_base_patch16_224", {"global_pool": "avg"}),
    "dinov2": (dinov2, "vit_base_patch14_dinov2", {}),
    "registers": (flat, "vit_base_patch14_reg4_dinov2", {"img_size": 40}),  # 9 positions would be two grids
    "moco-v3": (moco_v3, "vit_base_patch16_224", {}),
}


def checkpoint(path: Path, family: str = "vit") -> Path:
    save, name, changes = FAMILIES[family]
    torch.manual_seed(0)
    torch.save(save(timm.create_model(name, **{**SIZES, **changes}, num_classes=0)), path)
    return path


@pytest.mark.parametrize(
    "family", ["registers", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "registers")]
)
def test_a_family_is_fine_tuned_and_exported_and_read_by_timm(family: str, run_demo: Any, tmp_path: Path) -> None:
    """At another image size than the positions were learnt at: the export has the new size."""
    path = checkpoint(tmp_path / "file.pth", family)
    flags = [*SHORT_MILE, "--init", str(path), *ARCH, *SMALL, "--set", "size=32"]
    out = run_demo(
        "run", *flags, "--set", "optimizer.name=adamw", "--set", "optimizer.layer_decay=0.7", "--set", "drop_path=0.1"
    )
    config = json.loads((out / "export" / "config.json").read_text())
    assert "img=32" in config["arch"]
    assert main(["export", str(out), "--to", "timm", "--out", str(tmp_path / "timm")]) == 0
    read_back = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = torch.rand(2, 3, 32, 32)
    classifier = finetune_mile.load_classifier(str(out))
    with torch.inference_mode():
        torch.testing.assert_close(read_back(images), classifier(images), rtol=0, atol=1e-5)
    again = finetune_mile.load(str(tmp_path / "timm"))
    with torch.inference_mode():
        expected = read_back.forward_head(read_back.forward_features(images), pre_logits=True)
        torch.testing.assert_close(again(images), expected, rtol=0, atol=1e-5)


METHODS = (
    "softmax",
    "sigmoid",
    "mile",
    "auto",
    "noisy-student",
    "self-distill",
    "distill",
    "wan",
    "large-loss",
    "role",
)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_all_methods_train_a_transformer(method: str, run_demo: Any, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "file.pth")
    short = SHORT_MILE if method in ("mile", "auto") else SHORT
    flags = [*short, "--init", str(path), *ARCH, *SMALL]
    if method == "distill":
        flags += ["--teacher", str(run_demo("teacher", *flags, "--method", "softmax"))]
    out = run_demo("run", *flags, "--method", method)
    assert json.loads((out / "run.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet"])
def test_a_prefix_goes_with_an_arch_of_timm(name: str, tmp_path: Path) -> None:
    network = timm.create_model(name, num_classes=0).eval()
    state = {f"net.trunk.{key}": tensor for key, tensor in network.state_dict().items()}
    torch.save({"state_dict": {**state, "net.head.weight": torch.ones(2, 2)}}, tmp_path / "own.ckpt")
    found = finetune_mile.load(f"{tmp_path / 'own.ckpt'}::state_dict/net.trunk", arch=f"timm:{name}")
    assert found.report.dropped == ("state_dict/net.head.weight",)
    images = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(found(images), network(images))


def test_moco_v3s_stem_is_not_exported_to_timm(tmp_path: Path) -> None:
    from finetune_mile.core.problems import Problem
    from finetune_mile.networks.heads import build

    arch = "timm:vit_small_patch16_224:stem=conv,depth=1"
    config = {"arch": arch, "num_classes": 0, "size": 224, "padding": "torch"}
    with pytest.raises(Problem, match="timm has no convolutional stem"):
        write_timm(tmp_path, build(arch), config)
