"""`finetune-mile weights`: what it prints, writes and returns."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import as_separius, trunk, under
from PIL import Image
from shortcuts import refused
from torch import Tensor
from weights_page import write_docs

import finetune_mile
from finetune_mile.checkpoints.cards import list_cards
from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.loading import load_network
from finetune_mile.cli import main as command
from finetune_mile.config.flags import parse


def main(words: list[str]) -> int:
    return command(["weights", *words])


def noise(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(7) if name.endswith("tracked") else torch.rand(shape) + 0.5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    torch.manual_seed(0)
    torch.save(under("module.pre.", trunk("resnet-demo", noise)), folder / "mine.pth")
    network = finetune_mile.load(str(folder / "mine.pth"))
    images = torch.rand(2, 3, 32, 32)
    features = network(images).detach().numpy()
    np.savez(tmp_path / "expected.npz", x_32=images.numpy(), features_32=features)
    np.savez(tmp_path / "wrong.npz", x_32=images.numpy(), features_32=features * 1.001)
    np.savez(tmp_path / "shape.npz", x_32=images.numpy(), features_32=features[:, :5])
    np.savez(tmp_path / "lacking.npz", x_32=images.numpy())
    return folder / "mine.pth"


def test_ls_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in list_cards())
    assert "unverified" in table
    assert main(["ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == set(list_cards())
    assert main(["show", "mocov2"]) == 0
    shown = capsys.readouterr().out
    assert "a04e12f8" in shown
    assert "moco_v2_800ep_pretrain.pth.tar" in shown
    assert main(["show", "mocov7"]) == 2
    assert "did you mean" in capsys.readouterr().err


def listed(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert main(["ls", "--json", *flags]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_ls_filters_by_licence_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    everything = listed(capsys)
    assert {row["licence"] for row in listed(capsys, "--licence", "apache-2.0")} == {"Apache-2.0"}
    free = listed(capsys, "--commercial")
    assert free == [row for row in everything if row["licence"] != "CC-BY-NC-4.0"]
    small = listed(capsys, "--max-mb", "90", "--commercial")
    assert small == [row for row in free if row["megabytes"] <= 90]
    assert small[0]["name"] == "dinov2-s"  # the best one first
    for flags, sentence in (
        (["--licence", "gpl"], "--licence gpl: no card has it; there are Apache-2.0"),
        (["--max-mb", "0"], "--max-mb 0: must be above 0"),
        (["--max-mb", "0.1"], "no card fits these filters"),
    ):
        assert main(["ls", *flags]) == 2
        assert sentence in capsys.readouterr().err


def test_a_line_of_ls_has_licence_size_input_and_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = next(line.split() for line in lines if line.startswith("dinov2-s "))
    assert line[3:8] == ["Apache-2.0", "88", "224", "81.1", "79.0"]
    assert len(lines) == 1 + len(list_cards())  # each card in one line, so that head and grep work
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("columns", [80, 200])
def test_ls_keeps_its_numbers_on_a_narrow_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["ls", "--max-mb", "90"]) == 0
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    line = next(line for line in plain.splitlines() if line.startswith("dinov2-s "))
    assert re.search(r"Apache-2\.0 +88 +224 +81\.1 +79\.0", line)
    assert ("vit_small_patch14_dinov2" in line) == (columns == 200)


@pytest.mark.parametrize("verb", [["ls"], ["show", "byol"], ["check", "mocov9"], ["check", "none.pth"]])
def test_no_torch_before_it_is_needed(verb: list[str]) -> None:
    code = (
        "import sys; from finetune_mile.cli import main\n"
        f"code = main(['weights', *{verb!r}]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == (2 if verb[0] == "check" else 0), done.stderr


def test_check_accounts_and_compares(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file), "--against", str(file.parents[1] / "expected.npz")]) == 0
    out = capsys.readouterr().out
    assert "trunk behind a prefix" in out
    assert "mapping: 'module.pre.' -> ''" in out
    assert "resnet-demo" in out
    assert "the same as" in out
    assert main(["check", str(file)]) == 0
    assert "not compared (--against" in capsys.readouterr().out


def test_check_answers_in_one_screen(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it is, how sure, what was assumed, what is dropped, the input, and a line that can be typed."""
    assert main(["check", str(file)]) == 0
    out = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert {"format", "network", "sure", "assumed", "input", "loaded", "dropped", "use it"} <= lines.keys()
    assert len(out.splitlines()) <= 24
    assert lines["sure"] == "by the names of the tensors alone"
    assert {"no dilation", "features are the mean over the last map"} <= set(re.findall(r"assumed: (.*)", out))
    words = shlex.split(lines["use it"])
    parsed = parse(words[2:])
    assert finetune_mile.load(parsed.given["init"]).report.arch == "resnet-demo"


def test_check_against_another_checkpoint(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(file), str(tmp_path / "same")]) == 0
    assert main(["check", str(file), "--against", str(tmp_path / "same" / "model.safetensors")]) == 0
    state = torch.load(file, weights_only=True)
    first = next(iter(state))
    torch.save(state | {first: state[first] + 1}, tmp_path / "other.pth")
    assert main(["check", str(file), "--against", str(tmp_path / "other.pth")]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_check_shows_a_photo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Norms, and the classes that the head in the file finds: those of the network itself."""
    network, _, _ = load_network("simclr-demo", arch=None, num_classes=3, head_bias="zero")
    torch.save(network.state_dict(), tmp_path / "mine.pth")
    Image.new("RGB", (40, 40), (200, 30, 30)).save(tmp_path / "red.png")
    words = ["check", str(tmp_path / "mine.pth"), "--arch", "resnet-demo", "--image", str(tmp_path / "red.png")]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["image"]
    opened = finetune_mile.load(str(tmp_path / "mine.pth"), arch="resnet-demo")
    pixels = opened.preprocess(Image.open(tmp_path / "red.png")).unsqueeze(0)
    with torch.inference_mode():
        assert facts["norm"] == pytest.approx(float(opened(pixels).norm()), rel=1e-4)
        shares = network.eval()(pixels).softmax(1)[0]
    assert facts["classes"][0] == [f"class {int(shares.argmax())}", pytest.approx(float(shares.max()), rel=1e-4)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "its classes: class " in out
    assert "norm of the features" in out
    assert main(["check", str(tmp_path / "mine.pth"), "--image", str(tmp_path / "absent.png")]) == 2


def test_format_is_an_answer_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--format` is a part of --init, so that a recipe and a resumed run keep it; every verb with --init has it."""
    state = {name: torch.rand(tensor.shape) for name, tensor in trunk("resnet-demo").items() if tensor.ndim}
    torch.save(state, tmp_path / "mine.pth")
    assert parse(["--init", "mine.pth", "--format", "solo-learn"]).given["init"] == "mine.pth::format=solo-learn"
    assert main(["check", str(tmp_path / "mine.pth"), "--format", "byol-convert", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["padding"] == "same"
    assert finetune_mile.load(str(tmp_path / "mine.pth"), format="byol-convert").report.padding == "same"
    assert main(["check", str(tmp_path / "mine.pth"), "--format", "byol-convrt"]) == 2
    assert "did you mean byol-convert?" in capsys.readouterr().err
    with refused("--format solo-learn", "--init"):
        _ = parse(["--format", "solo-learn"]).given


@pytest.mark.parametrize(("against", "code"), [("wrong", 1), ("shape", 1), ("lacking", 2), ("absent", 2)])
def test_check_exits(file: Path, against: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file), "--against", str(file.parents[1] / f"{against}.npz")]) == code
    assert ("DIFFERENT" in capsys.readouterr().out) == (code == 1)


def test_check_for_scripts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    against = str(file.parents[1] / "wrong.npz")
    assert main(["check", str(file), "--json", "--against", against]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert result["parity"]["32"] == pytest.approx(1e-3, rel=0.01)
    assert result["counts"] == {"loaded": len(trunk("resnet-demo")), "reset": 0, "dropped": 0}
    assert result["mapping"] == {"module.pre.": ""}


def test_check_takes_the_vectors_beside_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file.parent / "expected.npz").write_bytes((file.parents[1] / "wrong.npz").read_bytes())
    assert main(["check", str(file)]) == 1
    capsys.readouterr()


def test_convert_out_and_in_again(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(file), str(out)]) == 0
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        first, second = (finetune_mile.load(str(p))(images) for p in (file, out))
    assert torch.equal(first, second)
    assert main(["convert", str(file), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_convert_keeps_padding_and_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sk.pth"
    torch.save({"resnet": as_separius(trunk("resnet50-sk", noise), sk=True), "head": {}}, path)
    assert main(["convert", str(path), str(tmp_path / "own")]) == 0
    again = finetune_mile.load(str(tmp_path / "own" / "model.safetensors"))
    assert (again.report.padding, again.report.arch) == ("tf", "resnet50-sk")
    assert again.card.preprocess.std == (1.0, 1.0, 1.0)
    assert main(["convert", str(path), str(tmp_path / "timm"), "--to", "timm"]) == 2
    assert "--to timm is not possible" in capsys.readouterr().err


def test_convert_to_timm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import timm

    path = tmp_path / "r18.pth"
    torch.save(trunk("resnet18", noise), path)
    assert main(["convert", str(path), str(tmp_path / "timm"), "--to", "timm"]) == 0
    capsys.readouterr()
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(theirs(images), finetune_mile.load(str(path))(images))


def test_docs_are_written_from_cards_and_measurements(file: Path, tmp_path: Path) -> None:
    (file.parent / "expected.npz").write_bytes((file.parents[1] / "expected.npz").read_bytes())
    out = tmp_path / "docs" / "page.md"
    write_docs(out, parity=tmp_path, rewritten=None)
    text = out.read_text()
    assert all(f"| `{name}` |" in text for name in list_cards())
    assert "| in | `trunk behind a prefix` | resnet-demo |" in text


def test_the_page_in_the_repository_is_of_these_cards() -> None:
    page = Path(finetune_mile.__file__).parents[1] / "docs" / "checkpoints.md"
    text = page.read_text()
    missing = [name for name in list_cards() if f"| `{name}` |" not in text]
    assert [name for name in missing if not name.endswith("-demo")] == []
    assert " NO |" not in text


def run_like_export(folder: Path, **config: object) -> Path:
    """An export as a run writes it: ResNet-18 with a head for three classes."""
    network, card, _ = load_network("none", arch="resnet18", num_classes=3, head_bias="prior")
    facts = card.preprocess.model_dump(mode="json") | {
        "arch": "resnet18", "padding": "torch", "num_classes": 3, "classes": ["cat", "dog", "owl"],
        "activation": "sigmoid", "method": "mile",
    }  # fmt: skip
    write_export(folder, network, facts | config)
    return folder


@pytest.mark.parametrize("to", ["own", "timm"])
def test_convert_keeps_the_trained_classifier(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import timm

    source, out = run_like_export(tmp_path / "export"), tmp_path / "out"
    assert main(["convert", str(source), str(out), "--to", to]) == 0
    assert "classifier with 3 classes kept" in capsys.readouterr().out
    images = torch.rand(2, 3, 64, 64)
    first, again = (finetune_mile.load_classifier(path) for path in (source, out))
    with torch.inference_mode():
        expected = first(images)
        assert torch.equal(again(images), expected)
        if to == "timm":
            theirs = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
            torch.testing.assert_close(theirs(images), expected)
            assert theirs.pretrained_cfg["label_names"] == ["cat", "dog", "owl"]
    assert again.classes == ("cat", "dog", "owl")
    picture = Image.fromarray(np.full((40, 40, 3), 90, dtype=np.uint8))
    assert dict(again.predict(picture)) == pytest.approx(dict(first.predict(picture))), "the sigmoid is kept as well"


def test_convert_drops_the_classifier_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = run_like_export(tmp_path / "export")
    assert main(["convert", str(source), str(tmp_path / "out"), "--drop-head"]) == 0
    assert "classifier with 3 classes dropped" in capsys.readouterr().out
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["num_classes"], config["classes"]) == (0, [])


def test_convert_says_that_a_foreign_classifier_is_dropped_and_how_to_keep_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torchvision

    model = torchvision.models.resnet18(num_classes=5).eval()
    torch.save(model.state_dict(), tmp_path / "net.pth")
    assert main(["convert", str(tmp_path / "net.pth"), str(tmp_path / "out")]) == 0
    assert "classifier fc.weight with 5 classes dropped; add --keep-head fc to keep it" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "net.pth"), str(tmp_path / "kept"), "--keep-head", "fc"]) == 0
    assert "classifier with 5 classes kept" in capsys.readouterr().out
    images = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(finetune_mile.load_classifier(tmp_path / "kept")(images), model(images))
    assert main(["convert", str(tmp_path / "net.pth"), str(tmp_path / "no"), "--keep-head", "head"]) == 2
    assert "--keep-head head" in capsys.readouterr().err


def test_convert_continues_after_a_kill_and_never_overwrites_a_complete_output(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, replace = tmp_path / "out", Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == last:
            raise KeyboardInterrupt
        return replace(self, target)

    for last in ("config.json", "model.safetensors"):  # before the first file is in place, and between the two
        monkeypatch.setattr(Path, "replace", killed)
        assert main(["convert", str(file), str(out)]) == 130
        monkeypatch.undo()
        assert not (out / last).exists()
    assert main(["convert", str(file), str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    capsys.readouterr()
    assert main(["convert", str(file), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("{}")
    assert main(["convert", str(file), str(tmp_path / "mine")]) == 2, "a file that no killed convert left"
