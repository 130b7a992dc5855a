"""Imitation on images without labels: balance, pseudo-labels in files, teachers from outside, and what is refused."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from shortcuts import ROOT, SHORT, SHORT_MILE, losses

from finetune_mile.checkpoints.loading import load_network
from finetune_mile.run import main
from finetune_mile.training import labelling

SEMI = [*SHORT_MILE, "--semi", "all", "--fraction", "0.1", "--steps", "12"]
CYCLE = [*SEMI, "--set", "mile.pseudo_labels=cycle"]
SOFT = [*CYCLE, "--set", "mile.targets=soft"]


def weights(folder):
    return load_file(folder / "export/model.safetensors")


def same(a, b):
    return all(tensor.equal(weights(b)[name]) for name, tensor in weights(a).items())


def settings(*pairs):
    return [f"--set={pair}" for pair in pairs]


@pytest.fixture
def seen(monkeypatch):
    """The given labels of every batch that is drawn, by pool, and how many images were labelled in blocks."""
    from finetune_mile.training import steps as training

    found = {"labels": [], "blocks": []}
    feed, label_block = training.feed, labelling._label_block

    def recording(task, device, pool, first_step):
        for batch in feed(task, device, pool, first_step):
            found["labels"].append((pool, batch.labels))
            yield batch

    def counting(task, device, roles, phase, part, tick):
        found["blocks"].append((phase.generation, len(part)))
        return label_block(task, device, roles, phase, part, tick)

    monkeypatch.setattr(training, "feed", recording)
    monkeypatch.setattr(labelling, "_label_block", counting)
    return found


@pytest.mark.parametrize("semi", ["all", "unlabelled"])
def test_each_imitation_batch_has_its_labelled_share(run_demo, seen, semi):
    run_demo("run", *SEMI, "--semi", semi, *settings("labelled_share=0.4", "accumulate=2", "mile.union=true"))
    parts = [labels for pool, labels in seen["labels"] if pool == "all"]
    assert len(parts) == 2 * 4, "two imitations of two steps, two parts each"
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert len(first) == len(second) == 4
        assert int((torch.cat([first, second]) >= 0).sum()) == 3, "round(0.4 x 8)"


def test_a_stop_while_the_teacher_labels_changes_nothing(run_demo, tmp_path, monkeypatch, seen):
    monkeypatch.setattr(labelling, "BLOCK", 32)
    whole = run_demo("whole", *CYCLE)
    assert seen["blocks"] == [(g, size) for g in (0, 1) for size in (32,) * 6 + (8,)]
    assert [p.name for p in (whole / "pseudo_labels").iterdir()] == ["generation-1"], "old ones are removed"
    seen["blocks"].clear()
    write = labelling._write

    def write_and_die(path, block, mark):
        write(path, block, mark)
        if path.parent.name == "generation-1" and path.name == "block-00002.safetensors":
            raise KeyboardInterrupt

    monkeypatch.setattr(labelling, "_write", write_and_die)
    killed = tmp_path / "killed"
    assert main([*CYCLE, "--out", str(killed)]) == 130
    monkeypatch.setattr(labelling, "_write", write)
    seen["blocks"].clear()
    assert main(["--resume", str(killed)]) == 0
    assert seen["blocks"] == [(1, 32)] * 3 + [(1, 8)], "only what is missing"
    assert same(killed, whole)
    assert losses(killed) == losses(whole)


def test_a_resume_inside_an_imitation_reads_the_labels_and_distrusts_strange_ones(
    run_demo, tmp_path, monkeypatch, stop_at, seen
):
    monkeypatch.setattr(labelling, "BLOCK", 100)
    whole, stopped = run_demo("whole", *SOFT), tmp_path / "stopped"
    stop_at(5)  # the first step of the first imitation
    assert main([*SOFT, "--out", str(stopped)]) == 143
    stop_at(None)
    first, second = sorted((stopped / "pseudo_labels/generation-0").iterdir())
    with safe_open(first, framework="pt") as file:
        assert len(file.metadata()["mark"]) == 2 * 64 + 1
    first.write_bytes(second.read_bytes())  # whole, but of other images
    seen["blocks"].clear()
    assert main(["--resume", str(stopped)]) == 0
    assert seen["blocks"] == [(0, 100), (1, 100), (1, 100)]
    assert same(stopped, whole)


@pytest.mark.slow
def test_a_process_that_is_killed_while_labelling_leaves_whole_blocks(run_demo, tmp_path):
    out, code = tmp_path / "killed", f"""
import os, signal, sys
from finetune_mile.training import labelling
from finetune_mile.run import main
labelling.BLOCK = 64
label_block = labelling._label_block
def die(task, device, roles, phase, part, tick):
    if (task.bad.path.parent / "pseudo_labels/generation-0/block-00001.safetensors").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return label_block(task, device, roles, phase, part, tick)
labelling._label_block = die
main({[*SOFT, "--out", str(tmp_path / "killed")]!r})
"""  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FINETUNE_MILE_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert len(list((out / "pseudo_labels/generation-0").glob("block-*"))) == 2
    assert main(["--resume", str(out)]) == 0, "also with blocks of another size, which are not used"
    assert not list(out.rglob("*.part"))
    assert same(out, run_demo("whole", *SOFT))


def test_soft_labels_once_per_cycle_equal_those_per_batch_without_augmentation(run_demo):
    plain = [*SEMI, "--set", "augment.crop=none", "--set", "mile.targets=soft"]
    each = run_demo("batch", *plain)
    once = run_demo("cycle", *plain, "--set", "mile.pseudo_labels=cycle")
    assert losses(once) == pytest.approx(losses(each), rel=1e-3), "half precision of ten classes"


def test_a_teacher_may_be_a_run_an_export_or_a_file_of_another_shape(run_demo, tmp_path):
    """Students are narrower and normalised in another way; the same teacher gives the same student."""
    run = run_demo("teacher", *SHORT, "--method", "sigmoid", "--steps", "6", "--arch", "resnet-demo")
    flags = [*SHORT, "--method", "distill", "--steps", "6", "--arch", "resnet-demo-gn", "--semi", "unlabelled"]
    flags += ["--fraction", "0.2", "--teacher"]
    students = [run_demo(name, *flags, str(path)) for name, path in (("a", run), ("b", run / "export"))]
    assert same(*students)
    wide, _, _ = load_network("none", arch="resnet18-cifar", num_classes=10, head_bias="zero")
    torch.save({"state_dict": wide.state_dict()}, tmp_path / "wide.pth")
    student = run_demo("c", *flags, str(tmp_path / "wide.pth"))
    assert len(losses(student)) == 6
    assert not same(student, students[0])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--semi", "unlabelled", "--fraction", "1.0"], "no such images at --fraction 1; lower the fraction"),
        (["--semi", "all", "--fraction", "1", "--set", "labelled_share=0.5"], "no unlabelled images to share a batch"),
        (["--semi", "all", "--fraction", "0.1", "--set", "labelled_share=0.01"], "no labelled or no unlabelled image"),
        (["--semi", "all", "--set", "labelled_share=1.5"], "--set labelled_share 1.5: input should be less than 1"),
        (["--semi", "all", "--set", "labelled_share=0"], "--set labelled_share 0: input should be greater than 0"),
        (["--set", "labelled_share=0.5"], "labelled_share needs --semi all or --semi unlabelled"),
        (["--k-s", "30"], "24 are too few for one generation: warm-up 0 + k_t 4 + k_s 30"),
        (["--k-t", "30"], "24 are too few for one generation: warm-up 0 + k_t 30 + k_s 2"),
        (["--set", "mile.warmup=30"], "24 are too few for one generation: warm-up 30 + k_t 4 + k_s 2"),
    ],
)
def test_semi_supervised_settings_that_cannot_work(flags, sentence, tmp_path, capsys):
    assert main([*SHORT_MILE, *flags, "--out", str(tmp_path / "run")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["noisy-student", "self-distill"])
def test_an_interaction_longer_than_the_budget_is_refused(method, tmp_path, capsys):
    flags = [*SHORT, "--method", method, "--set", f"{method.replace('-', '_')}.interaction=24"]
    assert main([*flags, "--out", str(tmp_path / "run")]) == 2
    assert "24 do not hold an interaction of 24" in capsys.readouterr().err


def test_a_teacher_of_other_classes_is_refused_before_anything_is_written(tmp_path, capsys):
    seven, _, _ = load_network("none", arch="resnet-demo", num_classes=7, head_bias="zero")
    torch.save({"state_dict": seven.state_dict()}, tmp_path / "seven.pth")
    headless = {name: tensor for name, tensor in seven.state_dict().items() if not name.startswith("fc.")}
    torch.save({"state_dict": headless}, tmp_path / "headless.pth")
    for name, sentence in (
        ("seven", "it has 7 classes, the data has 10"),
        ("headless", "it has no classifier"),
        ("missing", "there is no such run folder or file"),
    ):
        flags = [*SHORT, "--method", "distill", "--teacher", str(tmp_path / f"{name}.pth")]
        assert main([*flags, "--out", str(tmp_path / "run")]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert f"{name}.pth: {sentence}" in errors[0]
        assert not (tmp_path / "run").exists()


def test_a_bar_and_lines_tell_how_far_the_labels_are(monkeypatch, capsys):
    from finetune_mile.training import display

    monkeypatch.setenv("FORCE_COLOR", "1")
    with display.Display(10, visible=True) as bar:
        bar.labels(3, 40, images=100)
        assert [(task.fields["phase"], task.completed) for task in bar._bar.tasks] == [("start", 0), ("labels", 40)]
        bar.labels(3, 104, images=100)  # the last batch is not full
        assert [task.fields["phase"] for task in bar._bar.tasks] == ["start"]
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setattr(display, "PLAIN_SECONDS", -1.0)
    display.Display(10, visible=True).labels(3, 40, images=100)
    assert "labels of generation 3: 40 of 100 images" in capsys.readouterr().err


def test_a_kept_classifier_must_have_the_classes_of_the_data(photos_of, tmp_path, capsys):
    """Class number 0 would be another class: the run would learn on, with the wrong start."""
    first, second = photos_of("dress", "hat"), photos_of("hat", "zebra")
    flags = ["--steps", "2", "--batch-size", "8", "--set", "workers=0", "--size", "24"]
    start = ["--init", "simclr-demo", "--method", "sigmoid", "--data", str(first), "--out", str(tmp_path / "first")]
    assert main([*start, *flags]) == 0
    more = ["--recipe", "unlabelled", "--init", str(tmp_path / "first"), "--fraction", "0.5", *flags]
    assert main([*more, "--data", str(second), "--out", str(tmp_path / "second")]) == 2
    assert "--keep-head fc" in (said := capsys.readouterr().err)
    assert "other names" in said
    assert not (tmp_path / "second").exists()
    assert main([*more, "--data", str(first), "--out", str(tmp_path / "third")]) == 0


@pytest.fixture
def photos_of(tmp_path):
    """A function that writes a folder of photos of some classes."""

    def write(*classes):
        for name in classes:
            for number in range(8):
                path = tmp_path / "-".join(classes) / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.effect_noise((32, 32), 10 + 10 * number).convert("RGB").save(path)
        return tmp_path / "-".join(classes)

    return write
