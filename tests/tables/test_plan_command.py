"""`finetune-mile plan`: counts that can be checked by hand, and plans for what is not on this machine."""

import json

import pytest
from tiny import write_tiny

from finetune_mile.cli import main
from finetune_mile.config.resolve import resolve
from finetune_mile.core.problems import Problem
from finetune_mile.pricing.estimate import count, warnings
from finetune_mile.pricing.scene import Scene, look_at_data, look_at_network

IMAGENET = Scene(
    pools={"labelled": 12_811, "unlabelled": 1_268_356, "all": 1_281_167}, val=50_000, classes=1000, here=False,
    in_memory=False,
)  # fmt: skip


def demo(*sets, **flags):
    return resolve({"recipe": "demo", **flags}, list(sets)).recipe


def test_counts_by_hand():
    """1,000 steps of 64 on 12,811 images; warm-up 400, then 6 generations of 80 + 20."""
    recipe = demo("mile.warmup=400", "evaluate.images=500", steps=1000, k_t=80, k_s=20)
    found = count(recipe, IMAGENET)
    assert (found.generations, found.interaction_steps, found.imitation_steps) == (6, 880, 120)
    assert found.teacher_images == 120 * 64
    assert found.epochs == pytest.approx(1000 * 64 / 12_811)
    assert found.evaluation_images == 13 * 500 + 7 * 1000 + 50_000 + 12_811
    cycle = count(demo("mile.warmup=400", "mile.pseudo_labels=cycle", steps=1000, k_t=80, k_s=20, semi="all"), IMAGENET)
    assert cycle.teacher_images == 6 * 1_281_167


def test_supervised_learning_has_no_teacher():
    found = count(demo(method="softmax"), IMAGENET)
    assert (found.generations, found.imitation_steps, found.teacher_images) == (0, 0, 0)


def test_warnings_name_the_number():
    recipe = demo("mile.warmup=0", steps=20_000, k_t=6205, k_s=7000, rho=0.002, fraction=0.01)
    text = "\n".join(warnings(recipe, count(recipe, IMAGENET)))
    assert "k_t is 31 epochs of your labelled images" in text
    assert "k_s (7000) is larger than k_t (6205)" in text
    assert "the budget holds one generation" in text
    assert "rho 0.002 is near the prior 1/C = 0.001; and there is no warm-up" in text
    quiet = demo("mile.warmup=100", steps=1000, k_t=80, k_s=20, rho=0.25, fraction=0.01)
    assert warnings(quiet, count(quiet, IMAGENET)) == []
    long = demo("mile.warmup=900", steps=1000, k_t=80, k_s=20, rho=0.25)
    assert warnings(long, count(long, IMAGENET))[0] == "warm-up is most of the budget: 900 of 1,000 steps"


def test_imagenet_and_its_lists_are_known_without_being_here():
    recipe = demo(data="imagenet:not/here", fraction=0.1)
    scene = look_at_data(recipe)
    assert (scene.labelled, scene.pools["all"], scene.val, scene.here) == (128_116, 1_281_167, 50_000, False)
    with pytest.raises(Problem, match="a plan needs the data"):
        look_at_data(demo(data="folder:not/here"))


def test_d2_plan_counts_the_images_of_the_run_where_some_are_held_out(tmp_path):
    """`plan` counted 12,000 labelled images and 938 steps, the run had 11,400 and 891."""
    from finetune_mile.run import main as run

    flags = ["--data", "demo:400", "--init", "none", "--arch", "resnet-demo", "--rho", "auto", "--epochs", "0.1"]
    sizes = [
        "--set",
        "size=24",
        "--set",
        "evaluate.images=10",
        "--set",
        "evaluate.labels=false",
        "--set",
        "mile.warmup=0",
    ]
    steps = ["--k-t", "1", "--k-s", "1", "--batch-size", "8"]
    assert run([*flags, *sizes, *steps, "--out", str(tmp_path / "run")]) == 0
    split = json.loads((tmp_path / "run/split.json").read_text())
    scene = look_at_data(demo(data="demo:400", rho="auto"))
    assert (scene.pools["labelled"], scene.pools["unlabelled"]) == (split["labelled"], split["unlabelled"])
    assert len(split["calibration"]) > 50
    assert scene.pools["all"] == split["labelled"] + split["unlabelled"]
    away = look_at_data(demo("auto.calibration=0.05", data="imagenet:not/here", rho="auto"))
    assert away.labelled == round(1_281_167 * 0.95)


def test_a_card_is_enough_to_know_the_network():
    facts = look_at_network("simclrv2-sk1", None, None)
    assert (facts.arch, facts.size) == ("resnet50-sk", 224)
    with pytest.raises(Problem, match="which network"):
        look_at_network("none", None, None)


def test_plan_prints_every_line(capsys):
    assert main(["plan", "--data", "demo:200", "--init", "none", "--arch", "resnet-demo", "--set", "size=16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names[:9] == ["recipe", "data", "network", "steps", "generations", "forwards", "disk", "memory", "time"]
    assert "200 labelled of 200 images, 50 to evaluate on, 10 classes" in lines[1]
    assert "600 of batch 64 = 192.0 epochs" in lines[3]


def test_a_table_is_summed_over_its_runs(tmp_path, capsys):
    path = write_tiny(tmp_path, lambda tree: tree.update(seeds=[0, 1]))
    assert main(["plan", "--table", str(path), "--quick", "--runs", str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    assert "fine-tuning / student / 10 %" in text
    assert "all 4 runs: " in text
    assert "missing 4 runs: " in text
    assert main(["plan", "--table", str(path), "--init", "none"]) == 2
    assert "not available with --table" in capsys.readouterr().err


def test_a_cell_that_was_not_run_has_a_price(tmp_path, capsys):
    path, out = write_tiny(tmp_path), tmp_path / "ledger"
    assert (
        main(["table", str(path), "--quick", "--runs", str(tmp_path / "runs"), "--out", str(out), "--ledger-only"]) == 0
    )
    assert "not run, about" in capsys.readouterr().out
    assert '"fine-tuning / student / 10 %": "about' in (out / "prices.json").read_text()
