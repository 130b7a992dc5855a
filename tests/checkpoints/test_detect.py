"""A trunk is found behind any prefix, at any depth, in any order; a damaged one is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from making import as_children, as_separius, as_tensorflow, flat, light, linear, torch_file, trunk, under
from shortcuts import refused
from torch import Tensor

from finetune_mile.checkpoints.detect import BEHIND_PREFIX, Marks, read_arch
from finetune_mile.checkpoints.init import Located, with_choice
from finetune_mile.checkpoints.loading import Opened, open_contents
from finetune_mile.checkpoints.readers import Contents
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import build
from finetune_mile.networks.resnets import DEPTHS, name_arch, parse_arch

HERE = Located(path=Path("mine.pth"), name="mine")
WORDS = re.compile(r"conv\d|bn\d|layer\d+|blocks|fc|net|\d+|downsample|norm|shortcut")
parts = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True).filter(lambda part: not WORDS.fullmatch(part))
fast = settings(max_examples=25, deadline=None)


def noise(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    return torch.rand(shape) + 0.5


@cache
def demo() -> dict[str, Tensor]:
    return trunk("resnet-demo", noise)


def open_it(contents: Contents, choice: str | None = None) -> Opened:
    return open_contents(contents, with_choice(HERE, choice) if choice else HERE)


def nested(tensors: dict[str, Tensor], levels: list[str]) -> Contents:
    tree: dict[str, object] = dict(tensors)
    for level in reversed(levels):
        tree = {level: tree, "epoch": 3}
    return Contents(container="torch-zip", tree=tree)


@fast
@given(prefix=st.lists(parts, max_size=4), levels=st.lists(parts, max_size=3), seed=st.integers())
def test_any_prefix_nesting_and_order_is_found(prefix: list[str], levels: list[str], seed: int) -> None:
    names = list(demo())
    random.Random(seed).shuffle(names)
    shuffled = {name: demo()[name] for name in names}
    opened = open_it(nested(under("".join(f"{p}." for p in prefix), shuffled), levels))
    assert opened.report.arch == "resnet-demo"
    assert opened.report.reset == ()
    state = opened.network.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in demo().items())


@fast
@given(prefix=parts, data=st.data())
def test_a_damaged_trunk_is_refused_by_name(prefix: str, data: st.DataObject) -> None:
    tensors = trunk("resnet50")
    name = data.draw(st.sampled_from([n for n in tensors if not n.endswith("num_batches_tracked")]))
    shape = tuple(tensors[name].shape)
    damage = data.draw(st.sampled_from(["missing", "transposed", "wider"]))
    if damage == "missing":
        del tensors[name]
    elif damage == "transposed":
        assume(len(shape) == 4 and shape[0] != shape[1])
        tensors[name] = tensors[name].transpose(0, 1)
    else:
        tensors[name] = light(name, (shape[0] * 2, *shape[1:]))
    with pytest.raises(Problem, match=re.escape(name)):
        open_it(flat(under(f"{prefix}.", tensors)))


@pytest.mark.parametrize(
    ("tensors", "arch"),
    [
        (as_children(trunk("resnet34")), "resnet34"),
        (as_children(trunk("resnet18-cifar"), 3), "resnet18-cifar"),
        (as_separius(trunk("resnet101-sk"), sk=True), "resnet101-sk"),
        (as_separius(trunk("resnet50w2"), sk=False), "resnet50w2"),
        (trunk("resnet50-d"), "resnet50-d"),
        (trunk("timm:vit_tiny_patch16_224"), "timm:vit_tiny_patch16_224"),
    ],
)
def test_other_vocabularies_behind_an_unknown_prefix(tensors: dict[str, Tensor], arch: str) -> None:
    opened = open_it(flat(under("my.thing.", tensors) | linear("my.thing.fc", 8, 10)))
    assert opened.report.format == BEHIND_PREFIX
    assert opened.report.arch == arch
    assert opened.report.mapping == {"my.thing.": ""}
    assert len(opened.report.dropped) == 2


def test_two_trunks_are_an_error_that_names_both_and_the_way_out() -> None:
    contents = nested(under("online.", demo()) | under("slow.", trunk("resnet-demo", noise)), ["weights"])
    with refused("'mine.pth::weights/online.'", "--init 'mine.pth::weights/slow.'"):
        open_it(contents)
    for choice in ("weights/online.", "weights/online"):
        opened = open_it(contents, choice)
        assert torch.equal(opened.network.state_dict()["conv1.weight"], demo()["conv1.weight"])
        assert len(opened.report.dropped) == len(demo())
        assert opened.report.mapping == {choice: ""}


def test_a_choice_that_is_not_there_lists_what_is() -> None:
    contents = nested(under("online.", demo()) | under("slow.", demo()), [])
    message = r"no tensor is below 'fast'; .*--init 'mine\.pth::online' or --init 'mine\.pth::slow'"
    with pytest.raises(Problem, match=message):
        open_it(contents, "fast")


def test_the_other_network_of_a_known_format_can_be_asked_for() -> None:
    key, query = trunk("resnet18", noise), trunk("resnet18")
    contents = torch_file(state_dict=under("module.encoder_q.", query) | under("module.encoder_k.", key))
    opened = open_it(contents, "state_dict/module.encoder_k")
    assert torch.equal(opened.network.state_dict()["conv1.weight"], key["conv1.weight"])


def test_a_format_can_be_forced() -> None:
    plain = flat(trunk("resnet50"))
    assert open_it(plain).report.padding == "torch"
    assert open_it(plain, "byol-convert").report.padding == "same"


NAMES = [
    f"resnet{depth}{suffix}"
    for depth in DEPTHS
    for suffix in ("", "w2", "-d", "-cifar", "-sk" if depth >= 50 else "-proj")
]


@pytest.mark.parametrize("name", NAMES)
def test_architecture_is_read_from_shapes(name: str) -> None:
    shapes = {n: tuple(t.shape) for n, t in trunk(name).items()}
    assert read_arch(shapes, Marks(), source="x") == name
    arch = parse_arch(name)
    assert arch is not None
    assert name_arch(arch) == name


LIGHTNING = {"pytorch-lightning_version": "2.6.6"}
PROBE = linear("classifier", 512, 10)


def channels_last(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for n, t in tensors.items()}


@pytest.mark.parametrize("mark", ["momentum copy", "channels last", "named"])
def test_solo_learns_cifar_stem_has_its_padding(mark: str) -> None:
    backbone = under("backbone.", trunk("resnet18-cifar"))
    state = backbone | PROBE | linear("projector.0", 512, 64)
    if mark == "momentum copy":
        state |= under("momentum_backbone.", trunk("resnet18-cifar"))
    elif mark == "channels last":
        state = channels_last(state)
    tree = LIGHTNING if mark != "named" else {}
    opened = open_it(torch_file(state_dict=state, **tree), "solo-learn" if mark == "named" else None)
    assert opened.report.arch == "resnet18-cifar2"


@pytest.mark.parametrize(
    "extra", [{}, linear("projector.0", 512, 64), under("momentum_backbone.", trunk("resnet18-cifar"))]
)
@pytest.mark.parametrize("choice", [None, "state_dict/backbone", "state_dict/encoder"])
def test_common_names_do_not_make_a_file_solo_learns(extra: dict[str, Tensor], choice: str | None) -> None:
    """A user's own Lightning module calls its parts backbone, classifier and projector too."""
    trunk_name = "encoder." if choice == "state_dict/encoder" else "backbone."
    state = under(trunk_name, trunk("resnet18-cifar")) | PROBE | extra
    contents = torch_file(state_dict=state, hyper_parameters={"lr": 0.1}, **LIGHTNING)
    with refused("3x3 stem", "--arch resnet18-cifar (", "--arch resnet18-cifar2 ("):
        open_it(contents, choice)


@pytest.mark.parametrize(("arch", "asks"), [("resnet18-cifar", True), ("resnet18", False), ("resnet-demo", False)])
def test_only_a_3x3_stem_that_solo_learn_may_have_made_is_asked_about(arch: str, asks: bool) -> None:
    bare, own = flat(trunk(arch)), flat(trunk(arch) | linear("fc", 512, 10))
    assert open_it(own).report.arch == arch  # solo-learn's backbones have no fc
    if asks:
        with pytest.raises(Problem, match="3x3 stem"):
            open_it(bare)
        assert open_it(bare, "torchvision").report.arch == arch
    else:
        assert open_it(bare).report.arch == arch


@pytest.mark.parametrize(
    ("arch", "first_conv", "pool", "found"),
    [
        ("resnet18", True, True, "resnet18"),
        ("resnet18", True, False, "resnet18-nopool"),
        ("resnet18-cifar", False, False, "resnet18-cifar"),
        ("resnet18", False, False, "resnet18"),  # not what the tensors show: these settings are of something else
        ("resnet18-cifar", False, True, "resnet18-cifar-pool"),
    ],
)
def test_lightning_bolts_says_what_follows_the_stem(arch: str, first_conv: bool, pool: bool, found: str) -> None:
    settings = {"first_conv": first_conv, "maxpool1": pool}
    contents = torch_file(state_dict=under("encoder.", trunk(arch)), hyper_parameters=settings)
    assert open_it(contents).report.arch == found


@pytest.mark.parametrize(
    ("arch", "sentence"),
    [
        ("timm:vit_tiny_patch16_224:heads=5", "cannot be built with 5 heads"),
        ("timm:resnet18:heads=2", "cannot be built with 2 heads"),
        ("timm:resnet18:depth=2", "cannot be built with depth=2"),
        ("timm:vit_tiny_patch16_224:heads", "expected timm:NAME or timm:NAME:key=value"),
        ("timm:vit_tiny_patch16_224:colour=3", "unknown option 'colour'"),
        ("timm:vit_tiny_patch16_224:depth=99999999", "depth=99999999 is not a valid value"),
    ],
)
def test_attention_heads_that_timm_cannot_build_are_one_sentence(arch: str, sentence: str) -> None:
    with pytest.raises(Problem, match=f"--arch {arch}: .*{sentence}"):
        build(arch)


def test_a_network_after_the_file_and_another_by_arch_are_refused() -> None:
    with refused("mine.pth::resnet18-cifar2", "--arch resnet18-cifar", "two networks"):
        with_choice(replace(HERE, arch="resnet18-cifar"), "resnet18-cifar2")


@pytest.mark.parametrize("name", ["ca.fc1.weight", "se.weight", "fc_norm.weight", "attention_1.bias", "norm2.bias"])
def test_unknown_modules_inside_the_backbone_are_refused(name: str) -> None:
    for prefix in ("", "net."):
        contents = torch_file(state_dict=under(prefix, demo() | {name: light("", (3,)), "queue": light("", (3,))}))
        with refused(name, "features would be wrong"):
            open_it(contents)


@pytest.mark.parametrize("name", ["linear.weight", "projection.0.weight", "queue_ptr", "momentum_encoder.x", "neck.y"])
def test_what_is_beside_the_backbone_is_dropped(name: str) -> None:
    for prefix in ("", "net."):
        tree = under(prefix, demo() | {name: light("", (3,))})
        report = open_it(torch_file(model=tree, optimizer={"state": {0: {"exp_avg": light("", (3,))}}})).report
        assert report.dropped == (f"model/{prefix}{name}", "optimizer/state/0/exp_avg")
    flat_file = torch_file(**demo(), **{name: light("", (3,))}, optimizer={"state": {0: {"step": light("", (3,))}}})
    assert set(open_it(flat_file).report.dropped) == {name, "optimizer/state/0/step"}


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        (torch_file(epoch=3), "no tensor"),
        (flat(linear("a.b", 3, 4)), "unknown format"),
        (flat({n: t for n, t in trunk("resnet50").items() if not n.startswith("layer3.5")}), "is not supported"),
        (torch_file(type="shard_list", classy_state_dict={}), "shards"),
        (Contents(container="tf-checkpoint", tree={"a/kernel": light("", (2, 2))}), "unknown format"),
    ],
)
def test_what_is_no_trunk_is_refused(contents: Contents, sentence: str) -> None:
    with pytest.raises(Problem, match=sentence):
        open_it(contents)


def test_wrappers_are_taken_off_again_and_again() -> None:
    contents = torch_file(state_dict=under("_orig_mod.module.encoder_q._orig_mod.", trunk("resnet18")))
    assert open_it(contents).report.format == "moco"
    contents = torch_file(model=under("module._orig_mod.", trunk("resnet18")))
    assert open_it(contents).report.format == "torchvision"


def test_a_module_in_the_middle_of_a_name_stays() -> None:
    """Only leading components are taken off: `my_module.` is no wrapper."""
    opened = open_it(flat(under("my_module.", trunk("resnet18"))))
    assert opened.report.mapping == {"my_module.": ""}


def test_where_padding_cannot_be_known_it_is_asked_for() -> None:
    contents = flat(under("trunk.", trunk("resnet18-proj")))
    with pytest.raises(Problem, match=r"byol-convert.*--arch resnet18-proj"):
        open_it(contents)
    opened = open_contents(contents, replace(HERE, arch="resnet18-proj"))
    assert opened.report.padding == "torch"


def vissl(prefix: str) -> dict[str, Tensor]:
    return under(prefix, trunk("resnet18"))


def classy(tensors: dict[str, Tensor]) -> Contents:
    model = {"trunk": tensors, "heads": linear("0.clf.0", 512, 128)}
    return torch_file(classy_state_dict={"base_model": {"model": model}}, loss={})


@pytest.mark.parametrize(
    ("contents", "format"),
    [
        (classy(vissl("_feature_blocks.")), "vissl"),
        (classy(vissl("base_model._feature_blocks.")), "vissl"),
        (classy(vissl("")), "vissl"),
        (torch_file(model_state_dict=vissl("_feature_blocks.")), "vissl"),
        (torch_file(model_state_dict=vissl("trunk.base_model._feature_blocks.")), "vissl"),
        (flat(vissl("_feature_blocks.")), "vissl"),
        (flat(vissl("")), "torchvision"),
        (flat(under("module.", vissl("") | linear("prototypes.prototypes0", 128, 30))), "swav"),
        (torch_file(state_dict=under("module.", vissl("") | linear("fc", 512, 9)), amp={}), "torchvision"),
        (flat(under("module.", trunk("resnet50w4") | linear("prototypes", 128, 30))), "swav"),
        (torch_file(state_dict=under("encoder.", vissl("")) | linear("classifier", 512, 9)), "solo-learn"),
    ],
)
def test_layouts(contents: Contents, format: str) -> None:
    assert open_it(contents).report.format == format


def test_solo_learns_methods() -> None:
    """What the methods save beside their trunk is dropped; what is inside it and unknown stops the load."""
    backbone = under("backbone.", trunk("resnet18")) | under("momentum_backbone.", trunk("resnet18"))
    extras = ("queue", "queue_ptr", "queue_y", "prototypes.weight_g", "prototypes.0.weight", "head.mlp.0.weight")
    extras += ("momentum_head.x", "dino_loss_func.center", "local_memory_index", "momentum_classifier.bias")
    state = backbone | {name: light("", (3,)) for name in (*extras, "projector.0.weight", "predictor.1.bias")}
    report = open_it(torch_file(state_dict=state)).report
    assert set(extras) < set(report.dropped)
    more = {"novelty.weight": light("", (3,))}
    assert "novelty.weight" in open_it(torch_file(state_dict=state | more)).report.dropped
    with pytest.raises(Problem, match=r"backbone\.novelty"):
        open_it(torch_file(state_dict=state | under("backbone.", more)))


def test_tf2_optimiser_is_dropped_by_its_place() -> None:
    tail = "/.ATTRIBUTES/VARIABLE_VALUE"
    tree = as_tensorflow(trunk("resnet18-proj", counters=False))
    full = {f"model/{i}{tail}": name.replace("base_model/", "resnet/x/") for i, name in enumerate(tree)}
    variables = dict(zip(full, tree.values(), strict=True))
    for name in ("optimizer/iter", "save_counter", "model/0/.OPTIMIZER_SLOT/optimizer/Momentum"):
        variables[f"{name}{tail}"] = light("", ())
    full[f"optimizer/iter{tail}"] = "SGD/iter"
    contents = Contents(container="tf-checkpoint", tree=dict(variables), full_names=full)
    report = open_it(contents).report
    assert (report.arch, len(report.dropped)) == ("resnet18-proj", 3)


def test_simclr_v1_has_no_projection_head() -> None:
    tree = as_tensorflow(trunk("resnet50w2", counters=False))
    report = open_it(Contents(container="tf-checkpoint", tree=dict(tree))).report
    assert (report.arch, report.padding) == ("resnet50w2", "tf")
