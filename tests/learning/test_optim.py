import pytest
import torch

from finetune_mile.core.problems import Problem
from finetune_mile.learning.optim import make_optimizer, parameter_groups, rate_at, set_rate
from finetune_mile.networks.heads import build, get_head, new_head
from finetune_mile.networks.parts import set_drop_path


def test_the_rate_is_a_function_of_the_step():
    cosine = [rate_at(s, total_steps=10, schedule="cosine", warmup=2) for s in range(10)]
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert cosine == sorted(cosine[:2]) + sorted(cosine[2:], reverse=True)
    assert 0 < cosine[-1] < 0.1
    steps = [rate_at(s, total_steps=6, schedule="step", milestones=(2, 4), gamma=0.1) for s in range(6)]
    assert steps == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert rate_at(99, total_steps=10, schedule="constant") == 1.0


def test_groups_cover_everything_once_and_vectors_do_not_decay():
    network = build("resnet-demo")
    new_head(network, 5, "prior")
    groups = parameter_groups(network, lr=0.1, head_lr=2.0, weight_decay=0.01)
    members = [id(p) for g in groups for p in g["params"]]
    assert sorted(members) == sorted(id(p) for p in network.parameters())
    for group in groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.01 if p.ndim > 1 else 0.0)
            in_head = any(p is q for q in get_head(network).parameters())
            assert group["lr"] == (2.0 if in_head else 0.1)


def test_lars_does_not_adapt_the_head():
    """Two equal steps: a head weight moves by the plain rate, a trunk weight by its share of its own norm."""
    network = build("resnet-demo")
    new_head(network, 3, "zero", "zero")
    head, conv = get_head(network).weight, next(p for p in network.parameters() if p.ndim == 4)
    assert not head.any()
    optimizer = make_optimizer("lars", parameter_groups(network, lr=0.1, head_lr=None, weight_decay=0.0),
                               momentum=0.0, nesterov=False)  # fmt: skip
    for _ in range(2):
        before = conv.detach().clone()
        for p in network.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert head.detach().mean().item() == pytest.approx(-0.2)
    share = 0.1 * 0.001 * before.norm() / torch.ones_like(before).norm()
    assert (before - conv).mean().item() == pytest.approx(share.item(), rel=1e-3)


@pytest.mark.parametrize(("name", "lr"), [("sgd", 0.02), ("adamw", 0.02), ("lars", 4.0)])
def test_every_optimiser_learns_and_takes_its_rate(name, lr):
    torch.manual_seed(0)
    network = build("resnet-demo")
    new_head(network, 3, "zero")
    groups = parameter_groups(network, lr=lr, head_lr=None, weight_decay=0.0)
    optimizer = make_optimizer(name, groups, momentum=0.9, nesterov=name == "sgd")
    images, labels = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = []
    for _ in range(25):
        set_rate(optimizer, 0.5)
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert {g["lr"] for g in optimizer.param_groups} == {lr / 2}


@pytest.mark.parametrize(
    "arch", ["timm:vit_tiny_patch16_224:depth=2", "timm:convnext_tiny:depths=1-1-2-1,dims=8-16-24-32"]
)
def test_rates_of_layers_decay_as_timms(arch):
    from timm.optim import param_groups_layer_decay

    network = build(arch)
    new_head(network, 3, "zero")
    groups = parameter_groups(network, lr=1.0, head_lr=None, weight_decay=0.1, layer_decay=0.5)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    theirs = {
        id(p): group["lr_scale"]
        for group in param_groups_layer_decay(network, layer_decay=0.5)
        for p in group["params"]
    }
    assert rates == theirs
    assert all(group["weight_decay"] == 0 for group in groups for p in group["params"] if p.ndim == 1)


def test_rates_of_a_resnets_blocks_decay():
    network = build("resnet18")
    new_head(network, 3, "zero")
    groups = parameter_groups(network, lr=1.0, head_lr=2.0, weight_decay=0.0, layer_decay=0.5)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    by_name = {name: rates[id(parameter)] for name, parameter in network.named_parameters()}
    assert (by_name["fc.weight"], by_name["layer4.1.conv1.weight"], by_name["layer4.0.conv1.weight"]) == (
        2.0,
        0.5,
        0.25,
    )
    assert by_name["conv1.weight"] == min(rates.values()) == 0.5**9


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto"])
def test_drop_path_has_timms_rates(name):
    import timm
    from timm.layers import DropPath

    network = build(f"timm:{name}")
    set_drop_path(network, 0.3)
    rates = [m.drop_prob for m in network.modules() if isinstance(m, DropPath) and m.drop_prob]
    reference = timm.create_model(name, drop_path_rate=0.3)
    assert rates == pytest.approx([m.drop_prob for m in reference.modules() if isinstance(m, DropPath) and m.drop_prob])
    with pytest.raises(Problem, match="drop_path: this network has no blocks for it"):
        set_drop_path(build("resnet18"), 0.3)
