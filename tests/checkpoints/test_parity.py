"""Features equal the upstream network's own, format by format; the wrong network's do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from bundles import write_bundle
from making import as_children, as_haiku, as_separius, as_tensorflow, byol_convert, trunk, under
from material import SHARED, needs_shared, unpack
from torch import Tensor, nn
from torchvision.models import resnet18, resnet50

import finetune_mile
from finetune_mile.checkpoints.init import Located, with_choice
from finetune_mile.checkpoints.loading import open_contents
from finetune_mile.checkpoints.readers import Contents, read
from finetune_mile.networks.heads import build

TOLERANCE = 1e-4
HERE = Located(path=Path("x.pth"), name="x")
FOLDERS = {
    "byol_plain": ("byol", "resnet18-proj", "same"),
    "lightly_simclr": ("lightly", "resnet18", "torch"),
    "mocov2": ("moco", "resnet18", "torch"),
    "simclrv2_tf1_sk1": ("simclr-tf", "resnet50-sk", "tf"),
    "solo_simclr": ("solo-learn", "resnet18", "torch"),
    "vissl_swav": ("vissl", "resnet18", "torch"),
}


def unpacked(name: str, folder: Path) -> Path:
    """The checkpoint of one folder of the shared material, ready to be opened."""
    found = []
    for file in (SHARED / name).iterdir():
        if file.suffix == ".zst":
            found.append(unpack(file, folder))
        elif file.suffix == ".index":
            (folder / file.name).write_bytes(file.read_bytes())
            found.append(folder / file.name)
    return min(found, key=lambda path: ".data-" in path.name)


def difference(network: nn.Module, images: np.ndarray, expected: np.ndarray) -> float:
    with torch.inference_mode():
        features = network.eval()(torch.from_numpy(images)).numpy()
    return float(np.abs(features - expected).max() / np.abs(expected).max())


def assert_as_upstream(network: nn.Module, name: str, *, only: tuple[str, ...] = ()) -> None:
    data = np.load(SHARED / name / "expected.npz")
    sizes = [key.removeprefix("x_") for key in data if key.startswith("x_")]
    assert len(sizes) >= 2
    for size in only or sizes:
        assert difference(network, data[f"x_{size}"], data[f"features_{size}"]) < TOLERANCE
        for wrong in (key for key in data if key.startswith("WRONG") and key.endswith(f"_{size}")):
            assert difference(network, data[f"x_{size}"], data[wrong]) > 0.1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder name to the checkpoint in it, each unpacked once."""
    return cache(lambda name: unpacked(name, tmp_path_factory.mktemp(name)))


@needs_shared
def test_every_shared_checkpoint_is_tried() -> None:
    assert {path.parent.name for path in SHARED.glob("*/expected.npz")} == set(FOLDERS)


@needs_shared
@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_shared_checkpoints(name: str, files: Callable[[str], Path]) -> None:
    network = finetune_mile.load(str(files(name)))
    assert (network.report.format, network.report.arch, network.report.padding) == FOLDERS[name]
    assert_as_upstream(network, name)


@needs_shared
def test_a_tensorflow_folder_and_prefix_are_the_same(files: Callable[[str], Path]) -> None:
    index = files("simclrv2_tf1_sk1")
    for init in (index.parent, index.with_suffix("")):
        network = finetune_mile.load(str(init))
        assert_as_upstream(network, "simclrv2_tf1_sk1", only=("64",))


# ------------------------------------------- the same weights in other people's formats


@pytest.fixture(scope="module")
def simclr(files: Callable[[str], Path]) -> dict[str, Tensor]:
    """The shared SimCLR-v2 sk1 weights in our names."""
    opened = open_contents(read(files("simclrv2_tf1_sk1")), HERE, head_from=1)
    return dict(opened.network.state_dict())


@needs_shared
@pytest.mark.parametrize("kind", ["separius", "vissl", "tf2", "ema", "prefix"])
def test_simclr_v2_in_other_forms(kind: str, simclr: dict[str, Tensor]) -> None:
    ours = {n: t for n, t in simclr.items() if not n.startswith("proj.")}
    choice = None
    if kind == "separius":
        contents = Contents(container="torch-zip", tree={"resnet": as_separius(ours, sk=True), "head": {}})
    elif kind == "vissl":
        model = {"trunk": as_separius(ours, sk=True), "heads": {}}
        contents = Contents(container="torch-zip", tree={"classy_state_dict": {"base_model": {"model": model}}})
    elif kind == "prefix":
        contents = Contents(container="torch-zip", tree=dict(under("net.encoder.", ours)))
    elif kind == "ema":
        other = as_tensorflow({n: torch.zeros_like(t) for n, t in ours.items()})
        tree = other | under("ema_model/", as_tensorflow(ours))
        contents, choice = Contents(container="tf-checkpoint", tree=dict(tree)), "ema_model"
    else:
        text = (SHARED / "keys" / "simclr_v2_tf2_savedmodel_sk1.key_to_full_name.txt").read_text()
        rows = [line.split(" | ") for line in text.splitlines() if line]
        full = {key: name.removeprefix("full_name=") for key, name, _, _ in rows}
        numbered = as_tensorflow(ours, scope="")
        last = {key: "/".join(name.split("/")[-2:]) for key, name in full.items() if name.startswith("resnet/")}
        contents = Contents(
            container="tf-savedmodel", tree={key: numbered[short] for key, short in last.items()}, full_names=full
        )
    opened = open_contents(contents, with_choice(HERE, choice) if choice else HERE)
    if kind == "prefix":  # a bare trunk does not say its padding: selective kernels do
        assert opened.report.padding == "tf"
    assert_as_upstream(opened.network, "simclrv2_tf1_sk1", only=("64",))


@needs_shared
@pytest.mark.parametrize("kind", ["savedmodel", "object graph"])
def test_tf2_files_on_disk(kind: str, simclr: dict[str, Tensor], tmp_path: Path) -> None:
    """The layout of a real SavedModel (its keys and full names), written with these weights."""
    ours = {n: t for n, t in simclr.items() if not n.startswith("proj.")}
    text = (SHARED / "keys" / "simclr_v2_tf2_savedmodel_sk1.key_to_full_name.txt").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line]
    full = {key: name.removeprefix("full_name=") for key, name, _, _ in rows}
    numbered = as_tensorflow(ours, scope="")
    arrays = {
        key: numbered["/".join(name.split("/")[-2:])].numpy()
        for key, name in full.items()
        if name.startswith("resnet/")
    }
    prefix = tmp_path / "ckpt-1"
    if kind == "savedmodel":
        prefix = tmp_path / "variables" / "variables"
        (tmp_path / "saved_model.pb").write_bytes(b"")
    write_bundle(prefix, arrays, full_names=full, shards=16)
    network = finetune_mile.load(str(tmp_path))
    assert network.report.format == "simclr-tf"
    assert_as_upstream(network, "simclrv2_tf1_sk1", only=("64",))


@needs_shared
def test_first_projection_layer(files: Callable[[str], Path]) -> None:
    """`head_from=1`: features after relu(bn(dense(h))), as SimCLR-v2 fine-tunes."""
    opened = open_contents(read(files("simclrv2_tf1_sk1")), HERE, head_from=1)
    data = np.load(SHARED / "simclrv2_tf1_sk1" / "expected.npz")
    assert difference(opened.network, data["x_64"], data["proj1_64"]) < TOLERANCE


@needs_shared
def test_byol_in_other_forms(files: Callable[[str], Path]) -> None:
    opened = open_contents(read(files("byol_plain")), HERE)
    ours = {n: t for n, t in opened.network.state_dict().items() if "num_batches" not in n}
    params, state = as_haiku(ours, "res_net18")
    for contents in (
        Contents(container="pickle", tree={"backbone_params": params, "backbone_state": state}),
        byol_convert(ours),
    ):
        again = open_contents(contents, HERE)
        assert again.report.padding == "same"
        assert_as_upstream(again.network, "byol_plain", only=("64",))


# --------------------------------------------------------------- against torchvision's own network


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    torch.manual_seed(0)
    network = resnet50()
    network.fc = nn.Identity()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.8, 1.2)
    return network.eval()


def relative(network: nn.Module, reference: nn.Module, size: int) -> float:
    torch.manual_seed(1)
    images = torch.rand(2, 3, size, size)
    with torch.inference_mode():
        expected, features = reference(images), network.eval()(images)
    return float((features - expected).abs().max() / expected.abs().max())


def test_torchvision_is_exact(reference: nn.Module) -> None:
    contents = Contents(container="torch-zip", tree=dict(reference.state_dict()))
    network = open_contents(contents, HERE).network
    assert relative(network, reference, 64) == 0.0


@pytest.mark.parametrize("kind", ["simclr-tf", "byol"])
def test_padding_matters_on_even_maps_only(kind: str, reference: nn.Module) -> None:
    """On odd maps SAME is torch's padding, so there the features are torchvision's."""
    state = {n: t for n, t in reference.state_dict().items() if "num_batches" not in n}
    if kind == "byol":
        params, averages = as_haiku(state, "res_net50")
        contents = Contents(container="pickle", tree={"online_params": params, "online_state": averages})
    else:
        contents = Contents(container="tf-checkpoint", tree=dict(as_tensorflow(state)))
    opened = open_contents(contents, HERE)
    assert (opened.report.format, opened.report.arch) == (kind, "resnet50")
    assert relative(opened.network, reference, 65) < TOLERANCE
    assert relative(opened.network, reference, 64) > 0.01


def test_children_of_a_sequential(reference: nn.Module) -> None:
    children = nn.Sequential(*list(reference.children())[:-1])
    contents = Contents(container="torch-zip", tree=dict(under("encoder.", dict(children.state_dict()))))
    assert set(children.state_dict()) == set(as_children(trunk("resnet50")))
    network = open_contents(contents, HERE).network
    assert relative(network, reference, 64) == 0.0


@pytest.mark.parametrize("name", ["resnet50d", "vit_tiny_patch16_224"])
def test_timm_networks(name: str) -> None:
    import timm

    reference = timm.create_model(name, num_classes=0).eval()
    contents = Contents(container="safetensors", tree=dict(reference.state_dict()))
    network = open_contents(contents, HERE).network
    assert relative(network, reference, 224) < 1e-6


def test_lightlys_generator() -> None:
    from lightly.models import ResNetGenerator

    complete = ResNetGenerator("resnet-18").eval()
    children = list(complete.children())[:-1]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    # The generator's forward has a ReLU between bn1 and layer1. It is no module, so a Sequential of its children,
    # which lightly's benchmarks and examples train, has none.
    with_relu = nn.Sequential(*children[:2], nn.ReLU(), *children[2:], *pool).eval()
    for source, arch, reference in (
        (nn.Sequential(*children), "resnet18-cifar-norelu", nn.Sequential(*children, *pool).eval()),
        (complete, "resnet18-cifar", with_relu),
    ):
        tensors = {n: t for n, t in source.state_dict().items() if not n.startswith("linear.")}
        contents = Contents(container="torch-zip", tree=dict(under("backbone.", tensors)))
        opened = open_contents(contents, HERE)
        assert opened.report.arch == arch
        assert relative(opened.network, reference, 32) < 1e-5


def test_our_resnet18_is_torchvisions() -> None:
    reference = resnet18().eval()
    reference.fc = nn.Identity()
    ours = build("resnet18")
    ours.load_state_dict(reference.state_dict())
    assert relative(ours, reference, 64) == 0.0
