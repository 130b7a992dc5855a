"""Schedules are values: they fill the budget, alternate, and can be entered at any step."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shortcuts import ROOT

from finetune_mile.core.problems import Problem
from finetune_mile.core.types import check_amount, in_steps
from finetune_mile.learning.phases import Budget, after, drawn, trace
from finetune_mile.methods import METHOD_FLAGS, METHODS, NEEDS, auto, get_method
from finetune_mile.methods.mile import Block, phases

# What a setting that decides the length of phases may be; every other one takes its first choice or its default.
LENGTHS = {
    "k_t": st.integers(2, 9), "k_s": st.integers(2, 9), "warmup": st.integers(0, 9), "anneal": st.integers(0, 9),
    "interaction": st.integers(1, 9), "generations": st.integers(1, 4), "rho": st.just(0.25),
    "imitate_from": st.sampled_from(["student", "teacher"]), "phase_steps": st.sampled_from(["exact", "minus_one"]),
}  # fmt: skip
CHOICES = {
    "pseudo_labels": "batch", "union": False, "empty": "negative", "optimizer_state": "keep", "targets": "soft",
    "loss": "cross_entropy", "temperature": 1.0, "weight": 10.0, "anneal_weight": 1.0, "calibration": 0.1,
    "held_out": "auto", "gate": "auto", "v_min": 1.0, "g_min": 0.5, "beta": 0.5, "ce": 1.0, "teacher": 0.5,
}  # fmt: skip


def draw_block(model, draw):
    """A block of a method with lengths that are drawn."""
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    return model(**{name: draw(LENGTHS[name]) if name in LENGTHS else CHOICES[name] for name in required})


def draw_settings(method, draw):
    if method.name == "auto":
        return auto.Settings(draw_block(method.Block, draw), draw_block(Block, draw))
    return None if method.Block is None else draw_block(method.Block, draw)


@pytest.mark.parametrize("name", METHODS)
@given(data=st.data())
def test_every_schedule_fills_its_budget_and_resumes_anywhere(name, data):
    total, method = data.draw(st.integers(30, 120)), get_method(name)
    budget = Budget(total_steps=total, steps_per_epoch=10.0, pool="all", labelled_share=0.5)
    run = method.phases(draw_settings(method, data.draw), budget)
    assert sum(p.steps for p in run) == total
    assert all(p.steps >= 1 for p in run)
    assert "student" in run[-1].becomes
    assert method.name == name
    assert method.needs <= NEEDS.keys()
    assert method.flags.keys() >= {flag for flag in METHOD_FLAGS if flag in getattr(method.Block, "model_fields", ())}
    imitates = [p for p in run if p.name == "imitation"]
    assert bool(imitates) == ("teacher" in method.needs)
    assert all(not p.given and p.pool == "all" for p in imitates)
    assert run[-1].name == ("imitation" if imitates else "interaction")
    step = data.draw(st.integers(0, total))
    rest = [(p, done) for p, done in after(step, run)]
    assert sum(p.steps - done for p, done in rest) == total - step
    assert [p for p, _ in rest] == run[len(run) - len(rest) :]
    assert sum(drawn(step, run).values()) == step


def test_no_method_imports_torch_before_it_trains():
    code = "import importlib, sys; from finetune_mile.methods import METHODS\n"
    code += "for name in METHODS.values(): importlib.import_module(name); assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def mile(total, *, k_t, k_s, warmup=0, minus_one=False, imitate_from="student", last=None):
    block = Block(
        k_t=k_t, k_s=k_s, warmup=warmup, last=last, rho=0.25, imitate_from=imitate_from, pseudo_labels="batch",
        phase_steps="minus_one" if minus_one else "exact", union=False, empty="negative", optimizer_state="keep",
    )  # fmt: skip
    return phases(block, Budget(total_steps=total, steps_per_epoch=10.0))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 40))
def test_mile_alternates(k_t, k_s, warmup, more):
    run = mile(warmup + k_t + k_s + more, k_t=k_t, k_s=k_s, warmup=warmup)
    names = [p.name for p in run[1 if warmup else 0 :]]
    assert names == ["interaction", "imitation"] * (len(names) // 2)


def test_the_traces_of_both_variants():
    paper = mile(12, k_t=4, k_s=2)
    assert trace(paper) == "TTTTSSTTTTSS"
    assert [p.start for p in paper] == ["student", "student", "student", "student"]
    published = mile(12, k_t=4, k_s=2, minus_one=True, imitate_from="teacher")
    assert trace(published) == "TTTSTTTSTTTS"
    assert [p.start for p in published] == ["student", "teacher"] * 3


def test_surplus_goes_to_the_first_teacher_and_warm_up_is_shared():
    assert trace(mile(14, k_t=4, k_s=2)) == "TTTTTTSSTTTTSS"
    run = mile(16, k_t=4, k_s=2, warmup=3)
    assert trace(run) == "TTTT" + "TTTTSS" * 2
    assert run[0].becomes == ("teacher", "student")


@pytest.mark.parametrize("changes", [{"k_t": 1, "minus_one": True}, {"k_s": 1, "minus_one": True}, {"k_t": 40}])
def test_a_budget_that_holds_no_generation_is_refused(changes):
    with pytest.raises(Problem, match="k_t"):
        mile(12, **({"k_t": 4, "k_s": 2} | changes))


@pytest.mark.parametrize(
    ("amount", "steps"),
    [(200, 200), ("200 steps", 200), ("2 epochs", 20), ("1 epoch", 10), ("5 %", 50), ("2.5%", 25), ("0.01 %", 1)],
)
def test_amounts(amount, steps):
    assert in_steps(amount, total_steps=1000, steps_per_epoch=10.0) == steps


@pytest.mark.parametrize("amount", [0, -3, "many", "2 weeks", 1.5, "0 %"])
def test_amounts_that_mean_nothing(amount):
    with pytest.raises(ValueError, match=str(amount)):
        check_amount(amount)


@pytest.mark.parametrize("total", range(300, 3000, 7))
def test_rounded_shares_of_a_budget_cost_no_generation(total):
    def steps(amount):
        return in_steps(amount, total_steps=total, steps_per_epoch=100)

    shares = {"k_t": steps("5 %"), "k_s": steps("5 %"), "warmup": steps("62 %"), "last": steps("13 %")}
    run = mile(total, **shares)
    assert sum(p.steps for p in run) == total
    assert [p.name for p in run] == ["interaction", *["interaction", "imitation"] * 3]
    assert abs(run[0].steps - shares["warmup"]) <= 5
    run = mile(total, **{**shares, "last": steps("33 %")})
    assert [p.name for p in run] == ["interaction", "interaction", "imitation"]
    assert sum(p.steps for p in run) == total
