"""From `--init` to a network: heads, claims, exports, and memory that is the network's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from making import flat, linear, torch_file, trunk, under
from PIL import Image
from samples import SAMPLES
from shortcuts import refused
from torch import Tensor, nn

import finetune_mile
from finetune_mile.checkpoints.init import Located
from finetune_mile.checkpoints.loading import load_network, open_contents
from finetune_mile.checkpoints.readers import Contents, read
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import get_head


def noise(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    return torch.rand(shape) + 0.5


def head(name: str = "fc", classes: int = 10, features: int = 128) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.randn(classes, features), f"{name}.bias": torch.randn(classes)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small file with a classifier that must not leak."""
    path = tmp_path / "small.pth"
    state = under("module.", trunk("resnet-demo", noise) | head())
    torch.save({"state_dict": state, "epoch": 3}, path)
    return path


def load(init: Path | str, **options: object) -> tuple[nn.Module, object, object]:
    defaults = {"arch": None, "num_classes": 10, "head_bias": "zero"}
    return load_network(str(init), **(defaults | options))  # type: ignore[arg-type]


def test_report_accounts_for_every_tensor(file: Path) -> None:
    network, card, report = load(file)
    written = json.loads(json.dumps(report.to_json()))
    assert written["counts"] == {"loaded": len(trunk("resnet-demo")), "reset": 2, "dropped": 2}
    assert written["format"] == "torchvision"
    assert written["arch"] == "resnet-demo"
    assert set(written["reset"]) == {"fc.weight", "fc.bias"}
    assert set(written["loaded"]) | set(written["reset"]) == set(network.state_dict())
    assert (card.name, card.arch) == ("small", "resnet-demo")


def test_parameters_are_the_networks_own(file: Path) -> None:
    network, _, _ = load(file)
    file.write_bytes(b"gone")
    for tensor in [*network.parameters(), *network.buffers()]:
        assert tensor.is_contiguous()
        assert not tensor.is_meta
    assert all(p.requires_grad and p.is_leaf for p in network.parameters())
    out = network(torch.rand(2, 3, 32, 32)).sum()
    out.backward()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter -= 0.1 * parameter.grad
    assert torch.isfinite(network(torch.rand(2, 3, 32, 32))).all()


def test_a_file_that_was_read_stays_readable(file: Path) -> None:
    """Pages of the map are given back while loading; what was read is still there."""
    contents = read(file)
    open_contents(contents, Located(path=file, name="x"))
    expected = torch.load(file, weights_only=True)["state_dict"]
    for name, tensor in contents.tree["state_dict"].items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.slow
def test_loading_is_about_as_fast_as_plain_torch_and_takes_one_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from benchmarks.loading import compare, flat_file

    figures = compare(flat_file(tmp_path), repeats=5)
    assert figures["ratio"] < 1.5
    assert figures["loading_peak_over_file"] < 1.5


def test_half_precision_and_channels_last_come_as_float_and_contiguous() -> None:
    tensors = {
        n: t.half().to(memory_format=torch.channels_last) if t.ndim == 4 else t.half()
        for n, t in trunk("resnet-demo", noise).items()
    }
    opened = open_contents(flat(tensors), Located(path=Path("x"), name="x"))
    state = opened.network.state_dict()
    assert state["conv1.weight"].dtype == torch.float32
    assert state["conv1.weight"].is_contiguous()
    assert state["bn1.num_batches_tracked"].dtype == torch.int64


def test_the_head_is_new_unless_it_is_named(file: Path) -> None:
    old = torch.load(file, weights_only=True)["state_dict"]["module.fc.weight"]
    network, _, _ = load(file)
    assert not torch.equal(get_head(network).weight, old)
    network, _, report = load(file, keep_head="fc")
    assert torch.equal(get_head(network).weight, old)
    assert "fc.weight" in report.loaded
    assert report.dropped == ()
    with refused("classifier", "'fc.weight'"):
        load(file, keep_head="classifier")
    with refused("(10, 128)", "(7, 128)"):
        load(file, keep_head="fc", num_classes=7)


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("simclr-tf", "head_supervised"),
        ("separius-sk", "fc"),
        ("byol", "classifier"),
        ("solo-learn", "classifier"),
        ("lightly-benchmark", "online_classifier"),
        ("mile", "fc"),
        ("vit", "head"),
    ],
)
def test_classifiers_that_have_seen_labels_are_dropped_by_name(format: str, name: str) -> None:
    opened = open_contents(SAMPLES[format](), Located(path=Path("x"), name="x"))
    assert set(opened.classifier) == {"fc.weight", "fc.bias"}
    assert all(own in opened.report.dropped for own in opened.classifier_names.values())
    assert name in re.split(r"[./]", opened.classifier_names["fc.weight"])
    assert opened.classifier["fc.weight"].shape[1] == opened.network.num_features


def test_an_export_needs_no_detection_and_is_the_same_with_it() -> None:
    """Only a bare export is taken at its header's word; one more claim, and it goes the way of all files."""
    here = Located(path=Path("x"), name="x")
    alone = open_contents(SAMPLES["finetune-mile"](), here)
    claimed = open_contents(SAMPLES["finetune-mile"](), replace(here, arch="resnet-demo"))
    assert alone.report == claimed.report
    assert alone.card == claimed.card
    assert (alone.own, alone.classifier_names) == (claimed.own, claimed.classifier_names)


def test_a_header_that_is_also_of_timm_is_not_taken_at_its_word() -> None:
    config = {"arch": "resnet-demo", "padding": "torch", "mean": [0] * 3, "std": [1] * 3, "architecture": "resnet18"}
    contents = flat(trunk("resnet-demo"), "safetensors", finetune_mile=json.dumps(config))
    with pytest.raises(Problem, match="does not fit the network"):
        open_contents(contents, Located(path=Path("x"), name="x"))


def test_moco_v1s_embedding_is_no_classifier() -> None:
    state = under("module.encoder_q.", trunk("resnet50") | linear("fc", 2048, 128))
    opened = open_contents(torch_file(state_dict=state), Located(path=Path("x"), name="x"))
    assert opened.classifier == {}
    assert "encoder_q.fc.weight" in opened.report.dropped


@pytest.mark.parametrize("format", ["simclr-tf", "separius-sk", "separius"])
def test_first_projection_layer_is_kept_on_request(format: str) -> None:
    here = Located(path=Path("x.pth"), name="x")
    opened = open_contents(SAMPLES[format](), here, head_from=1)
    kinds = [type(layer).__name__ for layer in opened.network.proj]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU"]
    assert opened.network.proj[0].bias is None
    assert "proj.0.weight" in opened.report.loaded
    with pytest.raises(Problem, match="no SimCLR-v2 projection head"):
        open_contents(SAMPLES["moco"](), here, head_from=1)


def test_scratch_needs_an_architecture() -> None:
    with pytest.raises(Problem, match="--init none with --arch"):
        load("none")
    network, card, report = load("none", arch="resnet-demo", head_bias="prior")
    assert card.name == "none"
    assert report.loaded == ()
    assert set(report.reset) == set(network.state_dict())


@pytest.mark.parametrize("claim", ["resnet18", "resnet50-sk", "timm:resnet18"])
def test_a_wrong_claim_is_refused(file: Path, claim: str) -> None:
    with pytest.raises(Problem, match=f"holds a resnet-demo, --arch says {claim}"):
        load(file, arch=claim)


@pytest.mark.parametrize("name", ["layer1.0.bn1.running_var", "layer2.0.conv1.weight", "conv1.weight"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_undefined_numbers_are_refused(name: str, value: str, tmp_path: Path) -> None:
    tensors = trunk("resnet-demo", noise)
    tensors[name].view(-1)[3] = float(value)
    torch.save(tensors, tmp_path / "nan.pth")
    with refused("nan.pth", name, "infinite"):
        load(tmp_path / "nan.pth")


def test_all_damaged_tensors_are_named(tmp_path: Path) -> None:
    tensors = trunk("resnet-demo", noise)
    for name in ("conv1.weight", "bn1.bias", "layer1.0.conv1.weight", "layer2.0.bn2.weight"):
        tensors[name].view(-1)[0] = float("nan")
    torch.save(tensors, tmp_path / "nan.pth")
    with refused("conv1.weight, bn1.bias, layer1.0.conv1.weight and 1 more", "infinite"):
        load(tmp_path / "nan.pth")


def test_large_numbers_whose_sum_overflows_are_fine(tmp_path: Path) -> None:
    tensors = trunk("resnet-demo", noise)
    tensors["conv1.weight"].fill_(3e38)
    torch.save(tensors, tmp_path / "large.pth")
    load(tmp_path / "large.pth")


def test_a_negative_variance_is_refused(tmp_path: Path) -> None:
    tensors = trunk("resnet-demo", noise)
    tensors["layer1.0.bn1.running_var"][3] = -0.1
    torch.save(tensors, tmp_path / "x.pth")
    with refused("layer1.0.bn1.running_var", "negative"):
        load(tmp_path / "x.pth")


def test_a_classifier_with_undefined_numbers_is_not_kept(tmp_path: Path) -> None:
    tensors = trunk("resnet-demo", noise) | head()
    tensors["fc.weight"][2, 3] = float("inf")
    torch.save(tensors, tmp_path / "x.pth")
    load(tmp_path / "x.pth")  # not used, so it does no harm
    with refused("x.pth", "fc.weight", "infinite"):
        load(tmp_path / "x.pth", keep_head="fc")


@pytest.mark.parametrize("format", ["simclr-tf", "separius-sk"])
def test_keep_head_does_not_put_a_classifier_on_the_projection(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's classifier was trained on the backbone's features, which are as wide as the projection's."""
    from finetune_mile.checkpoints import loading

    here = Located(path=Path("x.pth"), name="x")
    opened = open_contents(SAMPLES[format](), here, head_from=1)
    monkeypatch.setattr(loading, "open_trunk", lambda *_, **__: opened)
    name = opened.classifier_names["fc.weight"].removesuffix(".weight")
    with refused(f"--keep-head {name}", "head_from 1", "--set head_from=0"):
        load("x.pth", num_classes=1000, keep_head=name, head_from=1)


# ------------------------------------------------------------------------------------- from Python


def test_load_gives_features_and_preprocess(file: Path) -> None:
    network = finetune_mile.load(str(file))
    assert not network.training
    image = Image.new("RGBA", (60, 50), (255, 0, 0, 255))
    view = network.preprocess(image)
    assert view.shape == (3, 224, 224)
    mean, std = (torch.tensor(getattr(network.card.preprocess, key)) for key in ("mean", "std"))
    torch.testing.assert_close(view[:, 5, 5], (torch.tensor([1.0, 0, 0]) - mean) / std)
    pixels = torch.zeros(3, 300, 256, dtype=torch.uint8)
    assert network.preprocess(pixels).shape == (3, 224, 224)
    assert network(view[None]).shape == (1, 128)
    assert network.report.arch == "resnet-demo"
    with pytest.raises(Problem, match="uint8"):
        network.preprocess(pixels.float())
    logits = finetune_mile.load(str(file), num_classes=3)
    assert logits(view[None]).shape == (1, 3)


def test_torch_is_imported_late() -> None:
    import subprocess
    import sys

    code = (
        "import finetune_mile, sys\n"
        "from finetune_mile.checkpoints import cards\n"
        "from finetune_mile.core import download\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_contents_of_the_wrong_card_is_refused() -> None:
    from finetune_mile.checkpoints.cards import find_card

    here = Located(path=Path("x.pth"), name="x", card=find_card("mocov2"))
    with refused("card mocov2", "format moco", "swav"):
        open_contents(SAMPLES["swav"](), here)
    contents: Contents = SAMPLES["moco"]()
    with refused("resnet18", "card", "resnet50"):
        open_contents(contents, here)
