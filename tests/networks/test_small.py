"""The networks for digit grids: shapes, heads, and back from an export."""

import pytest
import torch
from safetensors.torch import load_file
from shortcuts import SHORT

import finetune_mile
from finetune_mile.checkpoints.loading import open_with_head
from finetune_mile.networks.heads import SMALL, build, get_head, new_head


@pytest.mark.parametrize("arch", SMALL)
@pytest.mark.parametrize("side", [24, 42])
def test_features_and_logits(arch, side):
    network = build(arch).eval()
    images = torch.rand(2, 3, side, side)
    assert network(images).shape == (2, network.num_features)
    new_head(network, 7, "prior")
    assert network(images).shape == (2, 7)
    assert get_head(network).bias.shape == (7,)


def test_a_grid_cell_sees_each_cell_alone():
    network = build("grid-cell").eval()
    images = torch.rand(1, 3, 42, 42)
    moved = images.clone()
    moved[:, :, :14, :14] = 0  # another first cell
    seen = []
    network.trunk.register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    network(images), network(moved)
    assert not seen[0][0].equal(seen[1][0])
    assert seen[0][1:].equal(seen[1][1:])


@pytest.mark.parametrize("arch", SMALL)
def test_an_export_is_loaded_again(run_demo, arch):
    folder = run_demo("run", *SHORT, "--arch", arch, "--method", "sigmoid", "--steps", "2")
    opened = open_with_head(str(folder), "--teacher")
    network, how, classes = opened.network, opened.card.preprocess, opened.classes
    assert (how.size, len(classes)) == (24, 10)
    saved = load_file(folder / "export/model.safetensors")
    assert all(tensor.equal(saved[name]) for name, tensor in network.state_dict().items())
    assert finetune_mile.load(str(folder / "export"))(torch.rand(1, 3, 24, 24)).shape == (1, network.num_features)
