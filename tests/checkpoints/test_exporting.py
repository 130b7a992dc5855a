"""Weights out and in again: our own exports, timm's folders, and timm's names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from samples import SAMPLES
from shortcuts import refused
from torch import nn

from finetune_mile.checkpoints.exporting import write_export, write_timm
from finetune_mile.checkpoints.init import Located
from finetune_mile.checkpoints.loading import load_network, open_contents
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import get_head


def load(init: Path | str, **options: object) -> tuple[nn.Module, object, object]:
    defaults = {"arch": None, "num_classes": 10, "head_bias": "zero"}
    return load_network(str(init), **(defaults | options))  # type: ignore[arg-type]


CONFIG = {
    "arch": "resnet-demo", "padding": "tf", "num_classes": 10, "classes": list("abcdefghij"),
    "size": 32,
    "mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 0.5], "crop": 1.0, "interpolation": "bicubic",
    "activation": "sigmoid", "init": "none", "method": "mile",
}  # fmt: skip


def test_out_and_in_again_is_bit_equal(tmp_path: Path) -> None:
    network, _, _ = load("none", arch="resnet-demo")
    run = tmp_path / "run"
    write_export(run / "export", network, CONFIG)
    assert sorted(p.name for p in (run / "export").iterdir()) == ["config.json", "model.safetensors"]
    images = torch.rand(2, 3, 32, 32)
    expected = network.eval()(images)
    alone = tmp_path / "weights.safetensors"
    alone.write_bytes((run / "export" / "model.safetensors").read_bytes())
    for init in (run, run / "export", run / "export" / "model.safetensors", alone):
        again, card, report = load(init, keep_head="fc")
        assert torch.equal(again.eval()(images), expected)
        assert (report.format, report.padding, report.arch) == ("finetune-mile", "tf", "resnet-demo")
        assert card.preprocess.mean == (0.1, 0.2, 0.3)
        assert card.preprocess.size == 32
    assert json.loads((run / "export" / "config.json").read_text())["classes"][0] == "a"


def test_an_export_has_the_same_bytes_each_time_and_the_mode_of_the_umask(tmp_path: Path) -> None:
    network, _, _ = load("none", arch="resnet-demo")
    before = os.umask(0o027)
    try:
        for i in range(8):
            write_export(tmp_path / str(i), network, CONFIG | {"classes": ["é", '"b"', *"cdefghij"]})
    finally:
        os.umask(before)
    files = [tmp_path / str(i) / "model.safetensors" for i in range(8)]
    assert len({path.read_bytes() for path in files}) == 1
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}
    again, _, _ = load(tmp_path / "0", keep_head="fc")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), network.parameters(), strict=True))
    with safe_open(files[0], "pt") as stored:
        assert stored.metadata()["format"] == "pt"
        assert torch.equal(stored.get_tensor("fc.bias"), get_head(network).bias)


def test_an_exported_projection_layer_comes_back(tmp_path: Path) -> None:
    here = Located(path=Path("x"), name="x")
    opened = open_contents(SAMPLES["separius"](), here, head_from=1)
    write_export(tmp_path / "export", opened.network, CONFIG | {"arch": "resnet50", "num_classes": 0})
    again, _, report = load(tmp_path / "export")
    assert "proj.1.running_mean" in report.loaded
    assert get_head(again).in_features == 2048
    # the head of our own export belongs on its projection, so it may be kept
    write_export(tmp_path / "tuned", again, CONFIG | {"arch": "resnet50"})
    kept, _, report = load(tmp_path / "tuned", keep_head="fc", head_from=1)
    assert torch.equal(get_head(kept).weight, get_head(again).weight)
    assert {"proj.0.weight", "fc.weight"} <= set(report.loaded)


@pytest.mark.parametrize("arch", ["timm:vit_tiny_patch16_224", "resnet-demo-gn", "resnet18-cifar2"])
def test_any_network_goes_out_and_in(arch: str, tmp_path: Path) -> None:
    network, _, _ = load("none", arch=arch)
    write_export(tmp_path / "export", network, CONFIG | {"arch": arch, "padding": "torch"})
    again, _, report = load(tmp_path / "export", keep_head="fc")
    images = torch.rand(1, 3, 224, 224)
    assert torch.equal(again.eval()(images), network.eval()(images))
    assert (report.format, report.arch) == ("finetune-mile", arch)


def test_timm_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    made, create = [], timm.create_model

    def offline(name: str, *, pretrained: bool, num_classes: int) -> nn.Module:
        made.append((name, pretrained))
        return create(name, pretrained=False, num_classes=num_classes)

    monkeypatch.setattr(timm, "create_model", offline)
    network, card, report = load("timm:vit_tiny_patch16_224.augreg_in21k")
    assert ("vit_tiny_patch16_224.augreg_in21k", True) in made
    assert card.preprocess.mean == (0.5, 0.5, 0.5)
    assert report.format == "timm"
    assert network(torch.rand(1, 3, 224, 224)).shape == (1, 10)
    assert network(torch.rand(1, 3, 64, 64)).shape == (1, 10)  # positions are resized
    with pytest.raises(Problem, match="timm has no model"):
        load("timm:vit_nano")


def test_timm_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    create = timm.create_model

    def refuse(name: str, *, pretrained: bool, num_classes: int) -> nn.Module:
        if pretrained:
            raise OSError("no network\nlong story")
        return create(name, pretrained=False, num_classes=num_classes)

    monkeypatch.setattr(timm, "create_model", refuse)
    with refused("timm:resnet18", "no network"):
        load("timm:resnet18")


def test_a_run_that_is_not_finished_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(Problem, match="this run is not finished; continue it with --resume"):
        load(tmp_path)


def test_timm_loads_what_we_write_for_it(tmp_path: Path) -> None:
    import timm

    network, _, _ = load("none", arch="resnet18")
    config = CONFIG | {"arch": "resnet18", "padding": "torch", "size": 224, "crop": 0.875}
    write_timm(tmp_path / "timm", network, config)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(theirs(images), network.eval()(images))
    assert theirs.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    again, card, report = load(tmp_path / "timm", keep_head="fc")
    assert torch.equal(again.eval()(images), network(images))
    assert card.preprocess.mean == (0.1, 0.2, 0.3)
    assert report.arch == "resnet18"


@pytest.mark.parametrize(
    ("change", "why"),
    [({"padding": "tf"}, "padding"), ({"arch": "resnet50-sk", "padding": "torch"}, "timm has no resnet50-sk")],
)
def test_what_timm_cannot_compute_is_not_written(tmp_path: Path, change: dict[str, str], why: str) -> None:
    network, _, _ = load("none", arch="resnet-demo")
    with pytest.raises(Problem, match=why):
        write_timm(tmp_path / "timm", network, CONFIG | {"arch": "resnet18"} | change)
    assert not (tmp_path / "timm").exists()


def test_a_timm_file_with_its_architecture(tmp_path: Path) -> None:
    import timm

    source = timm.create_model("seresnet18" if timm.is_model("seresnet18") else "legacy_seresnet18", num_classes=5)
    name = source.pretrained_cfg["architecture"]
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(Problem):
        load(tmp_path / "model.safetensors")
    network, _, report = load(tmp_path / "model.safetensors", arch=f"timm:{name}")
    assert report.format == "timm"
    images = torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(network.eval().forward_features(images), source.eval().forward_features(images))
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name, "pretrained_cfg": {"crop_pct": 0.9}}))
    network, card, report = load(tmp_path)
    assert (report.arch, card.preprocess.crop) == (f"timm:{name}", 0.9)
