"""`finetune_mile.train`, `embed`, `probe`, `evaluate` and `Run`: the commands, from Python and with Python objects."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
import timm
import torch
import yaml
from accelerate import Accelerator
from PIL import Image
from shortcuts import losses
from torch import nn

import finetune_mile
from finetune_mile import Problem, Run, api
from finetune_mile.config.flags import RunOptions
from finetune_mile.core.in_memory import named
from finetune_mile.images.sources import load_data
from finetune_mile.run import main, prepare

# A run of a second, as SHORT is for the command.
FAST = {
    "arch": "resnet-demo", "method": "sigmoid", "steps": 4, "batch_size": 8, "size": 24, "workers": 0,
    "evaluate.images": 4, "evaluate.labels": False,
}  # fmt: skip


def picture(label, number):
    """A picture whose class shows in its colour."""
    noise = np.random.default_rng(100 * label + number).integers(0, 60, (30, 28, 3), dtype=np.uint8)
    noise[..., label] += 150
    return Image.fromarray(noise)


PICTURES = [(picture(label, number), label) for label in range(3) for number in range(5)]


class Pairs(torch.utils.data.Dataset):
    """What torchvision's data sets are: items (PIL image, int)."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Small(nn.Module):
    """A network of a user's own."""

    def __init__(self, num_features=6):
        super().__init__()
        self.num_features = num_features
        self.conv, self.norm = nn.Conv2d(3, 6, 5, stride=4), nn.BatchNorm2d(6)

    def forward(self, images):
        return self.norm(self.conv(images)).relu().mean((2, 3))


def hub_rows():
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["r", "g", "b"])})
    images, labels = zip(*PICTURES, strict=True)
    return datasets.Dataset.from_dict({"image": list(images), "label": list(labels)}, features=features)


def listed(folder):
    folder.mkdir()
    paths = []
    for number, (image, _) in enumerate(PICTURES):
        paths.append(folder / f"{number}.png")
        image.save(paths[-1])
    return paths, ["rgb"[label] for _, label in PICTURES]


def test_train_is_the_command(tmp_path, monkeypatch):
    flags = (
        "--data demo:40 --init none --arch resnet-demo --steps 6 --batch-size 8 --k-t 2 --k-s 1 --size 24 --flip true"
    )
    sets = (
        "evaluate.images=4 evaluate.labels=false mile.warmup=0 optimizer.clip=0.00001 augment.scale=[0.5,1] log_every=1"
    )
    words = [*flags.split(), *(word for each in sets.split() for word in ("--set", each))]
    assert main([*words, "--out", str(tmp_path / "command")]) == 0
    monkeypatch.chdir(tmp_path)
    run = finetune_mile.train(
        "demo:40", "none", arch="resnet-demo", steps=6, batch_size=8, k_t=2, k_s=np.int64(1), size=24, flip=True,
        out="python", log_every=1, keep_checkpoints=True,
        **{"evaluate.images": 4, "evaluate.labels": False, "mile.warmup": 0},
        **{"optimizer.clip": 1e-5, "augment.scale": (0.5, 1)},
    )  # fmt: skip
    assert losses(run.folder) == losses(tmp_path / "command")
    assert (run.folder / "recipe.yaml").read_text() == (tmp_path / "command/recipe.yaml").read_text()
    assert run.results == Run.open("python").results == json.loads((tmp_path / "command/results.json").read_text())
    assert run.report.is_file()
    kept = [[*folder.glob("checkpoints/step-*")] for folder in (run.folder, tmp_path / "command")]
    assert [bool(each) for each in kept] == [True, False]
    with pytest.raises(Problem, match=r"no labels.parquet .*finished.*its recipe says"):
        _ = run.labels
    with pytest.raises(Problem, match=r"--out python holds a run: continue it with --resume"):
        finetune_mile.train("demo:400", "none", out="python", **FAST)


def test_every_kind_of_data_holds_the_same_pictures(tmp_path):
    parts = {"train": Pairs(PICTURES[::2]), "val": Pairs(PICTURES[1::2]), "test": Pairs(PICTURES[:3])}
    given = {
        "rows": hub_rows(), "dict": datasets.DatasetDict(train=hub_rows(), validation=hub_rows()),
        "pairs": Pairs(PICTURES), "parts": parts, "lists": listed(tmp_path / "files"),
        "torch": hub_rows().select(range(15)).with_format("torch"),
    }  # fmt: skip
    for name, data in given.items():
        run = finetune_mile.train(data, "none", out=tmp_path / name, **FAST | {"evaluate.labels": True})
        rows = run.labels.to_pylist()
        total = {"dict": 15, "parts": 8}.get(name, 12)
        assert len(rows) == total, name
        assert run.results["images"] == {"dict": 15, "parts": 7}.get(name, 3)
        assert ("test_accuracy" in run.results) == (name == "parts")
        names = {label for row in rows for label in row["given"]}
        assert names == ({"0", "1", "2"} if name in ("pairs", "parts") else {"r", "g", "b"})
        assert f"data: python:{type(data).__name__}" in (run.folder / "recipe.yaml").read_text()
        if name == "lists":
            assert {row["id"] for row in rows} < {f"{'rgb'[i // 5]}/{i}.png" for i in range(15)}


class WithTargets(Pairs):
    """As torchvision's: labels without reading the images, names of classes, and perhaps other labels in the items."""

    classes, target_transform = ("red", "green", "blue"), None

    def __init__(self, items):
        super().__init__(items)
        self.targets, self.asked = [label for _, label in items], []

    def __getitem__(self, index):
        self.asked.append(index)
        image, label = self.items[index]
        return image, label if self.target_transform is None else self.target_transform(label)


def test_labels_of_torch_data_sets():
    whole = WithTargets(PICTURES)
    part = torch.utils.data.Subset(whole, [0, 1, 2, 5, 6, 7, 10, 11, 12])
    with named(whole, part) as (first, second):
        data, some = load_data(first), load_data(second)
        assert set(whole.asked) == {0}, "targets are enough"
        assert data.classes == some.classes == ("red", "green", "blue")
        assert sorted([*data.train.given.tolist(), *data.val.given.tolist()]) == whole.targets
        assert sorted([*some.train.given.tolist(), *some.val.given.tolist()]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        whole.target_transform = lambda label: 2 - label
        changed = load_data(first)
        assert [changed.train.given[0], changed.train.given[-1]] == [2, 0], "items win over targets"


def test_an_item_that_cannot_be_read_is_a_bad_image(tmp_path):
    class Broken(WithTargets):
        def __getitem__(self, index):
            if index == 3:
                raise OSError("image file is truncated")
            return super().__getitem__(index)

    run = finetune_mile.train({"train": Broken(PICTURES), "val": Pairs(PICTURES)}, "none", out=tmp_path / "run", **FAST)
    assert run.results["bad_images"] == 1
    assert "train,row-000000003,image file is truncated" in (run.folder / "bad_images.csv").read_text()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (7, "expected a datasets.Dataset, a torch Dataset"),
        (([], []), "there are 0 paths and 0 labels"),
        ((["a.jpg", "b.jpg"], ["x"]), "there are 2 paths and 1 labels"),
        ((["a.jpg", "a.jpg"], ["x", "x"]), "a.jpg is listed twice"),
        ((["a.jpg", "b.jpg"], [0, -5]), "label -5: classes are 0 to"),
        (Pairs([(torch.rand(3, 9, 9), 0)]), "is not .PIL image, int., without transforms: .*found Tensor float32"),
        ({"train": Pairs(PICTURES), "dev": Pairs(PICTURES)}, "the splits are train, dev; expected train, val, test"),
        (datasets.Dataset.from_dict({"label": [0, 1]}), "no image column among label; call select_columns"),
    ],
)
def test_data_that_cannot_be_used_is_refused(tmp_path, data, sentence):
    with pytest.raises(Problem, match=sentence):
        finetune_mile.train(data, "none", out=tmp_path / "run", **FAST)
    assert not (tmp_path / "run").exists()


def test_settings_get_the_sentences_of_the_command(tmp_path):
    with pytest.raises(Problem) as wrong:
        finetune_mile.train("demo:400", "none", out=tmp_path / "run", **FAST | {"mile.rhoo": 0.5, "lr": -1})
    assert "--set mile.rhoo: unknown key; did you mean rho?" in wrong.value.sentences
    assert any(sentence.startswith("--lr -1") for sentence in wrong.value.sentences)
    with pytest.raises(Problem, match="--data folder:nowhere: there is no directory"):
        finetune_mile.train("folder:nowhere", "none", **FAST)
    with pytest.raises(Problem, match="augment: a Small is not a value for a setting"):
        finetune_mile.train("demo:400", "none", augment=Small(), out=tmp_path / "run")
    with pytest.raises(Problem, match="nowhere: not a run folder"):
        Run.open("nowhere")
    with pytest.raises(Problem, match="--data: the value is empty; write --data VALUE"):
        finetune_mile.train(" ", "none", **FAST)
    with pytest.raises(Problem, match="--out: the value is empty; write --out VALUE"):
        finetune_mile.train("demo:400", "none", out="", **FAST)
    with pytest.raises(Problem, match="takes no other setting; leave out --batch-size"):
        finetune_mile.train(resume=tmp_path, batch_size=3)
    with pytest.raises(Problem, match="--sise: unknown flag; did you mean --size"):
        finetune_mile.embed("simclr-demo", "demo", sise=3)
    with pytest.raises(Problem, match="--draws -1: must be from 0 to 999,999"):
        finetune_mile.evaluate("timm:resnet18", "demo", draws=-1)
    with pytest.raises(Problem, match="--part trian: unknown; did you mean train"):
        finetune_mile.evaluate("timm:resnet18", "demo", part="trian")


def test_format_is_given_beside_init(monkeypatch):
    def stop(options):
        raise Problem(options.given["init"])

    monkeypatch.setattr(api, "prepare", stop)
    with pytest.raises(Problem, match=r"mine\.pth::format=solo-learn"):
        finetune_mile.train("demo:40", "mine.pth", format="solo-learn")
    with pytest.raises(Problem, match="--format solo-learn describes the file of --init"):
        finetune_mile.train("demo:40", format="solo-learn")


def test_values_become_those_of_a_recipe():
    given = {"fraction": "10 %", "steps": "100", "lr": np.float32(0.5), "truth": Path("real"), "arch": None,
             "mile.k_t": None, "mean": np.array([0.5, 0.5, 1.0]), "augment": {"scale": (0.5, 1)}}  # fmt: skip
    assert api._settings(given) == {
        "fraction": 0.1, "steps": 100, "lr": 0.5, "truth": "real", "mile.k_t": None, "mean": [0.5, 0.5, 1.0],
        "augment": {"scale": [0.5, 1]},
    }  # fmt: skip


def test_preparing_leaves_the_options_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = RunOptions(settings=FAST | {"data": "demo:40", "init": "none"}, resume="auto", out=Path("run"))
    used, resolved, path, _, _ = prepare(options)
    assert (options.resume, used.resume, path) == ("auto", None, Path("run"))
    assert resolved.said_by["steps"] == "--steps"
    assert resolved.said_by["workers"] == "--set workers"


def test_a_run_with_objects_is_resumed_with_the_same_objects_only(tmp_path, stop_at, capsys):
    settings = FAST | {"steps": 8, "log_every": 1, "checkpoint_every": 2}
    del settings["arch"]
    torch.manual_seed(0)
    data, network = Pairs(PICTURES), Small()
    finetune_mile.train(data, network, out=tmp_path / "whole", **settings)
    out = tmp_path / "stopped"
    stop_at(5)
    with pytest.raises(SystemExit) as stopped:
        finetune_mile.train(data, network, out=out, **settings)
    assert stopped.value.code == 143
    stop_at(None)
    with pytest.raises(Problem, match=r"no results.json \(the run is stopped\); continue it with train\(resume="):
        _ = Run.open(out).results
    capsys.readouterr()
    assert main(["--resume", str(out)]) == 2
    assert "python:Small: was given from Python and is not on disk; give the same network" in capsys.readouterr().err
    with pytest.raises(Problem, match="python:Pairs: was given from Python and is not on disk; give the same images"):
        finetune_mile.train(init=network, resume=out)
    with pytest.raises(Problem, match="training images changed"):
        finetune_mile.train(Pairs(PICTURES[:-2]), network, resume=out)
    run = finetune_mile.train(data, network, resume=out)
    assert losses(run.folder) == losses(tmp_path / "whole")


def test_a_network_of_ones_own(tmp_path, monkeypatch):
    torch.manual_seed(0)
    network = Small()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    settings = FAST | {"steps": 30, "size": 28}
    del settings["arch"]
    run = finetune_mile.train(Pairs(PICTURES), network, out=tmp_path / "run", **settings)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items()), "a copy is trained"
    model = run.classifier()
    assert not torch.equal(model.network.backbone.conv.weight, network.conv.weight)
    images = torch.rand(2, 3, 28, 28)
    again = finetune_mile.load_classifier(run.folder / "export", network=Small())
    torch.testing.assert_close(again(images), model(images))
    snippet = re.search(r"```python\n(.*?)```", (run.folder / "export/README.md").read_text(), re.DOTALL)
    names = {"network": Small()}
    monkeypatch.chdir(run.folder)
    PICTURES[0][0].save("photo.jpg")
    exec(compile(snippet[1], "README.md", "exec"), names)
    torch.testing.assert_close(names["model"](images), model(images))
    with pytest.raises(Problem, match=r"python:Small: was given from Python .*load_classifier\(RUN, network=...\)"):
        finetune_mile.load_classifier(run.folder)
    with pytest.raises(Problem, match=r"returns \(8, 6\), expected features \(B, 7\), as its num_features says"):
        finetune_mile.train(Pairs(PICTURES), Small(num_features=7), out=tmp_path / "wrong", **settings)
    with pytest.raises(Problem, match="Conv2d: it needs an attribute num_features"):
        finetune_mile.train(Pairs(PICTURES), nn.Conv2d(3, 6, 5), out=tmp_path / "none", **settings)
    with pytest.raises(Problem, match="--arch resnet18: the network was given"):
        finetune_mile.train(Pairs(PICTURES), network, out=tmp_path / "none", **settings | {"arch": "resnet18"})


def test_networks_that_have_a_name_keep_it(tmp_path):
    settings = {key: value for key, value in FAST.items() if key != "arch"}
    for name, network in (
        ("timm:resnet10t", timm.create_model("resnet10t", num_classes=7)),
        ("resnet-demo", finetune_mile.load("simclr-demo")),
    ):
        run = finetune_mile.train(Pairs(PICTURES), network, out=tmp_path / type(network).__module__, **settings)
        assert json.loads((run.folder / "export/config.json").read_text())["arch"] == name
        assert run.classifier().predict(PICTURES[0][0])[0][0] in ("0", "1", "2"), "no network is needed to load it"


@pytest.mark.slow
def test_embed_probe_and_evaluate_return_what_the_commands_write(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    paths, labels = listed(tmp_path / "files")
    found = finetune_mile.embed("simclr-demo", (paths, labels), workers=0, out=tmp_path / "features")
    assert found["train"]["features"].shape == (12, 128)
    assert found["val"]["labels"] == [["b"], ["g"], ["r"]]
    assert np.array_equal(np.load(tmp_path / "features/train.npy"), found["train"]["features"])
    network = finetune_mile.load("simclr-demo")
    with torch.inference_mode():
        path = tmp_path / "files" / found["train"]["ids"][0].partition("/")[2]
        expected = network(network.preprocess(Image.open(path)).unsqueeze(0))[0]
    np.testing.assert_allclose(found["train"]["features"][0], expected.numpy(), rtol=2e-3, atol=1e-3)

    loose = finetune_mile.embed("simclr-demo", tmp_path / "files", workers=0)  # images without labels
    assert loose["train"]["features"].shape == (15, 128)
    assert loose["val"] == {"ids": [], "labels": [], "features": pytest.approx(np.zeros((0, 128)))}

    result = finetune_mile.probe(["simclr-demo", Small()], (paths, labels), workers=0, size=24, k=3)
    assert {row["init"] for row in result["probes"]} == {"simclr-demo", "python:Small"}
    assert result["labels"] == 12
    with pytest.raises(Problem, match="--seeds 0: must be from 1"):
        finetune_mile.probe("simclr-demo", (paths, labels), seeds=0)

    run = finetune_mile.train((paths, labels), "simclr-demo", out=tmp_path / "run", **FAST | {"arch": None})
    scores = finetune_mile.evaluate(run, (paths, labels), workers=0, draws=0)
    assert scores["accuracy"] == run.results["accuracy"]
    assert not (tmp_path / "runs").exists()
    both = finetune_mile.evaluate(run, (paths, labels), workers=0, draws=10, compare=f"run:{run.folder}",
                                  out=tmp_path / "eval")  # fmt: skip
    assert both["comparison"]["accuracy"]["difference"] == 0
    assert json.loads((tmp_path / "eval/results.json").read_text())["accuracy"] == scores["accuracy"]
    with pytest.raises(Problem, match="python:tuple: was given from Python"):
        finetune_mile.evaluate(run)


def test_features_of_ones_own_network_follow_its_code(tmp_path, monkeypatch):
    """The cache must not give the features of a network whose weights stayed and whose forward pass changed."""
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    network = Small()
    first = finetune_mile.embed(network, Pairs(PICTURES), workers=0, size=24)["val"]["features"]
    monkeypatch.setattr(Small, "forward", lambda self, images: self.norm(self.conv(images)).mean((2, 3)))
    second = finetune_mile.embed(network, Pairs(PICTURES), workers=0, size=24)["val"]["features"]
    assert not np.allclose(first, second)


def test_runs_of_other_precision_follow_each_other_and_leave_the_caller_alone(tmp_path):
    mine = Accelerator(cpu=True, mixed_precision="no")
    for precision in ("bf16", "no"):
        run = finetune_mile.train("demo:400", "none", out=tmp_path / precision, **FAST, precision=precision)
        assert yaml.safe_load((run.folder / "recipe.yaml").read_text())["precision"] == precision
        assert mine.mixed_precision == "no"
    mine.prepare(nn.Linear(1, 1))


def test_a_second_run_of_several_processes_is_refused(tmp_path, monkeypatch):
    """It would wait for ever: the first run closes the connections of the processes."""
    monkeypatch.setattr(api._TRAINED, "is_set", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Problem, match="train was called again in one of several processes"):
        finetune_mile.train("demo:40", "none", out=tmp_path / "run", **FAST)


def test_train_in_a_thread(tmp_path):
    runs = []
    thread = threading.Thread(
        target=lambda: runs.append(finetune_mile.train("demo:400", "none", out=tmp_path / "run", **FAST))
    )
    thread.start()
    thread.join()
    assert runs[0].results["images"] == 100


def test_ctrl_c_is_a_keyboard_interrupt(tmp_path, monkeypatch):
    import os
    import signal

    from finetune_mile.training.folder import RunFolder

    monkeypatch.setattr(RunFolder, "append", lambda self, record: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="continued with train"):
        finetune_mile.train("demo:400", "none", out=tmp_path / "run", **FAST, log_every=1)


def test_asking_for_the_api_does_not_import_torch():
    code = (
        "import sys, finetune_mile as f; f.train, f.embed, f.probe, f.evaluate, f.Run.open, f.Problem; "
        "heavy = {'torch', 'datasets', 'accelerate', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        _ = finetune_mile.tran
