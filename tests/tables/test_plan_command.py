"""`finetune-mile plan`: counts that can be checked by hand, and plans for what is not on this machine."""

import json
from collections import Counter

import pytest
import yaml
from tiny import write_tiny

from finetune_mile.cli import main
from finetune_mile.config.flags import parse
from finetune_mile.config.resolve import resolve
from finetune_mile.core.problems import Problem
from finetune_mile.run import main as run
from finetune_mile.training.pricing import count, find_network

SCHEDULE = {"steps": 1000, "k_t": 80, "k_s": 20, "rho": 0.25}


def demo(*sets, **flags):
    return resolve({"recipe": "demo", **flags}, list(sets)).recipe


def one_percent(*sets, **flags):
    """The demo's recipe on 1 % of ImageNet, which is not here: 12,811 labelled images."""
    return demo(*sets, data="imagenet:not/here", fraction=0.01, **flags)


def test_counts_by_hand():
    """1,000 steps of 64 on 12,811 images; warm-up 400, then 6 generations of 80 + 20."""
    work = count(one_percent("mile.warmup=400", "evaluate.images=500", **SCHEDULE))
    assert (work.generations, work.imitation_steps, work.plan.total_steps) == (6, 120, 1000)
    assert work.teacher_images == 120 * 64
    assert work.epochs == pytest.approx(1000 * 64 / 12_811)
    assert work.evaluation_images == 13 * 500 + 7 * 1000 + 50_000 + 12_811
    cycle = count(one_percent("mile.warmup=400", "mile.pseudo_labels=cycle", **SCHEDULE, semi="all"))
    assert cycle.teacher_images == 6 * 1_281_167
    assert cycle.label_bytes == 1_281_167 * 125


def test_supervised_learning_has_no_teacher():
    work = count(one_percent(method="softmax"))
    assert (work.generations, work.imitation_steps, work.teacher_images) == (0, 0, 0)


def test_warnings_name_the_number():
    text = "\n".join(count(one_percent("mile.warmup=0", steps=20_000, k_t=6205, k_s=7000, rho=0.002)).warnings)
    assert "k_t is 31 epochs of your labelled images: " in text
    assert "k_s (7000) is larger than k_t (6205)" in text
    assert "the budget is enough for one generation only" in text
    assert "rho 0.002 is near the prior 1/C = 0.001; there is no warm-up" in text
    assert count(one_percent("mile.warmup=100", **SCHEDULE)).warnings == []
    (frozen,) = count(one_percent("mile.warmup=100", **SCHEDULE, trunk="frozen")).notes
    assert "with --trunk frozen each image passes the network once" in frozen
    long = count(one_percent("mile.warmup=900", **SCHEDULE))
    assert long.warnings[0] == "warm-up is most of the budget: 900 of 1,000 steps"
    assert count(demo(data="demo:40", batch_size=64)).warnings[0] == "a batch of 64 is more than the 40 labelled images"


def test_imagenet_and_its_lists_are_known_without_being_here():
    work = count(demo(data="imagenet:not/here", fraction=0.1))
    assert (work.pools["labelled"], work.pools["all"], work.val, work.here) == (128_116, 1_281_167, 50_000, False)
    held_out = count(demo("auto.calibration=0.05", data="imagenet:not/here", rho="auto"))
    assert held_out.pools["labelled"] == round(1_281_167 * 0.95)
    with pytest.raises(Problem, match="a plan needs the data"):
        count(demo(data="folder:not/here"))


RUNS = {
    "rho auto": ["--rho", "auto"],
    "held out": ["--set", "auto.held_out=always", "--set", "mile.pseudo_labels=cycle"],
    "semi": ["--semi", "unlabelled", "--fraction", "0.3", "--set", "mile.pseudo_labels=cycle"],
    "fraction": ["--method", "softmax", "--fraction", "0.5"],
}


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_a_plan_counts_what_the_run_does(tmp_path, flags):
    """`plan` counted 12,000 labelled images and 938 steps where the run had 11,400 and 891."""
    given = ["--data", "demo:400", "--init", "none", "--arch", "resnet-demo", "--epochs", "0.3", "--batch-size", "8",
             "--set", "mile.k_t=1", "--set", "mile.k_s=1", "--set", "size=24", "--set", "evaluate.images=10", "--set",
             "evaluate.labels=false", "--set", "mile.warmup=0", "--set", "log_every=1", *flags]  # fmt: skip
    assert run([*given, "--out", str(tmp_path / "run")]) == 0
    options = parse(given)
    work = count(resolve(options.given, options.sets).recipe)
    split = json.loads((tmp_path / "run/split.json").read_text())
    assert work.here
    assert (work.pools["labelled"], work.pools["unlabelled"]) == (split["labelled"], split["unlabelled"])
    assert work.pools["all"] == split["labelled"] + split["unlabelled"]
    assert (len(split.get("calibration", [])) > 50) == ("auto" in " ".join(flags))
    assert yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())["steps"] == work.plan.total_steps
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = Counter(record["phase"] for record in records if record["kind"] == "train")
    assert steps["imitation"] == work.imitation_steps
    assert steps.total() == work.plan.total_steps
    assert sum(record["kind"] == "evaluation" for record in records) == len(work.plan.phases)


def test_a_card_is_enough_to_know_the_network():
    network = find_network("simclrv2-sk1", None, None)
    assert (network.arch, network.size) == ("resnet50-sk", 224)
    with pytest.raises(Problem, match="which network"):
        find_network("none", None, None)


def test_plan_prints_every_line(capsys):
    assert main(["plan", "--data", "demo:200", "--init", "none", "--arch", "resnet-demo", "--set", "size=16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names[:9] == ["recipe", "data", "network", "steps", "generations", "forwards", "disk", "memory", "GPUs"]
    assert "200 labelled of 200 images, 50 validation images, 10 classes" in lines[1]
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
    assert main(["plan", "--table", str(path), "--quick", "--set", f"data=folder:{tmp_path}/nowhere"]) == 1
    assert "2 cells have no estimate" in capsys.readouterr().out


def test_a_cell_that_was_not_run_has_a_price(tmp_path, capsys):
    path, out = write_tiny(tmp_path), tmp_path / "ledger"
    assert (
        main(["table", str(path), "--quick", "--runs", str(tmp_path / "runs"), "--out", str(out), "--ledger-only"]) == 0
    )
    assert "not run, about" in capsys.readouterr().out
    assert '"fine-tuning / student / 10 %": "about' in (out / "prices.json").read_text()
