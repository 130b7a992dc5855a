"""The command as a user types it: every method, the whole run folder, and what is refused."""

import csv
import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file
from shortcuts import ROOT, SHORT, SHORT_MILE, losses

from finetune_mile.checkpoints.loading import open_with_head
from finetune_mile.run import main

FILES = {"recipe.yaml", "run.json", "init.json", "split.json", "metrics.jsonl", "results.json", "checkpoints", "export",
         "labels.parquet", "per_class.csv", "report.html", "validation.json"}  # fmt: skip


@pytest.mark.parametrize("keep", [False, True])
def test_checkpoints_of_a_finished_run_are_removed_unless_they_are_kept(run_demo, tmp_path, stop_at, capsys, keep):
    """They took 566 MB for 256 photos, and nothing reads them any more; a resumed run remembers the flag."""
    out = tmp_path / "run"
    stop_at(10)
    assert main([*SHORT_MILE, "--steps=12", "--out", str(out), *(["--keep-checkpoints"] if keep else [])]) == 143
    assert len([*(out / "checkpoints").glob("step-*.pt")]) == 2
    stop_at(None)
    assert main(["--resume", str(out)]) == 0
    assert len([*(out / "checkpoints").glob("*step-*")]) == 2 * keep
    assert {p.name for p in out.iterdir()} >= {"results.json", "export", "report.html"}
    assert main(["--resume", str(out)]) == 0
    assert "is finished" in capsys.readouterr().out
    if not keep:
        run_demo("next", *SHORT, "--method", "distill", "--teacher", str(out), "--init", str(out), "--steps", "2")


def test_checkpoints_stay_where_the_end_of_a_run_could_not_be_written(tmp_path, monkeypatch):
    from finetune_mile.training import train as training

    def full(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(training, "finish", full)
    with pytest.raises(OSError, match="full"):
        main([*SHORT_MILE, "--steps=6", "--out", str(tmp_path / "run")])
    assert [*(tmp_path / "run/checkpoints").glob("step-*.pt")]
    monkeypatch.undo()
    assert main(["--resume", str(tmp_path / "run")]) == 0
    assert not [*(tmp_path / "run/checkpoints").glob("step-*.pt")]


def test_a_run_leaves_everything_behind(tmp_path, capsys, rendered):
    out = tmp_path / "run"
    settings = ["mile.warmup=0", "evaluate.images=40"]
    flags = [
        "--data",
        "demo:400",
        "--steps",
        "12",
        "--batch-size",
        "8",
        "--k-t",
        "4",
        "--k-s",
        "2",
        "--fraction",
        "0.1",
    ]
    assert main([*flags, *(f"--set={s}" for s in settings), "--out", str(out)]) == 0
    assert {p.name for p in out.iterdir()} == FILES
    info = json.loads((out / "run.json").read_text())
    assert info["status"] == "finished"
    assert {"versions", "git", "card", "world_size", "device", "seconds", "images_per_second"} <= info.keys()
    init = json.loads((out / "init.json").read_text())
    assert init["counts"]["loaded"] == len(init["loaded"]) > 40
    assert set(init["reset"]) == {"fc.weight", "fc.bias"}
    split = json.loads((out / "split.json").read_text())
    assert split["labelled"] == len(split["ids"]) == 40
    results = json.loads((out / "results.json").read_text())
    wanted = {"accuracy", "top5", "real_acc", "f1@0.25", "f1@0.5", "f1@rho", "coverage@0.25", "lrap", "trivial_f1"}
    assert wanted <= results.keys()
    assert results["images"] == 100
    labels = pq.read_table(out / "labels.parquet")
    assert labels.num_rows == 40
    assert labels.column_names == ["id", "given", "found", "probability"]
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    assert recipe["steps"] == 12
    with (out / "per_class.csv").open() as stream:
        classes = list(csv.DictReader(stream))
    assert [row["class"] for row in classes] == [str(digit) for digit in range(10)]
    assert sum(int(row["given"]) for row in classes) == 100
    mean = sum(float(row["accuracy"]) for row in classes) / 10
    assert mean == pytest.approx(results["balanced_accuracy"], abs=1e-3)
    page = (out / "report.html").read_text()
    lowest = min(classes, key=lambda row: float(row["accuracy"]))
    printed = capsys.readouterr().out
    low = f"{lowest['class']}, {float(lowest['accuracy']):.1f} % of {lowest['given']} images"
    assert f"Lowest accuracy of a class: {low}, most often taken for {lowest['taken_for']}. " in printed
    first = page.partition("most often taken for</th>")[2].splitlines()[1]
    row = f'<tr><td>{lowest["class"]}</td><td class="number">{lowest["given"]}</td>'
    assert first.startswith(row)
    assert page.count("data:image/png") >= 18
    own = page.replace("http-equiv", "").replace("https://github.com/leeoniya/uPlot", "")  # its licence names it
    assert "http" not in own, "the page needs nothing from outside"
    opened = open_with_head(str(out), "--init")
    network, how, classes = opened.network, opened.card.preprocess, opened.classes
    assert network(torch.zeros(1, 3, 24, 24)).shape == (1, 10)
    assert how.size == 24
    assert classes == tuple("0123456789")
    assert "accuracy" in printed


@pytest.mark.slow
def test_all_six_methods_run(run_demo):
    """`distill` learns from the export of one of the others, of another architecture."""
    folders = {}
    for method in ("softmax", "sigmoid", "noisy-student", "self-distill"):
        folders[method] = run_demo(method, *SHORT, "--method", method)
    folders["mile"] = run_demo("mile", *SHORT_MILE, "--arch", "resnet-demo-gn")
    folders["distill"] = run_demo("distill", *SHORT, "--method", "distill", "--teacher", str(folders["mile"]))
    for method, folder in folders.items():
        assert len(losses(folder)) == 24, method
        results = json.loads((folder / "results.json").read_text())
        assert ("f1@rho" in results) == (method not in ("softmax", "sigmoid"))
        config = json.loads((folder / "export/config.json").read_text())
        assert config["activation"] == ("softmax" if method in ("softmax", "self-distill") else "sigmoid")


def test_a_run_is_never_overwritten_by_accident(tmp_path, capsys):
    out = tmp_path / "run"
    flags = [*SHORT, "--method", "sigmoid", "--steps", "2", "--out", str(out)]
    assert main(flags) == 0
    before = (out / "export/model.safetensors").read_bytes()
    assert main([*flags, "--seed", "1"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert (out / "export/model.safetensors").read_bytes() == before
    assert main(["--resume", str(out)]) == 0, "a finished run has nothing left to do"
    assert (out / "export/model.safetensors").read_bytes() == before
    assert main([*flags, "--seed", "1", "--overwrite"]) == 0
    assert (out / "export/model.safetensors").read_bytes() != before
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    assert main([*flags[:-1], str(tmp_path / "other"), "--overwrite"]) == 2
    assert (tmp_path / "other/notes.txt").read_text() == "mine"


def test_explain_prints_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SHORT_MILE, "--variant", "published", "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "TTTSTTTSTTTSTTTSTTTSTTTS" in printed
    assert "variant published" in printed
    assert "imitate_from" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_and_another_is_not(run_demo):
    a, b, c = (run_demo(name, *SHORT_MILE, "--seed", seed) for name, seed in (("a", "1"), ("b", "1"), ("c", "2")))
    tensors = [load_file(f / "export/model.safetensors") for f in (a, b, c)]
    assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0])
    assert not all(tensors[0][name].equal(tensors[2][name]) for name in tensors[0])


def test_a_folder_of_photos(tmp_path, run_demo):
    from PIL import Image

    for split in ("train", "val"):
        for label, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
            (tmp_path / "photos" / split / label).mkdir(parents=True)
            for i in range(4):
                mode = ("RGB", "L", "RGB", "P")[i]
                image = Image.new("RGB", (30 + 5 * i, 40), tuple(c + i for c in colour)).convert(mode)
                image.save(tmp_path / "photos" / split / label / f"{i}.{('jpg', 'png', 'webp', 'png')[i]}")
    out = run_demo(
        "run", "--data", str(tmp_path / "photos"), "--init", "none", "--arch", "resnet-demo", "--steps", "10",
        "--batch-size", "4", "--set", "size=16", "--set", "workers=0",
    )  # fmt: skip
    assert json.loads((out / "results.json").read_text())["images"] == 8


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--k-s", "30"], "are too few for one generation"),
        (["--semi", "unlabelled"], "no such images at --fraction 1"),
        (["--set", "accumulate=3"], "multiple of processes x accumulate"),
        (["--arch", "resnet51"], "--arch resnet51: unknown"),
    ],
)
def test_what_only_the_data_can_tell(flags, sentence, tmp_path, capsys):
    assert main([*SHORT_MILE, *flags, "--out", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_finding_16_processes_that_differ_get_their_results_and_a_warning(run_demo, monkeypatch, capsys):
    """The check of equal weights raised before the results were written, and again on every resume."""
    from finetune_mile.training import processes

    monkeypatch.setattr(processes, "gather_object", lambda totals: [totals[0], totals[0] * (1 + 1e-9)])
    out = run_demo("run", *SHORT_MILE)
    assert (out / "results.json").is_file()
    assert (out / "export/model.safetensors").is_file()
    info = json.loads((out / "run.json").read_text())
    assert info["status"] == "finished"
    assert info["processes_differ"] == pytest.approx(1e-9, rel=1e-3)
    assert "the processes ended with different weights (sums differ by 1.0e-09" in capsys.readouterr().err


def test_several_seeds_are_run_summed_up_and_continued(tmp_path, capsys):
    out = tmp_path / "seeds"
    words = [*SHORT, "--method", "sigmoid", "--out", str(out)]
    assert main([*words, "--seeds", "2"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    both = [json.loads((out / f"seed-{seed}/results.json").read_text())["accuracy"] for seed in (0, 1)]
    assert summary["accuracy"]["seeds"] == both
    assert summary["accuracy"]["mean"] == pytest.approx(sum(both) / 2)
    assert "2 seeds" in capsys.readouterr().out
    stamp = (out / "seed-1/results.json").stat().st_mtime_ns
    (out / "seed-0/results.json").unlink()
    assert main([*words, "--seeds=2"]) == 0  # what is there is not run again
    assert (out / "seed-1/results.json").stat().st_mtime_ns == stamp
    capsys.readouterr()
    assert main([*words, "--seeds", "2", "--lr", "0.5"]) == 2
    assert "holds runs of other settings (optimizer.lr)" in capsys.readouterr().err
    assert main([*words, "--seeds", "2", "--seed", "3"]) == 2
    assert "leave out --seed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "threads"),
    [({}, "1"), ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}, "all")],
)
def test_the_users_number_of_threads_is_obeyed(launcher, threads):
    """`accelerate launch` sets OMP_NUM_THREADS to 1 by itself, which is nobody's wish."""
    code = "import torch\nfrom finetune_mile.training.processes import use_threads\nprint(use_threads())"
    environment = {k: v for k, v in os.environ.items() if k not in ("FINETUNE_MILE_THREADS", *launcher)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"OMP_NUM_THREADS": "1"} | launcher, cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == ("1" if threads == "1" else str(len(os.sched_getaffinity(0))))


@pytest.mark.slow
def test_tensorboard_gets_losses_generations_and_scores(tmp_path, rendered):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert main([*SHORT_MILE, "--track", "tensorboard", "--out", str(out)]) == 0
    folder = str(next(out.rglob("events.out.tfevents.*")).parent)
    events = EventAccumulator(folder, size_guidance={"images": 0}).Reload()
    names = events.Tags()["scalars"]
    assert {"train/loss", "train/generation", "train/labels_per_image", "student/accuracy"} <= set(names)
    assert [event.step for event in events.Scalars("train/loss")][-1] == 24
    assert events.Tags()["images"] == ["generations", "predictions"], "the timeline, and sample predictions"
    for name in events.Tags()["images"]:
        (image,) = events.Images(name)
        assert image.step == 24
        assert min(image.width, image.height) > 300


def test_a_tracker_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--track", "trackio", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "error: --track trackio: the package is missing; pip install trackio\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("plugin", ["FSDP", "DEEPSPEED"])
def test_sharded_training_is_refused(tmp_path, monkeypatch, capsys, plugin):
    monkeypatch.setenv(f"ACCELERATE_USE_{plugin}", "true")
    assert main([*SHORT, "--out", str(tmp_path / "run")]) == 2
    assert f"Accelerate is configured for {plugin}, which is not supported" in capsys.readouterr().err


def test_a_schedule_that_is_likely_not_meant_so_is_told_before_the_first_step(tmp_path, capsys):
    assert main([*SHORT_MILE, "--rho", "0.1", "--out", str(tmp_path / "run")]) == 0
    assert "warning: rho 0.1 is near the prior 1/C = 0.1" in capsys.readouterr().err
