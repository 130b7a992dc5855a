"""What a run costs: counts that can be checked by hand, also for what is not on this machine; prices of tables."""

import json
from collections import Counter

import pytest
import yaml
from tiny import write_tiny

from finetune_mile.cli import main
from finetune_mile.config.flags import parse
from finetune_mile.config.resolve import resolve
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import build, new_head
from finetune_mile.paper.table_plan import _price_cell
from finetune_mile.run import main as run
from finetune_mile.training.memory import numbers_in
from finetune_mile.training.plan import unintended
from finetune_mile.training.pricing import count, find_data, find_weights, noise
from finetune_mile.training.processes import Signals
from finetune_mile.training.task import lay_out

SCHEDULE = {"steps": 1000, "k_t": 80, "k_s": 20, "rho": 0.25}


def demo(*sets, **flags):
    return resolve({"recipe": "demo", **flags}, list(sets)).recipe


def one_percent(*sets, **flags):
    """The demo's recipe on 1 % of ImageNet, which is not here: 12,811 labelled images."""
    return demo(*sets, data="imagenet:not/here", fraction=0.01, **flags)


def counted(recipe, counts=None):
    """Its phases, pools, and what it does beside its steps."""
    recipe, data, here = find_data(recipe, counts)
    _, pools, plan = lay_out(recipe, data)
    work = count(recipe, plan, pools, len(data.val), len(data.classes))
    sizes = {name: len(members) for name, members in pools.indices.items()}
    return plan, sizes, work, unintended(recipe, plan, sizes["labelled"], len(data.classes)), here


def imitation_steps(plan):
    return sum(phase.steps for phase in plan.phases if phase.name == "imitation")


def test_counts_by_hand():
    """1,000 steps of 64 on 12,811 images; warm-up 400, then 6 generations of 80 + 20."""
    plan, _, work, *_ = counted(one_percent("mile.warmup=400", "evaluate.images=500", **SCHEDULE))
    assert (plan.generations, imitation_steps(plan), plan.total_steps) == (6, 120, 1000)
    assert work.teacher_images == 120 * 64
    assert plan.total_steps / plan.steps_per_epoch == pytest.approx(1000 * 64 / 12_811)
    assert work.evaluation_images == 13 * 500 + 7 * 1000 + 50_000 + 12_811
    _, _, cycle, *_ = counted(one_percent("mile.warmup=400", "mile.pseudo_labels=cycle", **SCHEDULE, semi="all"))
    assert cycle.teacher_images == 6 * 1_281_167
    assert cycle.label_bytes == 1_281_167 * 125


def test_supervised_learning_has_no_teacher():
    plan, _, work, *_ = counted(one_percent(method="softmax"))
    assert (plan.generations, imitation_steps(plan), work.teacher_images) == (0, 0, 0)


def test_warnings_name_the_number():
    _, _, _, said, _ = counted(one_percent("mile.warmup=0", steps=20_000, k_t=6205, k_s=7000, rho=0.002))
    text = "\n".join(said)
    assert "k_t is 31 epochs of your labelled images: " in text
    assert "k_s (7000) is larger than k_t (6205)" in text
    assert "the budget is enough for one generation only" in text
    assert "rho 0.002 is near the prior 1/C = 0.001; there is no warm-up" in text
    assert counted(one_percent("mile.warmup=100", **SCHEDULE))[3] == []
    assert counted(one_percent("mile.warmup=900", **SCHEDULE))[3][0] == (
        "warm-up is most of the budget: 900 of 1,000 steps"
    )
    assert counted(demo(data="demo:40", batch_size=64))[3][0] == "a batch of 64 is more than the 40 labelled images"


def test_imagenet_and_its_lists_are_known_without_being_here():
    _, sizes, _, _, here = counted(demo(data="imagenet:not/here", fraction=0.1))
    assert (sizes["labelled"], sizes["all"], here) == (128_116, 1_281_167, False)
    _, sizes, *_ = counted(demo("auto.calibration=0.05", data="imagenet:not/here", rho="auto"))
    assert sizes["labelled"] == pytest.approx(1_281_167 * 0.95, abs=500), "of each class"
    with pytest.raises(Problem, match="--images N --classes N"):
        counted(demo(data="folder:not/here"))
    _, sizes, _, _, here = counted(demo(data="folder:not/here", fraction=0.5), (1000, 10))
    assert (sizes, here) == ({"labelled": 400, "unlabelled": 400, "all": 800}, False), "a fifth validates"
    data = noise(8, 2, 2, 8)
    assert data.train.read(3).equal(data.train.read(3))
    assert not data.train.read(3).equal(data.train.read(4))


RUNS = {
    "rho auto": ["--rho", "auto"],
    "held out": ["--set", "auto.held_out=always", "--set", "mile.pseudo_labels=cycle"],
    "semi": ["--semi", "unlabelled", "--fraction", "0.3", "--set", "mile.pseudo_labels=cycle"],
    "fraction": ["--method", "softmax", "--fraction", "0.5"],
}


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_a_plan_counts_what_the_run_does(tmp_path, flags):
    """`plan` counted 12,000 labelled images and 938 steps where the run had 11,400 and 891."""
    given = ["--data", "demo:240", "--init", "none", "--arch", "resnet-demo", "--epochs", "0.3", "--batch-size", "8",
             "--set", "mile.k_t=1", "--set", "mile.k_s=1", "--set", "size=24", "--set", "evaluate.images=10", "--set",
             "evaluate.labels=false", "--set", "mile.warmup=0", "--set", "log_every=1", *flags]  # fmt: skip
    assert run([*given, "--out", str(tmp_path / "run")]) == 0
    options = parse(given)
    plan, sizes, _, _, here = counted(resolve(options.given, options.sets).recipe)
    split = json.loads((tmp_path / "run/split.json").read_text())
    assert here
    assert (sizes["labelled"], sizes["unlabelled"]) == (split["labelled"], split["unlabelled"])
    assert sizes["all"] == split["labelled"] + split["unlabelled"]
    assert (len(split.get("calibration", [])) > 20) == ("auto" in " ".join(flags))
    assert yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())["steps"] == plan.total_steps
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = Counter(record["phase"] for record in records if record["kind"] == "train")
    assert steps["imitation"] == imitation_steps(plan)
    assert steps.total() == plan.total_steps
    assert sum(record["kind"] == "evaluation" for record in records) == len(plan.phases)


def test_a_card_is_enough_to_know_the_network(monkeypatch, tmp_path):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path))
    recipe, init = find_weights(resolve({"init": "simclrv2-sk1", "data": "folder:photos"}, []).recipe)
    assert (recipe.arch, recipe.size, init.kind) == ("resnet50-sk", 224, "none")


def test_the_memory_of_a_run_has_a_teacher_that_is_brought_along_in_it(tmp_path):
    """`check --table` left it out."""
    settings = {"data": "demo:40", "init": "none", "arch": "resnet-demo", "method": "distill", "teacher": str(tmp_path)}
    recipe = resolve(settings, ["size=16", "batch_size=8"]).recipe
    with Signals() as signals:
        small, large = (_price_cell(recipe, arch, {}, signals).memory for arch in ("resnet-demo", "resnet18"))
    teachers = [build(arch) for arch in ("resnet-demo", "resnet18")]
    for teacher in teachers:
        new_head(teacher, 10, "prior")
    assert large - small == 4 * (numbers_in(teachers[1]) - numbers_in(teachers[0]))


def test_the_cost_has_every_line(capsys):
    assert main(["check", "--data", "demo:200", "--init", "none", "--arch", "resnet-demo", "--set", "size=16"]) == 0
    said = {line[:9].strip(): line[15:] for line in capsys.readouterr().out.splitlines()}
    assert {"data", "load", "step", "memory", "loading", "steps", "forwards", "disk", "GPUs", "time"} <= said.keys()
    assert said["steps"].startswith("600 of batch 64 = 192.0 epochs")


def test_data_and_weights_that_are_elsewhere_are_counted(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path))
    words = ["--init", "none", "--arch", "resnet-demo", "--images", "500", "--classes", "3", "--set", "size=16"]
    assert main(["check", *words]) == 0
    printed = capsys.readouterr().out
    assert "400 training and 100 validation images, 3 classes; counted, they are not on this machine" in printed
    assert "reading images is not in it" in printed
    assert not (tmp_path / "features").exists()


def test_the_old_names_are_aliases_that_say_so(capsys):
    for name in ("plan", "preflight", "doctor"):
        assert main([name, "--data", "demo:20"]) == 0
        said = capsys.readouterr()
        assert said.err.startswith(f"note: `finetune-mile {name}` is now `finetune-mile check`")
        assert "demo: 20 training and 5 validation images" in said.out


def test_a_table_is_summed_over_its_runs(tmp_path, capsys):
    path = write_tiny(tmp_path, lambda tree: tree.update(seeds=[0, 1]))
    assert main(["check", "--table", str(path), "--quick", "--runs", str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    assert "fine-tuning / student / 10 %" in text
    assert "all 4 runs: " in text
    assert "missing 4 runs: " in text
    assert main(["check", "--table", str(path), "--init", "none"]) == 2
    assert "not available with --table" in capsys.readouterr().err
    assert main(["check", "--table", str(path), "--quick", "--set", f"data=folder:{tmp_path}/nowhere"]) == 1
    assert "2 cells have no estimate" in capsys.readouterr().out


def test_a_cell_that_was_not_run_has_a_price(tmp_path, capsys):
    path, out = write_tiny(tmp_path), tmp_path / "ledger"
    assert (
        main(["table", str(path), "--quick", "--runs", str(tmp_path / "runs"), "--out", str(out), "--ledger-only"]) == 0
    )
    assert "not run, about" in capsys.readouterr().out
    assert '"fine-tuning / student / 10 %": "about' in (out / "prices.json").read_text()
