"""`weights add` and `weights verify`: cards for a user's own files."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import finetune_mile
from finetune_mile.cli import main
from finetune_mile.core.files import shipped


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A checkpoint file of the user, and a configuration folder of its own."""
    monkeypatch.setenv("FINETUNE_MILE_CONFIG", str(tmp_path / "config"))
    (tmp_path / "files").mkdir()
    file = tmp_path / "files/net.safetensors"
    shutil.copy(shipped("weights") / "simclr-demo.safetensors", file)
    return file


def test_a_card_of_ones_own_is_found_from_any_folder(own, tmp_path, monkeypatch, capsys):
    assert main(["weights", "add", str(own), "--name", "mine", "--citation", "my thesis"]) == 0
    assert "use it: --init mine" in capsys.readouterr().out
    card = yaml.safe_load((tmp_path / "config/weights/mine.yaml").read_text())
    assert (card["name"], card["arch"], card["paper"]) == ("mine", "resnet-demo", "my thesis")
    assert (len(card["sha256"]), card["bytes"]) == (64, own.stat().st_size)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    network = finetune_mile.load("mine")
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(network(images), finetune_mile.load(str(own))(images))
    assert main(["weights", "ls"]) == 0
    assert "mine" in capsys.readouterr().out


def test_what_was_added_is_never_taken_for_something_else(own, capsys):
    assert main(["weights", "add", str(own), "--name", "mine"]) == 0
    assert main(["weights", "add", str(own), "--name", "mine"]) == 2
    assert "you added a card of this name before; replace it with --overwrite" in capsys.readouterr().err
    assert main(["weights", "add", str(own), "--name", "swav"]) == 2
    assert "a card of the package has this name" in capsys.readouterr().err
    assert main(["weights", "add", str(own), "--name", "../up"]) == 2
    assert main(["weights", "add", str(own.parent), "--name", "folder"]) == 2
    assert "name a checkpoint file" in capsys.readouterr().err
    tensors = load_file(own)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, own)
    assert main(["weights", "check", "mine"]) == 2
    assert "is not the file that card mine describes; `finetune-mile weights add" in capsys.readouterr().err
    assert main(["weights", "add", str(own), "--name", "mine", "--overwrite"]) == 0
    own.unlink()
    assert main(["weights", "check", "mine"]) == 2
    assert "the file of card mine does not exist any more" in capsys.readouterr().err


def test_verify_checks_hash_tensors_and_features_and_records_them(own, tmp_path, capsys):
    assert main(["weights", "add", str(own), "--name", "mine"]) == 0
    assert main(["weights", "verify", "mine", "simclr-demo"]) == 0
    said = capsys.readouterr().out
    assert "hash as on the card, features as on the card" in said
    record = json.loads((tmp_path / "config/weights/verified/mine.json").read_text())
    assert record["ok"]
    assert len(record["features"]) == 8
    assert record["files"]["net.safetensors"]["bytes"] == own.stat().st_size
    assert len(record["files"]["net.safetensors"]["sha256"]) == 64
    path = tmp_path / "config/weights/mine.yaml"
    card = yaml.safe_load(path.read_text())
    card["features"][3] += 0.1
    path.write_text(yaml.safe_dump(card))
    assert main(["weights", "verify", "mine"]) == 1
    assert "FEATURES DIFFER by 0.1" in capsys.readouterr().out
    assert main(["weights", "verify"]) == 2
