"""`--init` is one value, whoever asks, and a config has one reader."""

import json

import pytest
from shortcuts import refused

import finetune_mile
from finetune_mile.checkpoints.cards import Missing
from finetune_mile.checkpoints.init import Init, locate, parse_init, parse_source, read_config, read_header
from finetune_mile.cli import main
from finetune_mile.config.resolve import choose_recipe, resolve
from finetune_mile.core.problems import Problem
from finetune_mile.training.pricing import find_weights


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with one of each kind."""
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "mocov2", "run/export"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x").write_bytes(b"x")
    (tmp_path / "moco.pth.tar").write_bytes(b"x")
    (tmp_path / "model.ckpt-1.index").write_bytes(b"x")
    return tmp_path


KINDS = {
    "none": ("none", "none", None),
    "mocov2": ("card", "mocov2", None),
    "simclrv2-r50-1x-sk1": ("card", "simclrv2-sk1", None),
    "simclrv2-sk1::ema_model": ("card", "simclrv2-sk1", "ema_model"),
    "moco.pth.tar": ("file", "moco.pth.tar", None),
    "moco.pth.tar::a.b": ("file", "moco.pth.tar", "a.b"),
    "photos": ("folder", "photos", None),
    "./mocov2": ("folder", "mocov2", None),
    "model.ckpt-1": ("tensorflow", "model.ckpt-1", None),
    "model.ckpt-1.index": ("file", "model.ckpt-1.index", None),
    "timm:resnet50.a1_in1k": ("timm", "resnet50.a1_in1k", None),
    "hf:owner/name": ("hf", "owner/name", None),
}


@pytest.mark.parametrize("text", KINDS)
def test_every_kind(here, text):
    init = parse_init(text)
    assert (init.kind, init.name, init.choice) == KINDS[text]
    assert str(init) == text
    assert (init.path is None) == (init.kind in ("none", "card", "timm", "hf"))
    assert parse_init(init) is init


def test_format_and_prefix_are_fields_or_text(here):
    typed = parse_init("moco.pth.tar", format="solo-learn", prefix="a.b")
    written = parse_init("moco.pth.tar::a.b::format=solo-learn")
    assert typed.chosen == written.chosen == "a.b::format=solo-learn"
    assert parse_init("moco.pth.tar").chosen is None
    assert locate(typed) == locate(written)
    found = locate(typed, "resnet18")
    assert (found.arch, found.format, found.prefix) == ("resnet18", "solo-learn", "a.b")
    with pytest.raises(Problem, match="byol and solo-learn are two formats"):
        locate(parse_init("moco.pth.tar::byol", format="solo-learn"))


def test_the_home_folder(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert parse_init("~/moco.pth.tar").path == here / "moco.pth.tar"


def test_a_message_names_its_flag(here):
    (here / "empty").mkdir()
    (here / "run/run.json").write_text("{}")
    (here / "run/export/x").unlink()
    (here / "run/export").rmdir()
    for text, sentence in {"a.pth": "--teacher a.pth: there is no such run", "empty": "--teacher empty: the folder is",
                           "photos::": "--teacher photos::: nothing follows"}.items():  # fmt: skip
        with pytest.raises(Problem, match=sentence):
            parse_source(text, "--teacher")
    with refused("--teacher run", "is not finished", "--resume"):
        locate(parse_source("run", "--teacher"))
    with pytest.raises(Missing, match="--model nothing: no such file, and no card"):
        parse_init("nothing", "--model")


def test_a_folder_with_the_name_of_a_card(here):
    """--init means the card, for the recipe too; a classifier is never a card."""
    assert choose_recipe({"init": "mocov2"})[0].stem == "mocov2"
    assert parse_source("mocov2", "--teacher") == Init("mocov2", "folder", "mocov2", flag="--teacher")
    with pytest.raises(Problem, match="no such run folder or file"):
        parse_source("swav", "--teacher")


def test_a_price_knows_what_run_knows():
    def found(init, arch=None):
        return find_weights(resolve({"init": "none", "arch": "resnet18"}, []).recipe.model_copy(
            update={"init": init, "arch": arch}))[0]  # fmt: skip

    assert found("simclrv2-r50-1x-sk1").arch == "resnet50-sk"
    with pytest.raises(Missing, match=r"not/here\.pth"):
        found("not/here.pth")


def test_one_reader_of_configs(here, capsys):
    export = here / "run/export"
    assert read_config(here / "run") == {}
    (here / "run/config.json").write_text('{"arch": "of the folder"}')
    (export / "config.json").write_text('{"arch": "resnet18", "size": 24}')
    assert read_config(here / "run") == read_config(export) == {"arch": "resnet18", "size": 24}
    assert read_config(here / "run/x.pth") == {"arch": "of the folder"}
    (export / "config.json").write_text("[1]")
    assert read_config(export) == {}
    for damaged in (b"{", b"\xff", b"[" * 100_000):
        (export / "config.json").write_bytes(damaged)
        (export / "model.safetensors").write_bytes(b"x")
        for read in (read_config, lambda place: finetune_mile.load(str(place))):
            with pytest.raises(Problem, match=r"export/config.json is not valid JSON"):
                read(here / "run")
        assert main(["eval", "--model", "run:run", "--data", "demo"]) == 2
        assert "is not valid JSON" in capsys.readouterr().err


def test_the_header_of_an_export():
    assert read_header({}) is None
    assert read_header({"finetune_mile": json.dumps({"arch": "resnet18"})}) == {"arch": "resnet18"}
    for text in ("{", "[]", "{}"):
        with pytest.raises(Problem, match="the header of this finetune_mile export"):
            read_header({"finetune_mile": text})
