"""Every cause in the audit's two lists (files of upstream code, tried at 219dc10) has a test, named here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from making import as_children, as_generator, as_tensorflow, flat, light, linear, torch_file, trunk, under
from shortcuts import refused
from torch import Tensor, nn

import finetune_mile
from finetune_mile.checkpoints.adapters.behind import find_trunks
from finetune_mile.checkpoints.detect import BEHIND_PREFIX, assumptions
from finetune_mile.checkpoints.init import Located, with_choice
from finetune_mile.checkpoints.loading import Opened, open_contents
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.core.problems import Problem

# The cause: the test that has it. Those without a file are below.
SILENTLY_WRONG = {
    "taken for solo-learn on weak marks": "test_detect.py::test_common_names_do_not_make_a_file_solo_learns",
    "ViT-S of MoCo-v3 has 12 heads": "test_upstream.py::test_mocov3_vit_small_has_12_heads",
    "12 heads in solo-learn's MoCo-v3": "test_upstream.py::test_solo_learns_mocov3_vit_small_has_12_heads",
    "children of lightly's generator: no ReLU after bn1": "test_upstream.py::test_an_export_keeps_what_no_tensor_shows",
    "7x7 stem without max-pooling": "test_detect.py::test_lightning_bolts_says_what_follows_the_stem",
    "the advised ::PREFIX forgets the format": "test_upstream.py::test_a_prefix_keeps_the_format_of_the_file",
    "extracted solo-learn CIFAR backbone": "test_upstream.py::test_the_padding_of_a_3x3_stem_is_asked_for",
    "unknown modules inside the trunk": "test_upstream.py::test_attention_inside_the_backbone_is_refused_by_name",
    "anti-aliased timm ResNets": "test_anti_aliasing_is_assumed_and_the_printed_way_is_exact",
    "3x3 stem with max-pooling kept": "test_a_3x3_stem_with_max_pooling_is_assumed_away_and_can_be_said",
    "3x3 stem with stride 2, dilated stages": "test_stride_and_dilation_are_named_among_the_assumptions",
    "ResNet v1, stride in the 1x1": "test_the_stride_of_resnet_v1_can_be_said",
    "NaN in a convolution": "test_loading.py::test_undefined_numbers_are_refused",
}
OTHER_FAULTS = {
    "lightly's cards refuse lightly's files": "test_upstream.py::test_lightlys_cards_take_lightlys_files",
    "ways in a message that fail": "test_upstream.py::test_what_a_message_prints_works",
    "--arch timm:NAME is not mentioned": "test_a_network_of_timm_is_loaded_by_the_way_that_the_message_names",
    "ConvNeXt and Swin: four trunks": "test_a_stage_is_not_called_a_backbone",
    "ConvNeXt and Swin do not load": "test_vits.py::test_convnext_and_swin_flat_and_as_solo_learn_writes_them",
    "a ViT whose size timm has no name for": "test_vits.py::test_a_transformer_without_a_name_is_built_from_its_sizes",
    "a ViT at 384 pixels is given 224": "test_the_input_of_a_transformer_is_the_size_of_its_positions",
    "shards with an index": "test_vits.py::test_shards_with_an_index_are_one_checkpoint",
    "accelerate's folders": "test_vits.py::test_accelerates_folders",
    "ordinary objects called dangerous": "test_readers.py::test_ordinary_objects_beside_the_weights_are_inert",
    "TorchScript called compressed": "test_readers.py::test_torchscript_is_called_torchscript",
    "a module of torch 1.5 called damaged": "test_readers.py::test_a_whole_module_is_its_state_dict_in_both_containers",
    "wide and grouped ResNets": "test_wide_and_grouped_resnets_are_torchvisions",
    "EMA copies dropped without a word": "test_an_ema_copy_is_named_and_can_be_asked_for",
    "refused although they hold a good backbone": "test_files_that_hold_a_backbone_are_loaded",
    "second TF2 model of one process": "test_the_second_tf2_model_of_a_process_is_read",
}


@pytest.mark.parametrize("where", sorted({*SILENTLY_WRONG.values(), *OTHER_FAULTS.values()}))
def test_every_cause_has_its_test(where: str) -> None:
    file, _, name = where.rpartition("::")
    text = (Path(__file__).parent / (file or Path(__file__).name)).read_text()
    assert re.search(rf"^def {name}\(", text, re.M)


HERE = Located(path=Path("mine.pth"), name="mine")


def open_it(contents: Contents, choice: str | None = None) -> Opened:
    return open_contents(contents, with_choice(HERE, choice) if choice else HERE)


def own_network(make: Callable[[], nn.Module], change: Callable[[nn.Module], None] = lambda _: None) -> nn.Module:
    """A user's torchvision network, with numbers that every layer depends on, in eval mode."""
    torch.manual_seed(0)
    network = make()
    change(network)
    for name, buffer in network.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.1)
    return network.eval()


def features_apart(path: Path, network: nn.Module, **load: str) -> float:
    """Largest difference over the largest feature, at 64 pixels."""
    network.fc = nn.Identity()
    images = torch.rand(2, 3, 64, 64)
    with torch.inference_mode():
        expected, features = network(images), finetune_mile.load(str(path), **load)(images)  # type: ignore[arg-type]
    return float((features - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", ["resnext50_32x4d", "wide_resnet50_2"])
def test_wide_and_grouped_resnets_are_torchvisions(name: str, tmp_path: Path) -> None:
    network = own_network(getattr(torchvision.models, name))
    torch.save(network.state_dict(), tmp_path / "x.pth")
    assert finetune_mile.load(str(tmp_path / "x.pth")).report.arch == name
    assert features_apart(tmp_path / "x.pth", network) < 1e-5


@pytest.mark.parametrize("groups", ["resnext101_64x4d", "resnext50_32x4d-cifar", "wide_resnet101_2", "resnext50_8x14d"])
def test_wide_and_grouped_names_are_read_from_shapes(groups: str) -> None:
    assert open_it(flat(trunk(groups) | linear("fc", 2048, 10))).report.arch == groups


def test_anti_aliasing_is_assumed_and_the_printed_way_is_exact(tmp_path: Path) -> None:
    import timm

    network = own_network(lambda: timm.create_model("resnetaa50", num_classes=0))
    torch.save(network.state_dict(), tmp_path / "x.pth")
    report = finetune_mile.load(str(tmp_path / "x.pth")).report
    (told,) = [text for text in report.assumed if text.startswith("no anti-aliasing")]
    assert not report.certain
    ways = re.findall(r"--arch ([\w:]+)", told)
    assert [timm.is_model(way.removeprefix("timm:")) for way in ways] == [True, True]
    assert features_apart(tmp_path / "x.pth", network) > 0.01
    assert features_apart(tmp_path / "x.pth", network, arch=ways[0]) < 1e-5


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet18-cifar2", "resnet50", "resnet101", "resnet50-d", "resnext50_32x4d"]
)
def test_every_network_that_an_assumption_names_has_the_same_tensors(name: str) -> None:
    mine = {key: tuple(tensor.shape) for key, tensor in trunk(name).items()}
    for other in re.findall(r"--arch ([\w:-]+)", " ".join(assumptions(name, None))):
        assert {key: tuple(tensor.shape) for key, tensor in trunk(other).items()} == mine, other


def small_stem(network: nn.Module) -> None:
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)


def test_a_3x3_stem_with_max_pooling_is_assumed_away_and_can_be_said(tmp_path: Path) -> None:
    network = own_network(torchvision.models.resnet18, small_stem)
    torch.save(network.state_dict(), tmp_path / "x.pth")
    report = finetune_mile.load(str(tmp_path / "x.pth")).report
    (told,) = [text for text in report.assumed if text.startswith("no pooling after it")]
    (arch,) = re.findall(r"--arch (\S+?)\)", told)
    assert features_apart(tmp_path / "x.pth", network) > 0.01
    assert features_apart(tmp_path / "x.pth", network, arch=arch) < 1e-5


def test_stride_and_dilation_are_named_among_the_assumptions() -> None:
    assumed = open_it(flat(trunk("resnet18-cifar") | linear("fc", 512, 10))).report.assumed
    assert {"stride 1 in the 3x3 stem", "no dilation", "features are the mean over the last map"} <= set(assumed)


def test_what_a_known_format_is_nothing_is_assumed() -> None:
    state = under("encoder_q.", trunk("resnet50")) | under("encoder_k.", trunk("resnet50"))
    report = open_it(torch_file(state_dict=under("module.", state))).report
    assert (report.certain, report.assumed, report.others) == (True, (), ("encoder_k",))
    assert report.reason == "the loaded one is what moco's own evaluation uses"


def test_the_stride_of_resnet_v1_can_be_said(tmp_path: Path) -> None:
    def first(network: nn.Module) -> None:
        for stage in ("layer2", "layer3", "layer4"):
            block = network.get_submodule(f"{stage}.0")
            block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)  # type: ignore[assignment, union-attr]

    network = own_network(torchvision.models.resnet50, first)
    torch.save(network.state_dict(), tmp_path / "x.pth")
    (told,) = [
        t for t in finetune_mile.load(str(tmp_path / "x.pth")).report.assumed if t.startswith("stride in the 3x3")
    ]
    (arch,) = re.findall(r"--arch (\S+?)\)", told)
    assert features_apart(tmp_path / "x.pth", network) > 0.01
    assert features_apart(tmp_path / "x.pth", network, arch=arch) < 1e-5


def test_a_network_of_timm_is_loaded_by_the_way_that_the_message_names(tmp_path: Path) -> None:
    import timm

    network = own_network(lambda: timm.create_model("seresnet18", num_classes=0))
    torch.save(network.state_dict(), tmp_path / "x.pth")
    with refused("layer1.0.se.", "--arch timm:NAME"):
        finetune_mile.load(str(tmp_path / "x.pth"))
    assert features_apart(tmp_path / "x.pth", network, arch="timm:seresnet18") < 1e-5


def test_the_message_names_the_prefix_of_a_network_of_timm() -> None:
    with refused("--init 'mine.pth::state_dict/net'", "--arch timm:NAME"):
        open_it(torch_file(state_dict=under("net.", trunk("timm:seresnet18"))))


def test_the_input_of_a_transformer_is_the_size_of_its_positions() -> None:
    opened = open_it(flat(trunk("timm:vit_tiny_patch16_384") | linear("head", 192, 10)))
    assert opened.card.preprocess.size == 384
    assert opened.network(torch.zeros(1, 3, 384, 384)).shape == (1, 192)


def test_a_stage_is_not_called_a_backbone() -> None:
    """Blocks of ConvNeXt and Swin have names of a vision transformer's, behind one prefix for each stage."""
    for stage in ("stages.{}.blocks.0.norm1.weight", "layers.{}.blocks.0.attn.qkv.weight"):
        names = [stage.format(number) for number in range(4)]
        names += [name.replace("blocks.0", f"blocks.{block}") for name in names for block in range(1, 8)]
        assert find_trunks(names)[1] == {}


AVERAGED = under("module.", trunk("resnet18")) | {"n_averaged": light("", ())}  # torch.optim.swa_utils


@pytest.mark.parametrize(
    ("tree", "other"),
    [
        ({"state_dict": trunk("resnet18"), "state_dict_ema": trunk("resnet18")}, "state_dict_ema"),
        (
            {
                "model": trunk("resnet18"),
                "model_ema": under("module.", trunk("resnet18")) | {"n_averaged": light("", ())},
            },
            "model_ema",
        ),
    ],
)
def test_an_ema_copy_is_named_and_can_be_asked_for(tree: dict[str, dict[str, Tensor]], other: str) -> None:
    contents = torch_file(**tree)
    report = open_it(contents).report
    assert report.others == (other,)
    assert "not a moving average" in report.reason
    picked = open_it(contents, other).report
    assert (picked.arch, picked.reason) == ("resnet18", "the loaded one is the one that you chose")


@pytest.mark.parametrize("nested", [False, True])
def test_a_backbone_that_holds_another_one_can_be_chosen(nested: bool, tmp_path: Path) -> None:
    """A user's network with its teacher inside: nothing tells which one is meant, and each printed way is exact."""
    network, teacher = (own_network(torchvision.models.resnet18) for _ in range(2))
    nn.init.normal_(teacher.conv1.weight)  # type: ignore[arg-type, union-attr]
    network.teacher = teacher
    state = network.state_dict()
    torch.save({"state_dict": state} if nested else state, tmp_path / "x.pth")
    with pytest.raises(Problem, match="holds 2 backbones; choose one") as caught:
        finetune_mile.load(str(tmp_path / "x.pth"))
    first, second = re.findall(r"--init '([^']+)'", str(caught.value))
    assert features_apart(Path(first), network) < 1e-5
    assert features_apart(Path(second), teacher) < 1e-5
    (other,) = finetune_mile.load(second).report.others  # what `weights check` prints
    assert features_apart(Path(f"{tmp_path / 'x.pth'}::{other}"), network) < 1e-5


def test_copies_are_told_apart_by_their_numbers_and_names() -> None:
    """The same numbers twice are one backbone; a moving average is no default; student and teacher are asked for."""

    def noise(_: str, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape)

    one, two = trunk("resnet-demo", noise), trunk("resnet-demo", noise)
    twice = open_it(torch_file(state_dict=under("net.body.", one) | under("online.net.body.", one)))
    assert twice.report.mapping == {"state_dict/net.body.": ""}
    assert "same numbers" in twice.report.why
    average = open_it(torch_file(state_dict=under("online_network.", one) | under("target_network.", two)))
    assert average.report.mapping == {"state_dict/online_network.": ""}
    assert average.report.others == ("target_network",)
    assert "moving average" in average.report.why
    with refused("2 backbones", "--init 'mine.pth::state_dict/student.' or"):
        open_it(torch_file(state_dict=under("student.", one) | under("teacher.", two)))


R18, QUEUE = trunk("resnet18"), {"queue.representations": light("", (128, 64))}
META = {"meta": {"mmcv_version": "1.0", "time": "now"}}
BACKBONE = under("backbone.", R18)
ENCODERS = under("encoder_q.0.", R18) | under("encoder_k.0.", R18) | BACKBONE
HELD = {  # layouts that were refused although they hold a backbone: the file, its format and its network
    "OpenSelfSup's MoCo": (torch_file(state_dict=ENCODERS, **META), "openmmlab", "resnet18"),
    "the same without meta": (torch_file(state_dict=ENCODERS), BEHIND_PREFIX, "resnet18"),
    "MMPretrain's MoCo-v2": (
        torch_file(state_dict=BACKBONE | under("encoder_k.module.0.", R18) | linear("neck.fc0", 8, 8), **META),
        "openmmlab", "resnet18",
    ),
    "lightning-bolts' MoCo": (
        torch_file(state_dict=under("encoder_q.", R18) | under("encoder_k.", R18) | QUEUE), "moco", "resnet18",
    ),
    "MoCo's CIFAR notebook": (
        torch_file(state_dict=under("encoder_q.net.", as_children(trunk("resnet18-cifar"), 3))), BEHIND_PREFIX,
        "resnet18-cifar",
    ),
    "SupContrast": (
        torch_file(model=under("encoder.module.", as_generator(trunk("resnet18-cifar"))) | linear("head.0", 512, 128)),
        BEHIND_PREFIX, "resnet18-cifar",
    ),
    "PatrickHua's SimSiam": (
        torch_file(state_dict=BACKBONE | under("encoder.0.", R18) | linear("encoder.1.layer1.0", 512, 64)),
        BEHIND_PREFIX, "resnet18",
    ),
    "accelerate's save_state": (
        flat(under("encoder.", R18 | linear("fc", 512, 10)) | linear("projector.0", 512, 64)),
        BEHIND_PREFIX, "resnet18",
    ),
    "yaox12's BYOL": (
        torch_file(model=under("module.online_network.encoder.", R18) | under("module.target_network.encoder.", R18)),
        BEHIND_PREFIX, "resnet18",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HELD))
def test_files_that_hold_a_backbone_are_loaded(name: str) -> None:
    contents, format, arch = HELD[name]
    report = open_it(contents).report
    assert (report.format, report.arch, len(report.loaded)) == (format, arch, len(trunk(arch)))


def test_the_second_tf2_model_of_a_process_is_read() -> None:
    """Keras counts on: its layers are resnet_1, conv2d_53 and so on."""
    tree = as_tensorflow(trunk("resnet50", counters=False))

    def later(match: re.Match[str]) -> str:
        return f"{match[1]}_{int(match[2] or 0) + 53}/"

    full = {
        f"model/{i}": re.sub(r"(conv2d|batch_normalization)(?:_(\d+))?/", later, name) for i, name in enumerate(tree)
    }
    full = {key: name.replace("base_model/", "resnet_1/x/") for key, name in full.items()}
    variables = dict(zip(full, tree.values(), strict=True))
    report = open_it(Contents(container="tf-checkpoint", tree=dict(variables), full_names=full)).report
    assert (report.format, report.arch) == ("simclr-tf", "resnet50")
