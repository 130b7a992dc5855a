"""Every card is valid, agrees with its adapter, and names only what may be fetched."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import timm
import torch
import yaml
from shortcuts import refused

import finetune_mile
from finetune_mile.checkpoints.cards import LICENCES, Card, fetch_card, find_card, list_cards, read_card
from finetune_mile.checkpoints.init import parse_init
from finetune_mile.core.download import RemoteFile
from finetune_mile.core.files import shipped
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import build
from finetune_mile.networks.resnets import parse_arch

SHORT = ("simclrv2-sk0", "simclrv2-sk1", "mocov2", "byol", "swav", "simclr")
CARDS = sorted(list_cards())


def test_every_card_is_read() -> None:
    files = list(shipped("weights").rglob("*.yaml"))
    assert len(files) == len(CARDS)
    assert set(SHORT) <= set(CARDS)


@pytest.mark.parametrize("name", CARDS)
def test_card(name: str) -> None:
    from finetune_mile.checkpoints.adapters import ADAPTERS

    card = find_card(name)
    assert card.arch is not None
    assert parse_arch(card.arch) is not None or card.arch.startswith("timm:")
    if card.format is not None:
        assert card.format in ADAPTERS
    if card.format is not None and not name.endswith("-demo"):
        assert card.padding == ADAPTERS[card.format].padding
        assert card.preprocess == ADAPTERS[card.format].preprocess or (name.startswith("solo-") and "cifar" in name)
    assert card.licence in LICENCES
    assert card.file or name.startswith("solo-")
    assert card.linear_top1 is None or card.scores_from or name.endswith("-demo")
    for remote in card.remote():
        assert all(url.startswith("https://") for url in remote.urls)
    if not name.endswith("-demo"):
        assert not card.verified  # no published file can be fetched here
        assert card.remote() or name.startswith("solo-")
        assert card.paper.startswith("https://")


def test_the_megabytes_of_a_card_are_those_of_its_network() -> None:
    """The networks of a few cards, built without storage."""
    for name in ("dinov2-s", "dinov2-b-reg", "mae-l16", "dino-r50", "simclrv2-r50-2x-sk1", "simclr-demo"):
        card = find_card(name)
        with torch.device("meta"):
            tensors = build(str(card.arch)).state_dict().values()
        assert card.megabytes == round(sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6)
    assert all(find_card(name).megabytes for name in CARDS)


@pytest.mark.parametrize(
    "name", [name for name in CARDS if find_card(name).method in ("dino", "dinov2", "ibot", "mae")]
)
def test_strong_weights_are_named_with_licence_size_input_and_accuracy(name: str) -> None:
    card = find_card(name)
    if name.startswith(("lightly-", "solo-")):
        return
    assert card.licence == ("CC-BY-NC-4.0" if card.method == "mae" else "Apache-2.0")
    assert card.commercial == (card.method != "mae")
    assert card.preprocess.size == 224  # also DINOv2, whose positions are for 518
    assert (card.linear_top1 or 0) > 60
    assert card.knn_top1 is not None or card.method == "mae"
    assert card.scores_from
    if card.instead is not None:  # timm's own name of this network
        timm_name = card.instead.urls[0].split("/")[4]
        assert timm.get_pretrained_cfg(timm_name).hf_hub_id == f"timm/{timm_name}"
        assert timm.get_pretrained_cfg(timm_name).url == card.urls[0]
        assert str(card.arch).split(":")[1] == timm_name.split(".")[0]


@pytest.mark.parametrize(
    ("written", "known"), [("apache-2.0", "Apache-2.0"), ("cc by-nc 4.0", "CC-BY-NC-4.0"), ("x", "x")]
)
def test_licences_are_written_in_one_way(written: str, known: str) -> None:
    assert Card(name="x", method="m", arch=None, licence=written).licence == known


def test_cards_of_solo_learns_list_say_that_the_files_are_gone() -> None:
    """Its README of April 2026 has results and no files; whoever has a copy gives the file."""
    names = [name for name in CARDS if name.startswith("solo-")]
    assert len(names) >= 52, "the ResNets of its list"
    for name in names:
        card = find_card(name)
        assert (card.format, bool(card.data), card.scores_on) == ("solo-learn", True, card.data)
        assert not card.remote()
        assert (card.arch or "").endswith("-cifar2") == card.data.startswith("CIFAR")
    with refused("solo-learn removed the file", "--init FILE"):
        fetch_card(find_card("solo-byol-cifar10"))


def test_names_and_aliases_are_unique() -> None:
    names = [*CARDS, *(alias for name in CARDS for alias in find_card(name).aliases)]
    assert len(names) == len(set(names))


def test_the_thirteen_networks_of_simclr_v2() -> None:
    archs = {find_card(name).arch for name in CARDS if name.startswith("simclrv2-")}
    assert len(archs) == 13
    assert find_card("simclrv2-r50-1x-sk1").name == "simclrv2-sk1"


def test_no_url_in_python_and_no_python_in_cards() -> None:
    urls = [url for name in CARDS for remote in find_card(name).remote() for url in remote.urls]
    hosts = {urlsplit(url).hostname or "" for url in urls}
    assert {"storage.googleapis.com", "dl.fbaipublicfiles.com", "download.pytorch.org"} <= hosts
    package = Path(finetune_mile.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [host for host in hosts if host in text], path.name
    for path in list_cards().values():
        assert "!!python" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CARDS)
def test_no_card_needs_a_login(name: str) -> None:
    """These hosts answer a script with a login or a confirmation page; buckets have an anonymous address."""
    pages = (
        "storage.cloud.google.com",
        "drive.google.com",
        "docs.google.com",
        "dropbox.com",
        "1drv.ms",
        "sharepoint.com",
    )
    hosts = [urlsplit(url).hostname or "" for remote in find_card(name).remote() for url in remote.urls]
    assert [host for host in hosts if host.endswith(pages)] == []


@pytest.mark.parametrize(
    "url", ["http://example.com/a.pth", "ftp://example.com/a.pth", "file:///etc/passwd", "gs://bucket/a"]
)
def test_only_https_is_fetched(url: str) -> None:
    with pytest.raises(ValueError, match="only https"):
        RemoteFile(name="a.pth", urls=(url,))


@pytest.mark.parametrize("name", ["../a.pth", "/a.pth", "a/b.pth", ".hidden", ""])
def test_a_file_name_has_no_folders(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        RemoteFile(name=name, urls=("https://example.com/a.pth",))


def test_unknown_fields_and_two_ways_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "method": "m", "arch": None, "colour": "red"}))
    with refused("card x.yaml", "colour"):
        read_card(path)
    remote = RemoteFile(name="a", urls=("https://example.com/a",))
    with pytest.raises(ValueError, match="not both"):
        Card(name="x", method="m", arch=None, file="a", urls=remote.urls, files=(remote,))


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(Problem, match=r"did you mean .*mocov2.*weights ls"):
        find_card("moco-v2")


@pytest.mark.parametrize("name", ["resnet50", "vit_small_patch14_dinov2", "convnext_tiny", "wide_resnet50_2"])
def test_the_name_of_a_network_is_answered_with_checkpoints_of_it(name: str) -> None:
    with refused(f"timm:{name}", "timm:resnet50.a1_in1k", "dinov2-s"):
        parse_init(name)


def test_parse_init(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.ckpt-1.index").write_bytes(b"")
    for fine in ("none", "mocov2", "mocov2-800ep", "simclrv2-sk1::ema_model", "timm:resnet50", "hf:owner/name"):
        parse_init(fine)
    assert parse_init(str(tmp_path / "model.ckpt-1")).kind == "tensorflow"
    for wrong, why in {
        "mocov9000": "no card of that name",
        "missing.pth": "no such file",
        str(tmp_path / "nothing"): "no such file",
        str(tmp_path / "empty"): "empty",
        "timm:": "needs a model's name",
        "hf:name": "hf:owner/name",
        "mocov2::": "nothing follows",
    }.items():
        with pytest.raises(Problem, match=why):
            parse_init(wrong)
    chosen = parse_init("mocov2::b.c")
    assert (chosen.kind, chosen.name, chosen.choice) == ("card", "mocov2", "b.c")
