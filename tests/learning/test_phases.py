"""Schedules are values: they fill the budget, alternate, and can be entered at any step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_mile.core.problems import Problem
from finetune_mile.learning.phases import (
    SCHEDULES,
    Given,
    Soften,
    Threshold,
    after,
    check_amount,
    drawn,
    in_steps,
    mile,
    trace,
)

RULE = Threshold(rho=0.25)
MILE = {"warmup": 0, "minus_one": False, "imitate_from": "student", "targets": RULE, "pool": "labelled"}


def knobs(method, draw):
    if method in ("softmax", "sigmoid"):
        return {"loss": "bce"}
    if method in ("irm", "rex"):
        return {"kind": method, "weight": 10.0, "anneal": draw(st.integers(0, 9)), "anneal_weight": 1.0}
    if method == "mile":
        return {
            "k_t": draw(st.integers(2, 9)), "k_s": draw(st.integers(2, 9)), "warmup": draw(st.integers(0, 9)),
            "minus_one": draw(st.booleans()), "imitate_from": draw(st.sampled_from(["student", "teacher"])),
            "targets": RULE, "pool": "all",
        }  # fmt: skip
    soft = {"targets": Soften(temperature=1.0), "loss": "cross_entropy", "pool": "unlabelled"}
    if method == "noisy-student":
        return soft | {"interaction": draw(st.integers(1, 9)), "generations": draw(st.integers(1, 4))}
    return soft | ({"interaction": draw(st.integers(1, 9))} if method == "self-distill" else {})


@pytest.mark.parametrize("method", SCHEDULES)
@given(data=st.data())
def test_every_schedule_fills_its_budget_and_resumes_anywhere(method, data):
    total = data.draw(st.integers(30, 120))
    phases = SCHEDULES[method](total, **knobs(method, data.draw))
    assert sum(p.steps for p in phases) == total
    assert all(p.steps >= 1 for p in phases)
    assert "student" in phases[-1].becomes
    if method not in ("softmax", "sigmoid", "irm", "rex"):
        assert phases[-1].name == "imitation"
    step = data.draw(st.integers(0, total))
    rest = [(p, done) for p, done in after(step, phases)]
    assert sum(p.steps - done for p, done in rest) == total - step
    assert [p for p, _ in rest] == phases[len(phases) - len(rest) :]
    assert sum(drawn(step, phases).values()) == step


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 40))
def test_mile_alternates(k_t, k_s, warmup, more):
    phases = mile(warmup + k_t + k_s + more, k_t=k_t, k_s=k_s, **(MILE | {"warmup": warmup}))
    names = [p.name for p in phases[1 if warmup else 0 :]]
    assert names == ["interaction", "imitation"] * (len(names) // 2)


def test_the_traces_of_both_variants():
    paper = mile(12, k_t=4, k_s=2, **MILE)
    assert trace(paper) == "TTTTSSTTTTSS"
    assert [p.start for p in paper] == ["student", "student", "student", "student"]
    published = mile(12, k_t=4, k_s=2, **(MILE | {"minus_one": True, "imitate_from": "teacher"}))
    assert trace(published) == "TTTSTTTSTTTS"
    assert [p.start for p in published] == ["student", "teacher"] * 3


def test_surplus_goes_to_the_first_teacher_and_warm_up_is_shared():
    assert trace(mile(14, k_t=4, k_s=2, **MILE)) == "TTTTTTSSTTTTSS"
    phases = mile(16, k_t=4, k_s=2, **(MILE | {"warmup": 3}))
    assert trace(phases) == "TTTT" + "TTTTSS" * 2
    assert phases[0].becomes == ("teacher", "student")


@pytest.mark.parametrize("changes", [{"k_t": 1, "minus_one": True}, {"k_s": 1, "minus_one": True}, {"k_t": 40}])
def test_a_budget_that_holds_no_generation_is_refused(changes):
    with pytest.raises(Problem, match="k_t"):
        mile(12, **({"k_t": 4, "k_s": 2} | MILE | changes))


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
    phases = mile(total, **shares, minus_one=False, imitate_from="student", targets=Given(), pool="labelled")
    assert sum(p.steps for p in phases) == total
    assert [p.name for p in phases] == ["interaction", *["interaction", "imitation"] * 3]
    assert abs(phases[0].steps - shares["warmup"]) <= 5
    one = {**shares, "last": steps("33 %")}
    phases = mile(total, **one, minus_one=False, imitate_from="student", targets=Given(), pool="labelled")
    assert [p.name for p in phases] == ["interaction", "interaction", "imitation"]
    assert sum(p.steps for p in phases) == total
