"""One battery of contract checks for every adapter."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from making import light
from material import SHARED, needs_shared
from samples import SAMPLES
from torch import Tensor

from finetune_mile.checkpoints.adapters import ADAPTERS, adapt
from finetune_mile.checkpoints.adapters.adapter import leaves, names_of
from finetune_mile.checkpoints.adapters.simclr import targets
from finetune_mile.checkpoints.detect import Marks, detect, read_arch
from finetune_mile.checkpoints.init import Located
from finetune_mile.checkpoints.loading import build_for, check_fit, open_contents
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.core.problems import Problem

FORMATS = sorted(SAMPLES)
# files of these come from upstream's packages and samples: test_vits.py, test_upstream.py
ELSEWHERE = {
    *("clip-visual", "convnext", "dinov2", "mae", "msn", "open-clip", "openai-clip", "swin", "torchvision-vit"),
    *("hf-clip", "hf-convnext", "hf-dinov2", "hf-resnet", "hf-swin", "hf-vit"),
    *("openmmlab-mae", "openmmlab-moco-v3", "openmmlab-vit"),
}
HERE = Located(path=Path("sample.pth"), name="sample")


def fit(contents: Contents, name: str) -> None:
    """Detect, adapt, read the network's shape and hold the tensors against it."""
    found = detect(contents, HERE)
    assert found.format == name
    adapted = adapt(found.contents, found.adapter, source="sample.pth")
    tensors = {n: t for n, t in adapted.tensors.items() if not n.startswith(("fc.", "proj."))}
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    arch = read_arch(shapes, Marks(cifar_stem=found.adapter.cifar_stem), source="sample.pth")
    check_fit(build_for(arch, found.adapter.padding, tensors), tensors, source="sample.pth")


def place_of(contents: Contents, tensor: Tensor) -> tuple[dict[str, object], str]:
    """The mapping in a file that holds a tensor, and its name there."""
    todo: list[object] = [contents.tree]
    while todo:
        here = todo.pop()
        if isinstance(here, dict):
            for key, value in here.items():
                if value is tensor:
                    return here, key
            todo += here.values()
    raise LookupError


def one_tensor(contents: Contents, name: str) -> tuple[dict[str, object], str, str]:
    """Where one trunk tensor lies in a file, its name there, and ours."""
    adapter = ADAPTERS[name]
    own = adapter.unwrap(contents)
    ours = {adapter.rename(key): key for key in own}
    target = next(t for t in ("layer2.0.conv1.weight", "blocks.1.mlp.fc1.weight") if t in ours)
    return *place_of(contents, own[ours[target]]), target


def state_of(contents: Contents) -> list[tuple[str, int, tuple[int, ...], int]]:
    """Every tensor of a file: where it is, which one, its shape, and how often it was written to."""
    return [(path, id(tensor), tuple(tensor.shape), tensor._version) for path, tensor in leaves(contents.tree)]


@pytest.fixture(scope="module")
def every_sample() -> list[Contents]:
    return [sample() for sample in SAMPLES.values()]


def test_every_adapter_has_a_sample() -> None:
    assert set(SAMPLES) | ELSEWHERE == set(ADAPTERS)


@pytest.mark.parametrize("name", FORMATS)
class TestContract:
    def test_recognised_and_lands_on_the_trunk(self, name: str) -> None:
        fit(SAMPLES[name](), name)

    def test_no_other_adapter_is_tried_before(self, name: str) -> None:
        contents = SAMPLES[name]()
        before = list(ADAPTERS)[: list(ADAPTERS).index(name)]
        assert [b for b in before if ADAPTERS[b].recognise(contents)] == []

    def test_its_mark_is_in_every_file_that_it_recognises(self, name: str, every_sample: list[Contents]) -> None:
        """A file without the mark is never shown to `recognise`."""
        for contents in every_sample:
            if ADAPTERS[name].recognise(contents) is not None:
                assert re.search(ADAPTERS[name].mark, names_of(contents), re.MULTILINE)

    def test_leaves_the_file_s_contents_as_they_are(self, name: str) -> None:
        contents = SAMPLES[name]()
        before = state_of(contents)
        adapt(contents, ADAPTERS[name], source="sample.pth")
        assert state_of(contents) == before

    def test_injective_and_total(self, name: str) -> None:
        adapter = ADAPTERS[name]
        own = adapter.unwrap(SAMPLES[name]())
        names = [new for key in own if (new := adapter.rename(key)) is not None]
        assert len(names) == len(set(names)) > 40

    def test_every_tensor_is_accounted_for(self, name: str) -> None:
        contents = SAMPLES[name]()
        adapted = adapt(contents, ADAPTERS[name], source="sample.pth")
        assert len(adapted.tensors) + len(adapted.dropped) == len(list(leaves(contents.tree)))

    def test_refuses_an_added_tensor(self, name: str) -> None:
        contents = SAMPLES[name]()
        mapping, key, _ = one_tensor(contents, name)
        mapping[f"{key}_more"] = light("", (1,))
        with pytest.raises(Problem, match=f"{re.split(r'[./]', key)[-1]}_more"):
            open_contents(contents, HERE)

    def test_refuses_a_missing_tensor(self, name: str) -> None:
        contents = SAMPLES[name]()
        mapping, key, ours = one_tensor(contents, name)
        del mapping[key]
        with pytest.raises(Problem, match=f"({ours}|{key.split('/')[-2:][0]}) is missing"):
            open_contents(contents, HERE)


def test_an_adapter_that_writes_into_the_file_s_tensors_is_noticed() -> None:
    """The check of every adapter's manners can fail."""
    contents = SAMPLES["moco"]()
    tree = {"state_dict": {key: tensor.clone() for key, tensor in contents.tree["state_dict"].items()}}
    contents = replace(contents, tree=tree)
    before = state_of(contents)
    adapt(contents, replace(ADAPTERS["moco"], relayout=lambda _, tensor: tensor.zero_()), source="sample.pth")
    assert state_of(contents) != before


def test_two_names_for_one_are_refused() -> None:
    adapter = ADAPTERS["moco"]
    doubled = replace(adapter, rename=lambda key: adapter.rename(key) and "conv1.weight")
    with pytest.raises(Problem, match=r"both conv1\.weight"):
        adapt(SAMPLES["moco"](), doubled, source="sample.pth")


def test_tensorflow_counts_are_those_of_the_released_files() -> None:
    assert tuple(map(len, targets("resnet50"))) == (53, 53)
    assert tuple(map(len, targets("resnet50-sk"))) == (87, 71)


def from_json(path: Path) -> Contents:
    """A key list of the shared material as a file without memory."""

    def grow(node: object, name: str = "") -> object:
        if isinstance(node, dict):
            return {key: grow(value, key) for key, value in node.items()}
        if isinstance(node, list) and len(node) == 2 and isinstance(node[0], str):
            return light(name, tuple(node[1]))
        return node

    tree = grow(json.loads(path.read_text()))
    assert isinstance(tree, dict)
    return Contents(container="torch-zip", tree=tree)


def from_text(path: Path, container: str) -> Contents:
    """A list of TF2 checkpoint keys with full names as a file without memory."""
    rows = [line.split(" | ") for line in path.read_text().splitlines() if line]
    tree = {key: light("", tuple(json.loads(shape))) for key, _, _, shape in rows}
    names = {key: name.removeprefix("full_name=") for key, name, _, _ in rows}
    return Contents(container=container, tree=tree, full_names=names)  # type: ignore[arg-type]


KEYS = {
    "lightly__lightly_byol_r18.ckpt.json": "lightly",
    "lightly__lightly_moco_r18.ckpt.json": "lightly",
    "lightly__lightly_simclr_r18.ckpt.json": "lightly",
    "lightly__lightly_swav_r18.ckpt.json": "lightly",
    "moco_v2__checkpoint_0000.pth.tar.json": "moco",
    "simclr_v1_tonylins__resnet50-1x.pth.json": "tonylins",
    "simclr_v2_separius__r50_1x_sk0.pth.json": "separius",
    "simclr_v2_separius__r50_1x_sk1.pth.json": "separius-sk",
    "solo__solo_byol_r18-ep=0.ckpt.json": "solo-learn",
    "solo__solo_mocov2plus_r18-ep=0.ckpt.json": "solo-learn",
    "solo__solo_simclr_r18-ep=0.ckpt.json": "solo-learn",
    "solo__solo_swav_r18-ep=0.ckpt.json": "solo-learn",
    "swav__checkpoint.pth.tar.json": "swav",
    "swav__swav_800ep_pretrain.pth.tar.json": "swav",
    "vissl__simclr__model_final_checkpoint_phase99.torch.json": "vissl",
    "vissl__swav__model_final_checkpoint_phase99.torch.json": "vissl",
}
TF2 = {"simclr_v2_tf2_ckpt_sk0": "tf-checkpoint", "simclr_v2_tf2_savedmodel_sk1": "tf-savedmodel"}


@needs_shared
def test_every_shared_key_list_is_tried() -> None:
    names = {path.name for path in (SHARED / "keys").iterdir()}
    assert names == set(KEYS) | {f"{name}.key_to_full_name.txt" for name in TF2}


@needs_shared
@pytest.mark.parametrize("file", sorted(KEYS))
def test_shared_key_lists(file: str) -> None:
    fit(from_json(SHARED / "keys" / file), KEYS[file])


@needs_shared
@pytest.mark.parametrize("file", sorted(TF2))
def test_shared_tf2_key_lists(file: str) -> None:
    fit(from_text(SHARED / "keys" / f"{file}.key_to_full_name.txt", TF2[file]), "simclr-tf")


@needs_shared
def test_tf2_numbers_mean_the_objects_that_the_graph_says() -> None:
    """The structural path of a variable, which the adapter does not use, agrees with its target."""
    text = (SHARED / "keys" / "simclr_v2_tf2_savedmodel_sk1.key_to_full_name.txt").read_text()
    contents = from_text(SHARED / "keys" / "simclr_v2_tf2_savedmodel_sk1.key_to_full_name.txt", "tf-savedmodel")
    adapted = adapt(contents, ADAPTERS["simclr-tf"], source="x")
    by_tensor = {id(t): key for key, t in contents.tree.items()}
    own = ADAPTERS["simclr-tf"].unwrap(contents)
    ours = {by_tensor[id(own[source])]: name for name, source in adapted.sources.items()}
    paths = dict(re.findall(r"^(\S+) \|.*structural=(\S+) \|", text, flags=re.M))
    seen = 0
    for key, name in ours.items():
        found = re.search(r"block_groups/(\d)/layers/(\d+)/(\w+)/(\d+)(.*)/(\w+)$", paths[key])
        if found:
            seen += 1
            assert name.startswith(f"layer{int(found[1]) + 1}.{found[2]}.")
            assert ("downsample" in name) == (found[3] == "projection_layers")
            if found[3] != "projection_layers":
                inner = {"0": "conv1.", "1": "bn1.", "3": "conv2.", "5": "conv3.", "6": "bn3."}[found[4]]
                assert name.split(".", 2)[2].startswith(inner)
    assert seen > 300
