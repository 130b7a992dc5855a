"""`finetune_mile.load_classifier`: the trained head, its classes, and predictions that agree with `eval`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, RepoUrl, hub_mixin
from PIL import Image
from shortcuts import refused
from torch import Tensor

import finetune_mile
from finetune_mile import cli
from finetune_mile.checkpoints import classifier
from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.loading import load_network
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import load_data
from finetune_mile.measures.predictions import read_predictions
from finetune_mile.run import main

TRAINED = ["--data", "demo:400", "--method", "softmax", "--steps", "40", "--batch-size", "32", "--set",
           "evaluate.images=20", "--set", "evaluate.labels=false"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned something: the demo's pre-trained network, a few steps of softmax training."""
    out = tmp_path_factory.mktemp("classifier") / "run"
    assert main([*TRAINED, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def val(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[int]]:
    """The run's validation images as PNG files, and their given labels."""
    images, folder = load_data("demo:400").val, tmp_path_factory.mktemp("val")
    paths = [folder / f"{i}.png" for i in range(len(images))]
    for i, path in enumerate(paths):
        Image.fromarray(images.read(i).permute(1, 2, 0).numpy()).save(path)
    return paths, images.given.tolist()


def snippet(card: Path) -> str:
    found = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_model_card_snippet_gives_the_trained_classifier(
    run: Path, val: tuple[list[Path], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    paths, labels = val
    code = snippet(run / "export/README.md")
    asked = re.findall(r'"([^"]+\.jpg)"', code)
    for name in asked:  # the photo that the reader brings
        (run / name).write_bytes(paths[0].read_bytes())
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    for name in asked:
        (run / name).unlink()
    model = names["model"]
    best = [found[0][0] for found in model.predict(paths)]  # type: ignore[attr-defined]
    accuracy = 100 * np.mean([name == str(label) for name, label in zip(best, labels, strict=True)])
    results = json.loads((run / "results.json").read_text())
    assert results["accuracy"] > 20, "a run that learned nothing would prove nothing"
    assert "learned nothing" not in (run / "export/README.md").read_text() + (run / "report.html").read_text()
    assert accuracy == pytest.approx(results["accuracy"], abs=1e-9)
    assert cli.main(["eval", "--model", f"run:{run}", "--out", str(tmp_path / "eval"), "--draws", "0"]) == 0
    assert accuracy == pytest.approx(json.loads((tmp_path / "eval/results.json").read_text())["accuracy"], abs=1e-9)


def test_load_classifier_takes_a_run_an_export_and_a_file(run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((run / "export/model.safetensors").read_bytes())
    images, logits = torch.rand(2, 3, 24, 24), []
    for source in (run, str(run / "export"), run / "export/model.safetensors", alone):
        model = finetune_mile.load_classifier(source)
        assert not model.training
        assert model.classes == tuple("0123456789")
        assert model.report.reset == ()
        with torch.inference_mode():
            logits.append(model(images))
    assert all(torch.equal(each, logits[0]) for each in logits)


def odd_photos(root: Path) -> None:
    """Files that a plain reader gets wrong: rotated by EXIF, CMYK, 16 bits, a palette."""
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 255, (6, 9, 3), dtype=np.uint8)).resize((54, 36), Image.Resampling.BICUBIC)
    for name in ("0", "1"):
        (root / name).mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    noise.save(root / "0/rotated.jpg", quality=95, exif=exif)
    noise.convert("CMYK").save(root / "0/print.jpg", quality=95)
    Image.fromarray(rng.integers(0, 65535, (30, 40), dtype=np.uint16)).save(root / "1/deep.png")
    noise.convert("P").save(root / "1/palette.png")


def test_predict_sees_what_eval_sees(run: Path, tmp_path: Path) -> None:
    odd_photos(tmp_path / "photos")
    flags = ["--model", f"run:{run}", "--data", f"folder:{tmp_path / 'photos'}", "--part", "all", "--workers", "0"]
    assert cli.main(["eval", *flags, "--out", str(tmp_path / "eval"), "--draws", "0"]) == 0
    saved = read_predictions(tmp_path / "eval/logits.parquet")
    model = finetune_mile.load_classifier(run)
    paths = [tmp_path / "photos" / name for name in saved.ids]
    for found, by_pil, logits in zip(
        model.predict(paths), model.predict([Image.open(path) for path in paths]), saved.logits, strict=True
    ):
        chances = dict(found)
        assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
        assert [p for _, p in found] == sorted(chances.values(), reverse=True)
        ratio = chances["0"] / chances["1"]  # eval keeps the logits of the data's classes
        assert ratio == pytest.approx(float((logits[0] - logits[1]).exp()), rel=1e-3)
        assert dict(by_pil) == pytest.approx(chances, rel=1e-4)
    assert model.predict(str(paths[0])) == model.predict(paths[0])


def demo_export(folder: Path, **config: object) -> Path:
    network, card, _ = load_network("none", arch="resnet-demo", num_classes=3, head_bias="zero")
    facts = {"arch": "resnet-demo", "padding": "torch", "num_classes": 3, **card.preprocess.model_dump(mode="json")}
    write_export(folder, network, facts | {"size": 24} | config)
    return folder


def test_predict_gives_sigmoids_and_numbers_where_the_file_says_so(tmp_path: Path) -> None:
    model = finetune_mile.load_classifier(demo_export(tmp_path / "export", activation="sigmoid"))
    assert model.classes is None
    image = torch.randint(0, 255, (3, 30, 30), dtype=torch.uint8)
    with torch.inference_mode():
        expected: Tensor = model(model.preprocess(image).unsqueeze(0)).sigmoid()[0]
    found = model.predict(Image.fromarray(image.permute(1, 2, 0).numpy()))
    assert {name for name, _ in found} == {"0", "1", "2"}
    assert dict(found) == pytest.approx({str(i): float(p) for i, p in enumerate(expected)}, rel=1e-5)
    assert model.predict([]) == []


def test_predict_takes_arrays_and_tensors_alone_and_in_lists(tmp_path: Path) -> None:
    model = finetune_mile.load_classifier(demo_export(tmp_path / "export"))
    pixels = torch.randint(0, 255, (3, 3, 30, 26), dtype=torch.uint8)
    arrays = [image.permute(1, 2, 0).numpy() for image in pixels]
    Image.fromarray(arrays[0]).save(tmp_path / "0.png")
    mixed = [tmp_path / "0.png", arrays[1], pixels[2]]
    expected = model.predict([Image.fromarray(array) for array in arrays])
    assert len({labels[0][1] for labels in expected}) == 3
    for images in (mixed, tuple(mixed), pixels, np.stack(arrays), list(pixels)):
        for labels, same in zip(model.predict(images), expected, strict=True):
            assert dict(labels) == pytest.approx(dict(same), rel=1e-5)
    assert dict(model.predict(arrays[1])) == pytest.approx(dict(expected[1]), rel=1e-5)
    assert dict(model.predict(pixels[2])) == pytest.approx(dict(expected[2]), rel=1e-5)
    grey = np.repeat(arrays[0][..., :1], 3, axis=2)
    assert model.predict(grey[..., 0]) == model.predict(grey)
    with refused("not an image", "PIL", "Tensor float32 (3, 30, 26)"):
        model.predict(pixels[0].float())
    with pytest.raises(Problem, match=r"found ndarray uint8 \(3, 30, 26\)"):
        model.predict(pixels[0].numpy())
    with pytest.raises(Problem, match="found int"):
        model.predict([3])  # type: ignore[list-item]


def test_a_list_is_one_forward_pass_per_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifier, "BATCH", 2)
    model, sizes = finetune_mile.load_classifier(demo_export(tmp_path / "export")), []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    model.predict(torch.zeros(5, 3, 24, 24, dtype=torch.uint8))
    assert sizes == [2, 2, 1]


def test_save_pretrained_and_from_pretrained(run: Path, tmp_path: Path) -> None:
    model = finetune_mile.load_classifier(run)
    model.save_pretrained(tmp_path / "saved")
    for name in ("README.md", "model.safetensors"):
        assert (tmp_path / "saved" / name).read_bytes() == (run / "export" / name).read_bytes(), name
    saved, first = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "saved", run / "export"))
    assert saved == first
    again = finetune_mile.ImageClassifier.from_pretrained(tmp_path / "saved")
    images = torch.rand(2, 3, 24, 24)
    assert torch.equal(again(images), model(images))
    assert (again.classes, again.activation, again.preprocess) == (model.classes, model.activation, model.preprocess)


def test_a_classifier_of_another_library_is_saved_as_ours(tmp_path: Path) -> None:
    network, _, _ = load_network("none", arch="resnet-demo", num_classes=3, head_bias="zero")
    torch.save(network.state_dict(), tmp_path / "foreign.pth")
    model = finetune_mile.load_classifier(tmp_path / "foreign.pth")
    model.save_pretrained(tmp_path / "saved")
    again = finetune_mile.load_classifier(tmp_path / "saved")
    images = torch.rand(2, 3, 24, 24)
    assert torch.equal(again(images), model(images))
    assert again.preprocess == model.preprocess
    assert again.classes is None


def test_push_to_hub_uploads_an_export_that_from_pretrained_downloads(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands for the hub."""
    hub = tmp_path / "hub"
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: RepoUrl(f"https://huggingface.co/{repo_id}"))
    monkeypatch.setattr(
        HfApi, "upload_folder", lambda self, *, repo_id, folder_path, **_: shutil.copytree(folder_path, hub / repo_id)
    )
    model = finetune_mile.load_classifier(run)
    model.push_to_hub("me/photos")
    asked = []

    def download(repo_id: str, **options: object) -> str:
        asked.append(options["revision"])
        return str(hub / repo_id)

    monkeypatch.setattr(hub_mixin, "hf_hub_download", lambda repo_id, filename, **_: str(hub / repo_id / filename))
    monkeypatch.setattr(classifier, "snapshot_download", download)
    again = finetune_mile.ImageClassifier.from_pretrained("me/photos", revision="v1")
    assert asked == ["v1"]
    images = torch.rand(2, 3, 24, 24)
    assert torch.equal(again(images), model(images))


def test_predict_names_the_file_that_cannot_be_read(tmp_path: Path) -> None:
    model = finetune_mile.load_classifier(demo_export(tmp_path / "export"))
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xffnothing")
    with pytest.raises(Problem, match=r"broken.jpg cannot be read as an image"):
        model.predict([tmp_path / "broken.jpg"])
    with pytest.raises(Problem, match=r"absent.jpg cannot be read"):
        model.predict("absent.jpg")


def test_load_classifier_refuses_what_has_no_classifier(tmp_path: Path) -> None:
    network, _, _ = load_network("none", arch="resnet-demo", num_classes=3, head_bias="zero")
    trunk = {key: value for key, value in network.state_dict().items() if not key.startswith("fc.")}
    torch.save(trunk, tmp_path / "trunk.pth")
    with pytest.raises(Problem, match=r"trunk.pth: it has no classifier"):
        finetune_mile.load_classifier(tmp_path / "trunk.pth")
    with pytest.raises(Problem, match="no such run folder or file"):
        finetune_mile.load_classifier(tmp_path / "nothing")


def test_load_warns_when_it_replaces_a_trained_head_of_that_size(tmp_path: Path) -> None:
    export = str(demo_export(tmp_path / "export"))
    with pytest.warns(UserWarning, match=r"new, untrained head.*load_classifier"):
        finetune_mile.load(export, num_classes=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finetune_mile.load(export, num_classes=4)
        finetune_mile.load(export)
        finetune_mile.load("simclr-demo", num_classes=10)


def test_the_package_still_imports_without_torch() -> None:
    code = "import sys, finetune_mile; finetune_mile.load_classifier; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
